"""Laws of streams that two workers share, on one database and one log: read and resumed by both, written by one."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import aclosing, closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connections
from django.db.backends.signals import connection_created
from django.utils import timezone

from streamserve.clients.thread.client import ThreadClient
from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import QuotaExceeded, UnmetNeeds
from streamserve.protocol.events import Done, Meta, Status
from streamserve.protocol.requests import (
    GenerateRequest,
    Limits,
    Message,
    SamplingParams,
    decode_request,
    encode_request,
)
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import append, new_log_id
from streamserve.streams.reader.follow import collect, follow
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from streamserve.streams.store import Admission, Group
from streamserve.streams.stream import Stream
from streamserve.web import site
from streamserve.web.rows import orm
from streamserve.web.rows.store import RowStore, record_of
from tests.conftest import Caller, body_of
from tests.support.checks.stream_checks import check_native, check_native_part, going_away_of, text_of
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import Gate, ask, until
from tests.support.streams.log_lines import captured_events

pytestmark = pytest.mark.django_db(transaction=True)

NUM_TOKENS = 12
FINE = StreamConfig(coalesce_tokens=0)


@pytest.fixture
async def one(echo: ThreadClient, tmp_path: Path) -> AsyncIterator[Worker]:
    worker = Worker(tmp_path, echo, FINE)
    yield worker
    await worker.aclose()


@pytest.fixture
async def two(echo: ThreadClient, tmp_path: Path) -> AsyncIterator[Worker]:
    worker = Worker(tmp_path, echo, FINE)
    yield worker
    await worker.aclose()


def asked(**fields: Any) -> GenerateRequest:
    return ask(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, **fields})


async def quiet(worker: Worker, request: GenerateRequest) -> tuple[str, Done]:
    """Return text and end of an uninterrupted run."""
    stream = await worker.start(request)
    end = (await collect(worker.streams, stream))[-1].event
    assert isinstance(end, Done)
    return text_of(check_native(await worker.read(stream.id))), end


async def held(worker: Worker, gate: Gate, request: GenerateRequest, num_steps: int) -> tuple[Stream, Any]:
    """Start an answer whose engine is held after that many steps; return it and a task that reads it to its end."""
    gate.allow(num_steps)
    stream = await worker.start(request)
    reading = asyncio.create_task(worker.read(stream.id))
    await until(
        lambda: gate.is_holding and stream.last_seq > num_steps and stream.readers.num_holding == 1, "it is held"
    )
    return stream, reading


async def left(reading: asyncio.Task[bytes]) -> None:
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def counted(num: int, call: Awaitable[Any]) -> Any:
    """Await `call`, and check that it makes `number` queries."""
    statements: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        statements.append(sql)
        return execute(sql, params, many, context)

    with query_hook(note):
        result = await call
    assert len(statements) == num, statements
    return result


@contextmanager
def query_hook(note: Any) -> Iterator[None]:
    """Have `note` wrap the queries of connections that are opened from now on, in any thread."""

    def install(connection: Any, **kwargs: Any) -> None:
        if note not in connection.execute_wrappers:
            connection.execute_wrappers.append(note)

    orm.close()
    connection_created.connect(install)
    try:
        yield
    finally:
        connection_created.disconnect(install)
        orm.close()


async def in_row(stream_id: str, **fields: Any) -> None:
    """Wait until the row has these values."""
    async with asyncio.timeout(20):
        while not await StreamRow.objects.filter(pk=stream_id, **fields).aexists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_request_is_read_back_as_it_was_kept() -> None:
    """Every field of a request is read back; a wrong or an unknown one is refused."""
    request = GenerateRequest(
        model="m",
        messages=(Message(role="user", content="hi", extra={"name": "n"}),),
        sampling=SamplingParams(stop=("a", "b"), stop_token_ids=(1, 2), seed=3, max_tokens=4, logprobs=0),
        unset=("top_k",),
        n=2,
        chat_template_kwargs={"thinking": True},
        timeout_seconds=1.5,
        latency_class="batch",
        tenant="t",
        salt="s",
        stream_id="i",
        arrived_at=5.5,
        output_token_ids=((1,), (2, 3)),
        first_token_at=6.5,
        reader_tokens=(0, 0),
    )
    kept = encode_request(request)
    assert decode_request(kept) == request
    for wrong in ({**kept, "n": "2"}, {**kept, "new": 1}, {"n": 1}, [], "x"):
        with pytest.raises(ValueError):
            decode_request(wrong)


async def test_leaving_one_worker_for_the_other_at_every_event(one: Worker, two: Worker, gate: Gate) -> None:
    """What is read here up to any event, and there after it, is the uninterrupted text, for each of two readers."""
    reference, reference_end = await quiet(one, asked())
    for cut in range(1, NUM_TOKENS + 1):
        gate.allow(cut)
        stream = await one.start(asked())
        first = check_native_part(await one.read(stream.id, 0, cut))[:cut]
        gate.open()
        for _ in range(2):
            pair = await asyncio.gather(*(two.read(stream.id, cut) for _ in range(2)))
            for rest in pair:
                assert text_of(first + check_native(rest, after=cut)) == reference
        end = two.streams.find(stream.id).terminal
        assert isinstance(end, Done)
        assert (end.finish_reason, end.usage.completion_tokens) == ("length", reference_end.usage.completion_tokens)
        await in_row(stream.id, state="finished", completion_tokens=NUM_TOKENS)


async def test_replay_from_every_seq_by_the_other_worker(one: Worker, two: Worker) -> None:
    """A finished stream has the same events at the other worker, and its row stays as it was written."""
    stream = await one.start(asked())
    full = check_native(await one.read(stream.id))
    await in_row(stream.id, state="finished")
    for after in range(stream.last_seq):
        for data in await asyncio.gather(*(two.read(stream.id, after) for _ in range(2))):
            assert check_native(data, after=after) == full[after:]


async def test_a_reader_at_the_other_worker_follows_live(one: Worker, two: Worker, gate: Gate) -> None:
    """While the first worker writes, the second claims nothing, and both readers have the same."""
    stream, reading = await held(one, gate, asked(max_tokens=30), 4)
    other = asyncio.create_task(two.read(stream.id))
    await until(lambda: two.streams.find(stream.id) is not None, "it is found")
    shadow = two.streams.find(stream.id)
    assert (shadow.state, shadow.lease.is_held, shadow.is_live) == ("running", False, False)
    await asyncio.sleep(1.2)  # it has polled again by now
    gate.open()
    here, there = [check_native(data) for data in await asyncio.gather(reading, other)]
    assert here == there
    assert stream.lease.fence == 1
    assert stream.parking.num_parks == 0


async def test_the_other_worker_resumes_when_the_first_has_no_reader(one: Worker, two: Worker, gate: Gate) -> None:
    """The lease is released, the stream resumes at the reader's worker, and the reader sees one `resumed` at most."""
    reference, _ = await quiet(one, asked(max_tokens=30))
    stream, reading = await held(one, gate, asked(max_tokens=30), 4)
    other = asyncio.create_task(two.read(stream.id))
    await until(lambda: two.streams.find(stream.id) is not None, "it is found")
    await left(reading)
    gate.open()
    frames = check_native(await other)
    assert text_of(frames) == reference
    assert two.streams.find(stream.id).lease.fence == 2
    assert [frame.json["status"] for frame in frames if frame.event == "status"] == ["resumed"]
    assert stream.state == "parked"  # a stale value: the next read of the stream polls the row
    assert (await one.streams.reach(stream.id)).state == "finished"


