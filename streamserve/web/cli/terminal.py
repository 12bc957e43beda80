"""The two clients of `manage.py streamserve_chat`: `LocalChat` uses the engine, `RemoteChat` the HTTP API of a site.

Both keep the conversation and yield the new text of an answer, and of its thoughts and tool calls. Event loop; HTTP
runs in a thread with the standard library's client, so that the command needs no further package.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from streamserve.api.logs import get_logger
from streamserve.clients.adapter import AdapterClient
from streamserve.clients.base import EngineClient
from streamserve.conf import SiteConfig
from streamserve.dialects import native
from streamserve.dialects.fold import BlockBegun, Delta, Fold
from streamserve.protocol.engine import ModelDescription
from streamserve.protocol.errors import EngineUnavailable, StreamserveError, error_for
from streamserve.protocol.events import TEXT, BlockStart, Error, Event, Token
from streamserve.protocol.requests import Admission
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.follow import follow
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from streamserve.web.cli.loading_bar import description_of
from streamserve.web.resources import client_for

log = get_logger(__name__)

Progress = Callable[[ModelDescription], None]
Messages = list[dict[str, str]]
_POLL_SECONDS = 0.1
_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"


class Piece(NamedTuple):
    """New text of one block. `name` is a tool call's; its first piece has no text."""

    text: str
    kind: str = TEXT
    name: str = ""


class _Pieces:
    """What there is to print of an answer's events: of its first choice, as `Fold` sees it. `text` is the answer's."""

    def __init__(self) -> None:
        self._fold = Fold()
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def feed(self, event: Event) -> Iterator[Piece]:
        """Yield what an event adds. Raises the error that ends the answer."""
        if isinstance(event, Error):
            raise error_for(event.code, event.message, retryable=event.retryable)
        for piece in self._fold.feed(event):
            if not isinstance(piece, BlockBegun | Delta) or piece.block.choice:
                continue
            kind, name = piece.block.kind, piece.block.name or ""
            if isinstance(piece, BlockBegun):
                if name:
                    yield Piece("", kind, name)
            elif piece.token.text:
                if kind == TEXT:
                    self._texts.append(piece.token.text)
                yield Piece(piece.token.text, kind, name)


