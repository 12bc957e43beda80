"""Laws of the directory: what starting creates, what is found, what is kept and for how long, and how it closes."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextvars import ContextVar
from dataclasses import replace

import pytest

from streamserve.protocol.errors import EngineUnavailable, NotFound, Overloaded
from streamserve.protocol.events import Done, Error
from streamserve.protocol.stats import ModelDescription
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Reader, Stream
from tests.support.streams import ScriptedClient, ask, until

REQUEST = ask("scripted")


async def start(streams: Streams, owner: str = "u1") -> Stream:
    return await streams.start(REQUEST, owner=owner, tenant="t1")


def keeping(scripted: ScriptedClient, **settings: float) -> Streams:
    return Streams({"scripted": scripted}, MemoryLog(), StreamConfig(**settings))


async def test_an_unknown_model_is_not_found(streams: Streams) -> None:
    """The error names the model and the field, in every dialect's words."""
    with pytest.raises(NotFound, match="nosuch") as caught:
        await streams.start(ask("nosuch"), owner="u1", tenant="t1")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_a_refusal_creates_nothing(streams: Streams, scripted: ScriptedClient) -> None:
    """What the engine raises passes through, and no stream, log or count stays behind."""
    scripted.refusals.append(Overloaded("full", retry_after=7))
    with pytest.raises(Overloaded):
        await start(streams)
    assert (streams.all(), streams.num_live(), streams.num_live("u1")) == ([], 0, 0)


@pytest.mark.parametrize(("stage", "was_ready"), [("waiting", True), ("connecting", False)])
async def test_an_engine_that_is_coming_is_waited_for(scripted: ScriptedClient, stage: str, was_ready: bool) -> None:
    """A new request is asked again until the engine takes it; the time until then is none in the queue."""
    streams = keeping(scripted, engine_wait_seconds=60)
    scripted.description = ModelDescription(alias="scripted", state="loading", stage=stage, was_ready=was_ready)
    scripted.refusals.extend(EngineUnavailable("being replaced") for _ in range(3))
    await start(streams)
    arrivals = [request.arrived_at for request in scripted.requests]
    assert len(arrivals) == len(set(arrivals)) == 4
    assert len({request.stream_id for request in scripted.requests}) == 1
    await streams.aclose()


@pytest.mark.parametrize(
    ("state", "was_ready", "seconds"),
    [("loading", False, 60), ("failed", True, 60), ("paused", True, 60), ("draining", True, 0)],
    ids=["was never there", "has failed", "is paused", "time is up"],
)
async def test_no_other_engine_is_waited_for(
    scripted: ScriptedClient, state: str, was_ready: bool, seconds: float
) -> None:
    """The refusal is told at once, and nothing was created."""
    streams = keeping(scripted, engine_wait_seconds=seconds)
    scripted.description = ModelDescription(alias="scripted", state=state, was_ready=was_ready)
    scripted.refusals.append(EngineUnavailable("not now"))
    with pytest.raises(EngineUnavailable):
        await start(streams)
    assert (len(scripted.requests), streams.all(), streams.num_live()) == (1, [], 0)


async def test_the_request_is_completed_for_the_engine(streams: Streams, scripted: ScriptedClient) -> None:
    """Tenant, id and arrival are set here."""
    stream = await start(streams)
    (request,) = scripted.requests
    assert (request.tenant, request.stream_id) == ("t1", stream.id)
    assert request.arrived_at is not None
    assert len(stream.id) == 32
    assert int(stream.id, 16)


async def test_streams_are_found_by_both_ids(streams: Streams) -> None:
    """Both ids lead to the stream; others to nothing."""
    one, two = await start(streams), await start(streams)
    assert (streams.find(one.id), streams.find_log(two.log_id)) == (one, two)
    assert streams.find(one.log_id) is streams.find_log(one.id) is None
    assert not streams.is_expired(one.id)
    assert streams.all() == [one, two]


async def test_live_streams_are_counted_while_they_start(streams: Streams, scripted: ScriptedClient) -> None:
    """A check of `num_live` right before `start` cannot be raced; finished streams do not count."""
    scripted.hold = asyncio.Event()
    starting = asyncio.create_task(start(streams))
    await asyncio.sleep(0)
    assert (streams.num_live("u1"), streams.num_live("u2"), streams.num_live()) == (1, 0, 1)
    scripted.hold.set()
    stream = await starting
    assert streams.num_live("u1") == streams.num_live() == 1
    await stream.stop()
    assert streams.num_live() == 0


