"""Laws of the queue's bounds: by number, by the time that waiting prompts take, and their Retry-After."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from streamserve.clients.thread.admission import AdmissionControl
from streamserve.clients.timings import RecentTimes
from streamserve.engine.config import CLASSES, EngineConfig
from streamserve.engine.output import SequenceUpdate
from streamserve.protocol.engine import CoreStats
from streamserve.protocol.errors import Overloaded
from tests.support.engines.runners import FakeClock

# The core's statistics while something waits: a token takes a hundredth of a second. A chat may wait half a minute.
BUSY = CoreStats(queued_tokens=1000, queued_seconds=10.0)
IDLE = CoreStats()
# No prompt that waits is behind one of so many tokens, if both came at once.
LONG = 2000


def bounds_of(**config: Any) -> AdmissionControl:
    clock = FakeClock()
    return AdmissionControl(EngineConfig(**config), RecentTimes(clock), clock)


def scheduled(seq_id: int, num_cached_tokens: int = 0, at: float = 100.0) -> SequenceUpdate:
    """Its first token: all of its prompt is computed, or was found."""
    return SequenceUpdate(
        seq_id=seq_id, at=at, scheduled_at=at, num_cached_tokens=num_cached_tokens, token_ids=(7,), logprobs=(None,)
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


def test_a_flood_leaves_places_to_other_tenants() -> None:
    """A queue that one tenant has filled still has a share for each other one: half of it, then a third."""
    bounds = bounds_of(max_num_seqs=1, max_waiting=12)
    bounds.add(0, 10, tenant="flood")
    bounds.note(scheduled(0))
    seq_ids = itertools.count(1)

    def fill(tenant: str) -> int:
        """Ask until it is refused; return how often it was not."""
        for num_accepted in range(100):
            try:
                with bounds.reserve(1, "chat", tenant):
                    bounds.add(next(seq_ids), 10, tenant=tenant)
            except Overloaded:
                return num_accepted
        raise AssertionError("there is no bound")

    assert [fill(tenant) for tenant in ("flood", "light", "flood", "third", "light", "")] == [12, 6, 0, 4, 0, 3]
    with pytest.raises(Overloaded), bounds.reserve(5, "chat", "another"):
        pass


def test_a_prompt_that_is_read_takes_a_place_of_its_tenant() -> None:
    """Those in tokenisation count among the tenant's own, and their tenant among those that share the places."""
    bounds = bounds_of(max_num_seqs=1, max_waiting=3)
    with bounds.reserve(4, "chat", "flood"):
        with bounds.reserve(2, "chat", "light"):
            with pytest.raises(Overloaded), bounds.reserve(1, "chat", "light"):
                pass
            with bounds.reserve(1, "chat", "third"):
                pass
        with bounds.reserve(2, "chat", "third"):
            pass
    assert bounds.is_empty


def test_prompts_that_take_too_long_are_refused() -> None:
    """The waiting prompts take longer than a chat may wait: it is refused until a second of them is computed."""
    bounds = bounds_of()
    bounds.add(1, 2900)
    assert bounds.check_wait("chat", BUSY, num_tokens=LONG) == (1, 30.0)
    bounds.add(2, 200)
    with pytest.raises(Overloaded, match=r"would wait 31\.0 s, and may wait 30\.0 s") as caught:
        bounds.check_wait("chat", BUSY, num_tokens=LONG)
    assert (caught.value.http_status, caught.value.retry_after) == (503, 1)
    assert bounds.check_wait("document", BUSY, num_tokens=LONG) == (2, 120.0)
    assert bounds.check_wait("batch", BUSY, num_tokens=LONG) == (2, float("inf"))


def test_a_full_batch_is_waited_for() -> None:
    """Two seats, whose answers of 20 s have run for 12 and 4: the third that waits begins in 28 s, the fourth in 36."""
    bounds = bounds_of(max_num_seqs=2)
    bounds._times.note_finished({"prefill": 1.0, "decode": 19.0, "queue": 0.0, "ttft": 1.0, "itl_p50": 0, "itl_p95": 0})
    for seq_id, started_at in ((1, 88.0), (2, 96.0)):
        bounds.add(seq_id, 10)
        bounds.note(scheduled(seq_id, at=started_at))
    for seq_id, seconds in ((3, 8.0), (4, 16.0), (5, 28.0)):
        assert bounds.predict("chat", IDLE, num_tokens=LONG) == (seconds, 30.0)
        bounds.check_wait("chat", IDLE, num_tokens=LONG)
        bounds.add(seq_id, 10)
    with pytest.raises(Overloaded, match=r"would wait 36\.0 s") as caught:
        bounds.check_wait("chat", IDLE, num_tokens=LONG)
    assert caught.value.retry_after == 6


