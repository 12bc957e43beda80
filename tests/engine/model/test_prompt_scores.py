"""Log-probabilities of a prompt's own tokens: those of one plain forward pass of transformers over the whole prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from streamserve.engine.in_flight import halves
from streamserve.engine.model import prompt_scores
from streamserve.engine.model.decoder.decoder import Decoder
from streamserve.engine.model.runner import ModelRunner
from streamserve.engine.plan import RawLogprobs, StepOutOfMemory, StepPlan
from streamserve.engine.sequence import Sequence, SequenceRequest
from tests.support.engines.cores import Drive, request, sampling
from tests.support.models.model_driver import load_tiny, prompts
from tests.support.models.tiny_models import VOCAB_SIZE, build_model

TOP = 3
MAX_TOKENS = 6


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def family(request: pytest.FixtureRequest) -> str:
    """Gemma 2 caps its logits after the head, and attends within windows."""
    return str(request.param)


@pytest.fixture(scope="module")
def runner(family: str, tiny_folder: Callable[[str], Path]) -> Iterator[ModelRunner]:
    loaded = load_tiny(tiny_folder(family))
    loaded.can_overlap = True
    yield loaded
    loaded.close()


def asked(seq_id: int, prompt: Any, **fields: Any) -> SequenceRequest:
    how = sampling(**{"max_tokens": MAX_TOKENS, "prompt_logprobs": TOP, **fields.pop("how", {})})
    return request(seq_id, prompt, sampling=how, **fields)


def plain_scores(family: str, prompt: list[int]) -> tuple[list[float], list[list[float]]]:
    """The reference: each token's log-probability, and the likeliest ones' there."""
    with torch.inference_mode():
        logits = build_model(family)(torch.tensor([prompt])).logits[0, :-1].double()
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    return chosen.tolist(), logprobs.topk(TOP, dim=-1).values.tolist()


def scored(drive: Drive, seq_id: int) -> list[tuple[int, RawLogprobs]]:
    return [pair for update in drive.answers[seq_id].updates for pair in update.scored]


def assert_scores(family: str, found: list[tuple[int, RawLogprobs]], prompt: tuple[int, ...], first: int = 0) -> None:
    """Each token of the prompt but the first is there once, in order, with the reference's numbers."""
    assert [token_id for token_id, _ in found] == list(prompt[first + 1 :])
    chosen, top = plain_scores(family, list(prompt))
    for place, (token_id, raw) in enumerate(found, first):
        assert raw.chosen == pytest.approx(chosen[place], abs=2e-4)
        assert [logprob for _, logprob in raw.top] == pytest.approx(top[place], abs=2e-4)
        for candidate, logprob in raw.top:
            assert candidate != token_id or logprob == pytest.approx(raw.chosen, abs=1e-6)


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("every", [0, 3], ids=["in one go", "preempted"])
def test_equal_those_of_one_pass(
    family: str, runner: ModelRunner, overlap: bool, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of a prompt, a slice of the head's rows at a time, beside others; nothing is scored twice."""
    monkeypatch.setattr(prompt_scores, "_SLICE_BYTES", 4 * VOCAB_SIZE * 5)  # five rows
    requests = [asked(seq_id, prompt) for seq_id, prompt in enumerate(prompts(VOCAB_SIZE))]
    plain = [replace(one, sampling=replace(one.sampling, prompt_logprobs=None)) for one in requests]
    wanted = Drive(runner=runner, overlap=overlap, prefix_caching=False).tokens(*plain)
    drive = Drive(runner=runner, overlap=overlap, max_num_batched_tokens=16)
    drive.core.pool._on_evict = partial(runner.kv.fill_block, number=float("nan"))

    def preempt(running: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        return running if every and len(drive.plans) % (every + overlap) == 0 else ()

    drive.core.scheduler.forced_preempt = preempt
    assert drive.tokens(*requests) == wanted
    assert (drive.core.stats.preemptions > 0) == bool(every)
    for one in requests:
        assert_scores(family, scored(drive, one.seq_id), one.prompt_token_ids)
    drive.assert_empty()


def test_the_prefix_cache_gives_no_position_that_is_to_be_scored(family: str, runner: ModelRunner) -> None:
    """A cached prompt is computed again where it is scored; what was shown before may come from the cache."""
    prompt = tuple(range(5, 5 + 3 * runner.block_size))
    drive = Drive(runner=runner)
    drive.run(asked(0, prompt, how={"prompt_logprobs": None}))
    num_shown = runner.block_size + 1
    drive.run(
        asked(1, prompt),
        asked(2, prompt, num_prompt_logprobs=num_shown + 1),
        asked(3, prompt, how={"prompt_logprobs": None}),
    )
    assert [drive.answers[seq_id].num_cached_tokens // runner.block_size for seq_id in (1, 2, 3)] == [0, 1, 2]
    assert_scores(family, scored(drive, 1), prompt)
    assert_scores(family, scored(drive, 2), prompt, num_shown)
    assert scored(drive, 3) == []


@pytest.mark.parametrize("length", [1, 2])
def test_the_prompt_alone(family: str, runner: ModelRunner, length: int) -> None:
    """With max_tokens 0 nothing is generated; a prompt of one token has nothing to score."""
    drive = Drive(runner=runner)
    answer = drive.run(asked(0, range(7, 7 + length), how={"max_tokens": 0}))[0]
    assert (answer.token_ids, answer.finish_reason) == ([], "length")
    assert_scores(family, scored(drive, 0), tuple(range(7, 7 + length)))


def test_a_step_that_lacks_memory_is_scored_in_halves(
    family: str, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each half has its own positions."""
    prompt, launch, num_failed = tuple(range(9, 40)), runner.launch, 0

    def without_memory(plan: StepPlan) -> object:
        nonlocal num_failed
        if plan.num_tokens > len(prompt) // 2 + 1:
            num_failed += 1
            raise StepOutOfMemory("too large")
        return launch(plan)

    monkeypatch.setattr(runner, "launch", without_memory)
    drive = Drive(runner=runner)
    drive.run(asked(0, prompt))
    assert num_failed == 1
    assert_scores(family, scored(drive, 0), prompt)
    chunk = drive.plans[0].chunks[0]
    first, second = halves((chunk,), runner.block_size)
    assert first[0].scores is not None
    assert second[0].scores is not None
    assert first[0].scores.token_ids + second[0].scores.token_ids == prompt[1:]


def test_a_step_scores_a_bounded_part_of_a_prompt() -> None:
    """So that the others of the step do not wait for it; candidates count."""
    prompt = [token % 200 for token in range(1_000)]
    for top, most in ((0, 256), (20, 97)):
        drive = Drive(num_blocks=300)
        drive.run(asked(0, prompt, how={"prompt_logprobs": top, "max_tokens": 1}))
        sizes = [len(chunk.scores.token_ids) for plan in drive.plans for chunk in plan.chunks if chunk.scores]
        assert max(sizes) == most
        assert sum(sizes) == len(prompt) - 1
        assert [token_id for token_id, _ in scored(drive, 0)] == prompt[1:]
        assert {len(raw.top) for _, raw in scored(drive, 0)} == {top}


def test_numbers_that_are_not_finite_end_that_sequence_alone(family: str, runner: ModelRunner) -> None:
    """A head that gives NaN for one row."""
    good = asked(1, range(50, 70))
    drive = Drive(runner=runner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "logits", partialmethod(_spoiled, logits=Decoder.logits, row=3))
        answers = drive.run(asked(0, range(5, 30)))
    assert answers[0].error == "numerical_error"
    assert drive.run(good)[1].finish_reason == "length"
    assert_scores(family, scored(drive, 1), good.prompt_token_ids)


def _spoiled(model: Decoder, hidden: torch.Tensor, rows: torch.Tensor, *, logits: Any, row: int) -> torch.Tensor:
    out = logits(model, hidden, rows)
    if len(rows) > 1:  # the slices of the scores, not the row that draws
        out[row] = float("nan")
    return out
