"""Greedy answers through paged memory are those of `transformers.generate`, for every supported kind of attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.tiny_models import CONFIGS, FEATURE_OFF, VOCAB_SIZE, build_model

MAX_TOKENS = 12
WHOLE = 1000


def generate(model: Any, prompt: list[int], **fields: Any) -> list[int]:
    """The reference: transformers, one prompt, greedy, eager attention, never stopping."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **fields,
    )
    return [int(token) for token in output[0, len(prompt) :]]


@cache
def references(model_type: str) -> list[list[int]]:
    model = build_model(model_type)
    model.set_attn_implementation("eager")  # some versions take SDPA for Gemma 2, which has no softcap
    return [generate(model, prompt) for prompt in prompts(VOCAB_SIZE)]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def loaded(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> Any:
    """(model type, runner) of every supported tiny model."""
    runner = load_tiny(tiny_folder(request.param))
    yield request.param, runner
    runner.close()


@pytest.mark.parametrize("chunk", [1, 7, 16, WHOLE])
def test_greedy_equals_generate(loaded: Any, chunk: int) -> None:
    """In a mixed batch over shuffled pages, whatever the chunk size, each answer is the one `generate` gives alone."""
    model_type, runner = loaded
    answers = Driver(runner, seed=chunk).run(prompts(VOCAB_SIZE), max_tokens=MAX_TOKENS, chunk=chunk)
    assert answers == references(model_type)


def test_page_order_is_invisible(loaded: Any) -> None:
    """The order of the pages changes no token."""
    model_type, runner = loaded
    for seed in (1, 2):
        answers = Driver(runner, seed=seed).run(prompts(VOCAB_SIZE)[:2], max_tokens=4, chunk=16)
        assert answers == [answer[:4] for answer in references(model_type)[:2]]


@pytest.mark.parametrize("model_type", sorted(FEATURE_OFF))
def test_the_feature_bites(model_type: str) -> None:
    """With its feature off the reference answers differently, so the parity above has tested the feature."""
    model = build_model(model_type, **FEATURE_OFF[model_type])
    assert [generate(model, prompt) for prompt in prompts(VOCAB_SIZE)] != references(model_type)


def test_the_sinks_bite() -> None:
    """Without its sinks gpt_oss answers differently."""

    def no_sinks(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(-1e9)

    model = build_model("gpt_oss", edit=no_sinks)
    assert [generate(model, prompt) for prompt in prompts(VOCAB_SIZE)] != references("gpt_oss")


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_bfloat16_stays_close(model_type: str, tiny_folder: Callable[[str], Path]) -> None:
    """In bfloat16 the logits stay within rounding of the plain ones; it may turn ties, so tokens are not compared."""
    from streamserve.engine.model.load.probe import probe

    runner = load_tiny(tiny_folder(model_type), dtype="bfloat16", parity_probe=False)
    assert 0 < probe(runner) < (0.4 if model_type == "gpt_oss" else 0.05)
    assert runner.dtype == "bfloat16"
