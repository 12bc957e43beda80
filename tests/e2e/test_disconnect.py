"""A reader that disconnects, in any way, is absent from the very next step, and its blocks are free.

Real servers, raw sockets. A gate holds the engine in step k while the client leaves; the server is asked
when it has seen that; then the gate opens, and the trace of plans is read.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.support.apps.control_routes import get, wait_for
from tests.support.checks.stream_checks import check_native, check_native_part, text_of
from tests.support.servers.web_servers import ALL_SERVERS, Server

_DEADLINE_SECONDS = 60.0


@pytest.fixture(scope="module", params=ALL_SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The app of tests/support/apps/wire_app.py on a real server."""
    with ALL_SERVERS[request.param]("tests.support.apps.wire_app:app") as server:
        yield server


@pytest.fixture(autouse=True)
def _open_gate(server: Server) -> Iterator[None]:
    yield
    get(server, "/control?open=1")


def ask_http(server: Server) -> socket.socket:
    """Open a stream on a raw connection."""
    connection = server.connect()
    connection.sendall(b"GET /streams HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return connection


def ask_websocket(server: Server) -> socket.socket:
    """Open a stream on a raw WebSocket (RFC 6455, 4.1)."""
    connection = server.connect()
    connection.sendall(
        b"GET /streams HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    return connection


def read_until(connection: socket.socket, what: bytes) -> bytes:
    """Read from the server until `what` has come."""
    data = b""
    while what not in data:
        more = connection.recv(65536)
        assert more, f"the server closed before {what!r} came: {data!r}"
        data += more
    return data


def fin(connection: socket.socket) -> None:
    """Close the connection: a closed tab."""
    connection.close()


def rst(connection: socket.socket) -> None:
    """Reset the connection, as a killed process or a lost line does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    """Close the sending side; every ASGI server takes that for a disconnect."""
    connection.shutdown(socket.SHUT_WR)


def close_frame(connection: socket.socket) -> None:
    """Send a masked close frame, code 1001 "going away" (RFC 6455, 5.5.1)."""
    mask, code = os.urandom(4), struct.pack("!H", 1001)
    masked = bytes(byte ^ mask[index] for index, byte in enumerate(code))
    connection.sendall(b"\x88\x82" + mask + masked)


LEAVING = [
    pytest.param(ask_http, fin, id="http fin"),
    pytest.param(ask_http, rst, id="http rst"),
    pytest.param(ask_http, half_close, id="http half-close"),
    pytest.param(ask_websocket, close_frame, id="websocket close"),
    pytest.param(ask_websocket, fin, id="websocket fin"),
    pytest.param(ask_websocket, rst, id="websocket rst"),
]


@pytest.mark.parametrize(("num_steps", "sign"), [(0, b"meta"), (4, b"token")], ids=["in prefill", "while decoding"])
@pytest.mark.parametrize(("connect", "leave"), LEAVING)
def test_a_leaving_reader_is_absent_from_the_next_step(
    server: Server,
    connect: Callable[[Server], socket.socket],
    leave: Callable[[socket.socket], None],
    num_steps: int,
    sign: bytes,
) -> None:
    """Step k is held while the reader leaves; step k + 1 does not hold its sequence, and all its blocks are free."""
    get(server, f"/control?allow={num_steps}")
    connection = connect(server)
    read_until(connection, sign)
    held = wait_for(server, lambda state: state["is_holding"], "a step is held")
    (seq_id,) = held["plans"][-1]
    stream_id = held["streams"][-1]["id"]
    leave(connection)
    seen = wait_for(server, lambda state: state["streams"][-1]["state"] == "parked", "the disconnect is seen")
    assert seen["is_holding"], "the engine was to be held until the disconnect was seen"
    assert seen["plans"] == held["plans"]
    get(server, "/control?open=1")
    wait_for(server, lambda state: state["stats"]["blocks_used"] == 0, "its blocks are free")
    other = httpx.get(f"{server.url}/streams?prompt=other&max_tokens=4", timeout=_DEADLINE_SECONDS)
    assert len(check_native(other.content)) >= 3
    after = get(server, "/state")
    later = after["plans"][len(held["plans"]) :]
    assert later, "there were steps after the held one"
    assert all(seq_id not in plan for plan in later)
    assert (after["stats"]["blocks_used"], after["stats"]["running"], after["stats"]["waiting"]) == (0, 0, 0)
    assert [stream["state"] for stream in after["streams"] if stream["id"] == stream_id] == ["parked"]
    assert not {"delivery", "request watch", "relay", "subscription"} & set(after["tasks"])
    connection.close()


def test_a_returning_reader_loses_nothing(server: Server) -> None:
    """An answer cut by a reset and read on from the last whole event joins to the uninterrupted one."""
    path = "/streams?prompt=resume&max_tokens=60"
    reference = text_of(check_native(httpx.get(server.url + path, timeout=_DEADLINE_SECONDS).content))
    get(server, "/control?allow=20")
    connection = server.connect()
    connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    data = read_until(connection, b"event: token")
    rst(connection)
    body = data.split(b"\r\n\r\n", 1)[1]
    first = check_native_part(body[: body.rindex(b"\n\n") + 2] if b"\n\n" in body else b"")
    after, stream_id = first[-1].seq, get(server, "/state")["streams"][-1]["id"]
    get(server, "/control?open=1")
    rest = httpx.get(f"{server.url}/events?id={stream_id}&after={after}", timeout=_DEADLINE_SECONDS)
    assert rest.headers["streamserve-from"] == str(after + 1)
    assert text_of(first) + text_of(check_native(rest.content, after=after)) == reference


def test_headers_and_silence_on_the_wire(server: Server) -> None:
    """The head and first bytes come while the engine is held; keepalives fill the silence; no length is claimed."""
    get(server, "/control?allow=0")
    with httpx.stream("GET", f"{server.url}/streams?max_tokens=8", timeout=_DEADLINE_SECONDS) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["set-cookie"] == "a=1"
        assert "content-length" not in answer.headers
        assert "streamserve-handover" not in answer.headers
        data, chunks = b"", answer.iter_raw()
        while data.count(b": keepalive\n") < 2:
            data += next(chunks)
        get(server, "/control?open=1")
        check_native(data + b"".join(chunks))
