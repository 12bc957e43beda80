"""Laws of the queue's bounds: by number, by the time that waiting prompts take, and their Retry-After."""

from __future__ import annotations

import itertools

import pytest

from streamserve.engine.config import CLASSES
from streamserve.protocol.errors import Overloaded
from tests.support.engines.bounds import Bounds

# What a waiting token takes, in seconds. A chat may wait half a minute.
BUSY = 0.01
# No prompt that waits is behind one of so many tokens, if both came at once.
LONG = 2000


def test_a_place_is_held_while_a_prompt_is_read() -> None:
    """A prompt in tokenisation counts as waiting, and gives its place back also when tokenisation fails."""
    bounds = Bounds(max_num_seqs=1, max_waiting=1)

    def fail_to_read() -> None:
        with bounds.reserve(2, "chat"):
            with pytest.raises(Overloaded, match="2 answers are waiting"), bounds.reserve(1, "chat"):
                pass
            raise KeyError

    with pytest.raises(KeyError):
        fail_to_read()
    assert bounds.num_in_preparation == 0


def test_a_seat_that_is_taken_is_no_place() -> None:
    """Free seats lengthen the queue; a running sequence takes one, and its end gives it back."""
    bounds = Bounds(max_num_seqs=1, max_waiting=1)
    bounds.add(1, 10)
    bounds.start(1)
    with pytest.raises(Overloaded), bounds.reserve(2, "chat"):
        pass
    bounds.remove(1)
    with bounds.reserve(2, "chat"):
        pass
    assert bounds.num_in_preparation == 0


def test_each_class_has_its_own_places() -> None:
    """A thousand batch rows take no chat's place."""
    bounds = Bounds(max_num_seqs=1, max_waiting=2)
    for seq_id in range(3):
        bounds.add(seq_id, 10, "batch")
    with pytest.raises(Overloaded, match="3 answers are waiting"), bounds.reserve(1, "batch"):
        pass
    with bounds.reserve(2, "chat"):
        pass


def test_a_flood_leaves_places_to_other_tenants() -> None:
    """A queue that one tenant has filled still has a share for each other one: half of it, then a third."""
    bounds = Bounds(max_num_seqs=1, max_waiting=12)
    bounds.add(0, 10, tenant="flood")
    bounds.start(0)
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
    bounds = Bounds(max_num_seqs=1, max_waiting=3)
    with bounds.reserve(4, "chat", "flood"):
        with bounds.reserve(2, "chat", "light"):
            with pytest.raises(Overloaded), bounds.reserve(1, "chat", "light"):
                pass
            with bounds.reserve(1, "chat", "third"):
                pass
        with bounds.reserve(2, "chat", "third"):
            pass
    assert bounds.num_in_preparation == 0


def test_prompts_that_take_too_long_are_refused() -> None:
    """The waiting prompts take longer than a chat may wait: it is refused until a second of them is computed."""
    bounds = Bounds(seconds_per_token=BUSY)
    bounds.add(1, 2900)
    assert bounds.check_wait("chat", num_tokens=LONG) == (1, 30.0)
    bounds.add(2, 200)
    with pytest.raises(Overloaded, match=r"would wait 31\.0 s, and may wait 30\.0 s") as caught:
        bounds.check_wait("chat", num_tokens=LONG)
    assert (caught.value.http_status, caught.value.retry_after) == (503, 1)
    assert bounds.check_wait("document", num_tokens=LONG) == (2, 120.0)
    assert bounds.check_wait("batch", num_tokens=LONG) == (2, float("inf"))


def test_a_full_batch_is_waited_for() -> None:
    """Two seats, whose answers of 20 s have run for 12 and 4: the third that waits begins in 28 s, the fourth in 36."""
    bounds = Bounds(max_num_seqs=2)
    bounds.times.note_finished({"prefill": 1.0, "decode": 19.0, "queue": 0.0, "ttft": 1.0, "itl_p50": 0, "itl_p95": 0})
    for seq_id, started_at in ((1, 88.0), (2, 96.0)):
        bounds.add(seq_id, 10)
        bounds.start(seq_id, at=started_at)
    for seq_id, seconds in ((3, 8.0), (4, 16.0), (5, 28.0)):
        assert bounds.predict("chat", num_tokens=LONG) == (seconds, 30.0)
        bounds.check_wait("chat", num_tokens=LONG)
        bounds.add(seq_id, 10)
    with pytest.raises(Overloaded, match=r"would wait 36\.0 s") as caught:
        bounds.check_wait("chat", num_tokens=LONG)
    assert caught.value.retry_after == 6


