"""`StreamApp`: the routes of streamserve as one ASGI app, for any framework or none, and its `Request`. No Django.

    from streamserve.asgi import app

    ai = app(models={"chat": "Qwen/Qwen3-0.6B"}, authenticate=who)
    uvicorn module:ai                                          alone: it answers lifespan itself
    Starlette(routes=[Mount("/ai", ai)], lifespan=...)         mounted: `async with ai:` in the host's lifespan

Engines, log and streams are made on first use, on the event loop that serves. It serves one loop at a time.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from streamserve.api.answers import AnswerConfig, Defaults
from streamserve.api.call import ANONYMOUS, Call, Caller, Reply, admitted
from streamserve.api.routes import ANYONE, PROBES, ROUTES, Access, Route, failure, unknown_route
from streamserve.asgi.drain import Drain
from streamserve.asgi.guard import Guard, GuardedApp, RouteBound, limited_client
from streamserve.asgi.handover import respond
from streamserve.asgi.middleware import StreamMiddleware
from streamserve.asgi.receiver import RECEIVER, Receiver
from streamserve.asgi.site import LocalSite
from streamserve.asgi.types import Receive, Scope, Send, is_http1
from streamserve.clients.base import EmbeddingClient, EngineClient
from streamserve.clients.factory import make_client, make_embedder, remote_client
from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import LaunchConfig
from streamserve.clients.process.embedder import ProcessEmbedder
from streamserve.clients.remote.config import RemoteConfig
from streamserve.dialects.openai.chat import REASONING_FIELDS
from streamserve.engine.config import EmbedderConfig, EngineConfig, ModelConfig
from streamserve.protocol.errors import StreamserveError, Unauthorized
from streamserve.protocol.ids import request_id_of
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GenerateRequest
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import EventLog, MemoryLog
from streamserve.streams.registry import Streams
from streamserve.streams.store import counted_at
from streamserve.streams.stream import Stream

logger = logging.getLogger("streamserve.asgi")

Model = str | ModelConfig | RemoteConfig | EngineClient
# Takes the ASGI scope; None is an unknown caller: 401. Runs on the event loop, so it must not block. A StreamserveError
# that it raises becomes the response.
Authenticate = Callable[[Scope], Caller | Awaitable[Caller | None] | None]

# Only the scope `chat`, and routes that need these services only: other routes need users and a database.
_SERVICES = {"answers", "ops", "threads", "responses"}
_ROUTES = [(route.pattern(), route) for route in ROUTES if route.access.scope == "chat" and route.needs <= _SERVICES]
_ELSEWHERE = unknown_route("")


def _route_of(path: str) -> tuple[Route, dict[str, str]]:
    """Return the route of a path, and the variable parts of that."""
    for pattern, route in _ROUTES:
        match = pattern.fullmatch(path)
        if match is not None:
            return route, match.groupdict()
    return _ELSEWHERE, {}


def anyone(scope: Scope) -> Caller:
    """Return one visitor for every request. All callers share their streams: an id is enough to read a stream.

    Limits and shares of the engine are counted per client address.
    """
    return Caller("anon:anyone", counted_as=counted_at(limited_client((scope.get("client") or ("",))[0] or "")))


class StreamApp:
    """An ASGI app.

    `models`: alias → a folder, a hub id or "echo"; a `ModelConfig`; a `RemoteConfig`, for a server elsewhere; or an
    `EngineClient`, which is closed with the app.
    `embedding_models`: alias → a folder, a hub id or "echo", or an `EmbedderConfig`.
    `authenticate(scope)` returns the `Caller`, or None for a 401; it may be async. `authenticate=anyone` accepts every
    request. `state_dir`: engines are separate processes, shared by all processes with this folder; None: they run in
    this process. `prefix`: a path before all routes, where no mount removes it. `default_model` "": the first.
    `prompt_in_url`: `GET /streams/new?prompt=` starts answers, and access logs have their prompts.
    `reader_timings`: readers may report what they measured of their answers (docs/monitoring.md).
    `reasoning_field`: where chat completions show thinking, one of REASONING_FIELDS. `defaults`: system prompts and
    latency classes of models and routes. `log` (None: in memory) holds the
    events; no other process reads them, whatever the log.
    """

    def __init__(
        self,
        *,
        models: Mapping[str, Model],
        authenticate: Authenticate,
        embedding_models: Mapping[str, str | EmbedderConfig] = {},
        default_model: str = "",
        state_dir: str | Path | None = None,
        engine: EngineConfig | None = None,
        log: EventLog | None = None,
        settings: StreamConfig | None = None,
        limits: Limits | None = None,
        prefix: str = "",
        prompt_in_url: bool = False,
        reader_timings: bool = True,
        reasoning_field: str = REASONING_FIELDS[0],
        defaults: Defaults | None = None,
    ) -> None:
        if not callable(authenticate):
            raise TypeError("authenticate must be a function of the ASGI scope; `anyone` accepts every request")
        if not models or (default_model and default_model not in models):
            raise ValueError(f"models must name at least one model, and {default_model or 'the default'!r} among them")
        if embedding_models.keys() & models.keys():
            raise ValueError(f"{min(embedding_models.keys() & models.keys())!r} names two models")
        self._models, self._embedding_models, self._authenticate = models, embedding_models, authenticate
        self._state_dir = None if state_dir is None else str(Path(state_dir).resolve())
        self._engine, self._log = engine or EngineConfig(), log
        self._settings = settings or StreamConfig()
        if reasoning_field not in REASONING_FIELDS:
            raise ValueError(f"reasoning_field is one of {', '.join(REASONING_FIELDS)}, not {reasoning_field!r}")
        self._prefix = prefix.rstrip("/")
        self._config = AnswerConfig(
            limits=limits or Limits(),
            default_model=default_model or next(iter(models)),
            defaults=defaults or Defaults(),
            takes_prompt_in_url=prompt_in_url,
            takes_timings=reader_timings,
            gap_budgets={
                name: one.gap_p95_seconds for name, one in self._engine.classes.items() if one.gap_p95_seconds
            },
            reasoning_field=reasoning_field,
        )
        self._config.defaults.check_models(models)
        self._site: LocalSite | None = None
        self._drain: Drain | None = None
        self._is_draining = False
        self._guarded = GuardedApp(self._serve, Guard(bound_of=self._bound_of))
        self._middleware = StreamMiddleware(self._guarded)
        self._middleware.on_shutdown(self.shutdown)
        self._middleware.on_drain(self._begin_to_drain)
        self._middleware.on_going_away(self._shut_down_streams)
        self._middleware.serve_while_draining(*(f"{self._prefix}/{name}" for name in PROBES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outer = scope.get("streamserve")
        if outer is None:
            await self._middleware(scope, receive, send)
            return
        outer.on_shutdown(self.shutdown)
        outer.on_going_away(self._shut_down_streams)
        drain = scope.get("extensions", {}).get("streamserve.flow", {}).get("drain")
        if drain is not None and drain is not self._drain:
            self._drain = drain
            drain.on_drain(self._begin_to_drain)
            if drain.is_draining:
                self._begin_to_drain()
        await self._guarded(scope, receive, send)

    # For the host application

    async def startup(self) -> None:
        """Start loading the models; return at once. Without it the first request does."""
        self._serving().start_loading()

    async def shutdown(self) -> None:
        """End every stream, and close engines and log. A second call does nothing."""
        site, self._site, self._is_draining = self._site, None, False
        if site is not None:
            await site.aclose()

    async def __aenter__(self) -> Self:
        await self.startup()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    @property
    def streams(self) -> Streams:
        """The streams, for a `Delivery` in the host's own endpoint."""
        return self._serving().streams

    @property
    def clients(self) -> Mapping[str, EngineClient]:
        """The engines, by alias."""
        return self._serving().clients

    async def start_stream(self, caller: Caller, request: GenerateRequest, *, on_disconnect: str = "park") -> Stream:
        """Start an answer within the caller's limits, for the host's own endpoint. Raises StreamserveError."""
        return await self._serving().answers.start(caller, request, on_disconnect)

    # The site

    def _serving(self) -> LocalSite:
        loop = asyncio.get_running_loop()
        if self._site is None:
            clients = {alias: self._client(alias, model) for alias, model in self._models.items()}
            log = self._log or MemoryLog()
            self._site = LocalSite(
                clients,
                log,
                self._settings,
                {name: one.queue_seconds for name, one in self._engine.classes.items()},
                self._config,
                {alias: self._embedder(alias, model) for alias, model in self._embedding_models.items()},
            )
            self._site.ops.is_draining = self._is_draining
        if self._site.loop is not loop:
            raise RuntimeError(
                "This app still serves another event loop. Shut it down there first; in tests: `with TestClient(...)`."
            )
        return self._site

    def _client(self, alias: str, model: Model) -> EngineClient:
        if isinstance(model, RemoteConfig):
            return remote_client(replace(model, alias=alias))
        if isinstance(model, str):
            model = ModelConfig(alias=alias, path=model)
        if not isinstance(model, ModelConfig):
            return model
        model = replace(model, alias=alias)
        if self._state_dir is None:
            return make_client(model, self._engine)
        return ProcessClient(
            LaunchConfig(model=model, engine=self._engine, site=self._state_dir, state_dir=self._state_dir)
        )

    def _embedder(self, alias: str, model: str | EmbedderConfig) -> EmbeddingClient:
        config = EmbedderConfig(alias=alias, path=model) if isinstance(model, str) else replace(model, alias=alias)
        if self._state_dir is None:
            return make_embedder(config)
        named = ModelConfig(alias=alias, path="")
        return ProcessEmbedder(
            LaunchConfig(model=named, embedder=config, site=self._state_dir, state_dir=self._state_dir)
        )

    def _begin_to_drain(self) -> None:
        self._is_draining = True
        if self._site is not None:
            self._site.begin_to_drain()

    def _shut_down_streams(self) -> None:
        if self._site is not None:
            self._site.streams.shut_down()

    # Requests

    def _bound_of(self, path: str) -> RouteBound:
        route, _ = _route_of(_below(path, self._prefix))
        return RouteBound(body_bytes=self._config.limits.max_body_bytes, error_json=route.error_json)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(Request(scope, receive, send, self._prefix))
        elif scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})  # before accept: a 403

    async def _live(self, receive: Receive, send: Send) -> None:
        """Answer lifespan. The middleware runs `shutdown` before the message arrives here."""
        await receive()
        await self.startup()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, request: Request) -> None:
        route, params = _route_of(request.path)
        try:
            if request.method not in route.methods:
                raise route.wrong_method(request.method)
            caller = await self._admit(route.access, request.scope)
            call = Call(
                method="GET" if request.method == "HEAD" else request.method,
                is_head=request.method == "HEAD",
                path=request.scope["path"],
                headers=request.headers,
                is_http1=is_http1(request.scope),
                caller=caller,
                request_id=request.id,
                body=request.chunks,
                wait=request.wait,
                params=params,
                query_string=request.query_string,
                address=(request.scope.get("client") or ("",))[0],
                received_at=admitted(request.scope["streamserve.received_at"], request.headers),
            )
            reply = await route.reply(call, self._serving().services if route.services else {})
        except ClientLeft:
            return
        except StreamserveError as error:
            reply = route.error_reply(error, request.id, request.headers)
        except Exception:
            # The edge of a request: the log gets the error, the client gets the request's id.
            logger.exception("request %s to %s failed", request.id, request.path)
            reply = route.error_reply(failure(request.id), request.id, request.headers)
        await request.send(reply)

    async def _admit(self, access: Access, scope: Scope) -> Caller:
        if access.callers == ANYONE and not access.identifies:
            return ANONYMOUS
        try:
            return await self._caller(scope)
        except StreamserveError:
            if access.identifies:
                return ANONYMOUS
            raise

    async def _caller(self, scope: Scope) -> Caller:
        caller = self._authenticate(scope)
        if inspect.isawaitable(caller):
            caller = await caller
        if caller is None:
            raise Unauthorized("This request has no valid credentials. Send your credentials.")
        return caller


