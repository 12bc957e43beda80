"""Laws of several tokens a step: whatever a runner proposes and keeps, answers are those of one token a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streamserve.engine.echo import EOS, EchoRunner
from streamserve.engine.plan import StepPlan
from streamserve.engine.sequence import SequenceRequest
from tests.support.engines.cores import Answer, Drive, request, sampling
from tests.support.engines.runners import ProposingRunner, SmallRunner

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


def requests_of(way: str, **fields: Any) -> list[SequenceRequest]:
    """Five prompts; the longest answers end at the model's length."""
    how = sampling(**{"max_tokens": 50, **WAYS[way]})
    bad = {"bad_word_ids": ((301,), (310, 305), (311, 300, 302))} if way == "bad words" else {}
    return [
        request(n, range(10 * n, 10 * n + 7 + n), sampling=how, eos_token_ids=frozenset({EOS}), **bad, **fields)
        for n in range(1, 6)
    ]


def drive_of(runner: Any = None, **config: Any) -> Drive:
    return Drive(**{"runner": runner, "num_blocks": 257, "max_model_len": 52, "speculation": "off", **config})


def repeating(way: str, *, n: int = 3) -> list[SequenceRequest]:
    """Prompts that hold what the answer will be, as answers that quote do."""
    alone = play(drive_of(speculation="off"), requests_of(way))
    return [
        replace(one, prediction_token_ids=(*alone[one.seq_id].token_ids[:-1], 7, 7)) for one in requests_of(way)[:n]
    ]


def play(drive: Drive, requests: list[SequenceRequest]) -> dict[int, Answer]:
    """Run to the end; parked answers come back with what was shown."""
    drive.run(*requests)
    return drive.answers


def outcome(answer: Answer) -> tuple[Any, ...]:
    return answer.token_ids, answer.logprobs, answer.finish_reason


def texts_of(requests: list[SequenceRequest], answers: dict[int, Answer]) -> list[tuple[int, ...]]:
    return [(*one.prompt_token_ids, *answers[one.seq_id].token_ids) for one in requests]


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_one_token_a_step(way: str, overlap: bool) -> None:
    """Tokens, log-probabilities and reasons: with proposals right and wrong, and any number of them kept."""
    requests = requests_of(way)
    alone = play(drive_of(), requests)
    for seed in range(3):
        runner = ProposingRunner(
            EchoRunner(num_blocks=257, block_size=4, can_overlap=overlap), texts_of(requests, alone), seed
        )
        drive = drive_of(runner, overlap=overlap)
        found = play(drive, requests)
        assert {n: outcome(one) for n, one in found.items()} == {n: outcome(one) for n, one in alone.items()}
        drive.assert_empty()
        has_several = not overlap and way not in ("penalties", "one token")
        assert bool(runner.num_kept) is has_several, runner.num_kept


def test_some_steps_keep_several_and_some_none() -> None:
    """The proof above has cases of each kind, and fewer steps than tokens."""
    requests = requests_of("greedy")
    runner = ProposingRunner(EchoRunner(num_blocks=257, block_size=4), texts_of(requests, play(drive_of(), requests)))
    drive = drive_of(runner)
    play(drive, requests)
    assert {0, 1, 2, 3} <= runner.num_kept.keys()
    assert runner.num_wrong > 0
    assert len(drive.plans) < max(len(one.token_ids) for one in drive.answers.values())


