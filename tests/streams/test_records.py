"""Laws of a stream's record: when it is there, what it says of an end, and how streams are reached by it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import pytest

from streamserve.protocol.events import Done, Meta
from streamserve.protocol.limits import Limits
from streamserve.streams import registry
from streamserve.streams.log.base import Batch, EventLog, LogFull, MemoryLog, Result
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from tests.streams.conftest import start
from tests.support.streams.hand_made import ScriptedClient, StallingLog, tok, until
from tests.support.streams.stores import RecordStore, SharedRecords


class FullLog(MemoryLog):
    """A log that takes nothing."""

    async def commit(self, batches: Sequence[Batch]) -> list[Result]:
        raise LogFull("The log is full.")


def storing(scripted: ScriptedClient, log: EventLog | None = None) -> tuple[Streams, RecordStore, SharedRecords]:
    """Return a registry with a store of its own, that store, and the records."""
    shared = SharedRecords()
    store = shared.worker("one")
    return Streams({"scripted": scripted}, log or MemoryLog(), store=store), store, shared


async def test_the_record_is_there_before_the_stream_can_be_read(scripted: ScriptedClient) -> None:
    """The engine accepts, the record is inserted, `meta` is committed, and only then are tokens taken; no query."""
    log = StallingLog()
    streams, store, shared = storing(scripted, log)
    store.hold = asyncio.Event()
    starting = asyncio.create_task(start(streams))
    await until(lambda: store.calls["insert"] == 1, "the record is being inserted")
    scripted.last.push(tok("x"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert log.batches == []
    store.hold.set()
    stream = await starting
    await until(lambda: stream.last_seq == 2, "meta and a token are committed")
    record = shared.records[stream.id]
    assert (record.log_id, record.admission.owner, record.producer, record.fence) == (stream.log_id, "u1", "one", 1)
    assert record.request == stream.request
    assert store.calls == {"insert": 1}
    await streams.aclose()


async def test_an_answer_was_created_at_one_time(scripted: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record, which another process shows, has the second that its readers are told."""
    seconds = itertools.count(1_800_000_000)
    monkeypatch.setattr(time, "time", lambda: float(next(seconds)))
    streams, _, shared = storing(scripted)
    stream = await start(streams)
    assert int(shared.records[stream.id].created) == stream.created
    await streams.aclose()


async def test_without_a_record_nothing_starts(scripted: ScriptedClient) -> None:
    """The database's error passes through, the generation is cancelled, and neither stream nor log is left."""
    log = StallingLog()
    streams, store, shared = storing(scripted, log)
    store.refusals.append(OSError("no database"))
    with pytest.raises(OSError, match="no database"):
        await start(streams)
    assert scripted.last.is_cancelled
    assert (streams.all(), log.batches, shared.records) == ([], [], {})
    await streams.aclose()


async def test_without_a_log_the_record_is_finished(scripted: ScriptedClient) -> None:
    """The log's refusal passes through as the record's error code, and the generation is cancelled."""
    streams, store, shared = storing(scripted, FullLog())
    with pytest.raises(LogFull):
        await start(streams)
    await until(lambda: store.calls["finish"] == 1, "its end is written")
    [record] = shared.records.values()
    assert (record.is_finished, record.error_code, record.request) == (True, "log_full", None)
    assert scripted.last.is_cancelled
    assert streams.all() == []
    await streams.aclose()


@pytest.mark.parametrize("during", ["insert", "open"])
async def test_a_client_that_leaves_during_the_start_leaves_no_running_record(
    scripted: ScriptedClient, during: str
) -> None:
    """The insert and the commit run to their end; then the client's stream ends as abandoned, after `meta`."""
    log = StallingLog()
    streams, store, shared = storing(scripted, log)
    if during == "insert":
        store.hold = asyncio.Event()
    else:
        log.go.clear()
    starting = asyncio.create_task(start(streams))
    await until(lambda: store.calls["insert"] == 1, "the record is being inserted")
    for _ in range(3):
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert scripted.last.is_cancelled
    log.go.set()
    if store.hold is not None:
        store.hold.set()
    await until(lambda: store.calls["finish"] == 1, "its end is written")
    [record] = shared.records.values()
    assert (record.is_finished, record.finish_reason) == (True, "abandoned")
    first, last = (logged.event for logged in await log.read(record.log_id, 0))
    assert isinstance(first, Meta)
    assert isinstance(last, Done)
    await streams.aclose()


async def test_the_end_is_written_until_the_store_takes_it(
    scripted: ScriptedClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store is tried again after each logged refusal; until then the stream is kept and counts in no quota."""
    monkeypatch.setattr(registry, "_RETRY_SECONDS", 0.001)
    shared = SharedRecords()
    store = shared.worker("one")
    places = Limits(max_streams_per_principal=1)
    streams = Streams({"scripted": scripted}, MemoryLog(), store=store, limits=places)
    stream = await start(streams)
    store.finish_refusals.extend(OSError("database is locked") for _ in range(4))
    await stream.stop()
    await until(lambda: store.calls["finish"] >= 1, "it is tried")
    assert (shared.records[stream.id].is_finished, streams.find(stream.id)) == (False, stream)
    assert (await start(streams)).state == "running"
    await until(lambda: shared.records[stream.id].is_finished, "it is written")
    assert shared.records[stream.id].finish_reason == "cancelled"
    assert (store.calls["finish"], caplog.text.count("its end is not written yet")) == (5, 4)
    await streams.aclose()


async def test_a_record_that_was_read_is_not_read_again(scripted: ScriptedClient) -> None:
    """Another worker reaches a released stream with its record: no query, and one claim once it has a reader."""
    log, shared = MemoryLog(), SharedRecords()
    one, two = (Streams({"scripted": scripted}, log, store=shared.worker(name)) for name in ("one", "two"))
    stream = await start(one)
    stream.attach(reader := Attachment())
    stream.detach(reader)
    await until(lambda: not stream.lease.is_held, "it is released")
    found = await two.reach(stream.id, shared.records[stream.id])
    assert found is not None
    found.attach(Attachment())
    await until(lambda: found.lease.is_held, "it is claimed")
    assert two.store.calls == {"claim": 1}
    assert shared.records[stream.id].producer == "two"
    # The first worker still has the stream, and learns of the claim only by this record.
    shared.dead.add("two")
    back = await one.reach(stream.id, shared.records[stream.id])
    assert back is stream
    one.store.calls.clear()
    back.attach(Attachment())
    await until(lambda: back.lease.is_held, "it is claimed again")
    assert one.store.calls == {"claim": 1}
    await one.aclose()
    await two.aclose()


async def test_streams_are_reached_by_their_record(scripted: ScriptedClient) -> None:
    """A stream without a record costs one query, an unknown id finds None, a finished one is not written again."""
    log, shared = MemoryLog(), SharedRecords()
    one, two = (Streams({"scripted": scripted}, log, store=shared.worker(name)) for name in ("one", "two"))
    stream = await start(one)
    assert (await two.reach(stream.id)).log_id == stream.log_id
    assert await two.reach("0" * 32) is None
    assert two.store.calls == {"find": 2}
    await stream.stop()
    await until(lambda: shared.records[stream.id].is_finished, "its end is written")
    three = Streams({"scripted": scripted}, log, store=shared.worker("three"))
    ended = await three.reach(stream.id)
    await ended.ended.wait()
    await three.aclose()
    assert (ended.terminal, three.store.calls) == (stream.terminal, {"find": 1})
    await one.aclose()
    await two.aclose()
