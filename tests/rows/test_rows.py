"""Laws of a stream's row: what it keeps of a request, how many queries a call takes, and when its end is written."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Iterator
from contextlib import closing, contextmanager
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
from streamserve.protocol.errors import UnmetNeeds
from streamserve.protocol.events import Meta
from streamserve.protocol.requests import (
    Admission,
    GenerateRequest,
    Message,
    SamplingParams,
    decode_request,
    encode_request,
)
from streamserve.rows import orm
from streamserve.rows.store import RowStore
from streamserve.streams.log.base import append, new_log_id
from streamserve.streams.store import Group
from streamserve.web import site
from tests.conftest import Caller, body_of
from tests.rows.conftest import FINE, NUM_TOKENS, asked, held, left
from tests.support.checks.stream_checks import check_native
from tests.support.sites.rows import in_row
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import Gate, until
from tests.support.streams.log_lines import captured_events

pytestmark = pytest.mark.django_db(transaction=True)


async def counted(num: int, call: Awaitable[Any]) -> Any:
    """Await `call`, and check that it makes `number` queries."""
    statements: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if not sql.startswith("SET LOCAL"):  # how long PostgreSQL waits for a lock
            statements.append(sql)
        return execute(sql, params, many, context)

    with query_hook(note):
        result = await call
    statements = [one for one in statements if not one.startswith(("BEGIN", "SAVEPOINT", "RELEASE"))]
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
    )
    admission = Admission(owner="u", tenant="t", salt="s", stream_id="i", arrived_at=5.5)
    kept = encode_request(request, admission)
    assert decode_request(kept, admission) == (request, admission)
    for wrong in ({**kept, "request": {**kept["request"], "n": "2"}}, {"n": 1}, [], "x"):
        with pytest.raises(ValueError):
            decode_request(wrong, admission)
    with pytest.raises(UnmetNeeds):
        decode_request({**kept, "request": {**kept["request"], "new": 1}}, admission)


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
    """Each call of the store makes one query, the end one more; a record is read back as it was inserted."""
    gate.allow(0)
    stream = await one.start(asked())
    record = await counted(1, one.store.find(stream_id=stream.id))
    assert record == await counted(1, one.store.find(log_id=stream.log_id))
    assert (record.admission.owner, record.producer, record.request) == ("user:1", one.workers.own_id, stream.request)
    assert int(record.created) in (stream.created, stream.created + 1)
    assert await counted(1, one.store.running(Group("user:1"))) == []  # its own are in memory
    assert await counted(1, RowStore(None).running(Group("user:1"))) == [(stream.id, one.workers.own_id)]
    copy = replace(record, admission=replace(record.admission, stream_id="0" * 32), log_id="0" * 12, producer="")
    await counted(1, one.store.insert(copy))
    assert await counted(1, one.store.claim(copy.id, 1)) is True
    assert await counted(1, one.store.claim(copy.id, 1)) is False
    await counted(1, one.store.release(copy.id, 2))
    ended = replace(stream.summary(), id=copy.id, finish_reason="stop", completion_tokens=3, phases={"queue": 0.25})
    # Of a site without conversations: the end, and what was used.
    await counted(2, RowStore(one.workers).finish(ended, last_seq=5, text="abc"))
    found = await one.store.find(stream_id=copy.id)
    assert found == replace(
        copy,
        admission=replace(copy.admission, salt="", arrived_at=None),  # kept with the request
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
