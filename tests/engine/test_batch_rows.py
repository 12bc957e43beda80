"""Rows of batches: computed in what all other classes leave, whatever their age, and first to give memory back."""

from __future__ import annotations

from typing import Any

import pytest

from streamserve.engine.config import Policy
from streamserve.engine.sequence import SequenceRequest
from streamserve.protocol.requests import BATCH
from tests.support.engines.cores import Drive, request, sampling
from tests.support.engines.desk import Desk

NUM_ROWS = 500


def row(seq_id: int, num_tokens: int = 8, **fields: Any) -> SequenceRequest:
    """A row that has been waiting for a day."""
    how = {"arrived_at": -86_400.0, "salt": str(seq_id), "latency_class": BATCH, **fields}
    return request(seq_id, range(num_tokens), **how)


def steps_to_first_token(desk: Desk, seq_id: int) -> int:
    """How many steps begin until the sequence has its first token."""
    for number in range(1, 100):
        desk.step()
        if desk.sequences[seq_id].num_output_tokens:
            return number
    raise AssertionError("no token after 100 steps")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [65, 4000])
@pytest.mark.parametrize("max_admitted", [None, 8])
def test_a_chat_beside_500_rows_waits_for_one_step_at_most(
    num_blocks: int, max_admitted: int | None, overlap: bool
) -> None:
    """Seats, memory and places are full of rows: the first token comes at most one step later than alone."""
    shape = {"num_blocks": num_blocks, "overlap": overlap, "max_admitted": max_admitted, "max_num_batched_tokens": 64}
    alone, beside = Desk(**shape), Desk(**shape)
    beside.add(*(row(seq_id, sampling=sampling(max_tokens=40)) for seq_id in range(1, NUM_ROWS + 1)))
    for _ in range(60):
        beside.step()
    assert len(beside.scheduler.running) >= 6  # as many as have memory or seats
    chat = request(1000, range(100, 140), arrived_at=100.0)
    for desk in (alone, beside):
        desk.add(chat)
    assert steps_to_first_token(beside, 1000) <= steps_to_first_token(alone, 1000) + 1


def test_rows_start_after_everything_else() -> None:
    """The order of arrival is rows, a document, a chat that is late already; rows go last all the same."""
    desk = Desk(max_num_seqs=1)
    desk.add(row(1), row(2))
    desk.add(request(3, latency_class="document", arrived_at=99.0), request(4, arrived_at=100.0))
    desk.now += 20.0
    desk.run()
    order = sorted(desk.sequences.values(), key=lambda one: one.scheduled_at or 0.0)
    assert [one.seq_id for one in order] == [4, 3, 1, 2]


def test_rows_decode_in_the_seats_that_others_leave() -> None:
    """Of four seats three chats take theirs in each step, the rows share one; without chats they have all."""
    desk = Desk(max_num_seqs=4)
    desk.add(*(row(seq_id, sampling=sampling(max_tokens=40)) for seq_id in range(1, 5)))
    desk.step()
    desk.add(*(request(seq_id, range(4), salt=str(seq_id), arrived_at=100.0) for seq_id in (11, 12, 13)))
    desk.step()
    for _ in range(5):
        desk.step()
        assert {11, 12, 13} < set(desk.planned())
        assert len(desk.planned()) == 4
    while len(desk.scheduler.running) > 4:
        desk.step()
    desk.step()
    assert set(desk.planned()) == {1, 2, 3, 4}


def test_the_last_row_gives_its_memory_to_a_chat_and_continues_from_the_cache() -> None:
    """It is preempted, and not parked: nobody waits for it. What is still cached it does not compute again."""
    desk = Desk(num_blocks=17)
    desk.add(row(1, 16, sampling=sampling(max_tokens=8)), row(2, 16, sampling=sampling(max_tokens=8)))
    desk.step()
    desk.step()
    one = desk.sequences[2]
    desk.add(request(9, range(50, 82), sampling=sampling(max_tokens=2), arrived_at=100.0))
    desk.step()
    assert 9 in desk.planned()
    assert (one.num_preemptions, desk.parked()) == (1, [])
    desk.run()
    assert one.num_output_tokens == 8
    num_computed = sum(plan.get(2, 0) for plan in plans_of(desk))
    assert num_computed - (16 + 7) < 16  # it had computed 17 tokens, and more before the chat came


def plans_of(desk: Desk) -> list[dict[int, int]]:
    return [{chunk.seq_id: len(chunk.token_ids) for chunk in one.chunks} for one in desk.schedules]


def test_a_row_takes_no_memory_from_others() -> None:
    """A held chat has most of the memory: a row that lacks some waits, and starts when the chat has ended."""
    desk = Desk(num_blocks=13, lead_tokens=4)
    one = request(1, range(30), reader_tokens=0, arrived_at=100.0, sampling=sampling(max_tokens=40))
    desk.add(one)
    for _ in range(20):
        desk.step()
    desk.add(row(2, 16))
    for _ in range(20):
        desk.step()
    assert desk.sequences[2].scheduled_at is None
    assert not any(one.parked for one in desk.schedules)
    desk.scheduler.finish(desk.sequences[1])
    desk.step()
    assert desk.planned() == {2: 16}


def test_a_chat_that_grows_takes_memory_from_a_row_and_not_from_a_held_one() -> None:
    """A decode lacks a block: the row goes, and who is far ahead of its reader keeps its own."""
    desk = Desk(num_blocks=13, lead_tokens=4, policy=Policy(stalled_seconds=1e6))
    desk.add(request(1, range(12), salt="1", reader_tokens=0, arrived_at=100.0))
    for _ in range(8):
        desk.step()
    desk.scheduler._reserve._share = 0.0
    desk.add(request(3, range(12), salt="3", sampling=sampling(max_tokens=20), arrived_at=101.0))
    desk.step()
    desk.add(row(2, 12, sampling=sampling(max_tokens=8)))
    desk.step()
    assert 2 in desk.planned()
    for _ in range(12):
        desk.step()
        assert 3 in desk.planned()
    assert desk.sequences[2].num_preemptions == 1
    assert not any(one.parked for one in desk.schedules)


def test_rows_end_in_their_own_order() -> None:
    """Alone they have the whole machine, and the oldest go first."""
    desk = Desk(max_num_seqs=4)
    desk.add(*(row(seq_id, arrived_at=float(seq_id), sampling=sampling(max_tokens=3)) for seq_id in range(1, 41)))
    desk.run()
    starts = [desk.sequences[seq_id].scheduled_at or 0.0 for seq_id in range(1, 41)]
    assert starts == sorted(starts)
    assert all(one.num_output_tokens == 3 for one in desk.sequences.values())


@pytest.mark.parametrize(("latency_class", "weight"), [("chat", 1.0), (BATCH, 0.25)])
def test_tokens_of_rows_count_by_their_weight(latency_class: str, weight: float) -> None:
    """In a tenant's share; of any other class a token is a token."""
    drive = Drive(batch_weight=0.25)
    drive.run(request(1, range(20), tenant="a", latency_class=latency_class, sampling=sampling(max_tokens=5)))
    assert drive.core.scheduler.queue.shares._tokens["a"] == weight * (20 + 4)
