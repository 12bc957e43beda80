"""Laws of the quota: slots are counted from the check to the start, and only a stream without a reader is ended."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from streamserve.protocol.engine import ModelDescription, Park
from streamserve.protocol.errors import BadRequest, EngineUnavailable, Overloaded, QuotaExceeded
from streamserve.protocol.events import Done
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Admission
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.quota import StreamQuota
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.streams.conftest import DONE
from tests.support.streams.hand_made import ScriptedClient, StallingLog, ask, until
from tests.support.streams.stores import SharedRecords


@pytest.fixture
async def two_places(scripted: ScriptedClient) -> AsyncIterator[Streams]:
    """A registry where each owner may have two streams."""
    streams = Streams({"scripted": scripted}, StallingLog(), limits=Limits(max_streams_per_principal=2))
    yield streams
    await streams.aclose()


async def start(streams: Streams, owner: str = "user:1", on_disconnect: str = "park") -> Stream:
    return await streams.start(ask("scripted"), Admission(owner=owner, tenant=owner, on_disconnect=on_disconnect))


async def park_by_engine(scripted: ScriptedClient, stream: Stream) -> None:
    """Have the engine lose the stream and refuse it for an hour."""
    scripted.refusals.append(Overloaded("full", retry_after=3600))
    scripted.last.park(Park(reason="lost"))
    await until(lambda: stream.state == "parked" and not scripted.refusals, "it is parked")


def quota(**limits: int) -> StreamQuota:
    return StreamQuota(Limits(**limits), Streams({}, MemoryLog()))


async def test_a_place_is_held_while_a_stream_starts() -> None:
    """A slot is held while a stream starts, and is free again after a failure."""
    places = quota(max_streams_per_principal=1)
    async with places.reserve("user:1"):
        with pytest.raises(QuotaExceeded) as caught:
            async with places.reserve("user:1"):
                pass
        assert caught.value.http_status == 429
        assert "You have 1 answers" in caught.value.message
        async with places.reserve("user:2"):
            pass
    with pytest.raises(ZeroDivisionError):
        async with places.reserve("user:1"):
            raise ZeroDivisionError
    async with places.reserve("user:1"):
        pass


async def test_visitors_together_have_a_limit() -> None:
    """Visitors over their common limit get a 503, as it is not their own quota; users are not counted with them."""
    places = quota(max_streams_anonymous=1)
    async with places.reserve("user:1"), places.reserve("anon:a"):
        with pytest.raises(Overloaded) as caught:
            async with places.reserve("anon:b"):
                pass
    assert caught.value.http_status == 503
    assert 1 <= caught.value.retry_after <= 120


async def test_the_oldest_parked_stream_makes_room(two_places: Streams) -> None:
    """The oldest parked stream ends as abandoned; the younger one stays."""
    old, young = await start(two_places), await start(two_places)
    old.release()
    young.release()
    newcomer = await start(two_places)
    await old.ended.wait()
    assert isinstance(old.terminal, Done)
    assert old.terminal.finish_reason == "abandoned"
    assert (young.state, newcomer.state) == ("parked", "running")


async def test_a_parked_stream_that_is_read_is_not_ended(two_places: Streams, scripted: ScriptedClient) -> None:
    """A stream that the engine parked and a reader waits for is not ended: the newcomer is refused."""
    read = await start(two_places)
    read.attach(Attachment())
    await park_by_engine(scripted, read)
    await start(two_places)
    with pytest.raises(QuotaExceeded):
        await start(two_places)
    assert read.terminal is None


async def test_a_stream_whose_reader_is_on_its_way_is_not_ended(two_places: Streams, scripted: ScriptedClient) -> None:
    """A stream that the engine parks before its first reader has attached keeps its place: the newcomer is refused."""
    new = await start(two_places)
    scripted.last.park(Park(reason="ahead", resume_seconds=3600))
    await until(lambda: new.state == "parked", "it is parked")
    await start(two_places)
    with pytest.raises(QuotaExceeded):
        await start(two_places)
    new.attach(Attachment())
    assert new.terminal is None


async def test_an_answer_to_be_finished_is_not_ended(two_places: Streams, scripted: ScriptedClient) -> None:
    """A stream to be finished has no reader and waits only for the engine: it is not ended."""
    unread = await start(two_places, on_disconnect="finish")
    await park_by_engine(scripted, unread)
    await start(two_places)
    with pytest.raises(QuotaExceeded):
        await start(two_places)
    assert unread.terminal is None


async def test_nothing_is_ended_for_a_request_that_is_refused(two_places: Streams, scripted: ScriptedClient) -> None:
    """The engine's refusal passes through, and the parked answer can still be resumed."""
    parked, _ = await start(two_places), await start(two_places)
    parked.release()
    scripted.refusals.append(BadRequest("no", param="prompt"))
    with pytest.raises(BadRequest):
        await start(two_places)
    assert (parked.state, parked.terminal) == ("parked", None)


async def test_a_returning_reader_keeps_the_slot(two_places: Streams, scripted: ScriptedClient) -> None:
    """A reader that returns while the newcomer waits for the engine keeps the slot; the newcomer's run is cancelled."""
    parked, _ = await start(two_places), await start(two_places)
    parked.release()
    scripted.hold = asyncio.Event()
    starting = asyncio.create_task(start(two_places))
    await until(lambda: len(scripted.requests) == 3, "the engine is asked")
    parked.attach(Attachment())
    scripted.hold.set()
    with pytest.raises(QuotaExceeded):
        await starting
    assert sum(generation.is_cancelled for generation in scripted.sources[2:]) == 1
    assert (parked.terminal, len(two_places.all())) == (None, 2)


