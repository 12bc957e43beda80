"""Laws of running out of memory: the step is split, the largest chunk fails if it must, the rest is unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamserve.engine.echo import EchoRunner
from streamserve.engine.in_flight import halves
from streamserve.engine.plan import Chunk, StepPlan
from tests.support.engines.cores import Drive, alone, request, sampling
from tests.support.engines.runners import SmallRunner
from tests.support.engines.specs import spec_of

EVERY_WAY = pytest.mark.parametrize(
    ("overlap", "at_collect"), [(False, False), (False, True), (True, False), (True, True)]
)


def small(too_large: Callable[[StepPlan], bool], overlap: bool, at_collect: bool, **config: object) -> Drive:
    echo = EchoRunner(num_blocks=129, block_size=4, can_overlap=overlap)
    return Drive(runner=SmallRunner(echo, too_large, at_collect=at_collect), **config)


def larger_than(num_tokens: int) -> Callable[[StepPlan], bool]:
    return lambda plan: plan.num_tokens > num_tokens


@EVERY_WAY
def test_step_that_is_too_large_runs_in_halves(overlap: bool, at_collect: bool) -> None:
    """Every sequence gets the same tokens, though one prompt is split."""
    drive = small(larger_than(40), overlap, at_collect)
    one, other = request(1, range(30)), request(2, range(50, 90))
    answers = drive.run(one, other)
    assert [answers[1].token_ids, answers[2].token_ids] == [alone(one), alone(other)]
    assert drive.core.stats.out_of_memory == 1
    drive.assert_empty()


@EVERY_WAY
def test_largest_ends_when_a_half_is_too_large_too(overlap: bool, at_collect: bool) -> None:
    """It ends with out_of_memory; the other sequences get the tokens they get alone."""
    drive = small(lambda plan: any(c.seq_id == 2 for c in plan.chunks), overlap, at_collect)
    others = request(1, range(10)), request(3, range(90, 100))
    answers = drive.run(*others, request(2, range(40, 80)))
    assert answers[2].error == "out_of_memory"
    for one in others:
        assert answers[one.seq_id].token_ids == alone(one)
    drive.assert_empty()


@EVERY_WAY
@pytest.mark.parametrize("at_step", range(12))
def test_out_of_memory_once_in_any_step_changes_no_token(at_step: int, overlap: bool, at_collect: bool) -> None:
    """Whatever the step computed, and whatever was launched on top of it."""
    drive = small(lambda plan: plan.step_id == at_step, overlap, at_collect, max_num_batched_tokens=16)
    requests = [request(1), request(2, range(40, 70)), request(3, range(8), sampling=sampling(presence_penalty=0.1))]
    answers = drive.run(*requests)
    assert {seq_id: answer.token_ids for seq_id, answer in answers.items()} == {
        one.seq_id: alone(one) for one in requests
    }
    assert drive.core.stats.out_of_memory == 1
    drive.assert_empty()


@EVERY_WAY
def test_failed_steps_name_no_block(overlap: bool, at_collect: bool) -> None:
    """A sequence that never completed a step leaves no cached block."""
    drive = small(lambda plan: plan.chunks[0].seq_id == 1, overlap, at_collect)
    assert drive.run(request(1))[1].error == "out_of_memory"
    assert drive.core.stats.blocks_cached == 0
    assert drive.run(request(2))[2].num_cached_tokens == 0


@EVERY_WAY
def test_no_memory_at_all_ends_every_sequence(overlap: bool, at_collect: bool) -> None:
    """A runner that can do nothing ends each sequence with an error, and the engine accepts the next ones."""
    drive = small(larger_than(0), overlap, at_collect)
    answers = drive.run(*(request(seq_id) for seq_id in range(1, 6)))
    assert {answer.error for answer in answers.values()} == {"out_of_memory"}
    drive.assert_empty()


def test_budget_is_lowered() -> None:
    """The next steps are planned smaller, so that the same does not happen again at once."""
    drive = small(larger_than(64), False, False, max_num_batched_tokens=128)
    drive.run(*(request(seq_id, range(seq_id, seq_id + 60)) for seq_id in range(1, 5)))
    stats = drive.core.stats
    assert (stats.token_budget, stats.out_of_memory) == (64, 1)


def test_sequence_that_ends_in_the_first_half_is_not_in_the_second() -> None:
    """A cut prompt whose first part fails has no second part."""
    tried: list[tuple[int, int]] = []

    def too_large(plan: StepPlan) -> bool:
        tried.extend((chunk.start, len(chunk.token_ids)) for chunk in plan.chunks)
        return True

    drive = small(too_large, False, False)
    drive.run(request(1, range(40)))
    assert tried == [(0, 40), (0, 20)]


def chunk(seq_id: int, start: int, num_tokens: int) -> Chunk:
    end = start + num_tokens
    table = tuple(range(1, 1 + -(-end // 4)))
    spec = spec_of(end)
    return Chunk(
        seq_id=seq_id,
        start=start,
        token_ids=tuple(range(start, end)),
        block_table=table,
        samples=() if spec is None else (spec,),
    )


@pytest.mark.parametrize("sizes", [(1,), (2,), (1, 1), (1, 1, 1), (7,), (3, 9, 1), (1, 1, 30), (30, 1, 1), (4, 4)])
def test_halves_are_the_plan(sizes: tuple[int, ...]) -> None:
    """Together they hold each token once, in order; neither has more than half, rounded up; each end samples once."""
    chunks = tuple(chunk(seq_id, 5, size) for seq_id, size in enumerate(sizes))
    parts = halves(chunks, 4)
    together = [(one.seq_id, position) for half in parts for one in half for position in one.token_ids]
    assert together == [(one.seq_id, position) for one in chunks for position in one.token_ids]
    assert max(sum(len(one.token_ids) for one in half) for half in parts) <= -(-sum(sizes) // 2)
    for half in parts:
        for one in half:
            end = one.start + len(one.token_ids)
            assert len(one.block_table) == -(-end // 4)
            assert (not one.samples) == (end != 5 + sizes[one.seq_id])


@EVERY_WAY
def test_sequence_aborted_while_memory_runs_out_is_in_neither_half(overlap: bool, at_collect: bool) -> None:
    """An abort that comes before the halves are launched is in force before their plans are made."""
    left_at: list[int] = []

    def too_large(plan: StepPlan) -> bool:
        if left_at or plan.num_tokens <= 40:
            return False
        drive.core.abort(2)
        left_at.append(plan.step_id)
        return True

    drive = small(too_large, overlap, at_collect)
    one = request(1, range(30))
    assert drive.run(one, request(2, range(50, 90)))[1].token_ids == alone(one)
    later = [plan for plan in drive.plans if plan.step_id > left_at[0]]
    assert later
    assert not any(chunk.seq_id == 2 for plan in later for chunk in plan.chunks)
    drive.assert_empty()