async def test_a_reader_alternates_between_workers(one: Worker, two: Worker, gate: Gate) -> None:
    """A reader that changes workers after every event loses nothing; each worker finds what the other wrote."""
    reference, _ = await quiet(one, asked())
    gate.allow(1)
    stream = await one.start(asked())
    seen: list[Any] = []
    turn = 0
    while not seen or not isinstance(seen[-1].event, Done):
        worker = (one, two)[turn % 2]
        turn += 1
        found = await worker.streams.reach(stream.id)
        gate.allow(2)
        async with aclosing(follow(worker.streams, found, seen[-1].seq if seen else 0)) as events:
            async for logged in events:
                seen.append(logged)
                if not isinstance(logged.event, Status):
                    break
    gate.open()
    assert [logged.seq for logged in seen] == list(range(1, len(seen) + 1))
    assert "".join(getattr(logged.event, "text", "") for logged in seen) == reference
    await in_row(stream.id, state="finished")


async def test_a_worker_that_only_seems_dead_cannot_write(one: Worker, two: Worker, gate: Gate) -> None:
    """The other worker resumes; the log refuses what the first still makes, and its reader follows to the same end."""
    reference, _ = await quiet(one, asked(max_tokens=30))
    stream, reading = await held(one, gate, asked(max_tokens=30), 4)
    one.release_lock()
    other = asyncio.create_task(two.read(stream.id))
    await until(lambda: getattr(two.streams.find(stream.id), "lease", stream.lease).fence == 2, "it is claimed")
    gate.open()
    here, there = [check_native(data) for data in await asyncio.gather(reading, other)]
    assert text_of(here) == text_of(there) == reference
    await in_row(stream.id, state="finished", completion_tokens=30, fence=2)  # the row is written after the last event


