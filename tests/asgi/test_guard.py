"""Laws of the guard: what is over a bound is refused before the app inside runs, and what ends is counted no more."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from streamserve.asgi.guard import Guard, GuardedApp, RouteBound, client_of
from streamserve.asgi.types import Message, Receive, Scope, Send
from streamserve.dialects.openai import shapes
from tests.support.streams.hand_made import until

OK: Message = {"type": "http.response.start", "status": 200, "headers": []}
END: Message = {"type": "http.response.body", "body": b"ok"}
THERE = ("203.0.113.7", 4711)


class Inner:
    """Reads the body, then waits for `go`, then answers."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.num_called = 0
        self.num_read = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_called += 1
        has_more = scope["type"] == "http"
        while has_more:
            message = await receive()
            self.num_read += len(message.get("body", b""))
            has_more = message.get("more_body", False)
        await self.go.wait()
        if scope["type"] == "http":
            await send(OK)
            await send(END)


class Exchange:
    """One request to an app: what it sends and gets."""

    def __init__(self, app: GuardedApp, *chunks: bytes, is_whole: bool = True, **scope: Any) -> None:
        self.sent: list[Message] = []
        self.incoming: asyncio.Queue[Message] = asyncio.Queue()
        for number, chunk in enumerate(chunks or (b"",), 1):
            more = number < len(chunks) or not is_whole
            self.incoming.put_nowait({"type": "http.request", "body": chunk, "more_body": more})
        whole = {"type": "http", "method": "POST", "path": "/ours", "headers": [], "client": THERE, **scope}
        self.task = asyncio.create_task(app(whole, self.incoming.get, self._send))

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.sent[1]["body"])["error"])


def bound_of(path: str) -> RouteBound | None:
    known = {
        "/ours": RouteBound(body_bytes=10),
        "/v1": RouteBound(body_bytes=10, error_json=shapes.error_json),
        "/livez": RouteBound(body_bytes=10, is_probe=True),
    }
    return known.get(path)


@pytest.mark.parametrize(
    ("scope", "status"),
    [
        ({}, 429),
        ({"client": ("203.0.113.8", 1)}, 200),
        ({"client": ("127.0.0.1", 1)}, 200),
        ({"client": ("::1", 1)}, 200),
        ({"client": None}, 200),
        ({"client": ("", 0)}, 200),
    ],
)
async def test_connections_of_an_address(scope: dict[str, Any], status: int) -> None:
    """An address has so many at a time; others, and a proxy on the same machine, are not counted with it."""
    inner = Inner()
    app = GuardedApp(inner, Guard(max_per_address=2))
    open_ones = [Exchange(app), Exchange(app, type="websocket")]
    await until(lambda: inner.num_called == 2, "both are open")
    one = Exchange(app, **scope)
    await until(lambda: inner.num_called == 3 or bool(one.sent), "it is open or refused")
    inner.go.set()
    await one.task
    assert one.status == status
    if status == 429:
        assert one.error["code"] == "too_many_connections"
        assert dict(one.sent[0]["headers"])[b"retry-after"] == b"5"
    await asyncio.gather(*(each.task for each in open_ones))
    after = Exchange(app)
    await after.task
    assert after.status == 200


@pytest.mark.parametrize(
    ("address", "status"),
    [("2001:db8:1:2:f::9", 429), ("2001:db8:1:3::1", 200), ("::ffff:203.0.113.7", 200), ("::ffff:127.0.0.1", 200)],
)
async def test_the_addresses_of_one_network_are_one_client(address: str, status: int) -> None:
    """A client of IPv6 has a /64 of addresses, and is no other client by each."""
    inner = Inner()
    app = GuardedApp(inner, Guard(max_per_address=1))
    first = Exchange(app, client=("2001:db8:1:2::1", 1))
    await until(lambda: inner.num_called == 1, "it is open")
    one = Exchange(app, client=(address, 1))
    await until(lambda: inner.num_called == 2 or bool(one.sent), "it is open or refused")
    inner.go.set()
    await asyncio.gather(first.task, one.task)
    assert one.status == status


def test_clients_by_address() -> None:
    """One form for each client; what is no address is none."""
    addresses = ("203.0.113.7", "::ffff:203.0.113.7", "::1", "fe80::1%eth0", "", "testclient")
    assert [client_of(one) for one in addresses] == ["203.0.113.7", "203.0.113.7", "::1", "fe80::", "", ""]