def test_one_seat_is_waited_for() -> None:
    """An answer of 40 s in the only seat keeps a chat from waiting for its first 10 s, and no longer."""
    bounds = bounds_of(max_num_seqs=1)
    bounds._times.note_finished({"prefill": 0.0, "decode": 40.0, "queue": 0.0, "ttft": 1.0, "itl_p50": 0, "itl_p95": 0})
    bounds.add(1, 10)
    bounds.note(scheduled(1, at=97.0))
    with pytest.raises(Overloaded) as caught:
        bounds.check_wait("chat", IDLE, num_tokens=LONG)
    assert caught.value.retry_after == 7
    bounds.remove(1)
    bounds.add(2, 10)
    bounds.note(scheduled(2, at=85.0))
    assert bounds.check_wait("chat", IDLE, num_tokens=LONG) == (0, 30.0)
    assert bounds.predict("chat", IDLE, num_tokens=LONG) == (25.0, 30.0)


def test_memory_may_hold_fewer_than_there_are_seats() -> None:
    """Four answers of 40 s, one every 10 s, fill the blocks: the next begins when the first of them ends."""
    bounds = bounds_of(max_num_seqs=8)
    bounds._times.note_finished({"prefill": 0.0, "decode": 40.0, "queue": 0.0, "ttft": 1.0, "itl_p50": 0, "itl_p95": 0})
    for seq_id in range(4):
        bounds.add(seq_id, 10)
        bounds.note(scheduled(seq_id, at=65.0 + 10 * seq_id))
    full = CoreStats(running=4, blocks_used=100, blocks_total=100)
    assert bounds.predict("chat", IDLE, num_tokens=LONG) == (0.0, 30.0)
    assert bounds.predict("chat", full, num_tokens=LONG) == (5.0, 30.0)
    for seq_id in range(4, 7):
        bounds.add(seq_id, 10)
    with pytest.raises(Overloaded, match=r"would wait 35\.0 s"):
        bounds.check_wait("chat", full, num_tokens=LONG)
    assert bounds.check_wait("chat", IDLE, num_tokens=LONG) == (3, 30.0)


def test_only_those_before_it_count() -> None:
    """A chat goes before the documents and batch rows that came with it."""
    bounds = bounds_of()
    bounds.add(1, 50_000, "document")
    bounds.add(2, 50_000, "batch")
    assert bounds.check_wait("chat", BUSY, num_tokens=LONG) == (2, 30.0)
    with pytest.raises(Overloaded):
        bounds.check_wait("document", BUSY, num_tokens=LONG)


def test_a_resumed_answer_is_not_refused() -> None:
    """It was accepted once: it waits in the queue."""
    bounds = bounds_of()
    bounds.add(1, 50_000)
    assert bounds.check_wait("chat", BUSY, num_tokens=LONG, may_refuse=False) == (1, 30.0)


def test_a_full_queue_refuses_no_answer_that_was_accepted_once() -> None:
    """It has a place beyond the bound, which new requests then find full."""
    bounds = bounds_of(max_num_seqs=1, max_waiting=1)
    for seq_id in (1, 2):
        bounds.add(seq_id, 10)
    taken = bounds.reserve(1, "chat", may_refuse=False)
    with taken, pytest.raises(Overloaded, match="3 answers are waiting"), bounds.reserve(1, "chat"):
        pass


def test_retry_after_is_at_most_two_minutes() -> None:
    """However long the wait is: SDKs ignore more."""
    bounds = bounds_of()
    bounds.add(1, 1_000_000)
    with pytest.raises(Overloaded) as caught:
        bounds.check_wait("chat", BUSY, num_tokens=LONG)
    assert caught.value.retry_after == 120


def test_a_prompt_with_an_empty_queue_is_accepted() -> None:
    """An empty queue accepts a prompt of any length."""
    bounds = bounds_of()
    bounds.check_wait("chat", BUSY, num_tokens=LONG)
    bounds.add(1, 1_000_000)
    bounds.note(scheduled(1))
    bounds.check_wait("chat", BUSY, num_tokens=LONG)


