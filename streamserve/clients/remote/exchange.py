"""`Exchange`: one request to a server elsewhere and its event stream, read no faster than the answer's reader reads.

    send ─► head: status, content type ─► read ─► decode ─► put ─► wait for room ─► read ─► …  ─► finish
      │ FIRST_TOKEN_SECONDS until the first token ────────────► │ SILENCE_SECONDS for each read after it

Lives on the event loop, in the task of its generation; to cancel that task closes the connection. httpx does HTTP; what
is decoded here is bounded, whatever the server sends.

`probe` asks a server for its models: is it there, what software is it, does it have the model, how long a context. It
opens and keeps `warm_connections` connections, by as many requests at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from streamserve.clients.remote.config import OWNERS, RemoteConfig
from streamserve.clients.remote.errors import (
    MAX_ERROR_BYTES,
    UpstreamBroken,
    UpstreamLost,
    clean,
    error_of,
    room_of,
    unavailable,
)
from streamserve.clients.remote.generation import RemoteGeneration
from streamserve.clients.remote.metrics import RemoteMetrics, Timings
from streamserve.protocol.engine import Park
from streamserve.protocol.errors import BadRequest, StreamserveError
from streamserve.protocol.events import Done, Event, Status, Token
from streamserve.protocol.sse import CONTENT_TYPE, SSEDecoder, SSEError

if TYPE_CHECKING:
    import httpx

# A kept connection that the server closes at this very moment fails before a byte of the response: ask again.
_MAX_RETRIES = 2
# After its last event the server ends the response; then the connection is used again, else it is closed.
_END_SECONDS = 1.0
_LENGTHS = ("max_model_len", "context_length", "context_window", "max_context_length")
_MAX_MODELS_BYTES = 4 * 1024 * 1024  # of the list that `probe` reads


class Exchange:
    """See above. `on_open` is called once, when the server has accepted the request."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        config: RemoteConfig,
        generation: RemoteGeneration,
        metrics: RemoteMetrics,
        timings: Timings,
        on_open: Callable[[], None],
    ) -> None:
        self._http, self._config, self._generation = http, config, generation
        self._metrics, self._timings, self._on_open = metrics, timings, on_open
        self._decoder = SSEDecoder(config.max_line_bytes)
        self._deadline = 0.0  # of the first token

    async def run(self, route: str, body: dict[str, Any], *, was_queued: bool) -> None:
        """Send the request and put its events. Raises StreamserveError, UpstreamLost, UpstreamBroken, UpstreamError."""
        self._deadline = asyncio.get_running_loop().time() + self._config.first_token_seconds
        self._timings.sent()
        response = await self._open(route, body)
        try:
            self._on_open()
            await self._read(response, was_queued=was_queued)
        finally:
            await response.aclose()

    async def _open(self, route: str, body: dict[str, Any], *, may_lower: bool = True) -> httpx.Response:
        """Return the response with its event stream.

        A maximum that the server refuses beside this prompt is lowered to what fits, once: it is no fault of a request.
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
            return await self._open(route, {**body, "max_tokens": room}, may_lower=False)
        return response

    async def _send(self, route: str, body: dict[str, Any]) -> httpx.Response:
        """Return the response when its head is there. Raises StreamserveError where the server cannot be reached."""
        import httpx

        for attempt in range(_MAX_RETRIES + 1):
            fresh: list[str] = []

            async def note(name: str, info: Any, fresh: list[str] = fresh) -> None:
                if name.startswith("connection.connect"):
                    fresh.append(name)

            request = self._http.build_request("POST", self._config.url + route, json=body, extensions={"trace": note})
            self._metrics.counts.requests += 1
            try:
                return await self._http.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                raise UpstreamLost(f"cannot connect: {clean(str(error)) or type(error).__name__}") from error
            except httpx.TransportError as error:
                if fresh or attempt == _MAX_RETRIES:
                    raise UpstreamLost(f"no response: {clean(str(error)) or type(error).__name__}") from error
                self._metrics.counts.retries += 1
        raise AssertionError("not reached")

    async def _check_head(self, response: httpx.Response) -> None:
        """Raise for anything but an event stream."""
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if response.status_code != 200:
            self._metrics.counts.refused += 1
            body = await self._read_error(response)
            raise error_of(self._config.alias, response.status_code, response.headers, body, time.time())
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
            pass  # the status says enough
        except Exception as error:  # httpx's own; the status says enough
            _raise_foreign(error)
        return bytes(body[:MAX_ERROR_BYTES])

    async def _read(self, response: httpx.Response, *, was_queued: bool) -> None:
        generation, answer = self._generation, self._generation.answer
        parts = response.aiter_raw()
        while not answer.is_done:
            if not generation.has_room and not await self._wait_for_room():
                return
            try:
                part = await self._next(parts)
            except UpstreamLost:
                if answer.is_finished:
                    break  # only the end mark is missing
                raise
            if part is None:
                break
            events = self._events_of(part)
            num_tokens = sum(isinstance(event, Token) for event in events)
            if num_tokens:
                if was_queued and self._timings.first_at is None:
                    events.insert(0, Status(status="generating"))
                self._timings.token(num_tokens)
                self._metrics.tokens(num_tokens)
            generation.put(events)
        if not answer.is_finished:
            raise UpstreamLost("the response ended in the middle of the answer")
        self._finish()
        await self._end(parts)

    def _events_of(self, part: bytes) -> list[Event]:
        try:
            return [event for data in self._decoder.feed(part) for event in self._generation.answer.feed(data)]
        except SSEError as error:
            raise UpstreamBroken(str(error)) from error

    async def _wait_for_room(self) -> bool:
        """Wait until more is to be read; return False where the answer was parked instead, and the connection ends."""
        self._metrics.counts.holds += 1
        generation = self._generation
        while not generation.has_room:
            try:
                async with asyncio.timeout(self._config.hold_seconds):
                    await generation.wait_for_room()
            except TimeoutError:
                if generation.can_park and generation.is_ahead:
                    self._metrics.num_parks += 1
                    generation.park(Park(reason="lead", resume_at_lead=self._config.lead_tokens // 2))
                    return False
        return True

    async def _next(self, parts: AsyncIterator[bytes]) -> bytes | None:
        """Return what the server sends next, None at the end of the response. Raises UpstreamLost."""
        try:
            async with self._limit():
                return await anext(parts, None)
        except UpstreamLost:
            raise
        except Exception as error:
            _raise_foreign(error)
            raise UpstreamLost(f"the connection was lost: {clean(str(error)) or type(error).__name__}") from error

    def _limit(self) -> _Limit:
        return _Limit(self._config, None if self._generation.answer.has_begun else self._deadline)

    def _finish(self) -> None:
        answer, breakdown = self._generation.answer, self._timings.breakdown()
        usage = answer.total()
        self._metrics.finished(breakdown, usage.prompt_tokens)
        self._generation.put(
            [
                Done(
                    finish_reason=answer.finish_reason,
                    usage=usage,
                    latency=self._timings.latency,
                    breakdown=breakdown,
                    stop_string=answer.stop_string,
                )
            ]
        )

    async def _end(self, parts: AsyncIterator[bytes]) -> None:
        """Read the end of the response, so that the connection is kept; a server that sends more loses it."""
        try:
            async with asyncio.timeout(_END_SECONDS):
                await anext(parts, None)
        except Exception as error:  # TimeoutError, httpx's own: the connection is closed
            _raise_foreign(error)


class _Limit:
    """A time limit: until the first token a deadline, then so long for each read."""

    def __init__(self, config: RemoteConfig, deadline: float | None) -> None:
        self._config, self._deadline = config, deadline
        seconds = config.silence_seconds
        self._timeout = asyncio.timeout(seconds) if deadline is None else asyncio.timeout_at(deadline)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError as late:
            if self._deadline is None:
                raise UpstreamLost(f"nothing came for {self._config.silence_seconds:g} s") from late
            raise unavailable(self._config.alias, code="upstream_timeout") from late


def _raise_foreign(error: Exception) -> None:
    """Raise an error that is neither httpx's nor a time limit: it is a fault of ours."""
    import httpx

    if not isinstance(error, httpx.HTTPError | httpx.StreamError | TimeoutError):
        raise error


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a server says of itself. `server` is one of SERVERS; `warning` is for the operator."""

    server: str = "openai"
    max_model_len: int = 0
    warning: str = ""


async def probe(http: httpx.AsyncClient, config: RemoteConfig) -> Found:
    """Return what the server says. Raises UpstreamLost with the reason why it cannot be used."""
    answers = await asyncio.gather(*(_ask(http, config) for _ in range(max(1, config.warm_connections))))
    status, body = answers[0]
    if status in (401, 403):
        raise UpstreamLost(f"it refuses our key ({status}); check API_KEY_ENV")
    if status == 429 or status == 404:  # it is there, and has no such route, or no time for it
        return Found()
    if status != 200:
        raise UpstreamLost(f"GET {config.url}/models answers {status}")
    return _found(body, config)


async def _ask(http: httpx.AsyncClient, config: RemoteConfig) -> tuple[int, bytes]:
    """Return status and body of `GET /models`."""
    import httpx

    body = bytearray()
    try:
        async with asyncio.timeout(2 * config.connect_seconds), http.stream("GET", config.url + "/models") as response:
            async for part in response.aiter_raw():
                body += part
                if len(body) > _MAX_MODELS_BYTES:
                    raise UpstreamLost("its list of models has no end")
            return response.status_code, bytes(body)
    except TimeoutError as late:
        raise UpstreamLost(f"it did not answer within {2 * config.connect_seconds:g} s") from late
    except httpx.TransportError as error:
        raise UpstreamLost(f"cannot connect: {clean(str(error)) or type(error).__name__}") from error


def _found(body: bytes, config: RemoteConfig) -> Found:
    try:
        value: Any = msgspec.json.decode(body)
        listed = value if isinstance(value, list) else value["data"]  # some servers give the list alone
        models = [model for model in listed if isinstance(model, dict)]
    except (ValueError, TypeError, KeyError, RecursionError):
        return Found(warning="its /models is no list of models")
    names = [str(model.get("id")) for model in models]
    ours = next((model for model in models if model.get("id") == config.model), models[0] if models else {})
    server = OWNERS.get(str(ours.get("owned_by")), "openai")
    warning = ""
    if names and config.model not in names and server != "llama-server":  # which answers to any name
        warning = f"it has no model {config.model!r}. It has: {', '.join(clean(name) for name in names[:5])}"
    return Found(server=server, max_model_len=_model_len(ours), warning=warning)


def _model_len(model: dict[str, Any]) -> int:
    """Return the context length: vLLM's and SGLang's `max_model_len`, llama-server's `meta.n_ctx`; 0 if not named.

    Providers have other names for it.
    """
    meta = model.get("meta")
    places = [*map(model.get, _LENGTHS), meta.get("n_ctx") if isinstance(meta, dict) else None]
    for known in places:
        if isinstance(known, str) and known.isdecimal():
            known = int(known)
        if isinstance(known, int | float) and not isinstance(known, bool) and 0 < known < 2**53:
            return int(known)
    return 0
