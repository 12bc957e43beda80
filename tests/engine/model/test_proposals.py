"""A real model's answers where steps propose tokens: the same tokens and log-probabilities, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")
pytest.importorskip("gguf", reason="needs gguf: pip install gguf")

from streamserve.engine.model.runner import ModelRunner  # noqa: E402  (after the skips)
from streamserve.native.build import find_compiler  # noqa: E402
from tests.support.engines.cores import Answer, Drive, request, sampling  # noqa: E402
from tests.support.models.model_driver import load_tiny  # noqa: E402
from tests.support.models.smollm2 import smollm2  # noqa: E402

pytestmark = pytest.mark.proof

NUM_NEW = 40
SEEDS = 6  # of what is drawn: whether a text repeats itself depends on its last bits, and so on the processor


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    """Return a runner of the model with its weights as the file packs them."""
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler: apt install g++")
    runner = load_tiny(smollm2(), parity_probe=False, dtype=request.param, block_size=16)
    yield runner
    runner.close()


def prompts() -> list[list[int]]:
    """Return texts that repeat themselves, which the model then does too, and a text that does not."""
    rng = random.Random(1)
    phrases = [[rng.randrange(20, 40_000) for _ in range(length)] for length in (9, 14)]
    return [phrase * 4 + phrase[:5] for phrase in phrases] + [[rng.randrange(20, 40_000) for _ in range(30)]]


def answers(runner: ModelRunner, speculation: str, num_at_once: int, **fields: Any) -> tuple[dict[int, Answer], Drive]:
    drive = Drive(runner=runner, max_model_len=None, speculation=speculation, prefix_caching=False)
    how = sampling(**{"max_tokens": NUM_NEW, "logprobs": 2, **fields})
    wanted = [request(n, prompt, sampling=how) for n, prompt in enumerate(prompts(), 1)]
    for first in range(0, len(wanted), num_at_once):
        drive.run(*wanted[first : first + num_at_once])
    return drive.answers, drive


@pytest.mark.parametrize("num_at_once", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_answers_are_the_same(runner: ModelRunner, temperature: float, num_at_once: int) -> None:
    """Alone and side by side, greedy and drawn; some of the proposed tokens are accepted, and some are not."""
    num_accepted = num_proposed = 0
    for seed in range(SEEDS if temperature else 1):
        fields = {"temperature": temperature, "seed": seed}
        plain, _ = answers(runner, "off", 1, **fields)
        found, drive = answers(runner, "lookup", num_at_once, **fields)
        assert {n: (one.token_ids, one.logprobs) for n, one in found.items()} == {
            n: (one.token_ids, one.logprobs) for n, one in plain.items()
        }
        num_accepted += drive.core.stats.accepted_tokens["chat"]
        num_proposed += drive.core.stats.proposed_tokens["chat"]
    assert 0 < num_accepted < num_proposed
