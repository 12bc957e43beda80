"""A plain ASGI app for FlowServer's tests: it fills, fails, waits, and reports what the server holds. No Django.

GET /fill?bytes=… &piece=…   that many bytes of `pattern`, as fast as `send` lets it; WS the same, in binary messages
GET /bursts                  20 times 256 KiB, with a rest after each; it takes nothing of its body
GET /fail?pieces=…           that many pieces, then an exception; pieces=-1: before the head     WS: after the first
GET /return?pieces=…         the same, but returns without an end                                WS: at once
GET /wait?kind=…             event-stream|plain|length|none: sends hello (none: not even a head), then waits   WS: waits
     &receiving=…                 disconnect: listens; child: only a child task does work; none: must be cancelled
POST /body                   how long the body was
GET /state                   what there is of connections, tasks, descriptors; GET /go lets /wait end by itself
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import parse_qsl

from streamserve.asgi.types import Receive, Scope, Send

BLOCK = 64 * 1024


def pattern(start: int, num: int) -> bytes:
    """Return bytes [start, start + num) of an endless text in which every position differs from its neighbours."""
    first = start // 8
    blocks = b"".join(b"%07x." % block for block in range(first, (start + num) // 8 + 1))
    return blocks[start - first * 8 :][:num]


PIECES = [pattern(index * BLOCK, BLOCK) for index in range(16)]  # made once: the test is about copies

_SERVERS = {"daphne.server", "streamserve.asgi.flow.server", "uvicorn.server"}

go = asyncio.Event()
counts: dict[str, int] = {"sent": 0, "filled": 0, "called": 0, "bodies": 0}


lags: deque[Callable[[], int]] = deque(maxlen=1)  # of the latest large request


def log_line(text: str) -> None:
    """Print a line that the test reads, also when the server has ended."""
    print(f"PRINTED {text}", flush=True)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Route by type and path."""
    if scope["type"] == "lifespan":
        await lifespan(scope, receive, send)
        return
    counts["called"] += 1
    if scope["path"] == "/fill" and "extensions" in scope:
        lags.append(scope["extensions"]["streamserve.flow"]["num_untaken"])
    query = dict(parse_qsl(scope["query_string"].decode()))
    name = scope["path"].strip("/")
    if scope["type"] == "websocket":
        await receive()
        if query.get("accept") != "no":
            await send({"type": "websocket.accept"})
        await WEBSOCKETS[name](receive, send, **query)
    else:
        await PAGES[name](receive, send, **query)


async def lifespan(scope: Scope, receive: Receive, send: Send) -> None:
    """Register hooks with the drain, as an app of any framework can."""
    drain = scope["extensions"]["streamserve.flow"]["drain"]
    drain.on_drain(lambda: log_line("drain"))
    drain.serves = lambda path: path in {"/go", "/state"}
    if os.environ.get("GOING_AWAY"):
        drain.on_going_away(go.set)
        drain.on_going_away(lambda: log_line("going away"))
    if os.environ.get("FAIL_STARTUP"):
        await send({"type": "lifespan.startup.failed", "message": "no model"})
        return
    assert (await receive())["type"] == "lifespan.startup"
    scope["state"]["started"] = True
    await send({"type": "lifespan.startup.complete"})
    assert (await receive())["type"] == "lifespan.shutdown"
    log_line("shutdown")
    await send({"type": "lifespan.shutdown.complete"})


async def head(send: Send, kind: bytes = b"text/plain", *more: tuple[bytes, bytes], status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *more]})


async def body(send: Send, data: bytes, *, more_body: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more_body})


