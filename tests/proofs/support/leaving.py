"""Raw clients that request an answer from the site, read a given part of it, and leave abruptly."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

from tests.support.servers.web_servers import Server

KEY = "a-key-for-these-tests"
_SECONDS = 60.0


class Client:
    """One connection with one answer on it."""

    def __init__(self, server: Server) -> None:
        self.data = b""
        self.socket = socket.socket()
        self.socket.settimeout(_SECONDS)
        self.socket.connect(("127.0.0.1", server.port))

    def read_until(self, sign: bytes, number: int = 1) -> None:
        """Read until `sign` has come so many times."""
        while self.data.count(sign) < number:
            more = self.socket.recv(65536)
            assert more, f"the server closed before {number} times {sign!r}: {self.data[-500:]!r}"
            self.data += more

    def read_all(self) -> bytes:
        """Read to the end; return the body."""
        self.read_until(b"\r\n\r\n")
        while not self.data.endswith(b"0\r\n\r\n"):
            self.read_more()
        return dechunked(self.data)

    def read_more(self) -> None:
        more = self.socket.recv(65536)
        assert more, "the server closed"
        self.data += more


class HttpClient(Client):
    """Over POST /streams."""

    token, meta = b"event: token", b"event: meta"

    def ask(self, request: Mapping[str, Any]) -> None:
        body = json.dumps(request).encode()
        lines = [
            "POST /streams HTTP/1.1",
            "Host: localhost",
            f"Authorization: Bearer {KEY}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode() + body)


class WebSocketClient(Client):
    """Over /ws/streams (RFC 6455)."""

    token, meta = b'"event": "token"', b'"event": "meta"'

    def ask(self, request: Mapping[str, Any]) -> None:
        lines = [
            "GET /ws/streams HTTP/1.1",
            "Host: localhost",
            f"Authorization: Bearer {KEY}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Version: 13",
        ]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())
        self.read_until(b"\r\n\r\n")
        assert self.data.startswith(b"HTTP/1.1 101 "), self.data
        self.send_frame(1, json.dumps({"type": "start", "request": dict(request)}).encode())

    def send_frame(self, opcode: int, payload: bytes) -> None:
        """Send a masked frame (5.2)."""
        mask = os.urandom(4)
        size = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + struct.pack("!H", len(payload))
        masked = bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))
        self.socket.sendall(bytes([0x80 | opcode]) + size + mask + masked)


def fin(client: Client) -> None:
    """A closed tab."""
    client.socket.close()


def rst(client: Client) -> None:
    """A killed process, or a lost link."""
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.socket.close()


def half_close(client: Client) -> None:
    """The client sends no more; every ASGI server takes that for a disconnect."""
    client.socket.shutdown(socket.SHUT_WR)


def close_frame(client: Client) -> None:
    """Going away (RFC 6455, 7.4.1)."""
    assert isinstance(client, WebSocketClient)
    client.send_frame(8, struct.pack("!H", 1001))


# In turn, so that any seven in a row are all of them.
WAYS: list[tuple[type[HttpClient] | type[WebSocketClient], Callable[[Client], None]]] = [
    (HttpClient, fin),
    (WebSocketClient, close_frame),
    (HttpClient, rst),
    (WebSocketClient, fin),
    (HttpClient, half_close),
    (WebSocketClient, rst),
    (WebSocketClient, half_close),
]


def dechunked(data: bytes) -> bytes:
    """Return the body of a whole chunked response (RFC 9112, 7.1)."""
    out, place = bytearray(), data.index(b"\r\n\r\n") + 4
    while size := int(data[place : (end := data.index(b"\r\n", place))], 16):
        out += data[end + 2 : end + 2 + size]
        place = end + 2 + size + 2
    return bytes(out)
