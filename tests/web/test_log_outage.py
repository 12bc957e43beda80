"""A site whose log of events has no room for a while: what callers, rows and the other worker see of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from channels.testing import WebsocketCommunicator
from django.test import AsyncClient
from django.test.utils import override_settings

from streamserve import routing
from streamserve.clients.thread.client import ThreadClient
from streamserve.models import Stream as StreamRow
from streamserve.streams import stream as stream_module
from streamserve.streams import writer as writer_module
from streamserve.streams.config import StreamConfig
from streamserve.streams.stream import Stream
from streamserve.web import site as site_module
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.stream_checks import (
    Frame,
    check_native,
    check_native_part,
    going_away_of,
    notices_of,
    parse_sse,
    text_of,
)
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import Gate, ask, started_echo, until
from tests.support.streams.outages import FullFile

pytestmark = pytest.mark.django_db(transaction=True)

NUM_TOKENS = 60
FINE = StreamConfig(coalesce_tokens=0, log_outage_seconds=3600.0)
HASTY = replace(FINE, log_outage_seconds=0.0)
LOG_FILE = "streams.sqlite3"
# More than three times what the engine may be ahead of its reader: it cannot end before it is read.
BODY = {"prompt": "tell me", "max_tokens": 1000, "seed": 7, "ignore_eos": True}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits are retried soon, and a stop is refused soon."""
    monkeypatch.setattr(writer_module, "_FIRST_RETRY_SECONDS", 0.005)
    monkeypatch.setattr(writer_module, "_MAX_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(stream_module, "STOP_SECONDS", 0.05)


@pytest.fixture
async def full(tmp_path: Path) -> AsyncIterator[FullFile]:
    """The log of a site on `tmp_path`."""
    made = FullFile(tmp_path / LOG_FILE)
    yield made
    await made.aclose()


@pytest.fixture
async def site(tmp_path: Path, full: FullFile, transactional_db: Any) -> AsyncIterator[site_module.DjangoSite]:
    """A site on that log, whose outages last for ever. Its engine is slow enough to be read."""
    settings = {"MODELS": {"echo": {"PATH": "echo"}}, "CLIENT": "thread", "STATE_DIR": tmp_path}
    settings |= {"STREAMS": {"SNAPSHOT_EVENTS": 0, "LOG_OUTAGE_SECONDS": 3600}, "ECHO_STEP_SECONDS": 0.0005}
    with override_settings(STREAMSERVE=settings):
        await until_ready()
        made = site_module.get_site()
        made.log = made.streams.log = made.streams.writer.log = full.log
        yield made
        full.store.is_full = False
        await site_module.reset()


@pytest.fixture
async def gated() -> AsyncIterator[tuple[ThreadClient, Gate]]:
    gate = Gate()
    client = await started_echo(gate)
    yield client, gate
    gate.open()
    await client.aclose()


@pytest.fixture
async def one(gated: tuple[ThreadClient, Gate], tmp_path: Path, full: FullFile) -> AsyncIterator[Worker]:
    """The worker that has no room when `full` has begun."""
    worker = Worker(tmp_path, gated[0], FINE)
    await worker.log.aclose()
    worker.log = worker.streams.log = worker.streams.writer.log = full.log  # type: ignore[assignment]
    yield worker
    full.store.is_full = False
    gated[1].open()
    await worker.aclose()


@pytest.fixture
async def two(gated: tuple[ThreadClient, Gate], tmp_path: Path) -> AsyncIterator[Worker]:
    """A worker that has room."""
    worker = Worker(tmp_path, gated[0], FINE)
    yield worker
    gated[1].open()
    await worker.aclose()


class Response:
    """A stream that a caller reads as it comes."""

    def __init__(self, response: Any) -> None:
        assert response.status_code == 200
        self.stream_id = response["X-Stream-Id"]
        self.path = f"/streams/{self.stream_id}"
        self.data = b""
        self._chunks = aiter(response)

    async def read(self, until_there: bytes = b"") -> None:
        """Read until there is such a frame; without one, to the end."""
        async for chunk in self._chunks:
            self.data += chunk
            if until_there and until_there in self.data:
                return
        assert not until_there, self.data[-200:]

    @property
    def notices(self) -> list[str]:
        return [frame.json["status"] for frame in notices_of(self.data) if frame.event == "status"]

    async def close(self) -> None:
        await self._chunks.aclose()


async def held(worker: Worker, gate: Gate, full: FullFile) -> tuple[Stream, asyncio.Task[bytes]]:
    """Start an answer, and begin an outage in its middle, which it finds while the engine is held.

    Returns it and a task that reads it to its end.
    """
    gate.allow(4)
    stream = await worker.start(ask(max_tokens=NUM_TOKENS, ignore_eos=True))
    reading = asyncio.create_task(worker.read(stream.id))
    await until(lambda: stream.last_seq >= 3 and stream.readers.num_holding == 1, "it runs")
    await full.begin()
    gate.allow(1)
    await until(lambda: worker.streams.writer.outage is not None, "the outage is noticed")
    return stream, reading


async def cut_off(worker: Worker, gate: Gate, full: FullFile) -> tuple[Stream, list[Frame]]:
    """The same; the outage lasts, so that the reader is cut off. Returns the stream and what the reader has."""
    stream, reading = await held(worker, gate, full)
    worker.streams.writer._outage_seconds = 0.0
    seen = check_native_part(await reading)
    await until(lambda: not stream.lease.is_held, "its lease is released")
    return stream, seen


async def test_callers_wait_and_read_on(site: site_module.DjangoSite, full: FullFile, alice_key: str) -> None:
    """The reader has no gap and two notices, new answers get 507 meanwhile, and a later process reads all of it."""
    caller = Caller(key=alice_key)
    reading = Response(await caller.post("/streams", BODY))
    await reading.read(b"event: token")
    await full.begin()
    await reading.read(b"waiting")
    assert (await caller.get(reading.path)).json()["state"] in ("running", "parked")
    assert (await AsyncClient().get("/readyz")).json()["log"] == "log_full"
    asked, rows = [], await StreamRow.objects.acount()
    generate = site.clients["echo"].generate

    async def noting(request: Any) -> Any:
        asked.append(request)
        return await generate(request)

    site.clients["echo"].generate = noting  # type: ignore[method-assign]
    site.streams._quota.place_for = None  # type: ignore[assignment, method-assign]
    refused = await caller.post("/streams", BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "log_full")
    assert "Retry-After" in refused
    assert (asked, await StreamRow.objects.acount()) == ([], rows), "neither engine, quota nor table were asked"
    await full.end()
    await reading.read()
    assert (await AsyncClient().get("/readyz")).json()["log"] == "ok"
    frames = check_native(reading.data)
    assert reading.notices == ["waiting", "resumed"]
    assert frames[-1].json["usage"]["completion_tokens"] == 1000
    state = (await caller.get(reading.path)).json()
    assert (state["state"], state["usage"]["completion_tokens"]) == ("finished", 1000)
    del site.clients["echo"].generate, site.streams._quota.place_for
    await site_module.reset()
    await until_ready()
    again = check_native(await body_of(await caller.get(f"{reading.path}/events")))
    assert (text_of(again), again[-1]) == (text_of(frames), frames[-1])
    assert sum(len(frame.json["token_ids"]) for frame in again if frame.event == "token") == 1000
    whole = check_native(await body_of(await caller.post("/streams", BODY)))
    assert text_of(whole) == text_of(frames), "as without an outage"


async def test_a_stop_is_answered_503_and_takes_effect_later(
    site: site_module.DjangoSite, full: FullFile, alice_key: str
) -> None:
    """The engine drops it at once; the reader gets the end when the log has room."""
    caller = Caller(key=alice_key)
    reading = Response(await caller.post("/streams", BODY))
    await reading.read(b"event: token")
    await full.begin()
    await reading.read(b"waiting")
    stopped = await caller.post(f"{reading.path}/stop")
    assert stopped.status_code == 507
    await until(lambda: site.clients["echo"].stats().running == 0, "the engine has ended it")
    await full.end()
    await reading.read()
    assert check_native(reading.data)[-1].json["finish_reason"] == "cancelled"
    assert (await caller.post(f"{reading.path}/stop")).status_code == 200
    row = await StreamRow.objects.aget(pk=reading.stream_id)
    assert (row.state, row.finish_reason) == ("finished", "cancelled")


async def test_a_cut_answer_is_resumed_where_it_was(
    site: site_module.DjangoSite, full: FullFile, alice_key: str
) -> None:
    """The engine is free, no process has its lease, the connection ends with its cursor, and the rest follows."""
    caller = Caller(key=alice_key)
    reading = Response(await caller.post("/streams", BODY))
    await reading.read(b"event: token")
    await full.begin()
    await reading.read(b"waiting")
    site.streams.writer._outage_seconds = 0.0
    await reading.read()
    seen, farewell = check_native_part(reading.data), going_away_of(reading.data)
    assert farewell is not None
    await until(lambda: site.clients["echo"].stats().running == 0, "the engine has ended it")
    stream = site.streams.find(reading.stream_id)
    assert stream is not None
    await until(lambda: not stream.lease.is_held, "its lease is released")
    assert (await StreamRow.objects.aget(pk=reading.stream_id)).producer == ""
    site.streams.writer._outage_seconds = 3600.0
    await full.end()
    await until(lambda: site.streams.writer.outage is None, "the log has room")
    rest = Response(await caller.get(f"{reading.path}/events", **{"Last-Event-ID": farewell.json["event_id"]}))
    await rest.read()
    frames = seen + check_native(rest.data, after=seen[-1].seq)
    whole = check_native(await body_of(await caller.get(f"{reading.path}/events")))
    assert (text_of(frames), num_tokens(frames)) == (text_of(whole), 1000)
    assert text_of(check_native(await body_of(await caller.post("/streams", BODY)))) == text_of(whole)


async def connected(key: str) -> WebsocketCommunicator:
    """Return a socket of the caller."""
    headers = [(b"host", b"testserver"), (b"authorization", f"Bearer {key}".encode())]
    socket = WebsocketCommunicator(routing.application, "/ws/streams", headers=headers)
    assert (await socket.connect())[0]
    return socket


async def received(socket: WebsocketCommunicator, is_last: Callable[[Any], bool]) -> list[Any]:
    """Return the messages up to the first of that kind."""
    messages = [json.loads(await socket.receive_from(timeout=30))]
    while not is_last(messages[-1]):
        messages.append(json.loads(await socket.receive_from(timeout=30)))
    return messages


def is_status(status: str) -> Callable[[Any], bool]:
    return lambda message: message.get("event") == "status" and message["data"]["status"] == status


def is_end(message: Any) -> bool:
    return message.get("event") in ("done", "error")


async def test_a_websocket_waits_and_continues(site: site_module.DjangoSite, full: FullFile, alice_key: str) -> None:
    """Over a WebSocket too the answer has no gap and two notices without a seq; a new one is refused meanwhile."""
    socket = await connected(alice_key)
    await socket.send_json_to({"type": "start", "request": BODY})
    messages = await received(socket, lambda message: message.get("event") == "token")
    await full.begin()
    messages += await received(socket, is_status("waiting"))
    await socket.send_json_to({"type": "start", "request": BODY, "ref": "second"})
    messages += await received(socket, lambda message: message["type"] == "error")
    refused = messages.pop()
    assert (refused["ref"], refused["error"]["code"]) == ("second", "log_full")
    await full.end()
    messages += await received(socket, is_status("resumed"))
    assert [one for one in messages if one.get("event") == "status" and "seq" in one] == []
    messages += await received(socket, is_end)
    tokens = [one for one in messages if one.get("event") == "token"]
    assert sum(len(one["data"]["token_ids"]) for one in tokens) == 1000
    assert [one["seq"] for one in tokens] == sorted({one["seq"] for one in tokens})
    whole = check_native(await body_of(await Caller(key=alice_key).post("/streams", BODY)))
    assert "".join(one["data"]["text"] for one in tokens) == text_of(whole)
    await socket.disconnect()


async def test_a_cut_websocket_is_given_its_place(site: site_module.DjangoSite, full: FullFile, alice_key: str) -> None:
    """An outage that lasts ends the socket with the place to resume from; a new socket continues there."""
    socket = await connected(alice_key)
    await socket.send_json_to({"type": "start", "request": BODY})
    messages = await received(socket, lambda message: message.get("event") == "token")
    await full.begin()
    messages += await received(socket, is_status("waiting"))
    site.streams.writer._outage_seconds = 0.0
    (away,) = [one for one in await received(socket, lambda one: one["type"] == "farewell") if "after" in one]
    assert (await socket.receive_output(timeout=30))["type"] == "websocket.close"
    seen = [one for one in messages if "seq" in one]
    assert away["after"] == seen[-1]["seq"]
    site.streams.writer._outage_seconds = 3600.0
    await full.end()
    await until(lambda: site.streams.writer.outage is None, "the log has room")
    again = await connected(alice_key)
    await again.send_json_to({"type": "resume", "id": away["id"], "after": away["after"]})
    seen += [one for one in await received(again, is_end) if "seq" in one]
    tokens = [one["data"] for one in seen if one["event"] == "token"]
    assert sum(len(one["token_ids"]) for one in tokens) == 1000
    await again.disconnect()


async def test_an_answer_the_log_has_lost_is_over(site: site_module.DjangoSite, full: FullFile, alice_key: str) -> None:
    """A lost answer is one error without an id, a finished row with that error, and 410 for its ids."""
    caller = Caller(key=alice_key)
    reading = Response(await caller.post("/streams", BODY))
    await reading.read(b"event: token")
    stream = site.streams.find(reading.stream_id)
    assert stream is not None
    await full.log.drop(stream.log_id)
    await reading.read()
    frames = parse_sse(reading.data)
    assert [(frame.json["code"], frame.id) for frame in frames if frame.event == "error"] == [("log_lost", "")]
    await until(lambda: site.streams.find(reading.stream_id) is None, "it is dropped")
    row = await StreamRow.objects.aget(pk=reading.stream_id)
    assert (row.state, row.error_code) == ("finished", "log_lost")
    last_id = [frame.id for frame in frames if frame.id][-1]
    assert (await caller.get(f"{reading.path}/events", **{"Last-Event-ID": last_id})).status_code == 410


async def ended_row(stream_id: str) -> StreamRow:
    """Return the row of a stream once its end is written there, which follows the last event."""
    async with asyncio.timeout(10):
        while not await StreamRow.objects.filter(pk=stream_id, state="finished").aexists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return await StreamRow.objects.aget(pk=stream_id)


async def test_another_worker_resumes_what_was_cut(
    one: Worker, two: Worker, gated: tuple[ThreadClient, Gate], full: FullFile
) -> None:
    """The answer continues at the worker with room, in the middle of a word, before the first worker has room again."""
    gate = gated[1]
    stream, seen = await cut_off(one, gate, full)
    gate.open()
    rest = check_native(await two.read(stream.id, seen[-1].seq), after=seen[-1].seq)
    whole = check_native(await two.read(stream.id))
    assert text_of(whole) == text_of(seen + rest)
    assert num_tokens(whole) == NUM_TOKENS
    await full.end()
    await until(lambda: one.streams.writer.outage is None, "the first worker's batch is refused")
    assert check_native(await two.read(stream.id)) == whole
    assert (await ended_row(stream.id)).finish_reason == "length"


async def test_an_early_reader_keeps_no_worker_away(
    one: Worker, two: Worker, gated: tuple[ThreadClient, Gate], full: FullFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that returns to the worker without room is cut: that worker claims it in vain and releases it."""
    gate = gated[1]
    stream, seen = await cut_off(one, gate, full)
    one.streams.writer._outage_seconds = 3600.0
    full.store.refuses_claims = True
    fence = stream.lease.fence
    returned = asyncio.create_task(one.read(stream.id, seen[-1].seq))
    await until(lambda: stream.lease.fence > fence, "it is claimed")
    await until(lambda: stream._away is not None, "the log does not take the claim")
    returned.cancel()
    await asyncio.gather(returned, return_exceptions=True)
    gate.open()
    rest = check_native(await two.read(stream.id, seen[-1].seq), after=seen[-1].seq)
    assert num_tokens(seen + rest) == NUM_TOKENS


@pytest.mark.parametrize("is_back", [True, False])
async def test_a_server_stops_during_an_outage(
    one: Worker, two: Worker, gated: tuple[ThreadClient, Gate], full: FullFile, is_back: bool
) -> None:
    """The answer is left at once, with what was shown, and the next process continues it."""
    gate = gated[1]
    stream, reading = await held(one, gate, full)
    gate.open()
    one.streams.shut_down()
    seen = check_native_part(await reading)
    assert stream.has_left
    assert seen[-1].event != "done"
    if is_back:
        await full.end()
    await one.streams.aclose()
    whole = check_native(await two.read(stream.id))
    assert text_of(whole).startswith(text_of(seen))
    assert num_tokens(whole) == NUM_TOKENS


async def test_another_worker_stops_a_stream_during_an_outage(
    one: Worker, two: Worker, gated: tuple[ThreadClient, Gate], full: FullFile
) -> None:
    """The other worker's end is in the log first: the batch in doubt is refused, and the reader here gets the end."""
    gate = gated[1]
    stream, reading = await held(one, gate, full)
    there = await two.streams.reach(stream.id)
    assert there is not None
    await there.stop()
    await full.end()
    frames = check_native(await reading)
    assert frames[-1].json["finish_reason"] == "cancelled"
    gate.open()
    assert check_native(await two.read(stream.id)) == frames
    async with asyncio.timeout(30):  # the row is finished after the readers have the end
        while (row := await StreamRow.objects.aget(pk=stream.id)).state != "finished":  # noqa: ASYNC110  (rows have no event)
            await asyncio.sleep(0.01)
    assert row.finish_reason == "cancelled"


def num_tokens(frames: list[Frame]) -> int:
    """Count the tokens that native frames hold."""
    return sum(len(frame.json["token_ids"]) for frame in frames if frame.event == "token")