async def fill(receive: Receive, send: Send, bytes: str, piece: str = str(BLOCK)) -> None:
    await head(send)
    if piece == "all":
        await body(send, pattern(0, int(bytes)), more_body=False)
        counts["filled"] += 1
        return
    for index in range(int(bytes) // BLOCK):
        await body(send, PIECES[index % len(PIECES)])
        counts["sent"] += BLOCK
    await body(send, b"", more_body=False)
    counts["filled"] += 1


async def bursts(receive: Receive, send: Send) -> None:
    await head(send)
    for _ in range(20):
        await body(send, bytes(2**18))
        await asyncio.sleep(0.05)
    await body(send, b"", more_body=False)


async def fail(receive: Receive, send: Send, pieces: str) -> None:
    await _pieces(send, int(pieces))
    raise RuntimeError("the app failed on purpose")


async def return_early(receive: Receive, send: Send, pieces: str) -> None:
    await _pieces(send, int(pieces))


async def _pieces(send: Send, num: int) -> None:
    if num >= 0:
        await head(send)
    for _ in range(num):
        await body(send, b"piece\n")


async def wait(receive: Receive, send: Send, kind: str = "event-stream", receiving: str = "disconnect") -> None:
    try:
        if kind == "length":
            await head(send, b"text/plain", (b"content-length", b"1000"))
        elif kind != "none":
            await head(send, b"text/event-stream" if kind == "event-stream" else b"text/plain")
        if kind != "none":
            await body(send, b": hello\n\n")
        if await _wait(receive, receiving) == "go":
            await body(send, b"event: bye\n\n", more_body=False)
    finally:
        await asyncio.sleep(0.01)  # the drain has to wait for a slow finally
        log_line(f"finally {kind} {receiving}")


async def _wait(receive: Receive, receiving: str) -> str:
    if receiving == "none":
        await asyncio.Event().wait()
    if receiving == "child":
        await _consume()
    going = asyncio.create_task(go.wait())
    leaving = asyncio.create_task(_disconnect(receive))
    done, rest = await asyncio.wait({going, leaving}, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    return "go" if going in done else "left"


async def _consume() -> None:
    """Hold the generator in a child task that is never cancelled, as Django 5.2 does."""

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            log_line("finally generator")

    async def consume() -> None:
        async for _ in numbers():
            pass

    child = asyncio.create_task(consume())
    await asyncio.wait({child})


async def _disconnect(receive: Receive) -> None:
    while (message := await receive())["type"] not in ("http.disconnect", "websocket.disconnect"):
        pass
    log_line(f"{message['type']} {message.get('code', '')}".strip())


async def measure_body(receive: Receive, send: Send) -> None:
    num = 0
    while True:
        message = await receive()
        num += len(message["body"])
        if not message["more_body"]:
            break
    counts["bodies"] += 1
    await head(send)
    await body(send, b"%d" % num, more_body=False)


async def state(receive: Receive, send: Send) -> None:
    await head(send, b"application/json")
    await body(send, json.dumps(_state()).encode(), more_body=False)


async def let_go(receive: Receive, send: Send) -> None:
    go.set()
    await head(send)
    await body(send, b"ok", more_body=False)


@functools.cache
def _server() -> Any:
    return next(one for one in gc.get_objects() if type(one).__module__ in _SERVERS and hasattr(one, "connections"))


def _state() -> dict[str, Any]:
    server = _server()
    others = [task.get_name() for task in asyncio.all_tasks() if not task.done()]
    return {
        **counts,
        "untaken": lags[0]() if lags else None,
        "connections": len(server.connections),
        "transports": sum(one.is_open for one in getattr(server, "transports", {}).values()),
        "kept_transports": len(getattr(server, "transports", ())),
        "tasks": len(others),
        "fds": len(os.listdir("/proc/self/fd")),
    }


async def ws_fill(receive: Receive, send: Send, bytes: str) -> None:
    for index in range(int(bytes) // BLOCK):
        await send({"type": "websocket.send", "bytes": PIECES[index % len(PIECES)]})
        counts["sent"] += BLOCK
    counts["filled"] += 1
    await send({"type": "websocket.close", "code": 1001, "reason": "done"})


async def ws_fail(receive: Receive, send: Send, **query: str) -> None:
    if not query:
        await send({"type": "websocket.send", "text": "one"})
    raise RuntimeError("the app failed on purpose")


async def ws_return(receive: Receive, send: Send, **query: str) -> None: ...


async def ws_wait(receive: Receive, send: Send, receiving: str = "disconnect", **query: str) -> None:
    try:
        await _wait(receive, receiving)
    finally:
        log_line(f"finally websocket {receiving}")


async def ws_deaf(receive: Receive, send: Send) -> None:
    await go.wait()
    num = 0
    while (await receive())["type"] == "websocket.receive":
        num += 1
        if num == 500:
            await send({"type": "websocket.close", "code": 4500})


PAGES: dict[str, Any] = {
    "bursts": bursts,
    "fill": fill,
    "fail": fail,
    "return": return_early,
    "wait": wait,
    "body": measure_body,
    "state": state,
    "go": let_go,
}
WEBSOCKETS: dict[str, Any] = {
    "fill": ws_fill,
    "fail": ws_fail,
    "return": ws_return,
    "wait": ws_wait,
    "deaf": ws_deaf,
}
