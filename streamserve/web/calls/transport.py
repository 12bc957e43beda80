"""`http_client`: the site's own models for libraries that speak to a server, without a socket. Needs httpx.

    AsyncOpenAI, pydantic-ai, LangChain ── httpx ── SiteTransport ──► a route's endpoint ──► frames as they come

A request goes to the function of its route (api/routes.py), and the response is read as the library reads it: the
model is asked for no more than that.

    in a run of a pipeline    as `run.generate`: within the run's place, its caller's share of the engine, its class and
                              its deadline; no row. A finished answer is kept with the run, and not asked again
    anywhere else             as the Python API: an answer of `user`, of `tenant` or of the site, with row and limits

An answer within a run has a stream in memory (`inner_streams`). asyncio.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from streamserve.api.answers import Answers
from streamserve.api.call import Body, Call, Caller, Reply
from streamserve.api.routes import ROUTES, Route, failure, unknown_route
from streamserve.clients.base import EngineClient
from streamserve.clients.pipeline.journal import Place
from streamserve.clients.pipeline.run import INNER_COUNTS, Run, current_run
from streamserve.protocol.errors import StreamserveError, Unauthorized
from streamserve.protocol.events import is_success
from streamserve.protocol.ids import request_id_of
from streamserve.protocol.requests import Admission, GenerateRequest
from streamserve.streams.stream import Stream
from streamserve.web.site import get_site

try:
    import httpx
except ImportError as error:
    raise ImportError("The site's models in process need httpx: pip install 'streamserve[remote]'") from error

logger = logging.getLogger("streamserve.pipelines")

BASE_URL = "http://streamserve/v1"
_MAX_KEPT_BYTES = 512 * 1024  # of a response in a run; a larger one is asked again in another attempt


def http_client(*, user: Any = None, tenant: str = "") -> httpx.AsyncClient:
    """Return an HTTP client whose every request the site itself answers; `base_url` is that of its /v1.

    In a run the caller is the run's. Elsewhere an answer is of `user`, or of the site under the name `tenant`.
    """
    return httpx.AsyncClient(transport=SiteTransport(user=user, tenant=tenant), base_url=BASE_URL, timeout=None)


def openai_client(*, user: Any = None, tenant: str = "") -> Any:
    """Return an `AsyncOpenAI` whose models are the site's. Needs `openai`."""
    try:
        from openai import AsyncOpenAI
    except ImportError as error:
        raise ImportError("openai_client needs openai: pip install openai") from error
    client = http_client(user=user, tenant=tenant)
    return AsyncOpenAI(base_url=BASE_URL, api_key="in-process", http_client=client, max_retries=0)