class AnswerText:
    """The pieces of an answer as text to print: a terminal shows thoughts dim and calls by name."""

    def __init__(self, *, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._kind = ""

    def add(self, piece: Piece) -> str:
        """Return what to print for `piece`."""
        if not self._is_terminal:
            return piece.text if piece.kind == TEXT else ""
        begins = piece.kind != self._kind or (piece.kind != TEXT and not piece.text)
        before = (self.end() + ("\n" if self._kind else "")) if begins else ""
        if begins and piece.kind != TEXT:
            before += _DIM + (f"{_visible(piece.name)} " if piece.name else "")
        self._kind = piece.kind
        return before + (piece.text if piece.kind == TEXT else _visible(piece.text))

    def end(self) -> str:
        """Return what ends the dim text, if there is any."""
        return _NORMAL if self._is_terminal and self._kind not in ("", TEXT) else ""


def _visible(text: str) -> str:
    """Return `text` without the control characters that could end the dim text, or move the cursor."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


class Chat(Protocol):
    """A conversation with one model."""

    messages: Messages

    async def open(self, progress: Progress) -> None:
        """Wait until the model is ready."""

    def ask(self, question: str) -> AsyncGenerator[Piece]:
        """Yield the pieces of the answer. Closing the generator stops the answer."""

    async def aclose(self) -> None:
        """Stop the answer and close the connection."""


class LocalChat:
    """Uses the site's engine process, or an engine in this process, depending on CLIENT. No server, no database."""

    def __init__(self, settings: SiteConfig, alias: str, fields: dict[str, Any], messages: Messages) -> None:
        self.messages = messages
        self._settings, self._alias, self._fields = settings, alias, fields
        base = settings.models[alias].adapter_of
        self._engine = client_for(settings, base or alias)
        self._client: EngineClient = AdapterClient(alias, self._engine) if base else self._engine
        self._streams = Streams({alias: self._client}, MemoryLog(), settings.streams)

    async def open(self, progress: Progress) -> None:
        self._client.wake()
        while (model := self._client.describe()).state != "ready":
            raise_if_unavailable(model)
            progress(model)
            await asyncio.sleep(_POLL_SECONDS)
        progress(model)

    async def ask(self, question: str) -> AsyncGenerator[Piece]:
        self.messages.append({"role": "user", "content": question})
        pieces = _Pieces()
        try:
            async with aclosing(follow(self._streams, await self._start(question), transport="terminal")) as events:
                async for logged in events:
                    for piece in pieces.feed(logged.event):
                        yield piece
        finally:
            self.messages.append({"role": "assistant", "content": pieces.text})

    async def _start(self, question: str) -> Stream:
        """Start an answer that ends with its reader. A model without a chat template continues the question."""
        asked: list[dict[str, Any]] = [{"messages": self.messages}, {"prompt": question}]
        for fields in asked:
            body = {**fields, **self._fields, "model": self._alias}
            request = native.parse(body, self._settings.limits, default_model=self._alias).generate
            try:
                return await self._streams.start(
                    request, Admission(owner="terminal", tenant="terminal", on_disconnect="abort")
                )
            except StreamserveError as error:
                if error.code != "no_chat_template" or fields is asked[-1]:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def aclose(self) -> None:
        await self._streams.aclose()
        await self._engine.aclose()


class RemoteChat:
    """Uses a running site by its native SSE. The site aborts an answer whose connection closes."""

    def __init__(
        self, url: str, key: str | None, model: str | None, fields: dict[str, Any], messages: Messages
    ) -> None:
        self.messages = messages
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StreamserveError(f"{url!r} is no address of a site. Give an address like http://127.0.0.1:8000.")
        self._is_https = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/")
        self._fields = {**fields, **({"model": model} if model else {})}
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    async def open(self, progress: Progress) -> None:
        while True:
            status, body = await asyncio.to_thread(self._get_ready)
            if status not in (200, 503) or not isinstance(body, dict):
                raise StreamserveError(f"The site answers {status} at /readyz. Is it a streamserve site?")
            models = [description_of(model) for model in body.get("models", [])]
            for model in models:
                raise_if_unavailable(model)
                progress(model)
            if status == 200:
                return
            await asyncio.sleep(5 * _POLL_SECONDS)

    async def ask(self, question: str) -> AsyncGenerator[Piece]:
        self.messages.append({"role": "user", "content": question})
        pieces = _Pieces()
        try:
            async with aclosing(self._lines({"messages": self.messages, **self._fields})) as lines:
                async for piece in _read_pieces(lines, pieces):
                    yield piece
        finally:
            self.messages.append({"role": "assistant", "content": pieces.text})

    async def aclose(self) -> None:
        return None

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=600)

    def _get_ready(self) -> tuple[int, Any]:
        connection = self._connection()
        try:
            connection.request("GET", f"{self._path}/readyz", headers=self._headers)
            response = connection.getresponse()
            text = response.read()
            return response.status, json.loads(text) if text.startswith(b"{") else None
        except OSError as error:
            message = f"Nothing answers at {self._host}:{self._port or ''} ({error.strerror or error}). Is the site up?"
            raise EngineUnavailable(message) from None
        finally:
            connection.close()

    def _post(self, body: dict[str, Any]) -> http.client.HTTPResponse:
        """Open the stream; with on_disconnect=abort, closing the connection stops the answer."""
        connection = self._connection()
        text = json.dumps({**body, "on_disconnect": "abort"})
        try:
            connection.request("POST", f"{self._path}/streams", text, headers=self._headers)
            self._socket = connection.sock
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response)
        except BaseException:
            connection.close()
            raise
        return response

    async def _lines(self, body: dict[str, Any]) -> AsyncGenerator[str]:
        """Yield the lines of a streamed answer. A thread reads them; closing the generator shuts its connection."""
        response = await asyncio.to_thread(self._post, body)
        loop, lines = asyncio.get_running_loop(), asyncio.Queue[str | None]()  # bounded by one answer's length
        reading = asyncio.create_task(asyncio.to_thread(_read, response, partial(_put, loop, lines)))
        try:
            while (line := await lines.get()) is not None:
                yield line
        finally:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            await reading
            response.close()
            self._socket.close()


def raise_if_unavailable(model: ModelDescription) -> None:
    """Raise EngineUnavailable for a model that does not become ready by waiting."""
    if model.state == "failed":
        raise EngineUnavailable(f"The model {model.alias!r} cannot be used. {model.message}")
    if model.state in ("paused", "draining"):
        raise EngineUnavailable(f"The model {model.alias!r} is {model.state}. {model.message}")


def _put(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[str | None], line: str | None) -> None:
    loop.call_soon_threadsafe(lines.put_nowait, line)


def _read(response: http.client.HTTPResponse, put: Callable[[str | None], None]) -> None:
    """Put every line, then None. The reader of the events notices an early end."""
    try:
        for line in response:
            put(line.decode("utf-8").rstrip("\r\n"))
    except (OSError, ValueError, http.client.HTTPException) as error:
        log.debug("connection_cut", error=type(error).__name__)
    finally:
        put(None)


async def _read_pieces(lines: AsyncIterator[str], pieces: _Pieces) -> AsyncIterator[Piece]:
    """Yield the pieces of the events. Raises for an `error` event and for an end without a terminal event."""
    name = ""
    async for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            if name == "done":
                return
            event = _event_of(name, json.loads(line[6:]))
            if event is not None:
                for piece in pieces.feed(event):
                    yield piece
    raise StreamserveError("The connection ended before the answer did. Ask again.")


def _event_of(name: str, data: Mapping[str, Any]) -> Event | None:
    """Return an event of the native API that adds to what is printed, or that ends it; None for all others."""
    if name == "block_start":
        return BlockStart(choice=data["choice"], index=data["index"], kind=data["kind"], name=data.get("name"))
    if name == "token":
        return Token(choice=data["choice"], index=data["index"], text=data["text"], token_ids=())
    return Error(code=data["code"], message=data["message"]) if name == "error" else None


def _refusal(response: http.client.HTTPResponse) -> StreamserveError:
    """Return the error in the response to a refused request."""
    try:
        error = json.loads(response.read())["error"]
        return StreamserveError(error["message"], code=error["code"])
    except (ValueError, KeyError, TypeError):
        return StreamserveError(f"The site answers {response.status} {response.reason}.")
