"""Laws of the queue before the quota: beyond its places a caller's requests wait, and nothing of them is lost."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from streamserve.protocol.errors import BadRequest, EngineUnavailable, Overloaded, QuotaExceeded
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Admission
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.quota import Places
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.streams.conftest import DONE
from tests.support.streams.hand_made import ScriptedClient, ask, until
from tests.support.streams.stores import SharedRecords

LIMITS = Limits(
    max_streams_per_principal=2,
    max_streams_per_visitor=2,
    max_streams_anonymous=3,
    max_queued_per_principal=3,
    max_queued_anonymous=4,
)
PATIENCE = {"chat": 60.0, "completion": 0.01}


@pytest.fixture
async def streams(scripted: ScriptedClient) -> AsyncIterator[Streams]:
    """A registry where each caller may have two streams, and three requests that wait."""
    streams = Streams({"scripted": scripted}, MemoryLog(), limits=LIMITS, patience=PATIENCE)
    yield streams
    quota = streams._quota
    await streams.aclose()
    await until(lambda: quota._serving is None, "nobody is served any more")
    assert (quota.num_waiting, +quota._starting) == (0, {})


async def begin(streams: Streams, owner: str = "user:1", latency_class: str = "chat") -> Stream:
    """Start a stream that is read."""
    stream = await streams.start(ask("scripted", latency_class=latency_class), Admission(owner=owner, tenant=owner))
    stream.attach(Attachment())
    return stream


async def waiting(streams: Streams, owner: str = "user:1") -> asyncio.Task[Stream]:
    """Ask for a stream that has to wait."""
    number = streams.num_waiting
    task = asyncio.create_task(begin(streams, owner), name=owner)
    await until(lambda: streams.num_waiting > number, "it waits")
    return task


async def end(streams: Streams, stream: Stream) -> None:
    """Have the engine end it."""
    client = streams.clients["scripted"]
    assert isinstance(client, ScriptedClient)
    index = [admission.stream_id for admission in client.admissions].index(stream.id)
    client.sources[index].push(DONE)
    await stream.ended.wait()


async def test_a_request_waits_for_its_callers_place(streams: Streams, scripted: ScriptedClient) -> None:
    """It begins when an answer of its caller ends, with what it has waited taken from its patience."""
    first, _ = await begin(streams), await begin(streams)
    third = await waiting(streams)
    assert len(scripted.requests) == 2
    await end(streams, first)
    assert (await third).state == "running"
    before, waited = (scripted.admissions[index].waited_seconds for index in (0, 2))
    assert waited > before
    arrived_at = [admission.arrived_at for admission in scripted.admissions]
    assert arrived_at == sorted(arrived_at, key=lambda at: at or 0.0)


async def test_a_caller_with_places_does_not_wait_for_others(streams: Streams) -> None:
    """The queue is its caller's own."""
    held = [await begin(streams), await begin(streams)]
    task = await waiting(streams)
    assert (await begin(streams, "user:2")).state == "running"
    assert not task.done()
    await end(streams, held[0])
    await task


async def test_the_first_to_come_is_the_first_to_begin(streams: Streams) -> None:
    """Of one caller; a request that comes when a place is free stands behind those that wait."""
    held = [await begin(streams), await begin(streams)]
    tasks = [await waiting(streams) for _ in range(3)]
    for number in range(3):
        await end(streams, held.pop(0))
        held.append(await tasks[number])
        assert [task.done() for task in tasks] == [True] * (number + 1) + [False] * (2 - number)


async def test_visitors_take_turns(streams: Streams) -> None:
    """The place that all visitors lack goes to the visitor with the fewest answers, not to the first in time."""
    one = [await begin(streams, "anon:a"), await begin(streams, "anon:b"), await begin(streams, "anon:b")]
    flood = [await waiting(streams, "anon:a") for _ in range(2)]
    late = await waiting(streams, "anon:c")
    await end(streams, one[1])
    newcomer = await late
    assert not any(task.done() for task in flood)
    await end(streams, newcomer)
    assert (await flood[0]).state == "running"
    assert not flood[1].done()
    flood[1].cancel()


async def test_a_full_queue_refuses_at_once(streams: Streams) -> None:
    """Three may wait; the fourth is told when its turn would come."""
    await begin(streams), await begin(streams)
    tasks = [await waiting(streams) for _ in range(3)]
    with pytest.raises(QuotaExceeded) as refused:
        await begin(streams)
    assert (refused.value.http_status, refused.value.code) == (429, "too_many_streams")
    for task in tasks:
        task.cancel()


