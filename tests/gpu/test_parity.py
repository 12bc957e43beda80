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

from streamserve.engine.model.load.probe import probe  # noqa: E402
from streamserve.engine.model.sampler import (  # noqa: E402  (after the skips)
    exponential,
    row_key,
    sample,
)
from streamserve.engine.plan import StepOutOfMemory  # noqa: E402
from tests.engine.model.parity.test_parity import MAX_TOKENS, WHOLE, references  # noqa: E402
from tests.engine.model.test_out_of_memory import large_plan  # noqa: E402
from tests.support.engines.specs import spec_of  # noqa: E402
from tests.support.models.model_driver import Driver, load_tiny, prompts  # noqa: E402
from tests.support.models.tiny_models import CONFIGS, VOCAB_SIZE, save_model  # noqa: E402


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
    specs = [spec_of(i, seed=i, top_p=0.9, top_k=100 * (i % 3), min_p=0.01) for i in range(64)]
    assert torch.equal(sample(logits.cuda(), specs).token_ids.cpu(), sample(logits, specs).token_ids)


def test_poisoned_pages(tmp_path: Path) -> None:
    """NaN in every unowned block changes nothing on the GPU either."""
    runner = load_tiny(save_model(tmp_path, "llama"), device="cuda")
    wanted = Driver(runner, seed=1).run(prompts(VOCAB_SIZE), max_tokens=6, chunk=7)
    for block_id in range(runner.num_blocks):
        runner.kv.fill_block(block_id, float("nan"))
    assert Driver(runner, seed=2).run(prompts(VOCAB_SIZE), max_tokens=6, chunk=7) == wanted


def test_sampling_on_the_gpu_in_overlapped_steps(tmp_path: Path) -> None:
    """Launched before the last step is collected, its tokens taken on the GPU, seeded answers are those in turn."""
    runner = load_tiny(save_model(tmp_path, "llama"), device="cuda")
    assert runner.can_overlap
    how = {"temperature": 0.9, "top_p": 0.9, "seed": 5}
    lengths = [10, 7, 4, 2]
    wanted = Driver(runner, seed=1).run(prompts(VOCAB_SIZE), max_tokens=10, chunk=7, **how)
    found = Driver(runner, seed=2).run_overlapped(prompts(VOCAB_SIZE), max_tokens=lengths, **how)
    assert found == [tokens[:length] for tokens, length in zip(wanted, lengths, strict=True)]


SAMPLING = [
    {"temperature": 0.0},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "logprobs": 3},
    {"presence_penalty": 0.5, "repetition_penalty": 1.2, "output_token_ids": (3, 4, 4), "banned_token_ids": (1, 2)},
]


def test_a_launch_does_not_wait_for_the_gpu(tmp_path: Path) -> None:
    """Whatever is sampled how: nothing in a launch makes the host wait (torch raises where something would)."""
    runner = load_tiny(save_model(tmp_path, "llama"), device="cuda")
    Driver(runner).run(prompts(VOCAB_SIZE), max_tokens=3, chunk=7)  # things made on first use are made here
    driver = Driver(runner, seed=1)
    running = [driver.start(i, prompts(VOCAB_SIZE)[0], 6, **how) for i, how in enumerate(SAMPLING)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        handles = [driver.launch(running) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(runner.collect(handle).sampled) for handle in handles] == [3, 3, 3]


def test_out_of_memory(tmp_path: Path) -> None:
    """A step too large for the GPU raises `StepOutOfMemory`, and the runner continues."""
    folder = save_model(tmp_path, "llama", intermediate_size=1 << 14, num_hidden_layers=1)
    runner = load_tiny(folder, device="cuda", num_blocks=2000)
    wanted = Driver(runner, seed=1).run(prompts(VOCAB_SIZE), max_tokens=4, chunk=7)
    free, total = torch.cuda.mem_get_info()
    share = (torch.cuda.memory_reserved() + (200 << 20)) / total
    assert free > 200 << 20
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        with pytest.raises(StepOutOfMemory):
            runner.launch(large_plan(30))
        assert Driver(runner, seed=2).run(prompts(VOCAB_SIZE), max_tokens=4, chunk=7) == wanted
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
