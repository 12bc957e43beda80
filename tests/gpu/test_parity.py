"""The engine's promises on CUDA. Runs without Django:

python -m pytest --confcutdir tests/gpu -c /dev/null --rootdir . -p no:django tests/gpu
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")
pytest.importorskip("transformers", reason="needs transformers: pip install streamserve[engine]")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU that torch sees", allow_module_level=True)

from streamserve.engine.model.noise import exponential, row_key  # noqa: E402  (after the skips)
from streamserve.engine.model.probe import probe  # noqa: E402
from streamserve.engine.model.sampler import sample  # noqa: E402
from streamserve.engine.plan import SampleSpec  # noqa: E402
from tests.engine.model.driver import Driver, load_tiny, prompts  # noqa: E402
from tests.engine.model.test_parity import MAX_TOKENS, WHOLE, references  # noqa: E402
from tests.tiny_models import CONFIGS, VOCAB_SIZE, save_model  # noqa: E402


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
@pytest.mark.parametrize("chunk", [7, WHOLE])
def test_greedy_equals_generate_on_cpu(model_type: str, chunk: int, tmp_path: Path) -> None:
    """In fp32 the GPU answers token for token as transformers does on the CPU."""
    runner = load_tiny(save_model(tmp_path, model_type), device="cuda")
    assert runner.device == "cuda"
    answers = Driver(runner, seed=1).run(prompts(VOCAB_SIZE), max_tokens=MAX_TOKENS, chunk=chunk)
    assert answers == references(model_type)


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_bfloat16_stays_within_rounding(model_type: str, tmp_path: Path) -> None:
    """In bfloat16 the parity probe passes."""
    runner = load_tiny(save_model(tmp_path, model_type), device="cuda", dtype="bfloat16", parity_probe=False)
    probe(runner)


def test_noise_is_the_same_on_the_gpu() -> None:
    """The noise that decides a draw does not depend on the device."""
    keys = torch.tensor([row_key(seed, seed * 7) for seed in range(20)], dtype=torch.int32)
    torch.testing.assert_close(exponential(keys.cuda(), 5000).cpu(), exponential(keys, 5000), rtol=1e-5, atol=0)


def test_draws_are_the_same_on_the_gpu() -> None:
    """Equal logits and seeds give equal tokens on CPU and GPU."""
    logits = torch.randn(64, 4000, generator=torch.Generator().manual_seed(2)) * 2
    specs = [SampleSpec(position=i, seed=i, top_p=0.9, top_k=100 * (i % 3), min_p=0.01) for i in range(64)]
    assert torch.equal(sample(logits.cuda(), specs).token_ids.cpu(), sample(logits, specs).token_ids)


def test_poisoned_pages(tmp_path: Path) -> None:
    """NaN in every block that nobody owns changes nothing on the GPU either."""
    runner = load_tiny(save_model(tmp_path, "llama"), device="cuda")
    wanted = Driver(runner, seed=1).run(prompts(VOCAB_SIZE), max_tokens=6, chunk=7)
    for block_id in range(runner.num_blocks):
        runner.kv.fill_block(block_id, float("nan"))
    assert Driver(runner, seed=2).run(prompts(VOCAB_SIZE), max_tokens=6, chunk=7) == wanted
