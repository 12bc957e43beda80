"""Laws of the queue's bounds: by number, by the time that waiting prompts take, and their Retry-After."""

from __future__ import annotations

from typing import Any

import pytest

from streamserve.clients.thread.admission import AdmissionControl, RecentTimings
from streamserve.engine.config import CLASSES, EngineConfig
from streamserve.engine.output import SequenceUpdate
from streamserve.protocol.errors import Overloaded
from streamserve.protocol.stats import CoreStats
from tests.support.engines import FakeClock

# The core's statistics while something waits: a token takes a hundredth of a second. A chat may wait half a minute.
BUSY = CoreStats(queued_tokens=1000, queued_seconds=10.0)
IDLE = CoreStats()


def bounds_of(**config: Any) -> AdmissionControl:
    clock = FakeClock()
    return AdmissionControl(EngineConfig(**config), RecentTimings(clock), clock)


def scheduled(seq_id: int, num_cached_tokens: int = 0) -> SequenceUpdate:
    """Its first token: all of its prompt is computed, or was found."""
    return SequenceUpdate(
        seq_id=seq_id, at=1.0, scheduled_at=1.0, num_cached_tokens=num_cached_tokens, token_ids=(7,), logprobs=(None,)
    )


def test_a_place_is_held_while_a_prompt_is_read() -> None:
    """A prompt in tokenisation counts as waiting, and gives its place back also when tokenisation fails."""
    bounds = bounds_of(max_num_seqs=1, max_waiting=1)

    def fail_to_read() -> None:
        with bounds.reserve(2, "chat"):
            with pytest.raises(Overloaded, match="2 answers are waiting"), bounds.reserve(1, "chat"):
                pass
            raise KeyError

    with pytest.raises(KeyError):
        fail_to_read()
    assert bounds.is_empty


def test_a_seat_that_is_taken_is_no_place() -> None:
    """Free seats lengthen the queue; a running sequence takes one, and its end gives it back."""
    bounds = bounds_of(max_num_seqs=1, max_waiting=1)
    bounds.add(1, 10)
    bounds.note(scheduled(1))
    with pytest.raises(Overloaded), bounds.reserve(2, "chat"):
        pass
    bounds.remove(1)
    with bounds.reserve(2, "chat"):
        pass
    assert bounds.is_empty


def test_each_class_has_its_own_places() -> None:
    """A thousand batch rows take no chat's place."""
    bounds = bounds_of(max_num_seqs=1, max_waiting=2)
    for seq_id in range(3):
        bounds.add(seq_id, 10, "batch")
    with pytest.raises(Overloaded, match="3 answers are waiting"), bounds.reserve(1, "batch"):
        pass
    with bounds.reserve(2, "chat"):
        pass


def test_prompts_that_take_too_long_are_refused() -> None:
    """The waiting prompts take longer than a chat may wait: it is refused, with the time until they are computed."""
    bounds = bounds_of()
    bounds.add(1, 2900)
    assert bounds.check_wait("chat", BUSY) == (1, 30.0)
    bounds.add(2, 200)
    with pytest.raises(Overloaded, match=r"would wait 31 s, and may wait 30\.0 s") as caught:
        bounds.check_wait("chat", BUSY)
    assert (caught.value.http_status, caught.value.retry_after) == (503, 31)
    assert bounds.check_wait("document", BUSY) == (2, 120.0)
    assert bounds.check_wait("batch", BUSY) == (2, float("inf"))


def test_a_full_batch_is_waited_for() -> None:
    """Two seats, and answers take 20 s: the sixth that waits begins in a minute, and is refused."""
    bounds = bounds_of(max_num_seqs=2)
    bounds._timings.note_finished(
        {"prefill": 1.0, "decode": 19.0, "queue": 0.0, "ttft": 1.0, "itl_p50": 0, "itl_p95": 0}
    )
    for seq_id in (1, 2):
        bounds.add(seq_id, 10)
        bounds.note(scheduled(seq_id))
    for seq_id in (3, 4):
        bounds.check_wait("chat", IDLE)
        bounds.add(seq_id, 10)
    bounds.check_wait("chat", IDLE)
    bounds.add(5, 10)
    with pytest.raises(Overloaded, match="would wait 40 s") as caught:
        bounds.check_wait("chat", IDLE)
    assert caught.value.retry_after == 40


def test_memory_may_hold_fewer_than_there_are_seats() -> None:
    """Four sequences fill the blocks: a seat comes free half as often as with eight seats."""
    bounds = bounds_of(max_num_seqs=8)
    bounds._timings.note_finished(
        {"prefill": 0.0, "decode": 40.0, "queue": 0.0, "ttft": 1.0, "itl_p50": 0, "itl_p95": 0}
    )
    for seq_id in range(8):
        bounds.add(seq_id, 10)
        bounds.note(scheduled(seq_id))
    for seq_id in range(8, 12):
        bounds.add(seq_id, 10)
    assert bounds.check_wait("chat", IDLE) == (4, 30.0)
    with pytest.raises(Overloaded, match="would wait 50 s"):
        bounds.check_wait("chat", CoreStats(running=4, blocks_used=100, blocks_total=100))


def test_only_those_before_it_count() -> None:
    """A chat goes before the documents and batch rows that came with it."""
    bounds = bounds_of()
    bounds.add(1, 50_000, "document")
    bounds.add(2, 50_000, "batch")
    assert bounds.check_wait("chat", BUSY) == (2, 30.0)
    with pytest.raises(Overloaded):
        bounds.check_wait("document", BUSY)


