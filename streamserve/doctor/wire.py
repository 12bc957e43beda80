"""`Way`: an address to ask, and what came back from it: the head, and each piece with the time at which it arrived.

`http.client`, because it gives what arrived as it arrived, and the headers as they were sent. Nothing is followed,
unpacked or tried again here. Blocking; each call opens a connection of its own.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import secrets
import select
import socket
import ssl
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import urlsplit

CONNECT_SECONDS = 10.0
_PIECE_BYTES = 1 << 16
_WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3
_TEXT_FRAME, _CLOSE_FRAME = 1, 8
_MAX_ERROR_BYTES = 1 << 16


class WayError(Exception):
    """The address did not answer, or not in HTTP. The message is for people."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes, and when they arrived: seconds since 1970, to be compared with the server's times."""

    at: float
    data: bytes


@dataclass(slots=True, kw_only=True)
class Answer:
    """A response. `ended_at` is when it ended, `cut` why it ended before it was whole; "" where it came whole."""

    status: int
    headers: list[tuple[str, str]]
    asked_at: float
    pieces: list[Piece] = field(default_factory=list)
    ended_at: float = 0.0
    cut: str = ""

    def header(self, name: str) -> str:
        """Return a header's value, "" for none; several are joined."""
        return ", ".join(value for key, value in self.headers if key.lower() == name)

    @property
    def body(self) -> bytes:
        """What arrived."""
        return b"".join(piece.data for piece in self.pieces)

    def unpacked(self) -> list[Piece] | None:
        """Return the pieces without gzip or deflate; None for a coding that is not known here."""
        coding = self.header("content-encoding").strip().lower()
        if coding in ("", "identity"):
            return self.pieces
        if coding not in ("gzip", "deflate"):
            return None
        unpack = zlib.decompressobj(zlib.MAX_WBITS | 32)
        try:
            return [Piece(piece.at, unpack.decompress(piece.data)) for piece in self.pieces]
        except zlib.error:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One address. `headers` are sent with each request: of an inner hop the Host of the outermost."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_tls(self) -> bool:
        return urlsplit(self.url).scheme == "https"

    @property
    def netloc(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def _address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or (443 if self.is_tls else 80)

    def ask(
        self,
        path: str,
        headers: Mapping[str, str] | None = None,
        *,
        body: Any = None,
        method: str = "",
        seconds: float = 60.0,
        enough: Callable[[Answer], bool] = lambda answer: False,
    ) -> Answer:
        """Send a request and return what came back. `enough`: leave, in the middle of the response, once it holds.

        `seconds` is the longest silence that is waited for; it ends the response as one that was cut. `body` is sent
        as JSON. Raises WayError where no response began.
        """
        data = None if body is None else json.dumps(body).encode()
        connection = self._connection(seconds)
        try:
            with _as_way_error(self.url):
                self._send(connection, method or ("GET" if data is None else "POST"), path, headers or {}, data)
                asked_at = time.time()
                response = connection.getresponse()
            answer = Answer(status=response.status, headers=response.getheaders(), asked_at=asked_at)
            self._read(response, answer, enough)
            answer.ended_at = time.time()
            return answer
        finally:
            connection.close()

    @contextmanager
    def asking(self, path: str, headers: Mapping[str, str], body: Any) -> Iterator[None]:
        """Send a request, and leave without its response when the block ends. Raises WayError."""
        connection = self._connection(CONNECT_SECONDS)
        try:
            with _as_way_error(self.url):
                self._send(connection, "POST", path, headers, json.dumps(body).encode())
            yield
        finally:
            connection.close()

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        host, port = self._address
        if self.is_tls:
            return http.client.HTTPSConnection(host, port, timeout=seconds, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port, timeout=seconds)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        headers: Mapping[str, str],
        data: bytes | None,
    ) -> None:
        all_headers = {"Host": self.netloc, "User-Agent": "streamserve-doctor", **self.headers, **headers}
        if data is not None:
            all_headers |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
        connection.putrequest(method, self.path(path), skip_host=True, skip_accept_encoding=True)
        for name, value in all_headers.items():
            connection.putheader(name, value)
        connection.endheaders(data)

    def path(self, path: str) -> str:
        """Return the path below the address: it may have a prefix that a proxy takes off."""
        return urlsplit(self.url).path.rstrip("/") + path

    def _read(self, response: http.client.HTTPResponse, answer: Answer, enough: Callable[[Answer], bool]) -> None:
        try:
            while data := response.read1(_PIECE_BYTES):
                answer.pieces.append(Piece(time.time(), data))
                if enough(answer):
                    return
        except TimeoutError:
            answer.cut = "nothing came for too long"
        except (OSError, http.client.HTTPException) as error:
            answer.cut = f"the connection broke ({type(error).__name__})"

    def alpn(self) -> str:
        """Return the protocol that the address chooses where a browser offers HTTP/2 and HTTP/1.1; "" for no choice."""
        context = ssl.create_default_context()
        context.set_alpn_protocols(["h2", "http/1.1"])
        with (
            _as_way_error(self.url),
            socket.create_connection(self._address, CONNECT_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname=self._address[0]) as secured,
        ):
            return secured.selected_alpn_protocol() or ""

    def error_page(self) -> bytes:
        """Return what the outermost hop answers to bytes that are no request, which no proxy passes on."""
        try:
            with self._raw() as connection:
                connection.sendall(b"streamserve doctor / HTTP/1.1\r\nHost: a b\r\n\r\n")
                data = b""
                while len(data) < _MAX_ERROR_BYTES and (piece := connection.recv(_PIECE_BYTES)):
                    data += piece
                return data
        except (OSError, WayError):
            return b""

    @contextmanager
    def _raw(self) -> Iterator[socket.socket]:
        with _as_way_error(self.url):
            raw = socket.create_connection(self._address, CONNECT_SECONDS)
        with raw:
            if not self.is_tls:
                yield raw
                return
            with (
                _as_way_error(self.url),
                ssl.create_default_context().wrap_socket(raw, server_hostname=self._address[0]) as secured,
            ):
                yield secured

    @contextmanager
    def websocket(self, path: str, headers: Mapping[str, str], origin: str) -> Iterator[WebSocket]:
        """Open a WebSocket (RFC 6455, 4.1). Raises NotUpgraded with the response that came instead."""
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        asked = {
            "Host": self.netloc,
            "User-Agent": "streamserve-doctor",
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": key,
            "Sec-WebSocket-Version": "13",
            "Origin": origin,
            **self.headers,
            **headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in asked.items())
        with self._raw() as connection:
            connection.sendall(f"GET {self.path(path)} HTTP/1.1\r\n{head}\r\n".encode())
            with _as_way_error(self.url):
                response = http.client.HTTPResponse(connection)
                response.begin()
            accepted = base64.b64encode(hashlib.sha1(key.encode() + _WEBSOCKET_GUID).digest()).decode()
            if response.status != 101 or response.getheader("Sec-WebSocket-Accept") != accepted:
                raise NotUpgraded(response.status, response.read(_MAX_ERROR_BYTES) if response.status != 101 else b"")
            assert response.fp is not None
            yield WebSocket(connection, response.fp)