async def test_stop_from_the_other_worker(one: Worker, two: Worker, gate: Gate) -> None:
    """Stop cuts the stream where its user stopped reading, and frees the engine at once or with its next token."""
    stream, reading = await held(one, gate, asked(max_tokens=500), 6)
    found = await two.streams.reach(stream.id)
    stopping = asyncio.create_task(found.stop(4))
    await asyncio.wait_for(stopping, 10)
    assert isinstance(found.terminal, Done)
    assert (found.terminal.finish_reason, found.terminal.kept_seq) == ("cancelled", 4)
    gate.open()
    frames = check_native(await asyncio.wait_for(reading, 10))
    assert frames[-1].json["finish_reason"] == "cancelled"
    await until(lambda: one.streams.find(stream.id).terminal is not None, "the first has its end")
    await in_row(stream.id, state="finished", finish_reason="cancelled")
    await found.stop(2)
    assert found.terminal.kept_seq == 4


@pytest.mark.cut_streams("the worker stops")
async def test_a_worker_that_stops_leaves_its_streams(one: Worker, two: Worker, gate: Gate) -> None:
    """Readers get a going-away event and their connections end; the other worker resumes at once."""
    reference, _ = await quiet(one, asked(max_tokens=30))
    stream, reading = await held(one, gate, asked(max_tokens=30), 4)
    closing = asyncio.create_task(one.streams.aclose())
    await until(lambda: stream.has_left, "it is cut")
    gate.open()
    await closing
    data = await reading
    first = check_native_part(data)
    assert going_away_of(data) is not None
    rest = check_native(await two.read(stream.id, first[-1].seq), after=first[-1].seq)
    assert text_of(first + rest) == reference


@pytest.mark.cut_streams("the reader leaves")
async def test_a_worker_that_lacks_what_a_request_needs_keeps_it(one: Worker, two: Worker, gate: Gate) -> None:
    """An older worker shows a newer one's stream, but does not resume it without what it needs, nor end it."""
    stream, reading = await held(one, gate, asked(max_tokens=30), 4)
    row = await StreamRow.objects.aget(pk=stream.id)
    await StreamRow.objects.filter(pk=stream.id).aupdate(request={**row.request, "needs": ["canvas"], "canvas": "x"})
    assert check_native_part(await two.read(stream.id, 0, 3))[-1].seq >= 3
    record = record_of(await StreamRow.objects.aget(pk=stream.id))
    assert record.request is None
    assert isinstance(record.refusal, UnmetNeeds)
    gate.open()
    check_native(await reading)
    await in_row(stream.id, state="finished", completion_tokens=30)


async def test_an_unmet_need_is_no_end(one: Worker, two: Worker, gate: Gate) -> None:
    """When the newer worker has died, the older one's reader waits: the stream does not end with an error."""
    stream, reading = await held(one, gate, asked(max_tokens=30), 4)
    await left(reading)
    row = await StreamRow.objects.aget(pk=stream.id)
    await StreamRow.objects.filter(pk=stream.id).aupdate(request={**row.request, "needs": ["canvas"]})
    one.release_lock()
    reading = asyncio.create_task(two.read(stream.id))
    await until(lambda: two.streams.find(stream.id) is not None, "the older worker has it")
    found = two.streams.find(stream.id)
    assert found is not None
    await until(lambda: found.terminal is not None or found.parking._refused_at is not None, "the engine has answered")
    assert found.terminal is None
    await left(reading)
    gate.open()


async def test_a_stream_without_a_returning_reader_is_abandoned(one: Worker, two: Worker, gate: Gate) -> None:
    """A dead worker's stream has the resume window from when that is noticed; then any worker ends it as abandoned."""
    stream, reading = await held(one, gate, asked(max_tokens=500), 4)
    await left(reading)
    await in_row(stream.id, producer="")
    await StreamRow.objects.filter(pk=stream.id).aupdate(producer="0123456789abcdef", released_at=None)
    await two.reaper.round()
    await in_row(stream.id, producer="", released_at__isnull=False, state="running")
    await two.reaper.round()
    assert two.streams.find(stream.id).terminal is None
    await StreamRow.objects.filter(pk=stream.id).aupdate(released_at=timezone.now() - timedelta(seconds=601))
    await two.reaper.round()
    await in_row(stream.id, state="finished", finish_reason="abandoned", request__isnull=True)
    gate.open()


