"""The interface of an endpoint: it takes a `Call` and a `Site` and returns a `Reply`. Framework-free; asyncio.

Django's adapter (web/views.py) and the ASGI app (asgi/application.py) each build a Call, await the route's endpoint and
send its Reply. Endpoints know neither of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl

from streamserve.clients.base import EngineClient
from streamserve.dialects.openai.stored_chat import ListQuery, StoredChat
from streamserve.protocol.errors import BadRequest, UnsupportedMedia
from streamserve.protocol.json_body import check_head, decode_json, too_large
from streamserve.protocol.measures import Arrival, network_seconds
from streamserve.protocol.requests import GenerateRequest, Limits
from streamserve.streams.quota import Places
from streamserve.streams.reader.delivery import NO_FLOW, Flow
from streamserve.streams.registry import Streams
from streamserve.streams.store import Once, Record
from streamserve.streams.stream import Stream

T = TypeVar("T")

_MAX_QUERY_FIELDS = 1000


@dataclass(frozen=True, slots=True)
class Caller:
    """Limits are counted per `owner`; every caller of a `tenant` ("": the owner alone) may read and stop its streams.

    Owners that begin with "anon:" share the slots for visitors without a login. `latency_class` is that of its requests
    which name none; "": the route's or the model's. Callers with the same `counted_as` have one caller's limits and one
    tenant's share of the engine together, and nothing else in common: see `counted_at`.
    """

    owner: str
    tenant: str = ""
    latency_class: str = ""
    counted_as: str = ""

    def __post_init__(self) -> None:
        if not self.owner:
            raise ValueError("a Caller needs an owner; return None for an unknown caller")
        if not self.tenant:
            object.__setattr__(self, "tenant", self.owner)


def admitted(received_at: float, headers: Mapping[str, str]) -> Arrival:
    """Return a request's arrival, as far as it is known when its caller is admitted: call it then."""
    now, sent = time.monotonic(), headers.get("x-request-start")
    network = None if sent is None else network_seconds(sent, time.time() - (now - received_at))
    return Arrival(received_at, admitted_at=now, network_seconds=network)


ANONYMOUS = Caller("nobody")  # the caller at routes without authentication


class Wait(Protocol):
    """Await `work`; if the client disconnects first, cancel it and raise. Call it after the body has been read."""

    async def __call__(self, work: Coroutine[Any, Any, T], /) -> T: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to one route. Header names are in lower case; `params` are the variable parts of the path.

    A HEAD has the method "GET" and `is_head`: it gets the headers of the GET, and starts and holds nothing.
    """

    method: str
    headers: Mapping[str, str]
    caller: Caller
    request_id: str
    body: Callable[[], AsyncIterator[bytes]]  # unbounded: read it through `chunks` or `json`
    wait: Wait
    params: Mapping[str, str] = field(default_factory=dict)
    query_string: str = ""
    path: str = ""  # as the client sent it
    is_head: bool = False
    address: str = ""  # of the client, from the server
    received_at: float = field(default_factory=time.monotonic)  # when the server had the request's head

    def query(self) -> dict[str, str]:
        """Return the query parameters. Raises BadRequest for one that is given twice."""
        try:
            pairs = parse_qsl(self.query_string, keep_blank_values=True, max_num_fields=_MAX_QUERY_FIELDS)
        except ValueError:
            raise BadRequest("The query has too many parameters.") from None
        out = dict(pairs)
        if len(out) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in out if names.count(name) > 1)
            message = f"The parameter {twice!r} is given {names.count(twice)} times. Give it once."
            raise BadRequest(message, param=twice)
        return out

    async def chunks(self, limits: Limits) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, up to the limit. Its length and encoding are checked before the first byte."""
        check_head(self.headers.get("content-length", ""), self.headers.get("content-encoding", ""), limits)
        num_bytes = 0
        async for chunk in self.body():
            num_bytes += len(chunk)
            if num_bytes > limits.max_body_bytes:
                raise too_large(limits.max_body_bytes)
            yield chunk

    async def json(self, limits: Limits, *, optional: bool = False) -> dict[str, Any]:
        """Return the JSON object in the body; {} for an empty body if it is `optional`."""
        body = b"".join([chunk async for chunk in self.chunks(limits)])
        if optional and not body:
            return {}
        if self.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise UnsupportedMedia("Send JSON, with 'Content-Type: application/json'.", param="Content-Type")
        return decode_json(body, limits)

    async def start(
        self,
        site: Site,
        request: GenerateRequest,
        on_disconnect: str,
        *,
        once: Once | None = None,
        begins_unloaded: bool = False,
        places: Places | None = None,
    ) -> Stream:
        """Do what `Site.start` does for the caller, for as long as the client stays: it may wait for a place."""
        starting = site.start(
            self.caller,
            request,
            on_disconnect,
            received_at=self.received_at,
            once=once,
            begins_unloaded=begins_unloaded,
            places=places,
        )
        return await self.wait(starting)


class Named(Protocol):
    """Something with an id for log lines."""

    @property
    def id(self) -> str: ...