def test_one_seat_is_waited_for() -> None:
    """An answer of 40 s in the only seat keeps a chat from waiting for its first 10 s, and no longer."""
    bounds = Bounds(max_num_seqs=1)
    bounds.times.note_finished({"prefill": 0.0, "decode": 40.0, "queue": 0.0, "ttft": 1.0, "itl_p50": 0, "itl_p95": 0})
    bounds.add(1, 10)
    bounds.start(1, at=97.0)
    with pytest.raises(Overloaded) as caught:
        bounds.check_wait("chat", num_tokens=LONG)
    assert caught.value.retry_after == 7
    bounds.remove(1)
    bounds.add(2, 10)
    bounds.start(2, at=85.0)
    assert bounds.check_wait("chat", num_tokens=LONG) == (0, 30.0)
    assert bounds.predict("chat", num_tokens=LONG) == (25.0, 30.0)


def test_memory_may_hold_fewer_than_there_are_seats() -> None:
    """Four answers of 40 s, one every 10 s, fill the blocks: the next begins when the first of them ends."""
    bounds = Bounds(max_num_seqs=8)
    bounds.times.note_finished({"prefill": 0.0, "decode": 40.0, "queue": 0.0, "ttft": 1.0, "itl_p50": 0, "itl_p95": 0})
    for seq_id in range(4):
        bounds.add(seq_id, 10)
        bounds.start(seq_id, at=65.0 + 10 * seq_id)
    assert bounds.predict("chat", num_tokens=LONG) == (0.0, 30.0)
    bounds.blocks = (100, 100)
    assert bounds.predict("chat", num_tokens=LONG) == (5.0, 30.0)
    for seq_id in range(4, 7):
        bounds.add(seq_id, 10)
    with pytest.raises(Overloaded, match=r"would wait 35\.0 s"):
        bounds.check_wait("chat", num_tokens=LONG)
    bounds.blocks = (0, 0)
    assert bounds.check_wait("chat", num_tokens=LONG) == (3, 30.0)


def test_only_those_before_it_count() -> None:
    """A chat goes before the documents and batch rows that came with it."""
    bounds = Bounds(seconds_per_token=BUSY)
    bounds.add(1, 50_000, "document")
    bounds.add(2, 50_000, "batch")
    assert bounds.check_wait("chat", num_tokens=LONG) == (2, 30.0)
    with pytest.raises(Overloaded):
        bounds.check_wait("document", num_tokens=LONG)


def test_a_resumed_answer_is_not_refused() -> None:
    """It was accepted once: it waits in the queue."""
    bounds = Bounds(seconds_per_token=BUSY)
    bounds.add(1, 50_000)
    assert bounds.check_wait("chat", num_tokens=LONG, may_refuse=False) == (1, 30.0)


def test_a_full_queue_refuses_no_answer_that_was_accepted_once() -> None:
    """It has a place beyond the bound, which new requests then find full."""
    bounds = Bounds(max_num_seqs=1, max_waiting=1)
    for seq_id in (1, 2):
        bounds.add(seq_id, 10)
    taken = bounds.reserve(1, "chat", may_refuse=False)
    with taken, pytest.raises(Overloaded, match="3 answers are waiting"), bounds.reserve(1, "chat"):
        pass


def test_retry_after_is_at_most_two_minutes() -> None:
    """However long the wait is: SDKs ignore more."""
    bounds = Bounds(seconds_per_token=BUSY)
    bounds.add(1, 1_000_000)
    with pytest.raises(Overloaded) as caught:
        bounds.check_wait("chat", num_tokens=LONG)
    assert caught.value.retry_after == 120