async def test_a_finish_stream_is_finished(one: Worker, two: Worker, gate: Gate) -> None:
    """When the worker of an `on_disconnect="finish"` stream dies, another makes the rest without a reader."""
    gate.allow(3)
    stream = await one.start(asked(max_tokens=40), on_disconnect="finish")
    await until(lambda: gate.is_holding, "the engine is held")
    one.release_lock()
    await two.reaper.round()
    await until(lambda: two.streams.find(stream.id) is not None, "it is found")
    gate.open()
    await in_row(stream.id, state="finished", finish_reason="length", completion_tokens=40)


async def test_a_stream_without_its_log_is_over(one: Worker, two: Worker, gate: Gate) -> None:
    """A stream without its log cannot be resumed: readers get 410, and its row has the reason."""
    stream, reading = await held(one, gate, asked(max_tokens=500), 4)
    await left(reading)
    await in_row(stream.id, producer="")
    await two.log.drop(stream.log_id)
    assert await two.streams.reach(stream.id) is None
    await StreamRow.objects.filter(pk=stream.id).aupdate(released_at=timezone.now() - timedelta(days=1))
    await two.reaper.round()
    await in_row(stream.id, state="finished", error_code="producer_lost")
    gate.open()


@pytest.mark.parametrize("by", ["a reader", "the reaper"])
async def test_a_worker_dies_between_the_end_and_its_row(
    one: Worker, two: Worker, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has the end: a reader, or the reaper's first round, writes the row with the answer's own counts."""
    dies = asyncio.Event()
    monkeypatch.setattr(one.store, "finish", lambda *args, **kwargs: dies.wait())
    stream = await one.start(asked())
    full = check_native(await one.read(stream.id))
    one.release_lock()
    if by == "a reader":
        assert check_native(await two.read(stream.id)) == full
    else:
        await two.reaper.round()
    await in_row(stream.id, state="finished", finish_reason="length", completion_tokens=NUM_TOKENS, error_code="")
    dies.set()  # else the end of the test waits for it


async def test_a_quota_counts_what_other_workers_run(one: Worker, two: Worker, gate: Gate) -> None:
    """A quota counts streams that no worker runs too, and ends the oldest of them first."""
    gate.allow(0)
    read, left = await one.start(asked()), await one.start(asked())
    reader = Attachment()
    read.attach(reader)
    bounded = Streams(two.streams.clients, two.log, FINE, store=two.store, limits=Limits(max_streams_per_principal=2))
    with pytest.raises(QuotaExceeded):
        await bounded.start(asked(), Admission(owner="user:1", tenant="user:1"))
    left.attach(other := Attachment())
    left.detach(other)
    await until(lambda: not left.lease.is_held, "no worker runs it")
    newcomer = await bounded.start(asked(), Admission(owner="user:1", tenant="user:1"))
    await in_row(left.id, state="finished", finish_reason="abandoned")
    assert (read.terminal, newcomer.terminal) == (None, None)
    read.detach(reader)
    gate.open()
    await bounded.aclose()


async def test_an_end_is_written_when_the_database_is_unlocked(
    one: Worker, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While another process holds the SQLite file's write lock, the end is tried again; the row then has it."""
    options = connections.settings["default"]["OPTIONS"]
    gate.allow(0)
    stream = await one.start(asked())
    monkeypatch.setitem(options, "timeout", 0.05)
    orm.close()  # the next connection has the timeout
    with closing(sqlite3.connect(connections.settings["default"]["NAME"], isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        gate.open()
        check_native(await one.read(stream.id))
        await until(lambda: caplog.text.count("its end is not written yet") >= 2, "it is tried again")
        assert "database is locked" in caplog.text
        await in_row(stream.id, state="running")
        other.execute("ROLLBACK")
    await in_row(stream.id, state="finished", finish_reason="length", completion_tokens=NUM_TOKENS)
    orm.close()


async def test_the_reaper_leaves_the_streams_of_another_host(
    one: Worker, echo: ThreadClient, gate: Gate, tmp_path: Path
) -> None:
    """Without Redis the reaper cannot see whether their worker lives; after a day the row is ended."""
    stream, reading = await held(one, gate, asked(max_tokens=500), 4)
    there = Worker(tmp_path / "there", echo, FINE)
    with captured_events() as lines:
        await there.reaper.round()
        await there.reaper.round()
    assert [line["host"] for line in lines] == [one.workers.host]
    await in_row(stream.id, state="running", producer=one.workers.own_id, fence=1)
    assert await there.streams.reach(stream.id) is None
    await StreamRow.objects.filter(pk=stream.id).aupdate(created_at=timezone.now() - timedelta(days=1))
    await there.reaper.round()
    await in_row(stream.id, state="finished", error_code="producer_lost")
    await left(reading)
    gate.open()
    await there.aclose()


async def test_each_call_is_one_query(one: Worker, gate: Gate) -> None:
    """Each call of the store makes one query, and a record is read back as it was inserted."""
    gate.allow(0)
    stream = await one.start(asked())
    record = await counted(1, one.store.find(stream_id=stream.id))
    assert record == await counted(1, one.store.find(log_id=stream.log_id))
    assert (record.owner, record.producer, record.request) == ("user:1", one.workers.own_id, stream.request)
    assert int(record.created) in (stream.created, stream.created + 1)
    assert await counted(1, one.store.running(Group("user:1"))) == []  # its own are in memory
    assert await counted(1, RowStore(None).running(Group("user:1"))) == [(stream.id, one.workers.own_id)]
    copy = replace(record, id="0" * 32, log_id="0" * 12, producer="")
    await counted(1, one.store.insert(copy))
    assert await counted(1, one.store.claim(copy.id, 1)) is True
    assert await counted(1, one.store.claim(copy.id, 1)) is False
    await counted(1, one.store.release(copy.id, 2))
    ended = replace(stream.summary(), id=copy.id, finish_reason="stop", completion_tokens=3, phases={"queue": 0.25})
    await counted(1, one.store.finish(ended, last_seq=5, text="abc"))
    found = await one.store.find(stream_id=copy.id)
    assert found == replace(
        copy,
        is_finished=True,
        fence=2,
        request=None,
        phases={"queue": 0.25},
        finish_reason="stop",
        prompt_tokens=ended.prompt_tokens,
        completion_tokens=3,
        last_seq=5,
        text="abc",
    )
    gate.open()


async def test_one_line_a_stream_without_its_text(engine: None, alice_key: str) -> None:
    """The line has ids, counts, TTFT, ITL and the reason, but neither the prompt nor the key."""
    with captured_events() as lines:
        response = await Caller(key=alice_key).post("/streams", {"prompt": "canary-7391", "max_tokens": 6})
        answer = await body_of(response)
        await site.reset()
    [line] = [line for line in lines if line["event"] == "stream_finished"]
    assert line["stream_id"] == response["X-Stream-Id"]
    assert (line["completion_tokens"], line["finish_reason"]) == (6, "length")
    assert line["ttft_ms"] > 0
    assert line["itl_p50_ms"] <= line["itl_p95_ms"]
    assert "canary" not in str(lines)
    assert alice_key not in str(lines)
    assert answer


async def test_a_prompt_with_nul_is_kept(one: Worker, gate: Gate) -> None:
    """PostgreSQL's JSON refuses the character; another worker reads the request as it came."""
    stream, reading = await held(one, gate, asked(prompt="a\0b"), 2)
    record = await one.streams.store.find(stream_id=stream.id)
    assert record is not None
    assert record.request is not None
    assert record.request.prompt == "a\0b"
    gate.open()
    check_native(await reading)


async def test_the_log_of_a_queued_job_outlives_a_site_that_was_down(one: Worker, tmp_path: Path) -> None:
    """However long: the first round touches it before it drops old logs, such as one that no row knows."""
    kept, lost = new_log_id(), new_log_id()
    for log_id in (kept, lost):
        await append(one.log, log_id, 1, [Meta(model="p", stream_id="1" * 32, created=1)])
    row = StreamRow(id="1" * 32, log_id=kept, fence=1, owner="user:1", tenant="user:1", model="p", on_disconnect="job")
    await row.asave(force_insert=True)
    with closing(sqlite3.connect(tmp_path / "streams.sqlite3", isolation_level=None)) as file:
        file.execute("UPDATE logs SET touched_at = 0")
    await one.reaper.round()
    assert await one.log.last_seq(kept) == 1
    with pytest.raises(KeyError):
        await one.log.last_seq(lost)
