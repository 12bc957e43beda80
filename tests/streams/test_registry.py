"""Laws of the directory: what starting creates, what is found, what is kept and for how long, and how it closes."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextvars import ContextVar
from dataclasses import replace

import pytest

from streamserve.protocol.engine import ModelDescription
from streamserve.protocol.errors import EngineUnavailable, NotFound, Overloaded
from streamserve.protocol.events import Done, Error
from streamserve.protocol.requests import Admission
from streamserve.streams import registry
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.follow import follow
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from streamserve.streams.transcript import StreamSummary
from tests.streams.conftest import start
from tests.support.streams.hand_made import ScriptedClient, ask, tok, until, untimed
from tests.support.streams.stores import RecordStore, SharedRecords

REQUEST = ask("scripted")


def keeping(scripted: ScriptedClient, **settings: float) -> Streams:
    return Streams({"scripted": scripted}, MemoryLog(), StreamConfig(**settings))


async def test_an_unknown_model_is_not_found(streams: Streams) -> None:
    """The error names the model and the field, in every dialect's words."""
    with pytest.raises(NotFound, match="nosuch") as caught:
        await streams.start(ask("nosuch"), Admission(owner="u1", tenant="t1"))
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_a_refusal_creates_nothing(streams: Streams, scripted: ScriptedClient) -> None:
    """The engine's refusal passes through, and no stream, log or count stays behind."""
    scripted.refusals.append(Overloaded("full", retry_after=7))
    with pytest.raises(Overloaded):
        await start(streams)
    assert streams.all() == []


@pytest.mark.parametrize(("stage", "was_ready"), [("waiting", True), ("connecting", False)])
async def test_an_engine_that_is_coming_is_waited_for(scripted: ScriptedClient, stage: str, was_ready: bool) -> None:
    """A new request is asked again until the engine takes it; that wait does not count as queue time."""
    streams = keeping(scripted, engine_wait_seconds=60)
    scripted.description = ModelDescription(alias="scripted", state="loading", stage=stage, was_ready=was_ready)
    scripted.refusals.extend(EngineUnavailable("being replaced") for _ in range(2))
    await start(streams)
    arrivals = [admission.arrived_at for admission in scripted.admissions]
    assert len(arrivals) == len(set(arrivals)) == 3
    assert len({admission.stream_id for admission in scripted.admissions}) == 1
    await streams.aclose()


@pytest.mark.parametrize(
    ("state", "was_ready", "seconds"),
    [("failed", True, 60), ("paused", True, 60), ("draining", True, 0), ("loading", False, 0)],
    ids=["has failed", "is paused", "time is up for a drain", "time is up for a load"],
)
async def test_no_other_engine_is_waited_for(
    scripted: ScriptedClient, state: str, was_ready: bool, seconds: float
) -> None:
    """The refusal is raised at once, and nothing was created."""
    streams = keeping(scripted, engine_wait_seconds=seconds)
    scripted.description = ModelDescription(alias="scripted", state=state, was_ready=was_ready)
    scripted.refusals.append(EngineUnavailable("not now"))
    with pytest.raises(EngineUnavailable):
        await start(streams)
    assert (len(scripted.requests), streams.all()) == (1, [])


async def test_the_request_is_completed_for_the_engine(streams: Streams, scripted: ScriptedClient) -> None:
    """The directory sets id and arrival, and passes on whose it is."""
    stream = await start(streams)
    (admission,) = scripted.admissions
    assert (admission.tenant, admission.stream_id) == ("t1", stream.id)
    assert admission.arrived_at is not None
    assert len(stream.id) == 32
    assert int(stream.id, 16)


async def test_streams_are_found_by_both_ids(streams: Streams) -> None:
    """Both ids find the stream; unknown ids find None."""
    one, two = await start(streams), await start(streams)
    assert (streams.find(one.id), streams.find_log(two.log_id)) == (one, two)
    assert streams.find(one.log_id) is streams.find_log(one.id) is None
    assert not streams.is_expired(one.id)
    assert streams.all() == [one, two]


async def test_starting_can_be_cancelled(streams: Streams, scripted: ScriptedClient) -> None:
    """A client that leaves before acceptance leaves no stream, log or count."""
    scripted.hold = asyncio.Event()
    starting = asyncio.create_task(start(streams))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert streams.all() == []


async def test_finished_streams_are_dropped_after_retention(scripted: ScriptedClient) -> None:
    """Finished streams leave memory and log after the retention, and are known to have expired."""
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
    """A slow reader finishes reading, even after the retention."""
    streams = keeping(scripted, retention_seconds=0.01)
    read, other = await start(streams), await start(streams)
    reader = Attachment(is_watcher=True)
    read.attach(reader)
    await read.stop()
    await other.stop()
    await until(lambda: streams.find(other.id) is None, "the one without a reader is dropped")
    assert streams.find(read.id) is read
    read.detach(reader)
    await until(lambda: streams.find(read.id) is None, "then the other")
    await streams.aclose()


async def test_room_is_not_made_under_a_reader(scripted: ScriptedClient) -> None:
    """Above `max_finished` the oldest stream without a reader is dropped."""
    streams = keeping(scripted, max_finished=1)
    read, other = await start(streams), await start(streams)
    read.attach(Attachment())
    await read.stop()
    await other.stop()
    await until(lambda: streams.find(other.id) is None, "the younger is dropped")
    assert streams.find(read.id) is read
    await streams.aclose()