async def test_one_parked_stream_makes_room_for_one(two_places: Streams, scripted: ScriptedClient) -> None:
    """Of two newcomers at once, the first is promised the parked stream's slot."""
    parked, _ = await start(two_places), await start(two_places)
    parked.release()
    scripted.hold = asyncio.Event()
    first = asyncio.create_task(start(two_places))
    await until(lambda: len(scripted.requests) == 3, "the engine is asked")
    with pytest.raises(QuotaExceeded):
        await start(two_places)
    scripted.hold.set()
    assert (await first).state == "running"


async def test_a_newcomer_does_not_wait_for_the_log(two_places: Streams) -> None:
    """While the log takes nothing, the parked stream that cannot end is not counted, and the newcomer has the slot."""
    log = two_places.log
    assert isinstance(log, StallingLog)
    parked, _ = await start(two_places), await start(two_places)
    parked.release()
    quota = two_places._quota
    log.go.clear()
    async with quota.reserve("user:1") as make_room:
        await make_room()
        assert parked.terminal is None
        with pytest.raises(QuotaExceeded):
            async with quota.reserve("user:1"):
                pass
    log.go.set()
    await parked.ended.wait()


async def test_finished_streams_cost_nothing(scripted: ScriptedClient) -> None:
    """A place is found by the same number of calls beside 1 kept stream and beside 40; visitors' places too."""
    streams = Streams({"scripted": scripted}, MemoryLog(), limits=Limits())

    async def calls_of_a_place(owner: str) -> int:
        num = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal num
            num += event == "call"

        sys.setprofile(count)
        try:
            async with streams._quota.reserve(owner) as make_room:
                await make_room()
        finally:
            sys.setprofile(None)
        return num

    async def finish(num: int) -> None:
        for owner in ["user:1", "anon:1"] * num:
            await (await start(streams, owner)).stop()

    await finish(1)
    few = await calls_of_a_place("user:1"), await calls_of_a_place("anon:2")
    await finish(19)
    assert len(streams.all()) == 40
    assert (await calls_of_a_place("user:1"), await calls_of_a_place("anon:2")) == few
    await streams.aclose()


async def test_a_released_stream_that_is_resumed_meanwhile_stays(scripted: ScriptedClient) -> None:
    """A released stream that another worker claimed for a reader since it was chosen is not ended."""
    shared, log = SharedRecords(), MemoryLog()
    one, two = (
        Streams({"scripted": scripted}, log, StreamConfig(), store=shared.worker(name), limits=limits)
        for name, limits in (("one", None), ("two", Limits(max_streams_per_principal=1)))
    )
    left = await start(one)
    left.attach(reader := Attachment())
    left.detach(reader)
    await until(lambda: not left.lease.is_held, "no worker runs it")
    async with two._quota.reserve("user:1") as make_room:
        left.attach(Attachment())
        await until(lambda: left.lease.is_held, "it is claimed again")
        await make_room()
        await until(lambda: not two._quota._evicting, "the eviction is over")
    assert (left.terminal, two.all()) == (None, [])
    await one.aclose()
    await two.aclose()


async def test_callers_that_are_counted_as_one_share_the_places_of_all_processes(scripted: ScriptedClient) -> None:
    """Strangers at one address share a visitor's places here and at another worker, also once that has resumed one."""
    shared, log, limits = SharedRecords(), MemoryLog(), Limits(max_streams_per_visitor=2)
    one, two = (
        Streams({"scripted": scripted}, log, store=shared.worker(name), limits=limits) for name in ("one", "two")
    )

    async def begin(streams: Streams, name: str, counted_as: str = "anon:@here") -> Stream:
        return await streams.start(ask("scripted"), Admission(owner=name, tenant=name, counted_as=counted_as))

    first, second = await begin(one, "anon:a"), await begin(two, "anon:b")
    for stream in (first, second):
        stream.attach(Attachment())
    for streams in (one, two):
        with pytest.raises(QuotaExceeded):
            await begin(streams, "anon:c")
    await begin(two, "anon:d", counted_as="")
    again = await two.reach(first.id, shared.records[first.id])
    assert again is not None
    assert (again.admission.place_of, again.admission.share_of) == ("anon:@here", "anon:@here")
    assert (again.owner, again.tenant) == ("anon:a", "anon:a")
    await one.aclose()
    await two.aclose()


async def test_a_place_that_came_free_while_the_model_loaded_is_free(scripted: ScriptedClient) -> None:
    """What other processes run is read again, before a request that has waited for its engine is refused."""
    shared, log, limits = SharedRecords(), MemoryLog(), Limits(max_streams_per_principal=2)
    loading = ScriptedClient()
    loading.description = ModelDescription(alias="loading", state="loading")
    loading.refusals.append(EngineUnavailable("model loading is loading.", code="engine_loading"))
    one, two = (
        Streams({"scripted": scripted, "loading": loading}, log, store=shared.worker(name), limits=limits)
        for name in ("one", "two")
    )
    elsewhere = await start(two)
    starting = asyncio.create_task(one.start(ask("loading"), Admission(owner="user:1", tenant="t")))
    await until(lambda: len(loading.requests) == 1, "it waits for its model")
    scripted.last.push(DONE)
    await until(lambda: shared.records[elsewhere.id].is_finished, "the answer of the other process has ended")
    (await start(one)).attach(Attachment())
    loading.description = replace(loading.description, state="ready")
    assert (await starting).state == "running"
    await one.aclose()
    await two.aclose()