async def test_connections_in_all() -> None:
    """The bound of all connections holds for any address, and for a WebSocket, which is closed with 1013.

    Not for a probe: its supervisor would end the process, and every answer with it.
    """
    inner = Inner()
    app = GuardedApp(inner, Guard(max_connections=1, bound_of=bound_of))
    first = Exchange(app)
    await until(lambda: inner.num_called == 1, "it is open")
    second = Exchange(app, client=("127.0.0.1", 1))
    socket = Exchange(app, type="websocket")
    await asyncio.gather(second.task, socket.task)
    assert (second.status, second.error["code"]) == (503, "overloaded")
    assert [message["type"] for message in socket.sent] == ["websocket.accept", "websocket.close"]
    assert socket.sent[1]["code"] == 1013
    probe = Exchange(app, path="/livez")
    await until(lambda: inner.num_called == 2, "it is let in")
    inner.go.set()
    await asyncio.gather(first.task, probe.task)
    assert (inner.num_called, probe.status) == (2, 200)


@pytest.mark.parametrize(
    ("chunks", "headers", "num_read"),
    [
        ((b"",), [(b"content-length", b"11")], 0),
        ((b"",), [(b"Content-Length", b"9" * 30)], 0),
        ((b"12345", b"123456", b"rest"), [], 5),
    ],
    ids=["announced", "huge", "chunked"],
)
async def test_a_large_body(chunks: tuple[bytes, ...], headers: list[tuple[bytes, bytes]], num_read: int) -> None:
    """A body over the route's limit is 413 in its dialect: by its length before any is read, else at that chunk."""
    inner = Inner()
    inner.go.set()
    app = GuardedApp(inner, Guard(bound_of=bound_of))
    for path in ("/ours", "/v1"):
        inner.num_read = 0
        one = Exchange(app, *chunks, headers=headers, path=path)
        await one.task
        assert (one.status, one.error["code"]) == (413, "body_too_large")
        assert inner.num_read == num_read
        assert (b"connection", b"close") in one.sent[0]["headers"]
    elsewhere = Exchange(app, *chunks, headers=headers, path="/upload")
    await elsewhere.task
    assert elsewhere.status == 200


@pytest.mark.parametrize("version", ["2", "3"])
async def test_a_refusal_by_http2_has_no_header_of_a_connection(version: str) -> None:
    """HTTP/2 and HTTP/3 know none: a server that checks them would end the connection of all other requests, too."""
    one = Exchange(GuardedApp(Inner(), Guard(bound_of=bound_of)), b"x" * 11, http_version=version)
    await one.task
    assert one.status == 413
    assert b"connection" not in dict(one.sent[0]["headers"])


async def test_a_body_that_does_not_arrive_is_408() -> None:
    """A body has its time; after it is whole the app may wait as long as it likes."""
    inner = Inner()
    app = GuardedApp(inner, Guard(body_seconds=0.2, bound_of=bound_of))
    slow = Exchange(app, b"1", is_whole=False)
    await slow.task
    assert (slow.status, slow.error["code"]) == (408, "request_timeout")
    inner.go.set()
    whole = Exchange(app, b"1")
    await whole.task
    assert whole.status == 200


async def test_a_body_waits_for_its_app() -> None:
    """What the app does between two pieces of a body is not its client's time."""
    is_asking = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await asyncio.sleep(1.1)
        is_asking.set()
        await receive()
        await send(OK)
        await send(END)

    one = Exchange(GuardedApp(slow, Guard(body_seconds=1.0, bound_of=bound_of)), b"1", is_whole=False)
    await is_asking.wait()
    one.incoming.put_nowait({"type": "http.request", "body": b"2", "more_body": False})
    await one.task
    assert one.status == 200


@pytest.mark.parametrize(("given", "shown"), [(b"mine-7", "mine-7"), (b"not sane", "[0-9a-f]{32}")])
async def test_a_refusal_has_the_requests_id(given: bytes, shown: str) -> None:
    """As every response of the API: the client's own id, or a new one."""
    app = GuardedApp(Inner(), Guard(bound_of=bound_of))
    one = Exchange(app, b"x" * 11, headers=[(b"content-length", b"11"), (b"X-Request-Id", given)])
    await one.task
    assert one.status == 413
    assert re.fullmatch(shown, dict(one.sent[0]["headers"])[b"x-request-id"].decode())


async def test_an_error_of_the_app_is_not_ours() -> None:
    """What the app raises goes to the server, also our own kind of error."""
    from streamserve.protocol.errors import TooLarge

    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        raise TooLarge("of the app")

    one = Exchange(GuardedApp(failing, Guard(bound_of=bound_of)))
    with pytest.raises(TooLarge, match="of the app"):
        await one.task
    assert one.sent == []