class NotUpgraded(Exception):
    """A handshake was answered by a response that is no upgrade."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status, self.body = status, body


class WebSocket:
    """Enough of RFC 6455 to send a text and read one: frames of less than 64 KiB, no extensions."""

    def __init__(self, connection: socket.socket, reader: IO[bytes]) -> None:
        self._connection, self._reader = connection, reader

    def send(self, value: Any) -> None:
        """Send a JSON message, masked as a client must (5.3)."""
        data, mask = json.dumps(value).encode(), secrets.token_bytes(4)
        assert len(data) < 126
        masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
        self._connection.sendall(bytes((0x80 | _TEXT_FRAME, 0x80 | len(data))) + mask + masked)

    def receive(self, seconds: float) -> Any:
        """Return the next JSON message, None where the other end closed. Raises OSError, for good."""
        self._connection.settimeout(seconds)
        while True:
            first, length = self._reader.read(2).ljust(2, b"\0")
            if length == 126:
                (length,) = struct.unpack("!H", self._reader.read(2))
            data, kind = self._reader.read(length), first & 0x0F
            if not first or kind == _CLOSE_FRAME:  # no first byte: the connection ended
                return None
            if kind == _TEXT_FRAME:
                return json.loads(data)

    def has_news(self, seconds: float) -> bool:
        """Wait for so long at most, and return whether there is something to receive: a message, or the end."""
        return bool(select.select([self._connection], [], [], max(seconds, 0.0))[0])


@contextmanager
def _as_way_error(url: str) -> Iterator[None]:
    """Turn what can go wrong before a response into a sentence."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise WayError(f"The certificate of {url} is not trusted here: {error.verify_message}.") from None
    except TimeoutError:
        raise WayError(f"{url} does not answer.") from None
    except (OSError, http.client.HTTPException) as error:
        raise WayError(f"{url} cannot be asked: {str(error) or type(error).__name__}.") from None
