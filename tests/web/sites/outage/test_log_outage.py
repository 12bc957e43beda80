"""A site whose log of events has no room for a while: what callers and rows see of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from channels.testing import WebsocketCommunicator
from django.test import AsyncClient

from streamserve import routing
from streamserve.models import Stream as StreamRow
from streamserve.web import site as site_module
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.stream_checks import check_native, check_native_part, going_away_of, parse_sse, text_of
from tests.support.sites.rows import in_row
from tests.support.streams.hand_made import until
from tests.support.streams.outages import FullFile
from tests.web.sites.outage.conftest import BODY, Response, num_tokens

pytestmark = pytest.mark.django_db(transaction=True)


async def waiting_answer(caller: Caller, full: FullFile) -> Response:
    """Return an answer of which a token was shown before the log was full, and whose reader waits."""
    reading = Response(await caller.post("/streams", BODY))
    await reading.read(b"event: token")
    await full.begin()
    await reading.read(b"waiting")
    return reading


async def test_callers_wait_and_read_on(site: site_module.DjangoSite, full: FullFile, alice_key: str) -> None:
    """The reader has no gap and two notices, new answers get 507 meanwhile, and a later process reads all of it."""
    caller = Caller(key=alice_key)
    reading = await waiting_answer(caller, full)
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


async def test_a_stop_is_answered_507_and_takes_effect_later(
    site: site_module.DjangoSite, full: FullFile, alice_key: str
) -> None:
    """The engine drops it at once; the reader gets the end when the log has room."""
    caller = Caller(key=alice_key)
    reading = await waiting_answer(caller, full)
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
    reading = await waiting_answer(caller, full)
    site.streams.writer._outage_seconds = 0.0
    await reading.read()
    seen, farewell = check_native_part(reading.data), going_away_of(reading.data)
    assert farewell is not None
    await until(lambda: site.clients["echo"].stats().running == 0, "the engine has ended it")
    stream = site.streams.find(reading.stream_id)
    assert stream is not None
    await until(lambda: not stream.lease.is_held, "its lease is released")
    await in_row(reading.stream_id, producer="")
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
    messages += await received(socket, lambda one: one["type"] == "farewell")  # and what was committed before
    away = messages[-1]
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