class SiteTransport(httpx.AsyncBaseTransport):
    """See above. It holds nothing open: one serves every event loop, and needs no closing."""

    def __init__(self, *, user: Any = None, tenant: str = "") -> None:
        self._user, self._tenant = user, tenant

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request."""
        asked = _Asked(request, await request.aread())
        run = current_run()
        if run is not None:
            return await _answer_in_run(asked, run)
        reply, _ = await asked.reply(self._caller(), get_site().services.by_name)
        return _response(reply)

    def _caller(self) -> Caller:
        if self._user is None:
            return Caller(f"site:{self._tenant}")
        if not self._user.pk or not self._user.is_active:
            raise Unauthorized(f"The user {self._user} has no account that is active.")
        return Caller(f"user:{self._user.pk}")


class _Asked:
    """One request of a library."""

    def __init__(self, request: httpx.Request, body: bytes) -> None:
        self._request, self._body = request, body
        self.headers = {name.lower(): value for name, value in request.headers.items()}
        self.name = f"call {request.method} {request.url.raw_path.decode()} {hashlib.sha256(body).hexdigest()[:16]}"

    async def reply(self, caller: Caller, services: Mapping[str, object]) -> tuple[Reply, list[Stream]]:
        """Return the reply of its route, and the answers that it has begun."""
        method, path = self._request.method, self._request.url.path
        route, params = _route_of(path)
        call = Call(
            method="GET" if method == "HEAD" else method,
            is_head=method == "HEAD",
            headers=self.headers,
            caller=caller,
            request_id=request_id_of(self.headers.get("x-request-id", "")),
            body=self._pieces,
            wait=_wait,
            params=params,
            query_string=self._request.url.query.decode(),
            path=path,
        )
        try:
            if method not in route.methods:
                raise route.wrong_method(method)
            return await route.reply(call, services), call.started
        except StreamserveError as error:
            return route.error_reply(error, call.request_id, self.headers), call.started
        except Exception:
            logger.exception("request %s to %s failed", call.request_id, path)
            return route.error_reply(failure(call.request_id), call.request_id, self.headers), call.started

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield self._body


async def _wait(work: Any) -> Any:
    return await work


@cache
def _routes() -> list[tuple[Any, Route]]:
    """Return what callers may ask of /v1, with the patterns of the paths."""
    asked = [route for route in ROUTES if route.access.scope == "chat" and route.path.startswith("v1/")]
    return [(route.pattern(), route) for route in asked]


def _route_of(path: str) -> tuple[Route, dict[str, str]]:
    for pattern, route in _routes():
        if (match := pattern.fullmatch(path)) is not None:
            return route, match.groupdict()
    return unknown_route("v1/"), {}


# In a run


async def _answer_in_run(asked: _Asked, run: Run) -> httpx.Response:
    """Answer within the run, or repeat what another attempt of the run has been answered."""
    place = run.place(asked.name)
    if place.found is not None:
        run.count_inner(place.found["usage"])
        return httpx.Response(200, headers=place.found["headers"], text=place.found["text"])
    site = get_site()
    answers = _RunAnswers(site.inner_streams, site.services.answers, run)
    services = replace(site.services, answers=answers, chats=None, conversations=None)
    reply, started = await asked.reply(_caller_of(run), services.by_name)
    ends = _Ends(run, place, started)
    if isinstance(reply.body, bytes):
        if reply.status == 200:
            await ends.keep(reply.headers, reply.body)
        return _response(reply)
    return _response(reply, ends)


def _caller_of(run: Run) -> Caller:
    own = run.inner_admission(on_disconnect="abort")
    return Caller(own.owner, own.tenant, latency_class=run.latency_class, counted_as=own.counted_as)


class _RunAnswers(Answers):
    """Answers within a run: of the run's caller, in the run's place, as the pipeline asks."""

    def __init__(self, streams: Any, of_site: Answers, run: Run) -> None:
        config = replace(of_site.config, takes_prompt_in_url=False, unseal=None, only_on_disconnect="abort")
        super().__init__(streams, config, salt_of=lambda tenant: "")
        self._run = run

    async def clients_of(self, caller: Caller) -> Mapping[str, EngineClient]:
        """Return the models: those that a pipeline asks are its own, whoever calls it."""
        return {alias: client for alias, client in self.clients.items() if self._run.may_ask(alias)}

    async def admission(self, caller: Caller, **decided: Any) -> Admission:
        """Return the run's own."""
        own = self._run.inner_admission(on_disconnect=decided.get("on_disconnect", "abort"))
        return replace(own, trace=decided.get("trace") or own.trace)

    async def start(
        self, caller: Caller, request: GenerateRequest, on_disconnect: str = "abort", **more: Any
    ) -> Stream:
        """Start an answer within the run. Its deadline is the run's."""
        more.pop("once", None)
        return await super().start(caller, self._run.as_inner(request), "abort", **more)


class _Ends:
    """What follows a response in a run: its usage is counted, and it is kept."""

    def __init__(self, run: Run, place: Place, started: list[Stream]) -> None:
        self._run, self._place, self._started = run, place, started

    @property
    def are_over(self) -> bool:
        """Whether every answer has ended."""
        return all(stream.terminal is not None for stream in self._started)

    async def keep(self, headers: Mapping[str, str], body: bytes) -> None:
        """Count, and keep the response, if it is of a whole answer."""
        usages = [stream.usage for stream in self._started]
        total = {name: sum(getattr(usage, name) for usage in usages) for name in INNER_COUNTS}
        self._run.count_inner(total)
        for stream in self._started:
            get_site().inner_streams.forget(stream.id)
        if len(body) <= _MAX_KEPT_BYTES and all(_is_whole(stream) for stream in self._started):
            shown = {name: value for name, value in headers.items() if name.lower() == "content-type"}
            await self._place.keep({"headers": shown, "text": body.decode(), "usage": total})


def _is_whole(stream: Stream) -> bool:
    return stream.terminal is not None and is_success(stream.terminal)


class _Frames(httpx.AsyncByteStream):
    """The body of a streamed response. Closing it ends the answer."""

    def __init__(self, body: Body, headers: Mapping[str, str], ends: _Ends | None) -> None:
        self._body, self._headers, self._ends = body, headers, ends
        self._pieces = self._read()  # openai's client reads on where it has left off

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces

    async def _read(self) -> AsyncIterator[bytes]:
        whole = bytearray()
        ends = self._ends
        try:
            async for frames in self._body:
                if ends is not None and len(whole) <= _MAX_KEPT_BYTES:
                    whole += frames
                if ends is not None and ends.are_over and getattr(self._body, "is_over", False):
                    # Before the last frame: a library may read nothing after it.
                    await ends.keep(self._headers, bytes(whole))
                    ends = None
                yield frames
        finally:
            self._body.close()

    async def aclose(self) -> None:
        self._body.close()


def _response(reply: Reply, ends: _Ends | None = None) -> httpx.Response:
    """Return a reply as the library reads it."""
    if isinstance(reply.body, bytes):
        return httpx.Response(reply.status, headers=dict(reply.headers), content=reply.body)
    raw = {**reply.headers, **{name.decode(): value.decode() for name, value in reply.body.headers}}
    raw = {name: value for name, value in raw.items() if name.lower() != "content-encoding"}
    return httpx.Response(reply.status, headers=raw, stream=_Frames(reply.body, raw, ends))
