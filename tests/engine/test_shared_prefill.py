"""Laws of prompts that begin alike: a block they share is computed once, and a writer that left is not waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streamserve.engine.echo import EchoRunner
from streamserve.engine.plan import StepPlan
from streamserve.engine.sequence import SequenceRequest
from tests.support.engines.cores import Drive, alone, request, sampling
from tests.support.engines.runners import FaultyRunner

PROMPT = range(200)
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])


def burst(number: int, prompt: range = PROMPT, **fields: Any) -> list[SequenceRequest]:
    """The same prompt, with a seed for each."""
    return [
        request(seq_id, prompt, sampling=sampling(temperature=1.0, seed=seq_id, max_tokens=6), **fields)
        for seq_id in range(1, number + 1)
    ]


def make_drive(**fields: Any) -> Drive:
    return Drive(**{"num_blocks": 60, "block_size": 32, **fields})


def num_prefilled(plans: list[StepPlan], num_sequences: int) -> int:
    """Return how many prompt tokens the plans compute: all but five decodes each."""
    return sum(plan.num_tokens for plan in plans) - 5 * num_sequences


@OVERLAP
def test_four_answers_to_one_prompt_compute_it_once(overlap: bool) -> None:
    """200 tokens in blocks of 32: the first computes all, the others the eight that are in no full block."""
    drive = make_drive(overlap=overlap)
    answers = drive.run(*burst(4))
    assert num_prefilled(drive.plans, 4) == 200 + 3 * 8
    assert [answers[seq_id].num_cached_tokens for seq_id in range(1, 5)] == [0, 192, 192, 192]
    assert {one.seq_id: answers[one.seq_id].token_ids for one in burst(4)} == {
        one.seq_id: alone(one, num_blocks=60, block_size=32) for one in burst(4)
    }
    drive.assert_empty()


@OVERLAP
@pytest.mark.parametrize("budget", [8, 33, 100])
def test_a_burst_in_chunks_computes_it_once(budget: int, overlap: bool) -> None:
    """Also where the prompt takes many steps, and the others arrive in the middle of it."""
    drive = make_drive(overlap=overlap, max_num_batched_tokens=budget, prefill_chunk=budget)
    first, *others = burst(5)
    drive.add(first)
    drive.step()
    drive.step()
    drive.run(*others)
    assert num_prefilled(drive.plans, 5) == 200 + 4 * 8
    drive.assert_empty()


def test_prompts_that_part_share_what_they_share() -> None:
    """Two pairs in one: each common block is computed by one of those that have it in common."""
    ends = {1: [*range(64), *range(900, 970)], 2: [*range(64), *range(900, 964)], 3: [*range(64), *range(800, 870)]}
    drive = make_drive()
    answers = drive.run(*(request(seq_id, [*prompt, 1, 2, seq_id]) for seq_id, prompt in ends.items()))
    assert [answers[seq_id].num_cached_tokens for seq_id in ends] == [0, 128, 64]


def test_an_earlier_one_is_not_held_up_by_its_writer() -> None:
    """The writer's half-written block is finished in the turn of the earlier sequence."""
    drive = make_drive(max_num_batched_tokens=16, max_num_seqs=4)
    drive.add(request(9, range(64), arrived_at=50.0, sampling=sampling(max_tokens=1)))
    drive.step()
    drive.add(
        request(1, range(70), arrived_at=1.0, sampling=sampling(max_tokens=1)),
        request(5, range(500, 540), arrived_at=20.0, sampling=sampling(max_tokens=1)),
    )
    drive.step()
    assert list(drive.planned()) == [9, 5]
    drive.run()
    assert drive.answers[1].num_cached_tokens == 32
    assert sum(plan.num_tokens for plan in drive.plans) == 64 + (70 - 32) + 40


@OVERLAP
@pytest.mark.parametrize("leave", ["abort", "park", "preempt"])
def test_the_waiting_sequences_continue_when_the_writer_leaves(leave: str, overlap: bool) -> None:
    """Half-way through the prompt: one of the waiting sequences computes the rest, once."""
    drive = make_drive(overlap=overlap, max_num_batched_tokens=40, prefill_chunk=40)
    one, *others = burst(4)
    drive.add(one, *others)
    drive.step()
    drive.step()
    leaving: dict[str, Callable[[], None]] = {
        "abort": lambda: drive.core.abort(1),
        "park": lambda: drive.core._inbox.append(lambda: drive.core._output.fail(drive.core._sequences[1], "x", 0.0)),
        "preempt": lambda: preempt_first(drive),
    }
    leaving[leave]()
    drive.run()
    for other in others:
        assert drive.answers[other.seq_id].token_ids == alone(other, num_blocks=60, block_size=32)
    drive.assert_empty()


def preempt_first(drive: Drive) -> None:
    def preempt(running: Any) -> list[Any]:
        drive.core.scheduler.forced_preempt = None
        return [one for one in running if one.seq_id == 1]

    drive.core.scheduler.forced_preempt = preempt


@OVERLAP
def test_a_writer_that_fails_ends_alone(overlap: bool) -> None:
    """Its step has no result: the next waiting sequence computes the prompt."""
    echo = EchoRunner(num_blocks=60, block_size=32, can_overlap=overlap)
    drive = Drive(runner=FaultyRunner(echo, lambda step, seq_id: seq_id == 1), overlap=overlap)
    answers = drive.run(*burst(4))
    assert answers[1].error == "numerical_error"
    assert [answers[seq_id].num_cached_tokens for seq_id in (2, 3, 4)] == [0, 192, 192]
    for one in burst(4)[1:]:
        assert answers[one.seq_id].token_ids == alone(one, num_blocks=60, block_size=32)


def test_other_tenants_do_not_wait() -> None:
    """Under another salt nothing is shared, so nothing is waited for."""
    drive = make_drive()
    mine, theirs = burst(2)
    drive.add(mine, request(2, PROMPT, sampling=theirs.sampling, salt="theirs"))
    drive.step()
    assert drive.planned() == {1: 200, 2: 200}


def test_without_the_prefix_cache_no_sequence_waits() -> None:
    """Without shared blocks there is nothing to wait for."""
    drive = make_drive(prefix_caching=False)
    drive.add(*burst(3))
    drive.step()
    assert drive.planned() == {1: 200, 2: 200, 3: 200}