def test_a_resumed_answer_is_not_refused() -> None:
    """It was accepted once: it waits in the queue."""
    bounds = bounds_of()
    bounds.add(1, 50_000)
    assert bounds.check_wait("chat", BUSY, may_refuse=False) == (1, 30.0)


def test_retry_after_is_at_most_two_minutes() -> None:
    """However long the wait is: SDKs ignore more."""
    bounds = bounds_of()
    bounds.add(1, 1_000_000)
    with pytest.raises(Overloaded) as caught:
        bounds.check_wait("chat", BUSY)
    assert caught.value.retry_after == 120


def test_a_prompt_with_an_empty_queue_is_accepted() -> None:
    """An empty queue accepts a prompt of any length."""
    bounds = bounds_of()
    bounds.check_wait("chat", BUSY)
    bounds.add(1, 1_000_000)
    bounds.note(scheduled(1))
    bounds.check_wait("chat", BUSY)


def test_what_a_token_takes_is_remembered() -> None:
    """The core measures only while something waits; a burst within one step is bounded too."""
    bounds = bounds_of()
    bounds.add(1, 7000)
    bounds.check_wait("chat", IDLE)
    for stats in (BUSY, IDLE):
        with pytest.raises(Overloaded):
            bounds.check_wait("chat", stats)


def test_prompts_that_are_cached_take_little() -> None:
    """Where late prompts were found in the prefix cache for nine tenths, waiting ones count for that much less."""
    bounds = bounds_of()
    for seq_id in range(100):
        bounds.add(seq_id, 1000)
        bounds.note(scheduled(seq_id, num_cached_tokens=900))
    bounds.add(100, 29_000)
    bounds.check_wait("chat", BUSY)
    bounds.add(101, 2_000)
    with pytest.raises(Overloaded):
        bounds.check_wait("chat", BUSY)


def test_a_refusal_counts_as_one_of_the_queue() -> None:
    """The engine refuses requests that waited too long: the queue is then empty, which is no burst."""
    clock = FakeClock(100.0)
    bounds = AdmissionControl(EngineConfig(), RecentTimings(clock), clock)
    bounds.check_wait("chat", IDLE)
    bounds.add(1, 10)
    clock.advance(20.0)
    bounds.note(SequenceUpdate(seq_id=1, at=120.0, error="queue_timeout"))
    bounds.remove(1)
    assert bounds.check_wait("chat", IDLE) == (0, pytest.approx(2.1))
    clock.advance(6.1)
    assert bounds.check_wait("chat", IDLE) == (0, 30.0)


def test_a_flood_of_one_tenant_is_no_wait_for_another() -> None:
    """Each other tenant counts with one request more than the own ones: the engine takes them in turn."""
    bounds = bounds_of()
    for seq_id in range(40):
        bounds.add(seq_id, 1000, "chat", "flood")
    with pytest.raises(Overloaded):
        bounds.check_wait("chat", BUSY, tenant="flood")
    assert bounds.check_wait("chat", BUSY, tenant="light") == (40, 30.0)


def test_many_more_answers_run_than_a_step_holds() -> None:
    """Readers are slow: eighty answers run in eight seats, so a place comes free ten times as often."""
    bounds = bounds_of(max_num_seqs=8)
    bounds._timings.note_finished(
        {"prefill": 0.0, "decode": 40.0, "queue": 0.0, "ttft": 1.0, "itl_p50": 0, "itl_p95": 0}
    )
    for seq_id in range(80):
        bounds.add(seq_id, 10)
        bounds.note(scheduled(seq_id))
    for seq_id in range(80, 139):
        bounds.add(seq_id, 10)
    busy = CoreStats(running=80, blocks_used=90, blocks_total=100)
    assert bounds.check_wait("chat", busy) == (59, 30.0)
    bounds.add(139, 10)
    with pytest.raises(Overloaded, match="would wait 30 s"):
        bounds.check_wait("chat", busy)


def test_a_resume_counts_as_scheduled_once() -> None:
    """Updates of a sequence after its first step change nothing."""
    bounds = bounds_of(max_num_seqs=1, max_waiting=0)
    bounds.add(1, 10)
    for _ in range(3):
        bounds.note(scheduled(1))
    assert bounds.check_wait("chat", IDLE) == (0, 30.0)
    bounds.remove(1)
    bounds.note(scheduled(1))
    assert bounds.is_empty


def test_refusals_are_counted_by_class() -> None:
    """Those refused at once, in number or in time, and those that waited too long; each once."""
    bounds = bounds_of(max_num_seqs=1, max_waiting=1)
    bounds.add(1, 1_000_000)
    bounds.add(2, 10, "completion")
    for _ in range(2):
        with pytest.raises(Overloaded):
            bounds.check_wait("chat", BUSY)
    with pytest.raises(Overloaded), bounds.reserve(3, "document"):
        pass
    bounds.note(SequenceUpdate(seq_id=2, at=140.0, error="queue_timeout"))
    timings = bounds._timings
    assert timings.num_refused == 3
    counted = {name: one["refused"] for name, one in timings.by_class(CLASSES).items()}
    assert counted == {"chat": 2, "completion": 1, "document": 1, "batch": 0, "warm": 0}
