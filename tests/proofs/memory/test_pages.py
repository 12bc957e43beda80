"""Pages hold what is written to them, in any order, and unwritten pages are never read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.proofs.scale import IS_SOAK, scaled
from tests.support.models.tiny_models import CONFIGS, VOCAB_SIZE, save_model

NUM_TOKENS, CHUNK, NUM_LOGPROBS = 8, 7, 20


@pytest.mark.parametrize("model_type", sorted(CONFIGS) if IS_SOAK else ["gemma3_text", "llama"])
def test_pages_poisoned_and_permuted(tmp_path: Path, model_type: str) -> None:
    """NaN in every unwritten page and another order of pages change no log-probability."""
    pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")
    pytest.importorskip("transformers", reason="needs transformers: pip install streamserve[engine]")
    from transformers.utils import logging

    from tests.support.models.model_driver import load_tiny

    logging.disable_progress_bar()
    runner = load_tiny(save_model(tmp_path, model_type))
    wanted, num_deals = logprobs(runner, seed=0), scaled(40, least=5)
    for seed in range(1, 1 + num_deals):
        for block_id in range(runner.num_blocks):
            runner.kv.fill_block(block_id, math.nan)
        assert logprobs(runner, seed) == wanted
    runner.close()
    print(
        f"\npages, {model_type}: {num_deals} deals of poisoned pages, {len(wanted)} positions: the same to the last bit"
    )


def logprobs(runner: Any, seed: int) -> list[Any]:
    """Return the log-probabilities of a mixed batch whose pages are dealt by the seed."""
    from tests.support.models.model_driver import Driver, prompts

    driver = Driver(runner, seed=seed)
    running = [
        driver.start(index, prompt, NUM_TOKENS, logprobs=NUM_LOGPROBS)
        for index, prompt in enumerate(prompts(VOCAB_SIZE))
    ]
    while any(len(one.sampled) < NUM_TOKENS for one in running):
        driver.step([one for one in running if len(one.sampled) < NUM_TOKENS], CHUNK)
    return [sampled.logprobs for one in running for sampled in one.sampled]
