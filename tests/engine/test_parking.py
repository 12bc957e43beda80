"""Laws of parking for a waiting sequence that lacks memory: which one parks, when, and what it frees."""

from __future__ import annotations

from typing import Any

import pytest

from streamserve.engine.config import Policy
from streamserve.engine.sequence import Sequence, SequenceRequest, State
from tests.support.engines.cores import Drive, request, sampling
from tests.support.engines.desk import Desk

# Two seconds ahead is enough.
AHEAD = {"policy": Policy(min_ahead_seconds=2.0)}


def reading(
    seq_id: int,
    *,
    reader_tokens: int | None = 0,
    num_shown: int = 0,
    first_token_at: float | None = None,
    **fields: Any,
) -> SequenceRequest:
    """A long answer with a reader; `num_shown` tokens were made before, and the first of them when the reader came."""
    return request(
        seq_id,
        range(8),
        salt=str(seq_id),
        output_token_ids=(7,) * num_shown,
        reader_tokens=reader_tokens,
        first_token_at=first_token_at,
        sampling=sampling(max_tokens=400),
        **fields,
    )


def running(*requests: SequenceRequest, num_free: int = 4, **config: Any) -> Desk:
    """All of these run and have one more token; `num_free` blocks are free, and none is reserved for their growth."""
    num_used = sum(-(-(8 + len(one.output_token_ids) + 2) // 4) for one in requests)
    desk = Desk(**{"max_num_seqs": len(requests) + 1, "num_blocks": num_used + num_free + 1, **AHEAD, **config})
    desk.scheduler._reserve._share = 0.0
    desk.add(*requests)
    desk.step()
    desk.scheduler._reserve._share = 0.0
    assert len(desk.scheduler.running) == len(requests)
    return desk


def large(seq_id: int, num_blocks: int = 10, **fields: Any) -> SequenceRequest:
    """A prompt of so many blocks."""
    how = {"sampling": sampling(max_tokens=1), **fields}
    return request(seq_id, range(200, 200 + 4 * num_blocks), **how)


def test_furthest_ahead_parks_and_the_waiting_starts_at_once() -> None:
    """Memory is full: in the same step the one with most to read gives its blocks to the waiting one."""
    desk = running(reading(1, num_shown=60), reading(2, num_shown=100), reading(3, num_shown=80))
    desk.add(large(9))
    desk.step()
    assert (desk.parked(), set(desk.planned())) == ([2], {1, 3, 9})


def test_parked_holds_nothing() -> None:
    """A parked sequence is finished and its blocks are free."""
    desk = running(reading(1, num_shown=60), reading(2, num_shown=100))
    desk.add(large(9, sampling=sampling(max_tokens=0)))
    desk.step()
    parked = desk.sequences[2]
    assert (parked.state, parked.held.block_table, parked.num_computed_tokens) == (State.FINISHED, [], 0)
    assert desk.pool.stats().used == len(desk.sequences[1].held.block_table)
    assert parked not in (*desk.scheduler.running, *desk.scheduler.waiting)


def test_it_is_to_come_back_when_half_is_read() -> None:
    """101 tokens and nothing read, at 20 tokens a second: about 5 s ahead, so it asks again after half of that."""
    desk = running(reading(1, num_shown=100))
    desk.add(large(9))
    ((_, park),) = desk.step().parked
    assert (park.reason, park.resume_seconds) == ("ahead", pytest.approx(101 / 20 / 2, abs=0.02))


def test_a_reader_that_is_away_is_furthest_ahead() -> None:
    """It parks first, and its return is looked for in half a minute."""
    desk = running(reading(1, num_shown=60), reading(2, num_shown=100))
    desk.sequences[1].reader.report(0, 61, desk.now, is_away=True)
    desk.add(large(9))
    ((sequence, park),) = desk.step().parked
    assert (sequence.seq_id, park.resume_seconds) == (1, 30.0)


def test_an_answer_whose_reader_is_away_may_park_for_its_own_next_block() -> None:
    """Memory is full and all readers are away: one gives its blocks, in no chunk of that step, and no answer fails."""
    drive = Drive(num_blocks=151, lead_tokens=1000)
    drive.core.scheduler._reserve._share = 0.0
    drive.add(reading(1), reading(2))
    drive.step()
    for seq_id in (1, 2):
        drive.core.reader_at(seq_id, 0, is_away=True)
    answers = drive.run()
    parks = [answer.park.reason for answer in answers.values() if answer.park is not None]
    assert (parks, drive.core.stats.quarantines) == (["ahead"], 0)
    assert [answer.finish_reason for answer in answers.values() if answer.park is None] == ["length"]


def test_no_sequence_parks_that_is_not_ahead_enough() -> None:
    """Less than `min_ahead_seconds` to read is too little."""
    desk = running(reading(1, num_shown=30), reading(2, num_shown=20))
    desk.add(large(9))
    desk.step()
    assert (desk.parked(), list(desk.planned())) == ([], [1, 2])


def test_no_sequence_parks_without_a_reader() -> None:
    """Whole answers, jobs and warm prompts have no reader to get ahead of: they run."""
    desk = running(reading(1, num_shown=300, reader_tokens=None))
    desk.add(large(9))
    assert desk.step().parked == ()


def test_no_sequence_parks_for_a_seat() -> None:
    """A step holds one sequence, and the one that has begun is far ahead: it is paused, and keeps its blocks."""
    desk = running(reading(1, num_shown=300), max_num_seqs=1, num_free=20)
    desk.add(large(9))
    desk.step()
    assert (desk.parked(), list(desk.planned())) == ([], [9])
    assert len(desk.sequences[1].held.block_table) >= 308 // 4


def test_no_sequence_parks_before_it_has_a_token() -> None:
    """Every admission gives at least one token, so that parking in turns makes progress."""
    desk = Desk(max_num_seqs=2, num_blocks=40, max_num_batched_tokens=16, **AHEAD)
    desk.scheduler._reserve._share = 0.0
    desk.add(reading(1, num_shown=100), large(9, num_blocks=20, arrived_at=9.0))
    while desk.sequences[1].num_output_tokens == 100:
        assert desk.step().parked == ()
    desk.step()
    assert 1 in desk.parked() or desk.sequences[1].num_output_tokens == 102


def test_parks_for_blocks() -> None:
    """One by one they park, until it fits, and no more than needed."""
    desk = running(*(reading(seq_id, num_shown=60 + seq_id) for seq_id in range(1, 5)), num_free=25)
    desk.add(large(9, num_blocks=35))  # each of the four holds 18
    desk.step()
    assert (desk.parked(), set(desk.planned())) == ([4], {1, 2, 3, 9})


def test_no_sequence_parks_in_vain() -> None:
    """If all candidates together free too little, none parks."""
    desk = running(reading(1, num_shown=60), reading(2, num_shown=60, reader_tokens=None), num_free=14)
    desk.add(large(9, num_blocks=35))  # the reader's sequence holds 18
    assert desk.step().parked == ()


def test_first_in_the_queue_is_served_first() -> None:
    """The room of parked sequences goes to the head of the queue, not to a smaller one behind it."""
    desk = running(reading(1, num_shown=60), num_free=2)
    desk.add(large(8, num_blocks=20, arrived_at=8.0), large(9, num_blocks=2, arrived_at=9.0, salt="9"))
    desk.step()
    assert list(desk.planned()) == [8]


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_of_the_parked_are_given_back(overlap: bool) -> None:
    """The step computes nothing for a sequence that parks in it, and its budget is free again."""
    desk = running(reading(1, num_shown=100), overlap=overlap, max_num_batched_tokens=128)
    desk.step()
    desk.add(large(9, num_blocks=32))
    desk.step()
    assert desk.planned() == {9: 128}
    desk.run()


@pytest.mark.parametrize("seed", range(4))
def test_parking_in_turns_ends(seed: int) -> None:
    """Readers that resume on time share memory for two: all are served."""
    config = {"max_num_seqs": 8, "num_blocks": 230, "policy": Policy(min_ahead_seconds=0.1, hungry_seconds=0.05)}
    desk = Desk(**config, now=100.0 + seed / 7)
    for seq_id in range(1, 6):
        desk.add(reading(seq_id, arrived_at=desk.now + seq_id / 100))
    back: list[tuple[float, Sequence]] = []
    num_parks = 0
    while desk.scheduler.waiting or desk.scheduler.running or back:
        for sequence, park in desk.step().parked:
            num_parks += 1
            back.append((desk.now + park.resume_seconds, sequence))
        for due in [one for one in back if one[0] <= desk.now]:
            back.remove(due)
            resume(desk, due[1])
    assert num_parks > 0
    assert all(desk.sequences[seq_id].num_output_tokens <= 400 for seq_id in desk.sequences)
    assert sum(one.num_output_tokens == 400 for one in desk.sequences.values()) == 5


def resume(desk: Desk, parked: Sequence) -> None:
    """Resume with the tokens so far; the reader has read as much as it could."""
    old = parked.request
    assert parked.first_token_at is not None
    read = int(20 * (desk.now - parked.first_token_at))
    desk.add(
        reading(
            old.seq_id + 10,
            num_shown=parked.num_output_tokens,
            reader_tokens=min(read, parked.num_output_tokens),
            first_token_at=parked.first_token_at,
            arrived_at=old.arrived_at,
        )
    )


def test_no_sequence_parks_for_a_resumed_answer() -> None:
    """Otherwise resumed sequences would take turns for memory and be computed twice."""
    desk = running(reading(1, num_shown=100))
    desk.add(reading(2, num_shown=30, arrived_at=desk.now - 9))
    desk.step()
    assert desk.parked() == []
    desk.add(large(9, arrived_at=desk.now - 20))
    desk.step()
    assert (desk.parked(), [one.seq_id for one in desk.scheduler.waiting]) == ([], [9, 2])
