"""A WebSocket on `/ws/streams`, by the public `websockets` client, with JSON in and out."""

from __future__ import annotations

import contextlib
import json
import math
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

DEADLINE_SECONDS = 60.0


class Socket:
    """One connection. What is received is kept in `got`."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.got: list[dict[str, Any]] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.connection.send(json.dumps({"type": kind, **fields}))

    def receive(self) -> dict[str, Any]:
        """Receive the next message that is no ping of the server's."""
        while (message := self.receive_any()) == {"type": "ping"}:
            pass
        return message

    def receive_any(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.connection.recv(timeout=DEADLINE_SECONDS))
        self.got.append(message)
        return message

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Send a message and return the answer: the next message that is no event."""
        self.send(kind, **fields)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Receive the next message that is no event."""
        while (message := self.receive())["type"] == "event":
            pass
        return message

    def events(self, stream_id: str, last: int | None = None) -> list[dict[str, Any]]:
        """Receive until the stream's terminal event, or its `last`th event, has come; return the events."""
        while not _is_over(mine := self._events_of(stream_id), last):
            self.receive()
        return mine

    def events_acked(self, stream_id: str) -> list[dict[str, Any]]:
        """Acknowledge every event until the terminal one has come; return the events."""
        while not _is_over(mine := self._events_of(stream_id), None):
            with contextlib.suppress(ConnectionClosed):  # the remaining events have come, and the end of the connection
                self.send("ack", id=stream_id, seq=mine[-1]["seq"])
            self.receive()
        return mine

    def error_code(self) -> str:
        """Receive the next answer, which must be an error."""
        message = self.answer()
        assert message["type"] == "error", message
        return str(message["error"]["code"])

    def close_code(self) -> int:
        """Receive until the server closes, and return its code; 1006 if it gave none (RFC 6455, 7.1.5)."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                self.receive()
        close = self.connection.protocol.close_rcvd
        return 1006 if close is None else close.code

    def _events_of(self, stream_id: str) -> list[dict[str, Any]]:
        """Return the events of the log, without the `meta` that is repeated before `done`."""
        mine = [message for message in self.got if message["type"] == "event" and message["id"] == stream_id]
        return [message for message in mine if message["event"] != "meta" or "seq" in message]


def _is_over(events: list[dict[str, Any]], last: int | None) -> bool:
    return bool(events) and (len(events) >= (last or math.inf) or events[-1]["event"] in ("done", "error"))


@contextlib.contextmanager
def open_socket(url: str, key: str) -> Iterator[Socket]:
    """Connect to the server at `url` (ws://…) with an API key."""
    headers = {"Authorization": f"Bearer {key}"}
    options: dict[str, Any] = {"max_size": None, "ping_interval": None, "open_timeout": DEADLINE_SECONDS}
    with connect(f"{url}/ws/streams", additional_headers=headers, proxy=None, **options) as connection:
        yield Socket(connection)


@contextlib.contextmanager
def open_raw(url: str, key: str) -> Iterator[socket.socket]:
    """Connect without a library, whose locks tie sending to receiving, and with a small receive buffer."""
    with socket.socket() as raw:
        raw.settimeout(DEADLINE_SECONDS)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", urlsplit(url).port))
        lines = ["GET /ws/streams HTTP/1.1", "Host: 127.0.0.1", "Upgrade: websocket", "Connection: Upgrade"]
        lines += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="]
        raw.sendall("\r\n".join([*lines, f"Authorization: Bearer {key}", "", ""]).encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += raw.recv(1)
        assert head.startswith(b"HTTP/1.1 101 "), head
        yield raw


def masked(payload: bytes) -> bytes:
    """Return a text frame under 64 KiB as a client must send it (RFC 6455, 5.2); a mask of zeros changes nothing."""
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return b"\x81" + length + b"\0\0\0\0" + payload


def text_of(events: list[dict[str, Any]]) -> str:
    """Return the answer's text."""
    return "".join(message["data"]["text"] for message in events if message["event"] == "token")
