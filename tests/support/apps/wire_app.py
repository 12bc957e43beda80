"""A framework-free app for real servers: streams of a gated echo engine over HTTP and WebSocket, and its control.

GET /streams?prompt=…&max_tokens=…   a native stream, handed over      WS /streams   the same events as JSON texts
GET /events?id=…&after=…             read it again
GET /control?allow=3 | ?open=1       let that many steps run, then hold; hold nothing
GET /large?bytes=…                   an answer of one frame of that size
GET /broken                          an answer in plain text whose delivery fails at the fourth token
GET /state                           plans, blocks and streams as JSON; pieces of bodies that FlowServer has written

`changing`: the same behind another middleware, which changes what is sent.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from typing import Any
from urllib.parse import parse_qsl

from streamserve.asgi.handover import HEADER, offer
from streamserve.asgi.middleware import StreamMiddleware
from streamserve.asgi.types import Message, Receive, Scope, Send
from streamserve.clients.factory import echo_client
from streamserve.dialects.native import NativeEncoder, websocket_message
from streamserve.dialects.plain import TextEncoder
from streamserve.engine.config import EngineConfig, Policy
from streamserve.protocol.events import Done, LoggedEvent, Token
from streamserve.protocol.requests import Admission
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import Follow, follow
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.support.streams.hand_made import Gate, ScriptedClient, ask, tok, until

GATE = Gate()
CLIENT = echo_client(config=EngineConfig(check_integrity=True, policy=Policy(stalled_seconds=0.0)), on_plan=GATE)
SCRIPTED = ScriptedClient()
STREAMS = Streams({"echo": CLIENT, "scripted": SCRIPTED}, MemoryLog(), StreamConfig(keepalive_seconds=0.2))


async def inner(scope: Scope, receive: Receive, send: Send) -> None:
    """Route by path."""
    if scope["type"] == "websocket":
        await _websocket(receive, send)
        return
    query = dict(parse_qsl(scope["query_string"].decode()))
    if scope["path"] in {"/streams", "/events", "/broken", "/large"}:
        await _hand_over(send, await _delivery(scope["path"], query))
    else:
        await _json(send, _control(query) if scope["path"] == "/control" else _state())


app = StreamMiddleware(inner)
app.on_shutdown(STREAMS.aclose)
app.on_shutdown(CLIENT.aclose)


async def changing(scope: Scope, receive: Receive, send: Send) -> None:
    """Add a field to every token."""

    async def changed(message: Message) -> None:
        if "body" in message:
            message = {**message, "body": message["body"].replace(b'"index":0', b'"index":0,"is_changed":true')}
        await send(message)

    await app(scope, receive, changed)


num_written = 0


def _count_writes(request: Any) -> None:
    handle_reply = request.handle_reply

    def counted(self: Any, message: Message) -> None:
        global num_written
        num_written += bool(message.get("more_body"))
        handle_reply(self, message)

    request.handle_reply = counted


if "streamserve.asgi.flow.requests" in sys.modules:  # FlowServer serves; importing it would install its reactor
    _count_writes(sys.modules["streamserve.asgi.flow.requests"].FlowRequest)


async def _start(prompt: str = "hello", max_tokens: str = "500") -> Stream:
    CLIENT.start()
    await until(lambda: CLIENT.describe().state == "ready", "the echo engine is ready")
    request = ask(prompt=prompt, max_tokens=int(max_tokens), ignore_eos=True)
    return await STREAMS.start(request, Admission(owner="u1", tenant="t1"))


class _Breaking(TextEncoder):
    """Fails at the fourth token."""

    num_left = 3

    def encode(self, logged: LoggedEvent) -> bytes:
        if isinstance(logged.event, Token):
            if not self.num_left:
                raise ValueError("an encoder that breaks")
            self.num_left -= 1
        return super().encode(logged)


async def _delivery(path: str, query: dict[str, str]) -> Delivery:
    if path == "/broken":
        return Delivery(STREAMS, await _start(), _Breaking())
    if path == "/large":
        stream = await STREAMS.start(ask("scripted"), Admission(owner="u1", tenant="t1"))
        SCRIPTED.last.push(tok("x" * int(query["bytes"])), Done(finish_reason="stop"))
        return Delivery(STREAMS, stream, NativeEncoder(stream.log_id))
    if path == "/streams":
        stream = await _start(**query)
        return Delivery(STREAMS, stream, NativeEncoder(stream.log_id))
    found = STREAMS.find(query["id"])
    assert found is not None
    return Delivery(STREAMS, found, NativeEncoder(found.log_id), after=int(query["after"]))


async def _hand_over(send: Send, delivery: Delivery) -> None:
    headers = [(b"content-length", b"0"), (b"set-cookie", b"a=1"), (HEADER.encode(), offer(delivery).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _json(send: Send, value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _control(query: dict[str, str]) -> dict[str, Any]:
    if "open" in query:
        GATE.open()
    else:
        GATE.allow(int(query["allow"]))
    return {}


def _state() -> dict[str, Any]:
    return {
        "is_holding": GATE.is_holding,
        "plans": [[chunk.seq_id for chunk in plan.chunks] for plan in GATE.plans],
        "stats": asdict(CLIENT.stats()),
        "streams": [asdict(stream.summary()) for stream in STREAMS.all()],
        "tasks": sorted(task.get_name() for task in asyncio.all_tasks()),
        "num_written": num_written,
    }


async def _websocket(receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    stream = await _start()
    events = follow(STREAMS, stream)
    relaying = asyncio.create_task(_relay(stream, events, send), name="relay")
    try:
        while (await receive())["type"] != "websocket.disconnect":
            pass
    finally:
        events.close()
        relaying.cancel()
        await asyncio.gather(relaying, return_exceptions=True)


async def _relay(stream: Stream, events: Follow, send: Send) -> None:
    async for logged in events:
        text = json.dumps(websocket_message(stream.id, stream.log_id, logged))
        await send({"type": "websocket.send", "text": text})