T = TypeVar("T")


class ClientLeft(Exception):
    """The client disconnected before the response began; no response is sent."""


class Request:
    """Header names are lower-case. `path` is without the mount's root_path and the app's prefix."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, prefix: str = "") -> None:
        self.method: str = scope["method"]
        self.path = _below(_below(scope["path"], scope.get("root_path", "")), prefix)
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self.id = request_id_of(self.headers.get("x-request-id", ""))
        self.scope = scope
        self._receive, self._send = receive, send

    @property
    def query_string(self) -> str:
        """The query as text; a query that is not UTF-8 is decoded as Latin-1."""
        raw = self.scope.get("query_string", b"")
        try:
            return raw.decode()  # type: ignore[no-any-return]
        except UnicodeDecodeError:
            return raw.decode("latin-1")  # type: ignore[no-any-return]

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the body as they arrive. Raises ClientLeft."""
        has_more = True
        while has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            yield message.get("body", b"")
            has_more = message.get("more_body", False)

    async def wait(self, work: Coroutine[Any, Any, T], /) -> T:
        """Return the result of `work`; on a disconnect cancel it and raise ClientLeft. The body was read before."""
        receiver: Receiver = self.scope[RECEIVER]
        working = asyncio.create_task(work, name="whole answer")
        try:
            await asyncio.wait({working, receiver.watching()}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientLeft
            return working.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def send(self, reply: Reply) -> None:
        """Send the response. Inside a StreamMiddleware a body that streams is handed over."""
        body = reply.body
        if not isinstance(body, bytes):
            headers = _raw({**reply.headers, "x-request-id": self.id})
            await respond(self.scope, self._receive, self._send, body, status=reply.status, headers=headers)
            return
        length = {} if reply.status == 204 else {"content-length": str(len(body))}
        headers = _raw({**reply.headers, **length, "x-request-id": self.id})
        await self._send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})


def _below(path: str, root: str) -> str:
    """Return `path` without `root`. Some servers and mounts leave `root` in `path`, some remove it."""
    root = root.rstrip("/")
    return path[len(root) :] if root and (path + "/").startswith(root + "/") else path


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