async def test_retry_after_is_computed(streams: Streams) -> None:
    """Answers took ten seconds; of two places the next is free when the older answer has run for so long."""
    quota = streams._quota
    held = [await begin(streams), await begin(streams)]
    quota._answer_seconds = 10.0
    for stream, seconds in zip(held, (7.0, 2.0), strict=True):
        accepted_at = stream.transcript.timings.accepted_at
        assert accepted_at is not None
        stream.transcript.timings.accepted_at = accepted_at - seconds
    tasks = []
    for expected in (3, 8, 13):
        with pytest.raises(QuotaExceeded) as refused:
            await begin(streams, latency_class="completion")
        assert refused.value.retry_after in (expected, expected + 1)
        tasks.append(await waiting(streams))
    for task in tasks:
        task.cancel()


async def test_after_its_patience_it_is_refused(streams: Streams) -> None:
    """The class's time: then 429 with Retry-After, and for the place that all visitors lack 503."""
    await begin(streams), await begin(streams)
    with pytest.raises(QuotaExceeded) as refused:
        await begin(streams, latency_class="completion")
    assert 1 <= refused.value.retry_after <= 120
    for name in ("a", "b", "c"):
        await begin(streams, f"anon:{name}")
    with pytest.raises(Overloaded):
        await begin(streams, "anon:d", latency_class="completion")


async def test_nothing_waits_for_a_place_that_cannot_be(scripted: ScriptedClient) -> None:
    """A site without places for visitors refuses them at once."""
    limits = Limits(max_streams_per_visitor=0)
    streams = Streams({"scripted": scripted}, MemoryLog(), limits=limits, patience={"chat": 1e9})
    with pytest.raises(QuotaExceeded):
        await begin(streams, "anon:a")
    await streams.aclose()


async def test_visitors_share_the_room_to_wait(streams: Streams) -> None:
    """Four of all visitors; one that has filled it leaves a share to another."""
    for name in ("a", "b", "c"):
        await begin(streams, f"anon:{name}")
    tasks = [await waiting(streams, "anon:flood") for _ in range(3)]
    tasks += [await waiting(streams, "anon:d"), await waiting(streams, "anon:e")]
    for name in ("flood", "e"):
        with pytest.raises(Overloaded):
            await begin(streams, f"anon:{name}")
    for task in tasks:
        task.cancel()


async def test_visitors_of_one_address_share_its_room_to_wait(streams: Streams) -> None:
    """However many cookies one address has, the rest of the visitors have their share."""
    for name in ("a", "b", "c"):
        await begin(streams, f"anon:{name}")
    tasks = [await waiting(streams, f"anon:@flood/{number}") for number in range(4)]
    with pytest.raises(Overloaded):
        await begin(streams, "anon:@flood/new")
    tasks += [await waiting(streams, "anon:@home/d"), await waiting(streams, "anon:@home/e")]
    for task in tasks:
        task.cancel()


async def test_a_place_is_sought_once_for_each_caller_that_waits(scripted: ScriptedClient) -> None:
    """Where every caller has all its places taken, a look for free places costs no more than one check a caller."""
    limits = Limits(max_streams_per_principal=1)
    streams = Streams({"scripted": scripted}, MemoryLog(), limits=limits, patience=PATIENCE)
    names = [f"user:{number}" for number in range(100)]
    held = [await begin(streams, name) for name in names]
    tasks = [await waiting(streams, name) for name in names]
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, _: calls.update([frame.f_code.co_name]) if event == "call" else None)
    await streams._quota._give_out()
    sys.setprofile(None)
    # Besides, each check looks at every stream that is starting.
    assert calls["_enter"] == len(names)
    assert sum(calls.values()) < 50 * len(names)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(stream.is_live for stream in held)
    await streams.aclose()


async def test_who_leaves_leaves_the_queue(streams: Streams) -> None:
    """A cancelled request takes no place, nor does one that is cancelled as its place comes."""
    held = [await begin(streams), await begin(streams)]
    quota = streams._quota
    gone, unlucky, lucky = [await waiting(streams) for _ in range(3)]
    gone.cancel()
    await asyncio.wait([gone])
    assert quota.num_waiting == 2
    await end(streams, held[0])
    await until(lambda: quota.num_waiting == 1, "the place is given")
    unlucky.cancel()
    await asyncio.wait([unlucky])
    if unlucky.cancelled():  # else it was faster
        assert (await lucky).state == "running"
    else:
        lucky.cancel()


