"""`SiteHTTP`: the HTTP/1.1 requests of a load test, each on a connection of its own as another visitor's would be.

Small on purpose: the standard library's client blocks, and the measured machine often computes the client too. It
reads what any server or proxy sends in answer to `Connection: close`: chunks, a length, or a body up to the end. A
redirect is not followed. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

_CONNECT_SECONDS = 30.0
_MAX_LINE_BYTES = 1 << 20
_MAX_ERROR_BYTES = 1 << 16


class BadAddress(ValueError):
    """A text that is no address of a site."""


class Refused(Exception):
    """The site answered another status than 200. `code` is its error's, or the status."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Broken(Exception):
    """The connection could not be made, or ended before its answer did."""


class Frame(NamedTuple):
    """One server-sent event of the native API. `seq` is its number in the log, None where it has no id."""

    event: str
    seq: int | None
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a site is: "https://example.org/ai" has the routes at "/ai/streams"."""

    is_https: bool
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Return the address in `url`. Raises BadAddress."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise BadAddress(f"{url!r} is no address of a site: {error}.") from None
        is_plain = not (parts.query or parts.fragment or parts.username)
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
            raise BadAddress(f"{url!r} is no address of a site. Try http://127.0.0.1:8000.")
        return cls(parts.scheme == "https", parts.hostname, port, parts.path.rstrip("/"))

    @property
    def name(self) -> str:
        """Host and port as the Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_https else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.is_https else 'http'}://{self.name}{self.prefix}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A response under way: 200, its headers by lower-case name, and the connection that brings the body."""

    headers: Mapping[str, str]
    reader: asyncio.StreamReader

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises Broken where it is cut."""
        try:
            if "chunked" in self.headers.get("transfer-encoding", "").lower():
                while size := int((await self.reader.readline()).partition(b";")[0], 16):
                    yield await self.reader.readexactly(size)
                    await self.reader.readexactly(2)
            elif "content-length" in self.headers:
                yield await self.reader.readexactly(int(self.headers["content-length"]))
            else:
                while data := await self.reader.read(1 << 16):
                    yield data
        except (OSError, EOFError, ValueError) as error:  # EOFError: an incomplete read; ValueError: no size of a chunk
            raise Broken(f"the connection broke off ({type(error).__name__})") from None

    async def frames(self) -> AsyncIterator[Frame]:
        """Yield the events of a native stream."""
        rest = b""
        async for chunk in self.chunks():
            *whole, rest = (rest + chunk).split(b"\n\n")
            for text in whole:
                if (one := _frame(text)) is not None:
                    yield one


class SiteHTTP:
    """Asks one site. `address` is where its routes are."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._ssl = ssl.create_default_context() if address.is_https else None

    async def get(self, path: str, key: str) -> Any:
        """Return the JSON at `path`. Raises Refused and Broken."""
        async with self.open("GET", path, key) as answer:
            return json.loads(b"".join([chunk async for chunk in answer.chunks()]))

    @contextlib.asynccontextmanager
    async def open(self, method: str, path: str, key: str, body: Any = None) -> AsyncIterator[Answer]:
        """Send a request, and have its answer while the block runs. Raises Refused and Broken."""
        reader, writer = await self._connect()
        try:
            writer.write(self._head(method, path, key, body))
            try:
                status, headers = await _read_head(reader)
            except (OSError, EOFError, ValueError, IndexError) as error:
                raise Broken(f"no HTTP answer came ({type(error).__name__})") from None
            answer = Answer(headers, reader)
            if status != 200:
                raise await _refusal(status, answer)
            yield answer
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        opening = asyncio.open_connection(self.address.host, self.address.port, ssl=self._ssl, limit=_MAX_LINE_BYTES)
        try:
            return await asyncio.wait_for(opening, _CONNECT_SECONDS)
        except (OSError, TimeoutError) as error:
            raise Broken(f"nothing answers ({getattr(error, 'strerror', None) or type(error).__name__})") from None

    def _head(self, method: str, path: str, key: str, body: Any) -> bytes:
        content = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {self.address.prefix}{path} HTTP/1.1",
            f"Host: {self.address.name}",
            "Connection: close",
            "User-Agent: streamserve_load",
            f"Authorization: Bearer {key}",
        ]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        return "\r\n".join([*lines, "", ""]).encode() + content


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status = int((await reader.readline()).split()[1])
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return status, headers


async def _refusal(status: int, answer: Answer) -> Refused:
    """Return the error of an answer that is not 200."""
    text = b""
    with contextlib.suppress(Broken):
        async for chunk in answer.chunks():
            text = (text + chunk)[:_MAX_ERROR_BYTES]
    try:
        error = json.loads(text)["error"]
        return Refused(status, str(error["code"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):  # a proxy's page, a redirect
        where = f", to {answer.headers['location']}" if "location" in answer.headers else ""
        return Refused(status, str(status), f"HTTP status {status}{where}")


def _frame(text: bytes) -> Frame | None:
    fields = dict(line.split(b": ", 1) for line in text.splitlines() if b": " in line and line[:1] != b":")
    if b"data" not in fields:
        return None
    number = fields.get(b"id", b"").rpartition(b"-")[2]
    seq = int(number) if number.isdigit() else None
    return Frame(fields.get(b"event", b"").decode(), seq, json.loads(fields[b"data"]))
