"""A real model's answers with a draft model: the same tokens and log-probabilities, and memory for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")

from streamserve.engine.config import EngineConfig, ModelConfig  # noqa: E402  (after the skips)
from streamserve.engine.model.kv_cache import bytes_per_block  # noqa: E402
from streamserve.engine.model.load.start import load_runner  # noqa: E402
from streamserve.engine.model.runner import ModelRunner  # noqa: E402
from streamserve.engine.plan import DraftModel  # noqa: E402
from tests.support.engines.cores import Answer, Drive, request, sampling  # noqa: E402
from tests.support.models.model_driver import TINY, load_tiny, prompts  # noqa: E402
from tests.support.models.smollm2 import smollm2  # noqa: E402
from tests.support.models.tiny_models import VOCAB_SIZE, save_model  # noqa: E402

NUM_NEW = 48
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "seed": 3},
    "drawn from few": {"temperature": 0.7, "seed": 4, "top_k": 20, "top_p": 0.9},
}


@pytest.fixture(scope="module", params=["the same weights", "other weights", "transformers' layers"])
def pair(
    request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """Return a runner with a draft model, which draws the same tokens or other tokens."""
    target = tiny_folder("llama")
    draft = {
        "the same weights": lambda: target,
        "other weights": lambda: save_model(tmp_path_factory.mktemp("draft"), "llama", num_hidden_layers=1),
        "transformers' layers": lambda: tiny_folder("gpt2"),
    }[request.param]()
    runner = load_tiny(target, draft=str(draft), block_size=16)
    yield runner, request.param
    runner.close()


def cheap(runner: ModelRunner) -> DraftModel:
    """Return its draft model as if that were a twentieth of its size: otherwise none of the same size is asked."""
    assert runner.draft is not None
    return replace(runner.draft, weight=0.05)


def answers(runner: ModelRunner, num_at_once: int, *, speculation: str, **fields: Any) -> tuple[dict[int, Any], Drive]:
    drive = Drive(runner=runner, max_model_len=None, speculation=speculation, prefix_caching=False, draft=cheap(runner))
    how = sampling(**{"max_tokens": NUM_NEW, "logprobs": 2, **fields})
    wanted = [request(n, prompt, sampling=how) for n, prompt in enumerate(prompts(VOCAB_SIZE), 1)]
    for first in range(0, len(wanted), num_at_once):
        drive.run(*wanted[first : first + num_at_once])
    drive.assert_empty()
    return {n: values(one) for n, one in drive.answers.items()}, drive


def values(answer: Answer) -> tuple[Any, ...]:
    """Return tokens, and log-probabilities as far as float32 agrees when rows are computed together."""
    scores = [round(one.chosen, 4) for one in answer.logprobs if one is not None]
    return answer.token_ids, scores, answer.finish_reason


@pytest.mark.parametrize("num_at_once", [1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_the_same(pair: tuple[ModelRunner, str], way: str, num_at_once: int) -> None:
    """Alone and side by side, greedy and drawn; the same weights draw the same tokens, by the same noise."""
    runner, kind = pair
    plain, _ = answers(runner, 1, speculation="off", **WAYS[way])
    found, drive = answers(runner, num_at_once, speculation="lookup", **WAYS[way])
    assert {n: one[0] for n, one in found.items()} == {n: one[0] for n, one in plain.items()}
    for n, (_, scores, reason) in found.items():
        assert scores == pytest.approx(plain[n][1], abs=2e-3)
        assert reason == plain[n][2]
    stats = drive.core.stats
    assert stats.drafted_tokens["chat"] > 10
    if kind == "the same weights":
        assert stats.accepted_drafts["chat"] > 0.9 * stats.drafted_tokens["chat"]


def test_memory_holds_both(tiny_folder: Callable[[str], Path]) -> None:
    """A block of both is what the memory is divided by, and both have as many."""
    folder, size = str(tiny_folder("llama")), 200_000
    engine = EngineConfig(block_size=4, kv_cache_bytes=size, max_num_seqs=64)
    alone, paired = (
        load_runner(ModelConfig(alias="tiny", path=folder, parity_probe=False, draft=draft, **TINY), engine)
        for draft in ("", folder)
    )
    of_one = bytes_per_block(alone.layers, 4, alone.loaded.dtype)
    assert (alone.num_blocks, paired.num_blocks) == (size // of_one, size // (2 * of_one))
    assert paired.draft is not None
    assert paired.draft.runner.num_blocks == paired.num_blocks
    assert paired.draft.weight == pytest.approx(1.0)
    alone.close()
    paired.close()


@pytest.mark.parametrize("config", [{"speculation": "off"}, {"overlap": True}], ids=["off", "overlap"])
def test_it_is_not_loaded_where_nothing_is_proposed(tiny_folder: Callable[[str], Path], config: dict[str, Any]) -> None:
    """Its memory is the model's."""
    folder = str(tiny_folder("llama"))
    model = ModelConfig(alias="tiny", path=folder, parity_probe=False, draft=folder, **TINY)
    runner = load_runner(model, EngineConfig(block_size=4, num_blocks=9, **config))
    assert runner.draft is None
    runner.close()


def test_a_real_model_drafts_for_itself() -> None:
    """SmolLM2 with the same weights as a draft model: all that it proposes is accepted, and the answer is the same."""
    pytest.importorskip("gguf", reason="needs gguf: pip install gguf")
    runner = load_tiny(smollm2(), parity_probe=False, draft=str(smollm2()), block_size=16)
    try:
        prompt = [7 * n + 100 for n in range(20)]
        how = sampling(max_tokens=NUM_NEW)
        found = {}
        for speculation in ("off", "lookup"):
            drive = Drive(runner=runner, max_model_len=None, speculation=speculation, draft=cheap(runner))
            found[speculation] = drive.run(request(1, prompt, sampling=how))[1].token_ids
        assert found["lookup"] == found["off"]
        stats = drive.core.stats
        assert stats.accepted_drafts["chat"] == stats.drafted_tokens["chat"] > 10
    finally:
        runner.close()