async def test_a_place_that_comes_to_a_cancelled_request_is_given_on(streams: Streams) -> None:
    """The place and the cancellation meet in one turn of the loop: the next in the queue has it."""
    held = [await begin(streams), await begin(streams)]
    unlucky, lucky = [await waiting(streams) for _ in range(2)]
    quota = streams._quota
    held[0].end_with(DONE)
    await held[0].ended.wait()
    streams._note_end(held[0])
    await quota._give_out()
    unlucky.cancel()
    await asyncio.wait([unlucky])
    assert unlucky.cancelled()
    assert (await lucky).state == "running"


async def test_a_reader_that_leaves_makes_room(streams: Streams) -> None:
    """An answer that waits for its reader in vain gives its place to a request that waits."""
    first = await streams.start(ask("scripted"), Admission(owner="user:1", tenant="user:1"))
    first.attach(reader := Attachment())
    await begin(streams)
    third = await waiting(streams)
    first.detach(reader)
    assert (await third).state == "running"
    await first.ended.wait()


async def test_a_server_that_shuts_down_refuses_what_waits(streams: Streams) -> None:
    """With 503, so that another process may take it; no more may wait."""
    await begin(streams), await begin(streams)
    task = await waiting(streams)
    streams.begin_to_drain()
    with pytest.raises(EngineUnavailable) as refused:
        await task
    assert refused.value.retry_after == 1
    with pytest.raises(QuotaExceeded):
        await begin(streams)


async def test_a_place_that_another_process_frees(scripted: ScriptedClient) -> None:
    """A request waits for the answers of all processes, and begins when one ends in another one."""
    shared, log = SharedRecords(), MemoryLog()
    one, two = (
        Streams({"scripted": scripted}, log, store=shared.worker(name), limits=LIMITS, patience=PATIENCE)
        for name in ("one", "two")
    )
    held = [await begin(one), await begin(one)]
    task = await waiting(two)
    await end(one, held[0])
    assert (await task).state == "running"
    await one.aclose()
    await two.aclose()


async def test_a_store_that_fails_fails_the_request(scripted: ScriptedClient) -> None:
    """The first of the queue gets the database's error, and the next one its place."""
    store = SharedRecords().worker("one")
    streams = Streams({"scripted": scripted}, MemoryLog(), store=store, limits=LIMITS, patience=PATIENCE)
    held = [await begin(streams), await begin(streams)]
    failing, other = [await waiting(streams) for _ in range(2)]
    store.refusals.append(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await failing
    await end(streams, held[0])
    assert (await other).state == "running"
    await streams.aclose()


async def test_answers_that_begin_together_take_their_places_together(streams: Streams) -> None:
    """Two need two free places, and nobody has one of them meanwhile; three can never begin."""
    held = [await begin(streams), await begin(streams)]
    places, begun = Places(2), []

    async def both() -> None:
        for _ in range(2):
            admission = Admission(owner="user:1", tenant="user:1")
            begun.append(await streams.start(ask("scripted"), admission, places))
            begun[-1].attach(Attachment())
        places.close()

    task = asyncio.create_task(both())
    await until(lambda: streams.num_waiting == 1, "they wait")
    later = await waiting(streams)
    await end(streams, held[0])
    assert not begun
    await end(streams, held[1])
    await task
    assert (len(begun), later.done()) == (2, False)
    with pytest.raises(BadRequest):
        await streams.start(ask("scripted"), Admission(owner="user:1", tenant="user:1"), Places(3))
    await end(streams, begun[0])
    await later


async def test_places_that_no_answer_takes_are_free_again(streams: Streams) -> None:
    """The second of two is refused by the engine: its place is free once the request has ended."""
    client = streams.clients["scripted"]
    assert isinstance(client, ScriptedClient)
    places, admission = Places(2), Admission(owner="user:1", tenant="user:1")
    (await streams.start(ask("scripted"), admission, places)).attach(Attachment())
    client.refusals.append(BadRequest("no"))
    with pytest.raises(BadRequest):
        await streams.start(ask("scripted"), admission, places)
    places.close()
    assert (await begin(streams)).state == "running"
