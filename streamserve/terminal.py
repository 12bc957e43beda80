"""The two ways `manage.py streamserve_chat` reaches a model: `LocalChat` loads it here, `RemoteChat` speaks HTTP.

Both keep the conversation and yield the new text of an answer. Event loop; HTTP runs in a thread on the standard
library's client, so that the command needs nothing that streamserve does not need.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

import structlog

from streamserve.clients.factory import make_client
from streamserve.conf import Settings
from streamserve.dialects import native
from streamserve.protocol.errors import EngineUnavailable, NoChatTemplate, StreamserveError, error_for
from streamserve.protocol.events import Error, Token

log = structlog.get_logger("streamserve")

Progress = Callable[[float, str], None]
Messages = list[dict[str, str]]
_POLL_SECONDS = 0.1


class Chat(Protocol):
    """A conversation with one model."""

    messages: Messages

    async def open(self, progress: Progress) -> None:
        """Wait until the model is ready."""

    def ask(self, question: str) -> AsyncGenerator[str]:
        """Yield the new text of the answer. Left early, the answer stops."""

    async def aclose(self) -> None:
        """End what runs."""


class LocalChat:
    """The model in this process: no server, no database."""

    def __init__(self, settings: Settings, alias: str, fields: dict[str, Any], messages: Messages) -> None:
        self.messages = messages
        self._settings, self._alias, self._fields = settings, alias, fields
        model = settings.models[alias]
        self._client = make_client(model.model, model.engine, step_delay_seconds=settings.echo_step_seconds)

    async def open(self, progress: Progress) -> None:
        self._client.start()
        while (state := self._client.describe()).state not in ("ready", "failed"):
            progress(state.fraction, state.stage or "loading")
            await asyncio.sleep(_POLL_SECONDS)
        if state.state == "failed":
            raise EngineUnavailable(state.message)
        progress(1.0, "ready")

    async def ask(self, question: str) -> AsyncGenerator[str]:
        self.messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        try:
            generation = await self._client.generate(self._request({"messages": self.messages}))
        except NoChatTemplate:
            generation = await self._client.generate(self._request({"prompt": question}))
        try:
            async for event in generation:
                if isinstance(event, Token) and event.text:
                    pieces.append(event.text)
                    yield event.text
                elif isinstance(event, Error):
                    raise error_for(event.code, event.message, retryable=event.retryable)
        finally:
            generation.cancel()
            self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _request(self, asked: dict[str, Any]) -> Any:
        body = {**asked, **self._fields, "model": self._alias}
        return native.parse(body, self._settings.limits, default_model=self._alias).generate

    async def aclose(self) -> None:
        await self._client.aclose()


class RemoteChat:
    """A running site, by its native SSE; an answer left early is aborted there."""

    def __init__(
        self, url: str, key: str | None, model: str | None, fields: dict[str, Any], messages: Messages
    ) -> None:
        self.messages = messages
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StreamserveError(f"{url!r} is no address of a site. Give one like http://127.0.0.1:8000.")
        self._is_https = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/")
        self._fields = {**fields, **({"model": model} if model else {})}
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    async def open(self, progress: Progress) -> None:
        while True:
            status, body = await asyncio.to_thread(self._get_ready)
            states = body.get("models", []) if isinstance(body, dict) else []
            failed = next((model for model in states if model.get("state") == "failed"), None)
            if failed is not None:
                raise EngineUnavailable(f"The model {failed['alias']!r} could not be loaded. {failed['message']}")
            if status == 200:
                progress(1.0, "ready")
                return
            if status != 503:
                raise StreamserveError(f"The site answers {status} at /readyz. Is it a streamserve site?")
            progress(min((model.get("fraction", 0.0) for model in states), default=0.0), "loading")
            await asyncio.sleep(5 * _POLL_SECONDS)

    async def ask(self, question: str) -> AsyncGenerator[str]:
        self.messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        try:
            async with aclosing(self._lines({"messages": self.messages, **self._fields})) as lines:
                async for text in _tokens(lines):
                    pieces.append(text)
                    yield text
        finally:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})

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
        """Open the stream; with on_disconnect=abort, closing the connection is stopping."""
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
        """Yield the lines of a streamed answer, read by a thread, which ends when leaving shuts the connection."""
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


def _put(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[str | None], line: str | None) -> None:
    loop.call_soon_threadsafe(lines.put_nowait, line)


def _read(response: http.client.HTTPResponse, put: Callable[[str | None], None]) -> None:
    """Pass on every line, then None. An end that comes too early is for the reader of the events to notice."""
    try:
        for line in response:
            put(line.decode("utf-8").rstrip("\r\n"))
    except (OSError, ValueError, http.client.HTTPException) as error:
        log.debug("connection_cut", error=type(error).__name__)
    finally:
        put(None)


async def _tokens(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield the text of `token` events; raise what an `error` event says, and for an end without a terminal event."""
    event = ""
    async for line in lines:
        if line.startswith("event: "):
            event = line[7:]
        elif line.startswith("data: "):
            data = json.loads(line[6:])
            if event == "token" and data["text"]:
                yield data["text"]
            elif event == "error":
                raise StreamserveError(data["message"], code=data["code"])
            elif event == "done":
                return
    raise StreamserveError("The connection ended before the answer did. Ask again.")


def _refusal(response: http.client.HTTPResponse) -> StreamserveError:
    """Return the error that a refused request says."""
    try:
        error = json.loads(response.read())["error"]
        return StreamserveError(error["message"], code=error["code"])
    except (ValueError, KeyError, TypeError):
        return StreamserveError(f"The site answers {response.status} {response.reason}.")