def test_a_prompt_with_an_empty_queue_is_accepted() -> None:
    """An empty queue accepts a prompt of any length."""
    bounds = Bounds(seconds_per_token=BUSY)
    bounds.check_wait("chat", num_tokens=LONG)
    bounds.add(1, 1_000_000)
    bounds.start(1)
    bounds.check_wait("chat", num_tokens=LONG)


def test_a_burst_within_one_step_is_bounded() -> None:
    """What waits counts as soon as it is added, whatever the last step has seen."""
    bounds = Bounds(seconds_per_token=BUSY)
    bounds.check_wait("chat", num_tokens=LONG)
    bounds.add(1, 7000)
    for _ in range(2):
        with pytest.raises(Overloaded):
            bounds.check_wait("chat", num_tokens=LONG)


def test_prompts_that_are_cached_take_little() -> None:
    """Where late prompts were found in the prefix cache for nine tenths, waiting ones count for that much less."""
    bounds = Bounds(seconds_per_token=BUSY, cold_share=0.1)
    bounds.add(100, 29_000)
    bounds.check_wait("chat", num_tokens=LONG)
    bounds.add(101, 2_000)
    with pytest.raises(Overloaded):
        bounds.check_wait("chat", num_tokens=LONG)


def test_a_refusal_counts_as_one_of_the_queue() -> None:
    """The engine refuses requests that waited too long: the queue is then empty, which is no burst."""
    bounds = Bounds()
    bounds.check_wait("chat", num_tokens=LONG)
    bounds.clock.advance(20.0)
    bounds.note_refusal()
    assert bounds.check_wait("chat", num_tokens=LONG) == (0, pytest.approx(2.1))
    bounds.clock.advance(6.1)
    assert bounds.check_wait("chat", num_tokens=LONG) == (0, 30.0)


def test_a_flood_of_one_tenant_is_no_wait_for_another() -> None:
    """Each other tenant counts with one request more than the own ones: the engine takes them in turn."""
    bounds = Bounds(seconds_per_token=BUSY)
    for seq_id in range(40):
        bounds.add(seq_id, 1000, "chat", "flood")
    with pytest.raises(Overloaded):
        bounds.check_wait("chat", num_tokens=LONG, tenant="flood")
    assert bounds.check_wait("chat", num_tokens=LONG, tenant="light") == (40, 30.0)


def test_many_more_answers_run_than_a_step_holds() -> None:
    """Readers are slow: eighty answers of 40 s run in eight seats, so one ends every half second."""
    bounds = Bounds(max_num_seqs=8)
    bounds.times.note_finished({"prefill": 0.0, "decode": 40.0, "queue": 0.0, "ttft": 1.0, "itl_p50": 0, "itl_p95": 0})
    for seq_id in range(80):
        bounds.add(seq_id, 10)
        bounds.start(seq_id, at=60.5 + seq_id / 2)
    for seq_id in range(80, 139):
        bounds.add(seq_id, 10)
    bounds.blocks = (90, 100)
    assert bounds.check_wait("chat", num_tokens=LONG) == (59, 30.0)
    bounds.add(139, 10)
    with pytest.raises(Overloaded, match=r"would wait 30\.5 s"):
        bounds.check_wait("chat", num_tokens=LONG)


def standing(*queued: tuple[float, str]) -> Bounds:
    """Return a door in a standing overload, at second 200: chats wait since the times given, of the tenants given."""
    bounds = Bounds()  # its queue was last empty at second 100
    for number, (at, tenant) in enumerate(queued, 1000):
        bounds.clock.now = at
        bounds.add(number, 10, "chat", tenant)
    bounds.clock.now = 200.0
    return bounds


def test_the_next_request_is_as_late_as_the_first_of_the_queue() -> None:
    """In a standing overload: a chat may begin 1.6 s after its key; the door closes where the first has waited 2.07."""
    chat = standing((198.0, "a")).predict("chat", tenant="a", num_tokens=10)
    assert chat == (pytest.approx(2.0), pytest.approx(2.068))
    assert standing((198.0, "a"), (199.0, "a")).check_wait("chat", tenant="a") == (2, pytest.approx(2.1))
    with pytest.raises(Overloaded) as caught:
        standing((197.92, "a")).check_wait("chat", tenant="a")
    assert caught.value.retry_after == 1
    assert standing().predict("chat") == (0.0, 30.0)  # an empty queue is no overload