def test_what_is_proposed_takes_nothing_from_others() -> None:
    """No block beyond that of the next token, no token that a seat may need, and none past the lead."""
    requests = requests_of("greedy", reader_tokens=0)
    known = texts_of(requests, play(drive_of(), requests_of("greedy")))
    runner = ProposingRunner(EchoRunner(num_blocks=257, block_size=4), known)
    drive = drive_of(runner, lead_tokens=9, max_num_batched_tokens=12, max_num_seqs=8, prefix_caching=False)
    drive.add(*requests)
    for _ in range(60):
        drive.step()
    for plan in drive.plans:
        assert plan.num_tokens <= 12
        for chunk in plan.chunks:
            num_known = chunk.start + len(chunk.token_ids) - len(chunk.proposed_ids)
            assert len(chunk.block_table) == -(-num_known // 4)
    assert {len(one.token_ids) for one in drive.answers.values()} == {9}
    assert runner.num_kept


def test_a_preempted_answer_is_the_same() -> None:
    """What was proposed and computed is forgotten with the blocks."""
    requests = requests_of("drawn")
    alone = play(drive_of(), requests)
    runner = ProposingRunner(EchoRunner(num_blocks=257, block_size=4), texts_of(requests, alone))
    drive = drive_of(runner)
    drive.core.scheduler.forced_preempt = lambda running: running[:1] if len(drive.plans) % 3 == 0 else ()
    found = play(drive, requests)
    assert {n: outcome(one) for n, one in found.items()} == {n: outcome(one) for n, one in alone.items()}
    assert drive.core.stats.preemptions > 0


def test_a_step_out_of_memory_is_tried_again_without_proposals() -> None:
    """Its halves hold known tokens only."""
    requests = requests_of("drawn")
    alone = play(drive_of(), requests)
    tried: list[bool] = []  # for each plan: whether it holds proposals

    def is_too_large(plan: StepPlan) -> bool:
        tried.append(any(chunk.proposed_ids for chunk in plan.chunks))
        return tried[-1]

    runner = ProposingRunner(EchoRunner(num_blocks=257, block_size=4), texts_of(requests, alone))
    found = play(drive_of(SmallRunner(runner, is_too_large)), requests)
    assert {n: outcome(one) for n, one in found.items()} == {n: outcome(one) for n, one in alone.items()}
    first = tried.index(True)
    assert tried[first + 1 : first + 3] == [False, False]


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("way", WAYS)
def test_answers_that_were_predicted_are_the_same(way: str, overlap: bool) -> None:
    """With fewer steps, and counts of what was proposed; nothing is proposed while steps overlap."""
    requests = repeating(way)
    drives = [drive_of(speculation=name, overlap=overlap) for name in ("off", "lookup")]
    off, on = (play(drive, requests) for drive in drives)
    assert {n: outcome(one) for n, one in on.items()} == {n: outcome(one) for n, one in off.items()}
    drives[1].assert_empty()
    stats = drives[1].core.stats
    if overlap or way in ("penalties", "one token"):
        assert not stats.proposed_tokens
        return
    num_accepted = stats.accepted_tokens.get("chat", 0)
    last = [one.updates[-1] for one in on.values()]
    assert stats.proposed_tokens.get("chat", 0) == sum(one.num_proposed for one in last) >= num_accepted
    assert num_accepted == sum(one.num_accepted for one in last)
    if way != "short":
        assert num_accepted > 5
        assert len(drives[1].plans) < len(drives[0].plans)


def test_a_preempted_answer_that_was_predicted_is_the_same() -> None:
    """Its lookup stays; what was proposed goes with the blocks."""
    requests = repeating("drawn")
    alone = play(drive_of(), requests)
    drive = drive_of(speculation="lookup")
    drive.core.scheduler.forced_preempt = lambda running: running[:1] if len(drive.plans) % 3 == 0 else ()
    found = play(drive, requests)
    assert {n: outcome(one) for n, one in found.items()} == {n: outcome(one) for n, one in alone.items()}
    assert drive.core.stats.preemptions > 0
    assert drive.core.stats.accepted_tokens["chat"] > 0


def test_a_step_out_of_memory_tries_nothing_again() -> None:
    """Its halves hold known tokens only, and the answers are the same."""
    requests = repeating("greedy")
    alone = play(drive_of(), requests)

    def is_too_large(plan: StepPlan) -> bool:
        return any(len(chunk.proposed_ids) > 2 for chunk in plan.chunks)

    runner = SmallRunner(EchoRunner(num_blocks=257, block_size=4), is_too_large)
    drive = drive_of(runner, speculation="lookup")
    found = play(drive, requests)
    assert {n: outcome(one) for n, one in found.items()} == {n: outcome(one) for n, one in alone.items()}
    assert drive.core.stats.out_of_memory > 0
