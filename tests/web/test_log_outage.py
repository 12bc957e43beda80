"""A site whose log of events is full for a while: what callers, rows and the other worker see of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from django.test import AsyncClient
from django.test.utils import override_settings
from streamserve.streams.log.spare_log import SPARE_BYTES
from streamserve.streams.reader.tail import BrokenStream

from streamserve.clients.thread.client import ThreadClient
from streamserve.models import Stream as StreamRow
from streamserve.streams.config import StreamConfig
from streamserve.streams.reader.follow import follow
from streamserve.streams.stream import Stream
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.outages import FullFile
from tests.support.stream_checks import check_native, check_native_part, text_of
from tests.support.streams import Gate, ask, started_echo, until
from tests.support.two_workers import Worker

pytestmark = pytest.mark.django_db(transaction=True)

NUM_TOKENS = 60
FINE = StreamConfig(coalesce_tokens=0)
LOG_FILE = "streams.sqlite3"


@pytest.fixture
async def full(tmp_path: Path) -> AsyncIterator[FullFile]:
    """The log of a site on `tmp_path`."""
    made = FullFile(tmp_path / LOG_FILE)
    yield made
    await made.aclose()


@pytest.fixture
async def gated() -> AsyncIterator[tuple[ThreadClient, Gate]]:
    gate = Gate()
    client = await started_echo(gate)
    yield client, gate
    gate.open()
    await client.aclose()


@pytest.fixture
async def one(gated: tuple[ThreadClient, Gate], tmp_path: Path, full: FullFile) -> AsyncIterator[Worker]:
    """The worker whose disk is full when `full` is."""
    worker = Worker(tmp_path, gated[0], FINE)
    use(worker, full)
    yield worker
    await worker.aclose()


@pytest.fixture
async def two(gated: tuple[ThreadClient, Gate], tmp_path: Path) -> AsyncIterator[Worker]:
    worker = Worker(tmp_path, gated[0], FINE)
    yield worker
    await worker.aclose()


def use(worker: Worker, full: FullFile, max_bytes: int = SPARE_BYTES) -> None:
    """Have the worker write to that log."""
    worker.log = worker.streams.log = full.spare_log(max_bytes)


async def away(worker: Worker, gate: Gate, stream: Stream, full: FullFile) -> None:
    """Begin the outage, and have the stream notice it. The engine is held then."""
    await full.begin()
    while worker.log.is_durable(stream.log_id):
        before = stream.last_seq
        gate.allow(1)
        await until(lambda before=before: stream.last_seq > before, "one more event")  # type: ignore[misc]


async def test_callers_read_on_through_it(tmp_path: Path, alice_key: str, transactional_db: Any) -> None:
    """No gap, two notes, 507 for new answers meanwhile; all of it is there for the next process."""
    caller = Caller(key=alice_key)
    conf = {"MODELS": {"echo": {"PATH": "echo"}}, "CLIENT": "thread", "STATE_DIR": tmp_path}
    conf |= {"STREAMS": {"SNAPSHOT_EVENTS": 0}}
    with override_settings(STREAMSERVE={**conf, "ECHO_STEP_SECONDS": 0.0005}):
        await until_ready()
        full = FullFile(tmp_path / LOG_FILE)
        site.get_site().log = site.get_site().streams.log = log = full.log
        # More than three times what the engine may be ahead of its reader: it cannot end before it is read.
        body = {"prompt": "tell me", "max_tokens": 1000, "seed": 7, "ignore_eos": True}
        response = await caller.post("/streams", body)
        path = f"/streams/{response['X-Stream-Id']}"
        data = b""
        async with aclosing(aiter(response)) as chunks:
            while data.count(b"event: token") < 3:
                data += await anext(chunks)
            await full.begin()
            while b"log_full" not in data:
                data += await anext(chunks)
            state = (await caller.get(path)).json()
            assert (state["state"] in ("running", "parked"), state["resumable"]) == (True, False)
            assert (await caller.post("/streams", body)).status_code == 507
            assert (await AsyncClient().get("/readyz")).json()["log"] == "log_full"
            await full.end()
            await until(lambda: log.trouble is None, "the log is back")
            assert (await AsyncClient().get("/readyz")).json()["log"] == "ok"
            async for chunk in chunks:
                data += chunk
        frames = check_native(data)
        told = [frame.json for frame in frames if frame.event == "status"]
        assert [(one["status"], one["resumable"]) for one in told if "resumable" in one] == [
            ("log_full", False),
            ("log_back", True),
        ]
        assert frames[-1].json["usage"]["completion_tokens"] == 1000
        state = (await caller.get(path)).json()
        assert (state["state"], state["resumable"], state["usage"]["completion_tokens"]) == ("finished", True, 1000)
        await site.reset()
        await until_ready()
        again = check_native(await body_of(await caller.get(f"{path}/events")))
        assert (text_of(again), again[-1]) == (text_of(frames), frames[-1])
        assert sum(len(frame.json["token_ids"]) for frame in again if frame.event == "token") == 1000
        await site.reset()


async def test_it_is_not_let_go_of_meanwhile(
    one: Worker, two: Worker, gated: tuple[ThreadClient, Gate], full: FullFile
) -> None:
    """Its reader leaves: nobody else could go on with it. Then another worker does, in the middle of a word."""
    gate = gated[1]
    gate.allow(4)
    stream = await one.start(ask(max_tokens=NUM_TOKENS, ignore_eos=True))
    async with aclosing(follow(one.streams, stream)) as events:
        seen = [await anext(events) for _ in range(3)]
        await away(one, gate, stream, full)
        while seen[-1].seq < stream.last_seq:
            seen.append(await anext(events))
    await until(lambda: stream.state == "parked", "it is parked")
    await two.reaper.round()
    assert stream.lease.is_held
    assert (await StreamRow.objects.aget(pk=stream.id)).producer == one.workers.own_id
    await full.end()
    await until(lambda: not stream.lease.is_held, "it is let go of")
    gate.open()
    rest = check_native(await two.read(stream.id, seen[-1].seq), after=seen[-1].seq)
    whole = check_native(await two.read(stream.id))
    assert text_of(whole) == "".join(getattr(logged.event, "text", "") for logged in seen) + text_of(rest)
    assert whole[-1].json["usage"]["completion_tokens"] == NUM_TOKENS


async def test_without_room_in_memory_it_stands_still(
    one: Worker, two: Worker, gated: tuple[ThreadClient, Gate], full: FullFile
) -> None:
    """As much as memory is given for is shown; the rest comes when the log is back, without a gap."""
    gate = gated[1]
    await one.log.aclose()
    use(one, full, max_bytes=1000)
    gate.allow(4)
    stream = await one.start(ask(max_tokens=NUM_TOKENS, ignore_eos=True))
    reading = asyncio.create_task(one.read(stream.id))
    await until(lambda: stream.last_seq >= 3, "it runs")
    await away(one, gate, stream, full)
    gate.open()
    await until(lambda: stream.lease.fence > 1, "it stands still, and asks for the log")
    assert 3 < stream.last_seq < NUM_TOKENS
    await full.end()
    frames = check_native(await reading)
    assert frames[-1].json["usage"]["completion_tokens"] == NUM_TOKENS
    assert check_native(await two.read(stream.id)) == frames


async def test_a_server_that_stops_while_it_stands_still(
    one: Worker, two: Worker, gated: tuple[ThreadClient, Gate], full: FullFile
) -> None:
    """It is let go of at once, and the next process goes on when the log is back."""
    gate = gated[1]
    await one.log.aclose()
    use(one, full, max_bytes=1000)
    gate.allow(4)
    stream = await one.start(ask(max_tokens=NUM_TOKENS, ignore_eos=True))
    reading = asyncio.create_task(one.read(stream.id))
    await until(lambda: stream.last_seq >= 3, "it runs")
    await away(one, gate, stream, full)
    gate.open()
    await until(lambda: stream.lease.fence > 1, "it stands still, and asks for the log")
    one.streams.shut_down()
    seen = check_native_part(await reading)
    assert stream.has_left
    assert seen[-1].event != "done"
    await full.end()
    await one.aclose()
    whole = check_native(await two.read(stream.id))
    assert whole[: len(seen)] == seen
    assert whole[-1].json["usage"]["completion_tokens"] == NUM_TOKENS


@pytest.mark.parametrize("is_back", [True, False])
async def test_a_server_that_stops_meanwhile(
    one: Worker, two: Worker, gated: tuple[ThreadClient, Gate], full: FullFile, is_back: bool
) -> None:
    """Nobody can go on with it: it ends, for its reader and in its row. If the log is back in time it has all of it."""
    gate = gated[1]
    gate.allow(4)
    stream = await one.start(ask(max_tokens=NUM_TOKENS, ignore_eos=True))
    reading = asyncio.create_task(one.read(stream.id))
    await until(lambda: stream.last_seq >= 3 and stream.readers.num_holding == 1, "it runs")
    await away(one, gate, stream, full)
    one.streams.shut_down()
    gate.open()
    frames = check_native(await reading)
    assert frames[-1].json["code"] == "engine_unavailable"
    if is_back:
        await full.end()
    await one.aclose()
    row = await StreamRow.objects.aget(pk=stream.id)
    assert (row.state, row.error_code) == ("finished", "engine_unavailable")
    if is_back:
        assert check_native(await two.read(stream.id)) == frames
    else:
        assert await two.streams.reach(stream.id) is None  # an honest 410: its end is nowhere


async def test_another_worker_ends_it_meanwhile(
    one: Worker, two: Worker, gated: tuple[ThreadClient, Gate], full: FullFile
) -> None:
    """Its user stops it there, where there is room: here its reader is cut off, and finds the stopped answer."""
    gate = gated[1]
    gate.allow(4)
    stream = await one.start(ask(max_tokens=NUM_TOKENS, ignore_eos=True))
    reading = asyncio.create_task(one.read(stream.id))
    await until(lambda: stream.last_seq >= 3 and stream.readers.num_holding == 1, "it runs")
    await away(one, gate, stream, full)
    there = await two.streams.reach(stream.id)
    assert there is not None
    await there.stop()
    await full.end()
    with pytest.raises(BrokenStream):
        await reading
    gate.open()
    await stream.ended.wait()
    assert stream.has_left
    here = check_native(await one.read(stream.id))
    assert here[-1].json["finish_reason"] == "cancelled"
    assert check_native_part(await two.read(stream.id)) == here
    assert (await StreamRow.objects.aget(pk=stream.id)).finish_reason == "cancelled"
