"""`StreamApp`: the routes of streamserve as one ASGI app, for any framework or none. No Django anywhere below.

    from streamserve.asgi import app

    ai = app(models={"chat": "Qwen/Qwen3-0.6B"}, authenticate=who)
    uvicorn module:ai                                          alone: it answers lifespan itself
    Starlette(routes=[Mount("/ai", ai)], lifespan=...)         mounted: `async with ai:` in the host's lifespan

Everything is made on first use, on the event loop that serves; one loop at a time.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from streamserve.asgi.callers import Authenticate, Caller
from streamserve.asgi.endpoints import Call, Route, find_route
from streamserve.asgi.middleware import StreamMiddleware
from streamserve.asgi.request import ClientLeft, Request
from streamserve.asgi.site import Service
from streamserve.asgi.types import Receive, Scope, Send
from streamserve.clients.base import EngineClient
from streamserve.clients.factory import make_client
from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import LaunchConfig
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.protocol.errors import (
    MethodNotAllowed,
    StreamserveError,
    Unauthorized,
    headers_of,
    to_body,
)
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GenerateRequest
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import EventLog, MemoryLog
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream

logger = logging.getLogger("streamserve.asgi")

_NOBODY = Caller("nobody")  # at routes that are open
Model = str | ModelConfig | EngineClient


class StreamApp:
    """An ASGI app.

    `models`: alias → a folder, a hub id or "echo"; a `ModelConfig`; or an `EngineClient`, which is closed with the app.
    `authenticate(scope)` returns the `Caller`, or None for a 401; it may be async. To let everybody in, say so:
    `authenticate=anyone`. `state_dir`: engines are processes of their own, which all workers that name this folder
    share; None: they live in this process. `prefix`: a path before all routes, where no mount takes it off.
    `default_model` "": the first. `log` (None: in memory) holds the events; streams are this process's own with any.
    """

    def __init__(
        self,
        *,
        models: Mapping[str, Model],
        authenticate: Authenticate,
        default_model: str = "",
        state_dir: str | Path | None = None,
        engine: EngineConfig | None = None,
        log: EventLog | None = None,
        settings: StreamConfig | None = None,
        limits: Limits | None = None,
        prefix: str = "",
    ) -> None:
        if not callable(authenticate):
            raise TypeError("authenticate must be a function of the ASGI scope; to serve everybody, say anyone")
        if not models or (default_model and default_model not in models):
            raise ValueError(f"models must name at least one model, and {default_model or 'the default'!r} among them")
        self._models, self._authenticate = models, authenticate
        self._default_model = default_model or next(iter(models))
        self._state_dir = None if state_dir is None else str(Path(state_dir).resolve())
        self._engine, self._log = engine or EngineConfig(), log
        self._settings, self._limits = settings or StreamConfig(), limits or Limits()
        self._prefix = prefix.rstrip("/")
        self._service: Service | None = None
        self._middleware = StreamMiddleware(self._serve)
        self._middleware.on_shutdown(self.shutdown)
        self._middleware.on_farewell(self._say_farewell)
        self._middleware.serve_while_draining(f"{self._prefix}/livez", f"{self._prefix}/readyz")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outer = scope.get("streamserve")
        if outer is None:
            await self._middleware(scope, receive, send)
            return
        outer.on_shutdown(self.shutdown)
        drain = scope.get("extensions", {}).get("streamserve.flow", {}).get("drain")
        if drain is not None:
            drain.on_farewell(self._say_farewell)
        await self._serve(scope, receive, send)

    # For the host

    async def startup(self) -> None:
        """Begin loading the models; returns at once. Without it the first request does."""
        self._serving().start_loading()

    async def shutdown(self) -> None:
        """End every stream, and close engines and log. Twice is no mistake."""
        service, self._service = self._service, None
        if service is not None:
            await service.aclose()

    async def __aenter__(self) -> Self:
        await self.startup()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    @property
    def streams(self) -> Streams:
        """The streams, for a `Delivery` of the host's own."""
        return self._serving().streams

    @property
    def clients(self) -> Mapping[str, EngineClient]:
        """The engines, by alias."""
        return self._serving().clients

    async def start_stream(self, caller: Caller, request: GenerateRequest, *, on_disconnect: str = "park") -> Stream:
        """Start an answer within the caller's limits, for an endpoint of the host's own. Raises StreamserveError."""
        return await self._serving().start_stream(caller, request, on_disconnect)

    # What is made

    def _serving(self) -> Service:
        loop = asyncio.get_running_loop()
        if self._service is None:
            clients = {alias: self._client(alias, model) for alias, model in self._models.items()}
            self._service = Service(clients, self._log or MemoryLog(), self._settings, self._limits)
        if self._service.loop is not loop:
            raise RuntimeError(
                "This app serves another event loop, and was not shut down there. In tests: `with TestClient(...)`."
            )
        return self._service

    def _client(self, alias: str, model: Model) -> EngineClient:
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

    def _say_farewell(self) -> None:
        if self._service is not None:
            self._service.streams.shut_down()

    # Requests

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(Request(scope, receive, send, self._limits, self._prefix))
        elif scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})  # before it is accepted: a 403

    async def _live(self, receive: Receive, send: Send) -> None:
        """Converse with a server; by the time that shutdown is heard of here, it has been done."""
        await receive()
        await self.startup()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, request: Request) -> None:
        route, stream_id = find_route(request.path)
        try:
            await self._call(request, route, stream_id)
        except ClientLeft:
            return
        except StreamserveError as error:
            await _send_error(request, route, error)
        except Exception:
            # The edge of a request: what went wrong goes to the log, the client gets the id to ask about.
            if request.has_begun:
                raise
            logger.exception("request %s to %s failed", request.id, request.path)
            message = f"The server failed on this request. Its log has the cause under {request.id}."
            await _send_error(request, route, StreamserveError(message))

    async def _call(self, request: Request, route: Route, stream_id: str) -> None:
        if request.method not in route.methods:
            raise MethodNotAllowed(f"This address takes {' and '.join(route.methods)}, not {request.method}.")
        caller = _NOBODY if route.is_open else await self._caller(request)
        await route.endpoint(
            Call(
                request=request,
                service=self._serving(),
                caller=caller,
                default_model=self._default_model,
                stream_id=stream_id,
            )
        )

    async def _caller(self, request: Request) -> Caller:
        caller = self._authenticate(request.scope)
        if inspect.isawaitable(caller):
            caller = await caller
        if caller is None:
            raise Unauthorized("Nobody you are known as may call this. Send your credentials.")
        return caller


async def _send_error(request: Request, route: Route, error: StreamserveError) -> None:
    """Answer with `error` as the route's dialect shows it."""
    headers = headers_of(error)
    if error.http_status == 405:
        headers["Allow"] = ", ".join(route.methods)
    await request.send_json(route.error_json(to_body(error)), status=error.http_status, headers=headers)
