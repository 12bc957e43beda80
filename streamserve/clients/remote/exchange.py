"""`Exchange`: one POST to a server elsewhere, and the bytes of the event stream that answers it.

    open ─► head: status, content type ─► read ─► read ─► …  ─► finish ─► aclose
      │ FIRST_TOKEN_SECONDS until the first token ──► │ SILENCE_SECONDS for each read after it

httpx does HTTP; what is read here is bounded, whatever the server sends. Knows no answer. Event loop, in the task of
its source: to cancel that task closes the connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from streamserve.clients.remote.errors import (
    MAX_ERROR_BYTES,
    MISCONFIGURED,
    UpstreamAway,
    UpstreamBroken,
    UpstreamLost,
    clean,
    error_of,
    room_of,
    unavailable,
)
from streamserve.clients.remote.server import RemoteServer
from streamserve.protocol.errors import BadRequest, EngineUnavailable, Overloaded, StreamserveError
from streamserve.protocol.sse import CONTENT_TYPE

if TYPE_CHECKING:
    import httpx

# A kept connection that the server closes at this very moment fails before a byte of the response: ask again.
_MAX_RETRIES = 2
# After its last event the server ends the response; then the connection is used again, else it is closed.
_END_SECONDS = 1.0


class Exchange:
    """See above. Made when the request has its place: the time until the first token begins then."""

    def __init__(self, server: RemoteServer, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self._server, self._config, self._headers = server, server.config, headers
        self._deadline = asyncio.get_running_loop().time() + server.config.first_token_seconds
        self._has_begun = False
        self._response: httpx.Response | None = None
        self._parts: AsyncIterator[bytes] | None = None

    async def open(self, route: str, body: dict[str, Any], *, may_lower: bool = True) -> None:
        """Send the request, and return when the head of its event stream is there.

        A maximum that the server refuses beside this prompt is lowered to what fits, once: it is no fault of a request.
        Raises StreamserveError, UpstreamLost, UpstreamBroken.
        """
        async with self._limit():
            response = await self._send(route, body)
        try:
            await self._check_head(response)
        except BaseException as error:
            await response.aclose()
            room = room_of(error.message) if isinstance(error, BadRequest) else None
            if not may_lower or room is None or not 0 < room < body.get("max_tokens", 0):
                raise
            await self.open(route, {**body, "max_tokens": room}, may_lower=False)
            return
        self._response, self._parts = response, response.aiter_raw()

    async def read(self) -> bytes | None:
        """Return what the server sends next, None at the end of the response. Raises UpstreamLost."""
        assert self._parts is not None
        try:
            async with self._limit():
                return await anext(self._parts, None)
        except UpstreamLost:
            raise
        except Exception as error:
            _raise_foreign(error)
            raise UpstreamLost(f"the connection was lost: {clean(str(error)) or type(error).__name__}") from error

    def note_token(self) -> None:
        """From now on each read has a time limit of its own."""
        self._has_begun = True

    async def finish(self) -> None:
        """Read the end of the response, so that the connection is kept; a server that sends more loses it."""
        assert self._parts is not None
        try:
            async with asyncio.timeout(_END_SECONDS):
                await anext(self._parts, None)
        except Exception as error:  # TimeoutError, httpx's own: the connection is closed
            _raise_foreign(error)

    async def aclose(self) -> None:
        """Close the response; its connection too, unless `finish` has read the end."""
        if self._response is not None:
            await self._response.aclose()

    async def _send(self, route: str, body: dict[str, Any]) -> httpx.Response:
        """Return the response when its head is there. Raises UpstreamLost where the server cannot be reached."""
        import httpx

        http, counts = self._server.http, self._server.counts
        for attempt in range(_MAX_RETRIES + 1):
            fresh: list[str] = []

            async def note(name: str, info: Any, fresh: list[str] = fresh) -> None:
                if name.startswith("connection.connect"):
                    fresh.append(name)

            url, extensions = self._config.url + route, {"trace": note}
            request = http.build_request("POST", url, json=body, headers=self._headers, extensions=extensions)
            counts.requests += 1
            try:
                return await http.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                raise UpstreamAway(f"cannot connect: {clean(str(error)) or type(error).__name__}") from error
            except httpx.TransportError as error:
                if fresh or attempt == _MAX_RETRIES:
                    raise UpstreamLost(f"no response: {clean(str(error)) or type(error).__name__}") from error
                counts.retries += 1
        raise AssertionError("not reached")

    async def _check_head(self, response: httpx.Response) -> None:
        """Raise for anything but an event stream."""
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if (status := response.status_code) != 200:
            server = self._server
            server.counts.refused += 1
            body = await self._read_error(response)
            error = error_of(self._config.alias, status, response.headers, body, time.time(), server.report)
            if isinstance(error, Overloaded):
                server.note_busy(error.retry_after)
            elif isinstance(error, EngineUnavailable):
                server.note_fault(f"it answers {status}", certain=status in MISCONFIGURED)
            raise error
        if kind != CONTENT_TYPE.partition(";")[0]:
            raise UpstreamBroken(f"a response of type {clean(kind) or 'nothing'} instead of an event stream")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise UpstreamBroken("a compressed event stream, which was not asked for")

    async def _read_error(self, response: httpx.Response) -> bytes:
        body = bytearray()
        try:
            async with self._limit():
                async for part in response.aiter_raw():
                    body += part
                    if len(body) >= MAX_ERROR_BYTES:
                        break
        except (UpstreamLost, StreamserveError):
            pass  # the status tells enough
        except Exception as error:  # httpx's own; the status tells enough
            _raise_foreign(error)
        return bytes(body[:MAX_ERROR_BYTES])

    def _limit(self) -> _Limit:
        return _Limit(self._server, None if self._has_begun else self._deadline)


class _Limit:
    """A time limit: until the first token a deadline, then so long for each read.

    The server ends a deadline when it is found to be away, where another upstream can take the request.
    """

    def __init__(self, server: RemoteServer, deadline: float | None) -> None:
        self._server, self._deadline = server, deadline
        seconds = server.config.silence_seconds
        self._timeout = asyncio.timeout(seconds) if deadline is None else asyncio.timeout_at(deadline)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        if self._deadline is not None:
            self._server.begins.add(self._timeout)

    async def __aexit__(self, *error: Any) -> None:
        self._server.begins.discard(self._timeout)
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError as late:
            config = self._server.config
            if self._deadline is None:
                raise UpstreamLost(f"nothing came for {config.silence_seconds:g} s") from late
            if self._timeout.when() != self._deadline:
                raise UpstreamAway("it is away, and has given no token yet") from late
            self._server.note_loss(f"no token within {config.first_token_seconds:g} s")
            raise unavailable(config.alias, code="upstream_timeout") from late


def _raise_foreign(error: Exception) -> None:
    """Raise an error that is neither httpx's nor a time limit: it is a fault of ours."""
    import httpx

    if not isinstance(error, httpx.HTTPError | httpx.StreamError | TimeoutError):
        raise error
