"""Sampling parameters on a real model: greedy answers are those of a plain loop over a full forward pass a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamserve.engine.model.runner import ModelRunner
from streamserve.engine.sequence import Sequence, SequenceRequest
from streamserve.protocol.requests import SamplingParams
from tests.support.engines.cores import Drive, request, sampling
from tests.support.models.model_driver import load_tiny, prompts
from tests.support.models.tiny_models import VOCAB_SIZE, build_model

MAX_TOKENS = 14
EOS = 1
ALLOWED = (1, 5, 8, 13, 21, 34)
WAYS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": ((7, 0.4), (9, 0.6), (20, -100.0))},
    "allowed": {"allowed_token_ids": ALLOWED},
    "min_tokens": {"min_tokens": 6, "logit_bias": ((EOS, 50.0),)},
    "bad words": {"allowed_token_ids": ALLOWED},
    "all": {
        "allowed_token_ids": ALLOWED,
        "logit_bias": ((EOS, 0.2), (5, 0.3)),
        "min_tokens": 4,
        "frequency_penalty": 0.05,
        "repetition_penalty": 1.1,
    },
}
BAD_WORDS = {
    "bad words": ((8, 8), (5, 5), (8, 5), (5, 8, 13), (21,), (13, 13, 13), (34, 34)),
    "all": ((8, 5), (13, 13), (34,)),
}


@pytest.fixture(scope="module")
def runner(tiny_folder: Callable[[str], Path]) -> Iterator[ModelRunner]:
    loaded = load_tiny(tiny_folder("llama"))
    loaded.can_overlap = True
    yield loaded
    loaded.close()


def plain_answer(
    model: Any, prompt: list[int], how: SamplingParams, bad_words: tuple[tuple[int, ...], ...]
) -> list[int]:
    """The reference: all tokens again for each new one, and the definition of each parameter in turn."""
    output: list[int] = []
    while len(output) < MAX_TOKENS:
        with torch.inference_mode():
            z = model(torch.tensor([[*prompt, *output]])).logits[0, -1].double().numpy()
        for token, bias in how.logit_bias:
            z[token] += bias
        if how.allowed_token_ids:
            z[np.setdiff1d(np.arange(len(z)), how.allowed_token_ids)] = -np.inf
        for word in bad_words:
            if tuple(output[len(output) - len(word) + 1 :]) == word[:-1] and len(output) >= len(word) - 1:
                z[word[-1]] = -np.inf
        if len(output) < how.min_tokens:
            z[EOS] = -np.inf
        for token in {*prompt, *output}:
            z[token] = z[token] / how.repetition_penalty if z[token] > 0 else z[token] * how.repetition_penalty
        for token, count in Counter(output).items():
            z[token] -= how.frequency_penalty * count + how.presence_penalty
        output.append(int(z.argmax()))
        if output[-1] == EOS:
            break
    return output


def requests(way: str) -> list[SequenceRequest]:
    how = sampling(max_tokens=MAX_TOKENS, temperature=0.0, **WAYS[way])
    return [
        request(seq_id, prompt, sampling=how, eos_token_ids=frozenset({EOS}), bad_word_ids=BAD_WORDS.get(way, ()))
        for seq_id, prompt in enumerate(prompts(VOCAB_SIZE))
    ]


def poison(runner: ModelRunner, block_id: int) -> None:
    """Overwrite an evicted block."""
    runner.kv.fill_block(block_id, float("nan"))


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("way", WAYS)
def test_equals_the_plain_loop(runner: ModelRunner, way: str, overlap: bool) -> None:
    """Alone and beside others, with a step in flight or none, and preempted every few steps."""
    model, asked = build_model("llama"), requests(way)
    wanted = {
        one.seq_id: plain_answer(model, list(one.prompt_token_ids), one.sampling, one.bad_word_ids) for one in asked
    }
    without = {
        one.seq_id: plain_answer(model, list(one.prompt_token_ids), sampling(max_tokens=MAX_TOKENS), ())
        for one in asked
    }
    assert wanted != without, "the parameters change nothing here"
    for every in (0, 3):
        drive = Drive(runner=runner, overlap=overlap)
        drive.core.pool._on_evict = partial(poison, runner)

        def preempt(running: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
            return running if every and len(drive.plans) % (every + overlap) == 0 else ()  # noqa: B023

        drive.core.scheduler.forced_preempt = preempt
        assert drive.tokens(*asked) == wanted
        assert (drive.core.stats.preemptions > 0) == bool(every)
        drive.assert_empty()
