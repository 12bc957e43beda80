"""The interface of an endpoint: it takes a `Call` and the services it names, and returns a `Reply`. asyncio.

Django's adapter (web/views.py) and the ASGI app (asgi/application.py) each build a Call, await the route's endpoint and
send its Reply. Endpoints know neither of them. The services are classes such as `Answers` (api/answers.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl

from streamserve.protocol.errors import BadRequest, UnsupportedMedia
from streamserve.protocol.json_body import check_encoding, check_size, decode_json
from streamserve.protocol.limits import Limits
from streamserve.protocol.measures import Arrival, network_seconds
from streamserve.protocol.rates import Rates
from streamserve.protocol.trace import Trace
from streamserve.streams.reader.channel import nothing
from streamserve.streams.stream import Stream
from streamserve.tracing.spans import incoming

T = TypeVar("T")

_MAX_QUERY_FIELDS = 1000


@dataclass(frozen=True, slots=True)
class Caller:
    """Limits are counted per `owner`; every caller of a `tenant` ("": the owner alone) may read and stop its streams.

    Owners that begin with "anon:" share the slots for visitors without a login. `latency_class` applies to its requests
    that name none; "": the route's or the model's. Callers with the same `counted_as` have one caller's limits and one
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
    body: Callable[[], AsyncIterator[bytes]]  # bounded by the guard (asgi/guard.py)
    wait: Wait
    params: Mapping[str, str] = field(default_factory=dict)
    query_string: str = ""
    path: str = ""  # as the client sent it
    is_head: bool = False
    is_http1: bool = True  # a response may end its connection by a header
    address: str = ""  # of the client, from the server
    received_at: float = field(default_factory=time.monotonic)  # when the server had the request's head
    started: list[Stream] = field(default_factory=list)  # the answers that it has begun
    named: list[str] = field(default_factory=list)  # the model or pipeline that its body names
    origin: Trace | None = None  # the trace of what it is a part of, as a batch

    def query(self) -> dict[str, str]:
        """Return the query parameters. Raises BadRequest for a parameter that is given twice."""
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

    async def json(self, limits: Limits, *, optional: bool = False) -> dict[str, Any]:
        """Return the JSON object in the body; {} for an empty body if it is `optional`."""
        check_encoding(self.headers.get("content-encoding", ""))
        body = bytearray()
        async for piece in self.body():
            body += piece
            check_size(len(body), limits)  # also where no guard stands
        if optional and not body:
            return {}
        if self.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise UnsupportedMedia("Send JSON, with 'Content-Type: application/json'.", param="Content-Type")
        values = decode_json(bytes(body), limits)
        self.named.extend(name for key in ("model", "pipeline") if isinstance(name := values.get(key), str))
        return values

    @property
    def trace(self) -> Trace | None:
        """The distributed trace that it belongs to; None for none."""
        return self.origin or incoming(self.headers)

    @property
    def model(self) -> str:
        """The model or pipeline that it asks, as far as it is known: "" before its body is read, or for the default."""
        return self.params.get("name") or next(iter(self.named), "")


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

    async def run(self, send: Callable[[bytes], Awaitable[None]], num_untaken: Callable[[], int] = nothing) -> None:
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
    """The response of an endpoint. The headers of a `Body` override `headers`.

    `rates`: what is left of the caller's limits over time, where no answer has begun that says it.
    """

    status: int = 200
    body: bytes | Body = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    rates: Rates | None = None


Endpoint = Callable[..., Awaitable[Reply]]  # takes a `Call`, and the services that it names


def json_reply(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """Return `value` as a JSON response that is not cached."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    fixed = {"Content-Type": "application/json", "Cache-Control": "no-store"}
    return Reply(status=status, body=body, headers={**fixed, **(headers or {})})