async def test_starting_can_be_cancelled(streams: Streams, scripted: ScriptedClient) -> None:
    """A client that leaves before acceptance leaves nothing behind."""
    scripted.hold = asyncio.Event()
    starting = asyncio.create_task(start(streams))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert (streams.num_live(), streams.all()) == (0, [])


async def test_finished_streams_are_dropped_after_retention(scripted: ScriptedClient) -> None:
    """They leave memory and log, and are known to have expired."""
    streams = keeping(scripted, retention_seconds=0.01)
    stream = await start(streams)
    await stream.stop()
    await until(lambda: streams.find(stream.id) is None, "the stream is dropped")
    assert streams.is_expired(stream.id)
    assert streams.is_expired(stream.log_id)
    with pytest.raises(KeyError):
        await streams.log.read(stream.log_id, 0)
    await streams.aclose()


async def test_the_oldest_finished_streams_make_room(scripted: ScriptedClient) -> None:
    """No more than `max_finished` are kept, and no more than `max_expired` names are remembered."""
    streams = keeping(scripted, max_finished=2, max_expired=3)
    ended = []
    for _ in range(8):
        ended.append(await start(streams))
        await ended[-1].stop()
        await asyncio.sleep(0)
    await until(lambda: len(streams.all()) == 2, "six are dropped")
    assert streams.all() == ended[-2:]
    assert [streams.is_expired(stream.id) for stream in ended] == [False] * 3 + [True] * 3 + [False] * 2
    await streams.aclose()


async def test_a_stream_is_not_dropped_under_a_reader(scripted: ScriptedClient) -> None:
    """A slow reader finishes reading, whatever the clock says."""
    streams = keeping(scripted, retention_seconds=0.01)
    read, other = await start(streams), await start(streams)
    reader = Reader(is_watcher=True)
    read.attach(reader)
    await read.stop()
    await other.stop()
    await until(lambda: streams.find(other.id) is None, "the one without a reader is dropped")
    assert streams.find(read.id) is read
    read.detach(reader)
    await until(lambda: streams.find(read.id) is None, "then the other")
    await streams.aclose()


async def test_room_is_not_made_under_a_reader(scripted: ScriptedClient) -> None:
    """Too many are kept: the oldest that nobody reads goes."""
    streams = keeping(scripted, max_finished=1)
    read, other = await start(streams), await start(streams)
    read.attach(Reader())
    await read.stop()
    await other.stop()
    await until(lambda: streams.find(other.id) is None, "the younger is dropped")
    assert streams.find(read.id) is read
    await streams.aclose()


async def test_a_dropped_stream_is_forgotten_altogether(scripted: ScriptedClient) -> None:
    """No timer, task or table keeps its prompt in memory."""
    streams = keeping(scripted, retention_seconds=0.01)
    stream = await streams.start(replace(REQUEST, timeout_seconds=3600), owner="u1", tenant="t1")
    stream.release()
    await stream.stop()
    remains = weakref.ref(stream)
    del stream
    await until(lambda: streams.all() == [], "it is dropped")
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert remains() is None
    await streams.aclose()


async def test_closing_ends_every_stream_truthfully(scripted: ScriptedClient) -> None:
    """Running and parked ones end in a retryable error, which their readers can still read; nothing starts any more."""
    streams = keeping(scripted)
    running, parked, finished = await start(streams), await start(streams), await start(streams)
    parked.release()
    scripted.last.push(done := Done(finish_reason="stop"))
    await finished.ended.wait()
    await streams.aclose()
    for stream in (running, parked):
        assert isinstance(stream.terminal, Error)
        assert stream.terminal.retryable
        assert (await streams.log.read(stream.log_id, 0))[-1].event is stream.terminal
    assert finished.terminal is done
    assert all(generation.is_cancelled for generation in scripted.generations[:2])
    with pytest.raises(EngineUnavailable):
        await start(streams)
    assert [task for task in asyncio.all_tasks() if "stream" in task.get_name()] == []


async def test_a_stream_keeps_nothing_of_its_request(scripted: ScriptedClient) -> None:
    """Tasks and timers run in an empty context: no request, thread or connection lives as long as the stream."""
    seen: list[str | None] = []
    current_request: ContextVar[str | None] = ContextVar("current_request", default=None)

    async def on_finished(stream: Stream) -> None:
        seen.append(current_request.get())

    streams = Streams({"scripted": scripted}, MemoryLog(), on_finished=on_finished)
    current_request.set("GET /")
    await (await start(streams)).stop()
    await streams.aclose()
    assert seen == [None]