def test_what_a_token_takes_is_remembered() -> None:
    """The core measures only while something waits; a burst within one step is bounded too."""
    bounds = bounds_of()
    bounds.add(1, 7000)
    bounds.check_wait("chat", IDLE, num_tokens=LONG)
    for stats in (BUSY, IDLE):
        with pytest.raises(Overloaded):
            bounds.check_wait("chat", stats, num_tokens=LONG)


def test_prompts_that_are_cached_take_little() -> None:
    """Where late prompts were found in the prefix cache for nine tenths, waiting ones count for that much less."""
    bounds = bounds_of()
    for seq_id in range(100):
        bounds.add(seq_id, 1000)
        bounds.note(scheduled(seq_id, num_cached_tokens=900))
    bounds.add(100, 29_000)
    bounds.check_wait("chat", BUSY, num_tokens=LONG)
    bounds.add(101, 2_000)
    with pytest.raises(Overloaded):
        bounds.check_wait("chat", BUSY, num_tokens=LONG)


def test_a_refusal_counts_as_one_of_the_queue() -> None:
    """The engine refuses requests that waited too long: the queue is then empty, which is no burst."""
    clock = FakeClock(100.0)
    bounds = AdmissionControl(EngineConfig(), RecentTimes(clock), clock)
    bounds.check_wait("chat", IDLE, num_tokens=LONG)
    bounds.add(1, 10)
    clock.advance(20.0)
    bounds.note(SequenceUpdate(seq_id=1, at=120.0, error="queue_timeout"))
    bounds.remove(1)
    assert bounds.check_wait("chat", IDLE, num_tokens=LONG) == (0, pytest.approx(2.1))
    clock.advance(6.1)
    assert bounds.check_wait("chat", IDLE, num_tokens=LONG) == (0, 30.0)


def test_a_flood_of_one_tenant_is_no_wait_for_another() -> None:
    """Each other tenant counts with one request more than the own ones: the engine takes them in turn."""
    bounds = bounds_of()
    for seq_id in range(40):
        bounds.add(seq_id, 1000, "chat", "flood")
    with pytest.raises(Overloaded):
        bounds.check_wait("chat", BUSY, num_tokens=LONG, tenant="flood")
    assert bounds.check_wait("chat", BUSY, num_tokens=LONG, tenant="light") == (40, 30.0)


def test_many_more_answers_run_than_a_step_holds() -> None:
    """Readers are slow: eighty answers of 40 s run in eight seats, so one ends every half second."""
    bounds = bounds_of(max_num_seqs=8)
    bounds._times.note_finished({"prefill": 0.0, "decode": 40.0, "queue": 0.0, "ttft": 1.0, "itl_p50": 0, "itl_p95": 0})
    for seq_id in range(80):
        bounds.add(seq_id, 10)
        bounds.note(scheduled(seq_id, at=60.5 + seq_id / 2))
    for seq_id in range(80, 139):
        bounds.add(seq_id, 10)
    busy = CoreStats(running=80, blocks_used=90, blocks_total=100)
    assert bounds.check_wait("chat", busy, num_tokens=LONG) == (59, 30.0)
    bounds.add(139, 10)
    with pytest.raises(Overloaded, match=r"would wait 30\.5 s"):
        bounds.check_wait("chat", busy, num_tokens=LONG)


def standing(*queued: tuple[float, str]) -> AdmissionControl:
    """Return a door in a standing overload, at second 200: chats wait since the times given, of the tenants given."""
    clock = FakeClock(100.0)
    bounds = AdmissionControl(EngineConfig(), RecentTimes(clock), clock)
    for second in range(100):  # one request that is in time waits at any second
        clock.now = 100.0 + second
        bounds.predict("chat", IDLE, num_tokens=LONG)
        bounds.add(second, 10)
        bounds.remove(second - 1)
    for number, (at, tenant) in enumerate(queued, 1000):
        clock.now = at
        bounds.add(number, 10, "chat", tenant)
    bounds.remove(99)
    clock.now = 200.0
    return bounds


