"""Laws of the queue's bounds: by number, by the time that waiting prompts take, and their Retry-After."""

from __future__ import annotations

from typing import Any

import pytest

from streamserve.clients.thread.admission import AdmissionControl, RecentTimings
from streamserve.engine.config import EngineConfig
from streamserve.engine.output import SequenceUpdate
from streamserve.protocol.errors import Overloaded
from streamserve.protocol.stats import CoreStats
from tests.support.engines import FakeClock

# What the core says while something waits: a token takes a hundredth of a second.
BUSY = CoreStats(queued_tokens=1000, queued_seconds=10.0)
IDLE = CoreStats()


def bounds_of(**config: Any) -> AdmissionControl:
    return AdmissionControl(EngineConfig(**config), RecentTimings(FakeClock()))


def scheduled(seq_id: int, num_cached_tokens: int = 0) -> SequenceUpdate:
    return SequenceUpdate(seq_id=seq_id, at=1.0, scheduled_at=1.0, num_cached_tokens=num_cached_tokens)


def test_a_place_is_held_while_a_prompt_is_read() -> None:
    """What is being read waits already, and gives its place back also when reading fails."""
    bounds = bounds_of(max_num_seqs=1, max_waiting=1)

    def fail_to_read() -> None:
        with bounds.reserve(2):
            with pytest.raises(Overloaded, match="2 answers are waiting"), bounds.reserve(1):
                pass
            raise KeyError

    with pytest.raises(KeyError):
        fail_to_read()
    assert bounds.is_empty


def test_a_seat_that_is_taken_is_no_place() -> None:
    """Free seats lengthen the queue; a sequence that runs takes one, and its end gives it back."""
    bounds = bounds_of(max_num_seqs=1, max_waiting=1)
    bounds.add(1, 10)
    bounds.note(scheduled(1))
    with pytest.raises(Overloaded), bounds.reserve(2):
        pass
    bounds.remove(1)
    with bounds.reserve(2):
        pass
    assert bounds.is_empty


def test_prompts_that_take_too_long_are_refused() -> None:
    """Seconds that wait plus one's own over the bound: refused, to come back when the excess is worked off."""
    bounds = bounds_of(max_queued_prefill_seconds=60.0)
    bounds.add(1, 5000)
    bounds.check_prefill(1000, BUSY)
    with pytest.raises(Overloaded, match="take 50 s") as caught:
        bounds.check_prefill(1701, BUSY)
    assert (caught.value.http_status, caught.value.retry_after) == (503, 8)


def test_retry_after_is_at_most_two_minutes() -> None:
    """However long it takes: SDKs ignore more."""
    bounds = bounds_of()
    bounds.add(1, 1_000_000)
    with pytest.raises(Overloaded) as caught:
        bounds.check_prefill(1, BUSY)
    assert caught.value.retry_after == 120


def test_a_prompt_that_waits_for_nobody_is_taken() -> None:
    """An empty queue accepts a prompt of any length."""
    bounds = bounds_of()
    bounds.check_prefill(1_000_000, BUSY)
    bounds.add(1, 1_000_000)
    bounds.note(scheduled(1))
    bounds.check_prefill(1_000_000, BUSY)


def test_what_a_token_takes_is_remembered() -> None:
    """The core measures only while something waits; a burst within one step is bounded too."""
    bounds = bounds_of()
    bounds.add(1, 7000)
    bounds.check_prefill(1, IDLE)
    with pytest.raises(Overloaded):
        bounds.check_prefill(1, BUSY)
    with pytest.raises(Overloaded):
        bounds.check_prefill(1, IDLE)


def test_prompts_that_are_cached_take_little() -> None:
    """Where late prompts were found in the prefix cache for nine tenths, those that wait count for that much less."""
    bounds = bounds_of()
    for seq_id in range(100):
        bounds.add(seq_id, 1000)
        bounds.note(scheduled(seq_id, num_cached_tokens=900))
    bounds.add(100, 50_000)
    bounds.check_prefill(1000, BUSY)
    with pytest.raises(Overloaded):
        bounds.check_prefill(15_000, BUSY)


def test_a_resume_counts_as_scheduled_once() -> None:
    """Updates of a sequence after its first step change nothing."""
    bounds = bounds_of(max_num_seqs=1, max_waiting=0)
    bounds.add(1, 10)
    for _ in range(3):
        bounds.note(scheduled(1))
    assert bounds.check_prefill(0, IDLE) == 0
    bounds.remove(1)
    bounds.note(scheduled(1))
    assert bounds.is_empty