async def test_finished_streams_are_bounded_in_bytes(scripted: ScriptedClient) -> None:
    """Long prompts make room earlier than their number does; the newest stays, and what is dropped is counted back."""
    streams = keeping(scripted, max_finished_bytes=1_000_000)
    long, ended = replace(REQUEST, prompt="x" * 400_000), []
    for _ in range(5):
        ended.append(await streams.start(long, Admission(owner="u1", tenant="t1")))
        await ended[-1].stop()
    await until(lambda: len(streams.all()) == 2, "three are dropped")
    assert streams.all() == ended[-2:]
    small = [await start(streams) for _ in range(9)]
    for stream in small:
        await stream.stop()
    await until(lambda: all(stream.id in streams._kept for stream in small), "all are kept")
    assert streams.all() == [*ended[-2:], *small]
    huge = await streams.start(replace(REQUEST, prompt="x" * 2_000_000), Admission(owner="u1", tenant="t1"))
    await huge.stop()
    await until(lambda: streams.all() == [huge], "it takes the room of all others, and stays")
    await streams.aclose()
    assert streams._num_kept_bytes == 0


async def test_a_request_that_msgpack_cannot_hold_is_dropped_too(scripted: ScriptedClient) -> None:
    """An engine in this process takes what no message can carry: a number beyond 64 bits, half a surrogate."""
    streams = keeping(scripted, retention_seconds=0.01)
    odd = replace(REQUEST, chat_template_kwargs={"number": 2**70, "text": "\ud800"})
    stream = await streams.start(odd, Admission(owner="u1", tenant="t1"))
    await stream.stop()
    await until(lambda: streams.all() == [], "it is dropped")
    await streams.aclose()


async def test_events_in_memory_count_too(scripted: ScriptedClient) -> None:
    """With a log in memory a long answer is as large as its events."""
    streams = keeping(scripted, max_finished_bytes=1_000_000)
    ended = []
    for _ in range(3):
        ended.append(await start(streams))
        ended[-1].attach(Attachment())
        scripted.last.push(*(tok("word " * 20, number) for number in range(1000)))
        scripted.last.push(Done(finish_reason="stop"))
        await ended[-1].ended.wait()
        for reader in ended[-1].readers.attached:
            ended[-1].detach(reader)
    await until(lambda: len(streams.all()) == 1, "each makes the room of the one before")
    assert streams.all() == ended[-1:]
    await streams.aclose()


async def test_a_dropped_stream_is_forgotten_altogether(scripted: ScriptedClient) -> None:
    """No timer, task or table keeps a dropped stream's prompt in memory."""
    streams = keeping(scripted, retention_seconds=0.01)
    stream = await streams.start(replace(REQUEST, timeout_seconds=3600), Admission(owner="u1", tenant="t1"))
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
    """Running and parked streams end in a retryable error that their readers can still read; no new stream starts."""
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
    assert untimed(finished.terminal) == done
    assert all(generation.is_cancelled for generation in scripted.sources[:2])
    with pytest.raises(EngineUnavailable):
        await start(streams)
    assert [task for task in asyncio.all_tasks() if "stream" in task.get_name()] == []


async def test_a_stream_keeps_nothing_of_its_request(scripted: ScriptedClient) -> None:
    """Tasks and timers run in an empty context: no request, thread or connection lives as long as the stream."""
    seen: list[str | None] = []
    current_request: ContextVar[str | None] = ContextVar("current_request", default=None)

    class Store(RecordStore):
        async def finish(self, summary: StreamSummary, *, last_seq: int, text: str) -> None:
            seen.append(current_request.get())

    streams = Streams({"scripted": scripted}, MemoryLog(), store=Store(SharedRecords(), "one"))
    current_request.set("GET /")
    await (await start(streams)).stop()
    await streams.aclose()
    assert seen == [None]


async def test_a_lease_that_cannot_be_released_does_not_keep_readers(
    scripted: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that does not answer while the process closes: the stream's task is cancelled, its readers end."""
    monkeypatch.setattr(registry, "_CLOSE_SECONDS", 0.01)

    class Store(RecordStore):
        async def release(self, stream_id: str, fence: int) -> None:
            await asyncio.Event().wait()

    streams = Streams({"scripted": scripted}, MemoryLog(), store=Store(SharedRecords(), "one"))
    stream = await start(streams)
    reading = asyncio.create_task(anext(follow(streams, stream, 1), None))
    await until(lambda: stream.readers.num_attached == 1, "it is read")
    await streams.aclose()
    async with asyncio.timeout(60):
        assert await reading is None
    assert stream.ended.is_set()


async def test_a_parked_stream_keeps_nothing_of_its_generation(streams: Streams, scripted: ScriptedClient) -> None:
    """Neither the task nor the start of its generation keeps a parked stream, however many there are."""
    stream = await start(streams)
    remains = weakref.ref(scripted.sources.pop())
    stream.release()
    await until(lambda: stream.state == "parked", "it is parked")
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert remains() is None
