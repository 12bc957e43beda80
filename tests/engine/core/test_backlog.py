"""Laws of the core's backlog: what the door sees of the queue, between steps too."""

from __future__ import annotations

import pytest

from streamserve.engine.config import CLASSES
from streamserve.engine.policy.backlog import Backlog
from tests.support.engines.cores import Drive, request, sampling


def ids_of(backlog: Backlog) -> tuple[list[int], list[int]]:
    """The ids of what waits, and of what runs."""
    return [one.seq_id for one in backlog.waiting], [one.seq_id for one, _ in backlog.running]


def test_what_is_added_and_ended_counts_at_once() -> None:
    """Between two steps too: a request waits as soon as it is added, and is gone as soon as it is aborted."""
    drive = Drive(max_num_seqs=2)
    for seq_id in (1, 2, 3, 4):
        drive.add(request(seq_id))
    assert ids_of(drive.core.backlog) == ([1, 2, 3, 4], [])
    drive.step()
    assert ids_of(drive.core.backlog) == ([3, 4], [1, 2])
    drive.add(request(5))
    drive.core.abort(3)
    drive.core.stop(1, 1)
    assert ids_of(drive.core.backlog) == ([4, 5], [2])
    drive.core.abort(5)
    assert ids_of(drive.core.backlog) == ([4], [2])
    drive.step()
    assert ids_of(drive.core.backlog) == ([], [2, 4])
    drive.run()
    assert (ids_of(drive.core.backlog), drive.core._changes) == (([], []), {})


def test_a_backlog_is_a_picture() -> None:
    """What was read once does not change with the steps that follow."""
    drive = Drive(max_num_seqs=1)
    drive.add(request(1), request(2))
    drive.step()
    before = drive.core.backlog
    drive.run()
    assert ids_of(before) == ([2], [1])
    assert before.running[0][1] == pytest.approx(100.01)


def test_a_place_is_the_scheduler_s() -> None:
    """The door orders by the key and the time of lateness that the scheduler has fixed."""
    drive = Drive(max_num_seqs=1, classes=CLASSES)
    for one in (request(1), request(2, arrived_at=7.0), request(3, arrived_at=8.0, output_token_ids=(5,))):
        drive.add(one)
    added = {one.seq_id: one for one in drive.core.backlog.waiting}
    drive.step()
    drive.add(request(4))
    waiting = {one.seq_id: one for one in drive.core.scheduler.waiting}
    seen = {one.seq_id: one for one in drive.core.backlog.waiting}
    for seq_id, sequence in waiting.items():
        assert (seen[seq_id].order_key, seen[seq_id].late_at) == (sequence.ticket.order_key, sequence.ticket.late_at)
        assert seen[seq_id].order_key == added[seq_id].order_key
    assert 4 in seen


def test_a_preempted_sequence_still_runs() -> None:
    """It has begun: its reader waits for no first step."""
    drive = Drive()
    drive.add(request(1), request(2))
    drive.step()
    drive.core.scheduler.forced_preempt = lambda running: running[-1:]
    drive.step()
    waiting = [one.seq_id for one in drive.core.scheduler.waiting]
    assert waiting or drive.core.stats.preemptions
    assert sorted(ids_of(drive.core.backlog)[1]) == [1, 2]
    assert ids_of(drive.core.backlog)[0] == []


def test_the_share_that_is_not_cached_is_learned() -> None:
    """Each prompt's first token shows what of it was cached, and weighs a tenth."""
    drive = Drive()
    drive.run(request(1, sampling=sampling(max_tokens=2)))
    assert drive.core.backlog.cold_share == 1.0
    drive.run(request(2, sampling=sampling(max_tokens=2)))
    cached = drive.answers[2].num_cached_tokens / 20
    assert cached > 0.5
    assert drive.core.backlog.cold_share == pytest.approx(1.0 - 0.1 * cached)


def test_what_a_token_takes_is_remembered() -> None:
    """The queue's time is known only while something waits; the backlog has what it was last."""
    drive = Drive(num_blocks=400, max_num_seqs=1)
    for seq_id in range(1, 40):
        drive.add(request(seq_id, range(seq_id), sampling=sampling(max_tokens=1 + seq_id % 3)))
    known = 0.0
    while drive.core.has_work:
        drive.step()
        stats = drive.core.stats
        if stats.queued_tokens and stats.queued_seconds:
            known = stats.queued_seconds / stats.queued_tokens
        assert drive.core.backlog.seconds_per_token == known
    assert drive.core.stats.queued_tokens == 0


def test_a_refusal_at_the_door_counts() -> None:
    """At once, and in the engine's own patience from the next step on: the queue may be empty because of it."""
    drive = Drive(classes=CLASSES)
    drive.run(request(1))
    drive.clock.advance(5.0)
    drive.core.note_refusal()
    at = drive.clock()
    assert drive.core.backlog.patience.refused_at == at
    drive.clock.advance(1.0)
    drive.run(request(2))
    assert drive.core.scheduler.queue.patience.refused_at == at
    assert drive.core.backlog.patience.empty_at is not None
    assert drive.core.backlog.patience.empty_at <= at  # the refused request has found an empty queue


def test_a_burst_on_an_idle_engine_is_no_overload() -> None:
    """The queue was empty until the first request came, though the last of the burst are refused before any step."""
    drive = Drive(classes=CLASSES)
    drive.run(request(1))
    drive.clock.advance(60.0)
    for seq_id in (2, 3):
        drive.add(request(seq_id, arrived_at=drive.clock()))
    drive.core.note_refusal()
    assert not drive.core.backlog.patience_at(drive.clock()).is_standing("chat", drive.clock())
    drive.step()
    assert not drive.core.scheduler.queue.patience.is_standing("chat", drive.clock())
