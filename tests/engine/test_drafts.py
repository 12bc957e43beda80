"""Laws of a draft model: whatever it proposes, answers are those of one token a step, and it costs others nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streamserve.engine.echo import EOS, EchoRunner
from streamserve.engine.plan import Sampled, StepPlan, StepResult
from streamserve.engine.sequence import SequenceRequest
from tests.support.engines.cores import Answer, Drive, request, sampling
from tests.support.engines.runners import GuessingRunner, SmallRunner, WrappedRunner

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 5, "top_k": 7},
    "log-probabilities": {"logprobs": 3},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "bad words": {"bad_words": ("x",)},  # the ids are the request's
    "biases": {"logit_bias": ((300, 2.0),), "temperature": 1.0},
    "stop tokens": {"stop_token_ids": tuple(range(300, 330))},
    "a least length": {"stop_token_ids": tuple(range(300, 400)), "min_tokens": 17},
    "short": {"max_tokens": 3},
    "one token": {"max_tokens": 1},
}
NUM_BLOCKS, BLOCK_SIZE = 257, 8


def requests_of(way: str, **fields: Any) -> list[SequenceRequest]:
    """Five prompts; the longest answers end at the model's length."""
    how = sampling(**{"max_tokens": 60, **WAYS[way]})
    bad = {"bad_word_ids": ((301,), (310, 305), (311, 300, 302))} if way == "bad words" else {}
    return [
        request(n, range(10 * n, 10 * n + 7 + n), sampling=how, eos_token_ids=frozenset({EOS}), **bad, **fields)
        for n in range(1, 6)
    ]


def echo() -> EchoRunner:
    return EchoRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def drive_of(draft: Any = None, runner: Any = None, **config: Any) -> Drive:
    return Drive(**{"runner": runner or echo(), "draft": draft, "max_model_len": 64, **config})


def outcomes(requests: list[SequenceRequest], drive: Drive) -> dict[int, tuple[Any, ...]]:
    """Run to the end."""
    answers: dict[int, Answer] = drive.run(*requests)
    return {n: (one.token_ids, one.logprobs, one.finish_reason) for n, one in answers.items()}


def assert_drawn_right(requests: list[SequenceRequest], draft: GuessingRunner, drive: Drive) -> None:
    """After known tokens the draft model drew the model's own: its memory held these tokens, and no others."""
    for one in requests:
        tokens = (*one.prompt_token_ids, *drive.answers[one.seq_id].token_ids)
        for (seq_id, position), token_id in draft.first.items():
            if seq_id == one.seq_id and position < len(tokens):
                assert token_id == tokens[position], (seq_id, position)


