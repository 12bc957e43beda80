"""FlowServer and stock daphne under tests/support/apps/flow_app.py, and raw clients that read only on demand."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import ROOT, Server, daphne, environ_of, run_server

HELLO = b": hello\n\n"  # the first bytes of /wait
APP = "tests.support.apps.flow_app:app"
DEADLINE_SECONDS = 60.0
# Longer than the limits of test_limits.py.
BLOCK_SECONDS = 1.0
# So small that a kernel's buffers cannot hide a stalled reader for long.
_RECEIVE_BYTES = 4096


@contextlib.contextmanager
def flow(*options: str, app: str = APP, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Serve `app` with `python -m streamserve.asgi.flow` while the block runs."""
    port = free_port()
    command = [sys.executable, "-m", "streamserve.asgi.flow", app, "--host", "127.0.0.1", "--port", str(port)]
    with run_server([*command, *options], port, ROOT, environ_of(ROOT, env)) as server:
        yield server


def stock() -> contextlib.AbstractContextManager[Server]:
    """Serve the same app with stock daphne while the block runs."""
    return daphne(APP)


def until(claim: Callable[[], Any], what: str, server: Server | None = None) -> Any:
    """Call `claim` until its result is true, and return that."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        if value := claim():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {DEADLINE_SECONDS:.0f} s: {what}\n{server.output() if server else ''}")


def state(server: Server) -> dict[str, Any]:
    """Return what the server holds, which includes this request."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_SECONDS)) as client:
        client.request("GET", "/state")
        value: dict[str, Any] = json.load(client.getresponse())
    return value


def printed_lines(server: Server) -> list[str]:
    """Return the lines that the app printed, in order."""
    return [line.removeprefix("PRINTED ") for line in server.output().splitlines() if line.startswith("PRINTED ")]


def exit_code(server: Server) -> int:
    """Wait until the server has ended by itself; return its exit code."""
    return server.process.wait(DEADLINE_SECONDS)


def terminate(server: Server, number: int = signal.SIGTERM) -> None:
    """Send the server a signal."""
    server.process.send_signal(number)


def connect(server: Server) -> socket.socket:
    """Open a connection with a small receive buffer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    client.settimeout(DEADLINE_SECONDS)
    client.connect(("127.0.0.1", server.port))
    return client


def get(server: Server, path: str, *headers: str) -> socket.socket:
    """Request a page, and read nothing."""
    client = connect(server)
    client.sendall("\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode())
    return client


def websocket(server: Server, path: str) -> socket.socket:
    """Request a WebSocket, and read nothing (RFC 6455, 4.1)."""
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    return get(server, path, "Upgrade: websocket", "Connection: Upgrade", key, "Sec-WebSocket-Version: 13")


def read_until(client: socket.socket, what: bytes) -> bytes:
    """Read until `what` has come."""
    data = b""
    while what not in data:
        more = client.recv(65536)
        assert more, f"the server closed before {what!r} came: {data!r}"
        data += more
    return data


def read_all(client: socket.socket) -> tuple[bytes, bool]:
    """Read to the end; return the bytes and whether it ended with a FIN and no reset."""
    data = bytearray()
    try:
        while more := client.recv(65536):
            data += more
    except ConnectionResetError:
        return bytes(data), False
    return bytes(data), True


def chunks(data: bytes) -> tuple[bytes, bool]:
    """Return the body of a chunked response, and whether its terminator came (RFC 9112, 7.1)."""
    out, place = bytearray(), data.index(b"\r\n\r\n") + 4
    while (end := data.find(b"\r\n", place)) >= 0:
        size = int(data[place:end], 16)
        if size == 0:
            return bytes(out), True
        out += data[end + 2 : end + 2 + size]
        place = end + 2 + size + 2
    return bytes(out), False


def frames(data: bytes) -> list[tuple[int, bytes]]:
    """Return (opcode, payload) of the server's whole frames after its handshake (RFC 6455, 5.2)."""
    out, place = [], data.index(b"\r\n\r\n") + 4
    while place + 2 <= len(data):
        opcode, size, place = data[place] & 15, data[place + 1], place + 2
        if size >= 126:
            width = 2 if size == 126 else 8
            size, place = int.from_bytes(data[place : place + width], "big"), place + width
        if place + size > len(data):
            break
        out.append((opcode, data[place : place + size]))
        place += size
    return out


def close_code(data: bytes) -> int | None:
    """Return the code of the server's close frame."""
    return next((struct.unpack("!H", load[:2])[0] for opcode, load in frames(data) if opcode == 8), None)


def frame(opcode: int, payload: bytes) -> bytes:
    """Return a client's frame, masked with zeros; up to 125 bytes."""
    return bytes([0x80 | opcode, 0x80 | len(payload)]) + b"\0\0\0\0" + payload


def reset(client: socket.socket) -> None:
    """Close by a reset, as a killed process or a lost link does."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