def test_a_long_prompt_finds_the_door_closed_first() -> None:
    """In a standing overload shorter prompts go before it, so it will be later by what its own one puts it back."""
    bounds = standing((198.0, "a"))
    assert bounds.check_wait("chat", tenant="a", num_tokens=100) == (1, pytest.approx(2.1))
    with pytest.raises(Overloaded, match=r"would wait 2\.7 s"):
        bounds.check_wait("chat", tenant="a", num_tokens=LONG)


def test_a_flood_closes_the_door_for_its_tenant_alone() -> None:
    """A tenant that has more in the queue than another does not make it late, as the engine takes them in turn."""
    flood = standing(*((197.92, "flood") for _ in range(9)))
    with pytest.raises(Overloaded):
        flood.check_wait("chat", tenant="flood")
    assert flood.check_wait("chat", tenant="light") == (9, pytest.approx(2.1))


def test_what_comes_back_says_nothing_of_the_overload() -> None:
    """A parked answer is first in the queue with the key of its arrival: a new request is not as late as that."""
    bounds = standing((199.0, "a"))
    bounds.add(1, 10, arrived_at=100.0, output_token_ids=(5,))
    assert bounds.check_wait("chat", tenant="a") == (2, pytest.approx(2.1))


def test_refusals_are_counted_by_class() -> None:
    """Those refused at once, in number or in time; each once."""
    bounds = Bounds(seconds_per_token=BUSY, max_num_seqs=1, max_waiting=1)
    bounds.add(1, 1_000_000)
    bounds.add(2, 10, "completion")
    for _ in range(2):
        with pytest.raises(Overloaded):
            bounds.check_wait("chat", num_tokens=LONG)
    with bounds.reserve(1, "document"), pytest.raises(Overloaded), bounds.reserve(2, "document"):
        pass
    timings = bounds.times
    assert timings.num_refused == 3
    counted = {name: one["refused"] for name, one in timings.by_class(CLASSES).items()}
    assert counted == {"chat": 2, "completion": 0, "document": 1, "batch": 0, "warm": 0}


def test_rows_of_batches_keep_no_chat_waiting() -> None:
    """All seats have rows, and five hundred old ones wait with long prompts: a chat would begin at once, a row late."""
    bounds = Bounds(seconds_per_token=BUSY, max_num_seqs=2)
    bounds.times.note_finished({"prefill": 1.0, "decode": 99.0, "queue": 0.0, "ttft": 1.0, "itl_p50": 0, "itl_p95": 0})
    for seq_id in range(502):
        bounds.add(seq_id, 1000, "batch")
    for seq_id in range(2):
        bounds.start(seq_id)
    bounds.blocks = (100, 100)
    assert bounds.predict("chat", num_tokens=LONG) == (0.0, 30.0)
    assert bounds.predict("batch", num_tokens=LONG)[0] > 100.0
    bounds.add(600, 10)
    assert bounds.predict("batch", num_tokens=LONG)[0] > bounds.predict("chat", num_tokens=LONG)[0]


def test_patience_that_is_spent_before_counts() -> None:
    """A request that has waited elsewhere may wait the rest of its class's time, and is refused for more."""
    bounds = Bounds(seconds_per_token=BUSY)
    assert bounds.check_wait("chat", waited_seconds=12.0) == (0, 18.0)
    assert bounds.check_wait("chat", waited_seconds=40.0) == (0, 0.0)
    bounds.add(1, 1900)
    assert bounds.check_wait("chat", num_tokens=LONG) == (1, 30.0)
    with pytest.raises(Overloaded, match=r"would wait 19\.0 s, and may wait 18\.0 s"):
        bounds.check_wait("chat", num_tokens=LONG, waited_seconds=12.0)