@pytest.mark.parametrize("share_wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_one_token_a_step(way: str, share_wrong: float) -> None:
    """Tokens, log-probabilities and reasons, with proposals right and wrong."""
    requests, draft = requests_of(way), GuessingRunner(echo(), share_wrong)
    drive = drive_of(draft)
    assert outcomes(requests, drive) == outcomes(requests, drive_of(speculation="off"))
    drive.assert_empty()
    stats = drive.core.stats
    num_drafted, num_accepted = stats.drafted_tokens.get("chat", 0), stats.accepted_drafts.get("chat", 0)
    if way in ("penalties", "one token"):
        assert not draft.passes
        return
    if way not in ("bad words", "biases", "a least length"):  # which the draft model does not know
        assert_drawn_right(requests, draft, drive)
    if way != "short":
        assert num_drafted > 20 if share_wrong < 1 else num_drafted > 5
        assert num_accepted > 10 if share_wrong < 1 else num_accepted == 0
    assert num_drafted <= stats.proposed_tokens.get("chat", 0)


def test_a_draft_model_that_is_right_saves_steps() -> None:
    """Half of them at least, its first steps counted, in which it is not asked yet."""
    requests = requests_of("greedy")
    drives = [drive_of(GuessingRunner(echo(), 0.0)), drive_of(speculation="off")]
    for drive in drives:
        drive.run(*requests)
    assert 2 * len(drives[0].plans) < len(drives[1].plans)


def test_what_it_proposes_takes_nothing_from_others() -> None:
    """No block beyond that of the next token, nothing past the lead, and no more tokens than a step has."""
    draft = GuessingRunner(echo(), 0.2)
    drive = drive_of(draft, lead_tokens=19, max_num_batched_tokens=12, max_num_seqs=8, prefix_caching=False)
    drive.add(*requests_of("greedy", reader_tokens=0))
    for _ in range(60):
        drive.step()
    assert draft.passes
    for plan in drive.plans:
        assert plan.num_tokens <= 12
        for chunk in plan.chunks:
            num_known = chunk.start + len(chunk.token_ids) - len(chunk.proposed_ids)
            assert len(chunk.block_table) == -(-num_known // BLOCK_SIZE)
    assert {len(one.token_ids) for one in drive.answers.values()} == {19}


def test_no_prompt_waits_for_it() -> None:
    """Before a step that holds a part of a prompt it computes nothing."""
    draft = GuessingRunner(echo(), 0.2)
    drive = drive_of(draft, max_num_batched_tokens=16)
    drive.add(*requests_of("greedy")[:2])
    for number in range(24):
        if number == 12:
            drive.add(request(9, range(100, 150), sampling=sampling(max_tokens=2)))
        before = len(draft.passes)
        drive.step()
        holds_prompt = any(len(chunk.token_ids) - len(chunk.proposed_ids) > 1 for chunk in drive.plans[-1].chunks)
        assert not (holds_prompt and len(draft.passes) > before)
    assert len(draft.passes) > 5


def test_a_long_prompt_is_caught_up_over_several_steps() -> None:
    """Each step holds a part, and nothing is proposed until all is known."""
    draft = GuessingRunner(echo(), 0.0)
    drive = drive_of(draft, prefill_chunk=4, max_model_len=200)
    one = request(1, range(70), sampling=sampling(max_tokens=120), eos_token_ids=frozenset())
    found = outcomes([one], drive)
    assert found == outcomes([one], drive_of(speculation="off", max_model_len=200))
    parts = [len(plan.chunks[0].token_ids) for plan in draft.passes if not plan.chunks[0].samples]
    assert len(parts) > 4
    assert max(len(plan.chunks[0].token_ids) for plan in draft.passes) <= BLOCK_SIZE
    assert_drawn_right([one], draft, drive)


def test_a_preempted_answer_is_the_same() -> None:
    """Its draft model begins again, in the blocks that it gets."""
    requests, draft = requests_of("drawn"), GuessingRunner(echo(), 0.2)
    drive = drive_of(draft)
    drive.core.scheduler.forced_preempt = lambda running: running[:1] if len(drive.plans) % 7 == 0 else ()
    assert outcomes(requests, drive) == outcomes(requests, drive_of(speculation="off"))
    assert drive.core.stats.preemptions > 0
    assert drive.core.stats.accepted_drafts["chat"] > 0
    assert_drawn_right(requests, draft, drive)


@pytest.mark.parametrize("at_collect", [False, True], ids=["launch", "collect"])
def test_a_pass_out_of_memory_costs_its_proposals(at_collect: bool) -> None:
    """The step runs without; after a rest the draft model computes what it had lost."""
    tried: list[StepPlan] = []

    def is_too_large(plan: StepPlan) -> bool:
        tried.append(plan)
        return len(tried) % 5 == 0

    requests = requests_of("drawn")
    draft = GuessingRunner(SmallRunner(echo(), is_too_large, at_collect=at_collect), 0.2)
    drive = drive_of(draft)
    assert drive.core.scheduler.drafting is not None
    drive.core.scheduler.drafting.rest_steps = 3
    assert outcomes(requests, drive) == outcomes(requests, drive_of(speculation="off"))
    assert drive.core.stats.out_of_memory > 1
    assert drive.core.stats.accepted_drafts["chat"] > 0
    assert_drawn_right(requests, draft, drive)


def test_a_step_out_of_memory_is_tried_again_without_proposals() -> None:
    """Its halves hold known tokens only, and what the draft model had computed for it counts for nothing."""
    requests, draft = requests_of("drawn"), GuessingRunner(echo(), 0.2)

    def is_too_large(plan: StepPlan) -> bool:
        return any(len(chunk.proposed_ids) > 2 for chunk in plan.chunks)

    drive = drive_of(draft, SmallRunner(echo(), is_too_large))
    assert outcomes(requests, drive) == outcomes(requests, drive_of(speculation="off"))
    assert drive.core.stats.out_of_memory > 0
    assert_drawn_right(requests, draft, drive)


def test_nothing_is_proposed_while_steps_overlap() -> None:
    """The draft model is not asked."""
    draft = GuessingRunner(echo(), 0.0)
    runner = EchoRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, can_overlap=True)
    drive = drive_of(draft, runner, overlap=True)
    drive.run(*requests_of("greedy"))
    assert not draft.passes


class LargeVocabulary(WrappedRunner):
    """Draws a token that the model does not have."""

    def collect(self, handle: object) -> StepResult:
        result = self.inner.collect(handle)
        return replace(result, sampled=tuple(Sampled(seq_id=one.seq_id, token_ids=(10**6,)) for one in result.sampled))


def test_a_token_that_the_model_lacks_is_not_proposed() -> None:
    """As large vocabularies are filled up to round numbers, each in its own way."""
    drive = drive_of(LargeVocabulary(echo()))
    requests = requests_of("greedy")
    assert outcomes(requests, drive) == outcomes(requests, drive_of(speculation="off"))
    assert not drive.core.stats.drafted_tokens


def test_a_draft_model_needs_the_models_blocks() -> None:
    """Others would be read and written elsewhere."""
    with pytest.raises(ValueError, match="64 blocks of 8"):
        drive_of(EchoRunner(num_blocks=64, block_size=BLOCK_SIZE))
