"""Laws of quarantine: a failed integrity check ends the sequences with blocks, and the engine continues."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamserve.engine.plan import Chunk
from streamserve.engine.sequence import Sequence
from tests.support.engines.cores import Drive, alone, request, sampling

BOTH_WAYS = pytest.mark.parametrize("overlap", [False, True])


def free_twice(drive: Drive) -> None:
    drive.core.pool.free(drive.core.scheduler.running[0].held.block_table[:1])


def give_out_held_block(drive: Drive) -> None:
    pool = drive.core.pool
    held = pool._blocks[drive.core.scheduler.running[0].held.block_table[0]]
    pool._free.push(held, at_front=True)


def give_out_null_block(drive: Drive) -> None:
    drive.core.scheduler.running[0].held.block_table[-1] = 0


def miscount_free(drive: Drive) -> None:
    drive.core.pool._free.num_blocks -= 1


def miscount_cached(drive: Drive) -> None:
    drive.core.pool._num_free_cached -= 1


def lose_a_block(drive: Drive) -> None:
    drive.core.scheduler.running[0].held.block_table.pop()


def compute_too_much(drive: Drive) -> None:
    drive.core.scheduler.running[0].num_computed_tokens += 3


def run_twice(drive: Drive) -> None:
    drive.core.scheduler.running.append(drive.core.scheduler.running[0])


def forget_to_run(drive: Drive) -> None:
    drive.core.scheduler.running.clear()


def raise_in_the_scheduler(drive: Drive) -> None:
    def broken(running: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        drive.core.scheduler.forced_preempt = None
        raise RuntimeError("a mistake")

    drive.core.scheduler.forced_preempt = broken


FAULTS = [
    free_twice,
    give_out_held_block,
    give_out_null_block,
    miscount_free,
    miscount_cached,
    lose_a_block,
    compute_too_much,
    run_twice,
    forget_to_run,
    raise_in_the_scheduler,
]


@BOTH_WAYS
@pytest.mark.parametrize("fault", FAULTS)
def test_engine_continues_after_a_fault(fault: Callable[[Drive], None], overlap: bool) -> None:
    """Running sequences end with an error or as they would alone; waiting and later ones are complete."""
    drive = Drive(num_blocks=25, max_num_seqs=2, overlap=overlap, check_integrity=False)
    requests = [request(seq_id, range(seq_id % 4, seq_id + 18)) for seq_id in range(1, 6)]
    drive.add(*requests[:4])
    for _ in range(4):
        drive.step()
    fault(drive)
    answers = drive.run(requests[4])
    for one in requests:
        answer, whole = answers[one.seq_id], alone(one)
        if answer.error is None:
            assert (answer.token_ids, answer.finish_reason) == (whole, "length")
        else:
            assert (answer.error, answer.token_ids) == ("internal_error", whole[: len(answer.token_ids)])
    assert [answers[seq_id].error for seq_id in (4, 5)] == [None, None]
    assert drive.core.stats.quarantines == 1
    drive.core.pool.check_integrity([])
    drive.assert_empty()


@BOTH_WAYS
def test_nothing_of_the_old_pool_is_found(overlap: bool) -> None:
    """After a quarantine the same prompt is computed anew."""
    drive = Drive(overlap=overlap)
    drive.add(request(1, sampling=sampling(max_tokens=50)))
    for _ in range(3):
        drive.step()
    raise_in_the_scheduler(drive)
    answers = drive.run(request(2))
    assert answers[1].error == "internal_error"
    assert (answers[2].num_cached_tokens, answers[2].token_ids) == (0, alone(request(2)))


def test_repeated_quarantine_ends_waiting_sequences_too() -> None:
    """A second quarantine in a row ends the waiting sequences too; later ones are served."""
    drive = Drive(max_num_seqs=1)

    def broken(running: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        raise RuntimeError("a mistake")

    drive.core.scheduler.forced_preempt = broken
    answers = drive.run(request(1), request(2))
    assert {answer.error for answer in answers.values()} == {"internal_error"}
    assert drive.core.stats.quarantines == 2
    drive.core.scheduler.forced_preempt = None
    assert drive.run(request(3))[3].finish_reason == "length"


def test_aborted_sequence_gets_no_update_from_a_quarantine() -> None:
    """Even if its own abort was what found the mistake."""
    drive = Drive()
    drive.add(request(1), request(2))
    drive.step()
    drive.core.scheduler.running[0].held.block_table.append(60)  # a block without a holder
    drive.core.abort(1)
    drive.run()
    assert (drive.answers[1].error, drive.answers[2].error) == (None, "internal_error")


def test_plan_beyond_the_budget_never_runs() -> None:
    """A scheduler that plans too much is stopped before the runner sees it."""
    drive = Drive(max_num_batched_tokens=16, max_num_seqs=4)
    schedule = drive.core.scheduler.schedule
    chunks: list[Chunk] = []

    def too_much(now: float) -> object:
        drive.core.scheduler._budget.num_tokens = 99
        planned = schedule(now)
        chunks.extend(planned.chunks)
        return planned

    drive.core.scheduler.schedule = too_much  # type: ignore[assignment,method-assign]
    drive.run(request(1, range(60)))
    assert drive.answers[1].error == "internal_error"
    assert len(chunks[0].token_ids) == 60
    assert drive.plans == []


def test_counters_continue() -> None:
    """Totals never go back, though the pool is a new one."""
    drive = Drive()
    drive.run(request(1), request(2))
    before = drive.core.stats
    drive.add(request(3))
    raise_in_the_scheduler(drive)
    drive.run()
    after = drive.core.stats
    assert after.prefix_queries >= before.prefix_queries > 0
    assert after.steps >= before.steps