def test_the_next_request_is_as_late_as_the_first_of_the_queue() -> None:
    """In a standing overload: a chat may begin 1.6 s after its key; the door closes where the first has waited 2.07."""
    chat = standing((198.0, "a")).predict("chat", IDLE, tenant="a", num_tokens=10)
    assert chat == (pytest.approx(2.0), pytest.approx(2.068))
    assert standing((198.0, "a"), (199.0, "a")).check_wait("chat", IDLE, tenant="a") == (2, pytest.approx(2.1))
    with pytest.raises(Overloaded) as caught:
        standing((197.92, "a")).check_wait("chat", IDLE, tenant="a")
    assert caught.value.retry_after == 1
    assert standing().predict("chat", IDLE) == (0.0, 30.0)  # an empty queue is no overload


def test_a_long_prompt_finds_the_door_closed_first() -> None:
    """In a standing overload shorter prompts go before it, so it will be later by what its own one puts it back."""
    bounds = standing((198.0, "a"))
    assert bounds.check_wait("chat", IDLE, tenant="a", num_tokens=100) == (1, pytest.approx(2.1))
    with pytest.raises(Overloaded, match=r"would wait 2\.7 s"):
        bounds.check_wait("chat", IDLE, tenant="a", num_tokens=LONG)


def test_a_flood_closes_the_door_for_its_tenant_alone() -> None:
    """A tenant that has more in the queue than another does not make it late, as the engine takes them in turn."""
    flood = standing(*((197.92, "flood") for _ in range(9)))
    with pytest.raises(Overloaded):
        flood.check_wait("chat", IDLE, tenant="flood")
    assert flood.check_wait("chat", IDLE, tenant="light") == (9, pytest.approx(2.1))


def test_a_resume_counts_as_scheduled_once() -> None:
    """Updates of a sequence after its first step change nothing."""
    bounds = bounds_of(max_num_seqs=1, max_waiting=0)
    bounds.add(1, 10)
    for _ in range(3):
        bounds.note(scheduled(1))
    assert bounds.check_wait("chat", IDLE, num_tokens=LONG) == (0, 30.0)
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
            bounds.check_wait("chat", BUSY, num_tokens=LONG)
    with bounds.reserve(1, "document"), pytest.raises(Overloaded), bounds.reserve(2, "document"):
        pass
    bounds.note(SequenceUpdate(seq_id=2, at=140.0, error="queue_timeout"))
    timings = bounds._times
    assert timings.num_refused == 3
    counted = {name: one["refused"] for name, one in timings.by_class(CLASSES).items()}
    assert counted == {"chat": 2, "completion": 1, "document": 1, "batch": 0, "warm": 0}


def test_rows_of_batches_keep_no_chat_waiting() -> None:
    """All seats have rows, and five hundred old ones wait with long prompts: a chat would begin at once, a row late."""
    bounds = bounds_of(max_num_seqs=2)
    bounds._times.note_finished({"prefill": 1.0, "decode": 99.0, "queue": 0.0, "ttft": 1.0, "itl_p50": 0, "itl_p95": 0})
    for seq_id in range(502):
        bounds.add(seq_id, 1000, "batch")
    for seq_id in range(2):
        bounds.note(scheduled(seq_id))
    full = CoreStats(running=2, blocks_total=100, blocks_used=100, queued_tokens=500_000, queued_seconds=5_000.0)
    assert bounds.predict("chat", full, num_tokens=LONG) == (0.0, 30.0)
    assert bounds.predict("batch", full, num_tokens=LONG)[0] > 100.0
    bounds.add(600, 10)
    assert bounds.predict("batch", full, num_tokens=LONG)[0] > bounds.predict("chat", full, num_tokens=LONG)[0]


def test_patience_that_is_spent_before_counts() -> None:
    """A request that has waited elsewhere may wait the rest of its class's time, and is refused for more."""
    bounds = bounds_of()
    assert bounds.check_wait("chat", IDLE, waited_seconds=12.0) == (0, 18.0)
    assert bounds.check_wait("chat", IDLE, waited_seconds=40.0) == (0, 0.0)
    bounds.add(1, 1900)
    assert bounds.check_wait("chat", BUSY, num_tokens=LONG) == (1, 30.0)
    with pytest.raises(Overloaded, match=r"would wait 19\.0 s, and may wait 18\.0 s"):
        bounds.check_wait("chat", BUSY, num_tokens=LONG, waited_seconds=12.0)