class Body(Protocol):
    """The body of a streamed response, such as `Delivery`. Run it, iterate it or close it; see `Closing`."""

    @property
    def stream(self) -> Named: ...

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response's headers, in ASGI form."""

    async def run(self, send: Callable[[bytes], Awaitable[None]], flow: Flow = NO_FLOW) -> None:
        """Send everything, waiting for `send` each time. Cancel it to disconnect."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the bytes that `run` sends."""

    def cut_off(self) -> bytes | None:
        """Close because the server shuts down; return the last bytes to send, or None."""

    def on_close(self, call: Callable[[], None]) -> None:
        """Call `call` once when the body closes; at once if it has."""

    def close(self) -> None:
        """Detach the reader. Idempotent and synchronous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The response of an endpoint. The headers of a `Body` override `headers`."""

    status: int = 200
    body: bytes | Body = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def json_reply(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """Return `value` as a JSON response that is not cached."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    fixed = {"Content-Type": "application/json", "Cache-Control": "no-store"}
    return Reply(status=status, body=body, headers={**fixed, **(headers or {})})


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A stream that the caller may read. `stream` is None once its events are dropped, `record` without a database."""

    stream: Stream | None
    record: Record | None = None


class StoredChats(Protocol):
    """The chat completions that a site stores for its tenants. Those of other tenants are as unknown ids."""

    async def keep(self, stream: Stream, messages: Sequence[Mapping[str, Any]], metadata: Mapping[str, str], /) -> None:
        """Store the answer of that stream once it has ended well; nothing where the site does not store."""

    async def fill(self, stream_id: str, /) -> None:
        """Store an answer that has just ended, if it is kept, without waiting for the end of its stream's record."""

    async def find(self, caller: Caller, stream_id: str, /) -> StoredChat | None:
        """Return the completion; None for one that is not stored, or not whole. Raises NotFound for a deleted one."""

    async def page(self, caller: Caller, query: ListQuery, /) -> tuple[Sequence[StoredChat], bool]:
        """Return a part of the tenant's completions, and whether there are more."""

    async def annotate(self, caller: Caller, stream_id: str, metadata: Mapping[str, str], /) -> StoredChat:
        """Replace the metadata. Raises NotFound, NotFinished."""

    async def delete(self, caller: Caller, stream_id: str, /) -> None:
        """Delete the completion with its events. Raises NotFound, NotFinished."""


class Site(Protocol):
    """The services of an endpoint: the Django site (web/site.py), or one process without a database (asgi/site.py)."""

    @property
    def streams(self) -> Streams: ...

    @property
    def clients(self) -> Mapping[str, EngineClient]: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def default_model(self) -> str: ...

    def default_class(self, route: str, model: str) -> str:
        """Return the latency class of requests that name none, on a route ("streams", "websocket") for a model."""

    @property
    def is_draining(self) -> bool:
        """Whether the server is shutting down and refuses new answers."""

    @property
    def is_debug(self) -> bool:
        """Whether responses may name folders and libraries: only on a developer's machine."""

    @property
    def takes_prompt_in_url(self) -> bool:
        """Whether `GET /streams/new?prompt=` starts answers: servers write addresses into their access logs."""

    @property
    def reasoning_field(self) -> str:
        """Where chat completions show thinking: `reasoning_content`, `reasoning` or `both`."""

    @property
    def unseal(self) -> Callable[[str], str] | None:
        """Opens the system prompt of a chat element's page; None where there are no such pages."""

    @property
    def stored_chats(self) -> StoredChats | None:
        """The chat completions that callers asked to store; None without a database."""

    def with_own_system(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request as `start` gives it to its model: with the site's own system prompt, where it has one."""

    async def health(self) -> Mapping[str, Any]:
        """Return the fields of `/readyz` beside the models; a `database` that is not "ok" is a reason."""

    async def work(self) -> Mapping[str, Mapping[str, int]]:
        """Return how much durable work waits and runs: kind → state → rows; nothing where there is none."""

    async def start(
        self,
        caller: Caller,
        request: GenerateRequest,
        on_disconnect: str,
        /,
        *,
        received_at: float | None = None,
        once: Once | None = None,
        begins_unloaded: bool = False,
        places: Places | None = None,
    ) -> Stream:
        """Start an answer for `caller`, within its limits; its times count from `received_at`.

        With `once` return the answer that its key has started before, without a wait. Beyond the caller's places this
        waits, and while the model loads, but for an answer that `begins_unloaded`: endpoints call it through
        `Call.start`. `places`: of several answers that begin together. Raises StreamserveError.
        """

    async def find(self, caller: Caller, *, stream_id: str = "", log_id: str = "") -> Found:
        """Return the stream of that id or log id, with one query at most.

        Raises NotFound for another tenant's stream as for an unknown id; LogUnavailable.
        """


def with_class(request: GenerateRequest, asked: str | None, caller: Caller, site: Site, route: str) -> GenerateRequest:
    """Return the request in its latency class: what it asked for, or what key, route or model have by default."""
    name = asked or caller.latency_class or site.default_class(route, request.model)
    return request if name == request.latency_class else replace(request, latency_class=name)


class AuditedSite(Site, Protocol):
    """A site with users and a record of watches. Routes with the scope "watch" need one."""

    async def find_for_watcher(self, caller: Caller, stream_id: str) -> tuple[str, Found]:
        """Return the name of the caller's user, and the stream, of any tenant.

        Raises NotFound for an unknown id, and for every id if the user may not watch.
        """

    async def watch(self, call: Call, username: str, stream: Stream, after: int) -> Body:
        """Record the watch and return its delivery."""
