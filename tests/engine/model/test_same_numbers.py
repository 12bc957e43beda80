"""Packed weights of a real model: how a sequence's tokens come to the engine changes no number of its answer.

Compared are tokens and log-probabilities, bit for bit. The answers are drawn at temperature 1 with fixed seeds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")
pytest.importorskip("gguf", reason="needs gguf: pip install gguf")

from streamserve.engine.model.runner import ModelRunner  # noqa: E402  (after the skips)
from streamserve.native.build import find_compiler  # noqa: E402
from tests.support.models.model_driver import Driver, Running, load_tiny  # noqa: E402
from tests.support.models.smollm2 import smollm2  # noqa: E402

LENGTHS, NUM_NEW = (20, 33, 70), 6
Number = tuple[Any, ...]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    """Return a runner of the model with its weights as the file packs them."""
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler: apt install g++")
    runner = load_tiny(smollm2(), parity_probe=False, dtype=request.param)
    yield runner
    runner.close()


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(20, 40_000) for _ in range(length)] for length in LENGTHS]


def numbers(running: Running) -> list[Number]:
    """Return the tokens that were drawn, with their log-probabilities."""
    return [(sampled.token_ids, sampled.logprobs) for sampled in running.sampled]


def answer(driver: Driver, running: Sequence[Running], chunk: int, num_new: int = NUM_NEW) -> list[list[Number]]:
    """Run sequences together until each has `num_new` new tokens."""
    waiting = list(running)
    while waiting:
        driver.step(waiting, chunk)
        waiting = [one for one in waiting if len(one.sampled) < num_new]
    return [numbers(one) for one in running]


def start(driver: Driver, prompt: Sequence[int], max_tokens: int = NUM_NEW) -> Running:
    return driver.start(len(prompt), prompt, max_tokens, temperature=1.0, seed=5, logprobs=2)


@pytest.fixture(scope="module")
def wanted(runner: ModelRunner) -> list[list[Number]]:
    """Return the answers with each prompt alone and in one chunk."""
    driver = Driver(runner)
    return [answer(driver, [start(driver, prompt)], 128)[0] for prompt in prompts()]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_and_neighbours(runner: ModelRunner, wanted: list[list[Number]], chunk: int) -> None:
    """In chunks of any size, beside other prompts and decodes."""
    driver = Driver(runner, seed=chunk)
    assert answer(driver, [start(driver, prompt) for prompt in prompts()], chunk) == wanted


def test_parks(runner: ModelRunner, wanted: list[list[Number]]) -> None:
    """After a park the prompt and the tokens so far are computed as one prompt."""
    driver = Driver(runner, seed=3)
    for prompt, numbers_of_whole in zip(prompts(), wanted, strict=True):
        so_far = [token for token_ids, _ in numbers_of_whole[:3] for token in token_ids]
        resumed = start(driver, [*prompt, *so_far])
        assert answer(driver, [resumed], 128, NUM_NEW - 3)[0] == numbers_of_whole[3:]


def test_prefix_hits(runner: ModelRunner, wanted: list[list[Number]]) -> None:
    """With a part of the prompt read from blocks that another sequence has filled, in prefills and in decodes."""
    driver = Driver(runner, seed=4)
    for prompt, numbers_of_whole in zip(prompts(), wanted, strict=True):
        first = start(driver, [*prompt[:-6]], max_tokens=20)
        driver.step([first], 5 if len(prompt) < 40 else 128)
        while first.num_computed < len(prompt) - 6:
            driver.step([first], 5)
        num_shared = (len(prompt) - 6) // runner.block_size
        second = start(driver, prompt)
        pairs = zip(first.tables, second.tables, strict=True)
        second.tables = [found[:num_shared] + own[num_shared:] for found, own in pairs]
        second.num_computed = num_shared * runner.block_size
        assert answer(driver, [second], 128)[0] == numbers_of_whole
