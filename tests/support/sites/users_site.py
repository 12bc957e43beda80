"""The demo site for proofs on real servers: settings, URLs and ASGI application, with an engine that the test controls.

The engine is the echo engine in the web process, with two planted faults: it can be held, and a prompt of `FAIL` gets,
after three tokens, one whose bytes raise. Besides the site's own routes there are
    /control?hold=1|0     hold the engine before its next step, or let it run
    /control              what the server holds: connections, deliveries, sequences, blocks
    /plain                a stream by Django's own StreamingHttpResponse, which waits until the engine runs
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

from django.http import HttpRequest, StreamingHttpResponse
from django.urls import include, path

from project.asgi import application as site
from streamserve.asgi.types import Receive, Scope, Send
from streamserve.clients import factory
from streamserve.clients.thread.acceptance import LoadedEngine
from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.echo import EchoTokenizer
from streamserve.engine.plan import Progress, Sampled, StepPlan, StepResult
from streamserve.web import resources
from streamserve.web import site as site_module
from tests.support.engines.runners import WrappedRunner
from tests.support.streams.hand_made import Gate
from tests.support.streams.log_threads import begun

BAD_PROMPT = "FAIL"
_BAD_TOKEN = 0  # the echo engine never yields it
_GATE = Gate(keeps_plans=False)
_running = asyncio.Event()


class BrittleTokenizer(EchoTokenizer):
    """Raises for one token."""

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == _BAD_TOKEN:
            raise RuntimeError("the tokenizer failed on purpose")
        return super().token_bytes(token_id)


class BadTokenRunner(WrappedRunner):
    """Yields that token as the fourth one of a prompt that contains `FAIL`."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._left: dict[int, int] = {}  # by sequence

    def launch(self, plan: StepPlan) -> object:
        for chunk in plan.chunks:
            if chunk.start == 0 and bytes(token for token in chunk.token_ids if token < 256) == BAD_PROMPT.encode():
                self._left[chunk.seq_id] = 3
        return self.inner.launch(plan)

    def collect(self, handle: object) -> StepResult:
        result = self.inner.collect(handle)
        return StepResult(step_id=result.step_id, sampled=tuple(map(self._changed, result.sampled)))

    def _changed(self, one: Sampled) -> Sampled:
        left = self._left.get(one.seq_id)
        if left is None:
            return one
        self._left[one.seq_id] = left - 1
        return one if left else replace(one, token_ids=(_BAD_TOKEN,))


def _load(config: EngineConfig, progress: Progress) -> LoadedEngine:
    loaded = factory._load_echo(config, 0.0, progress)
    return replace(loaded, runner=BadTokenRunner(loaded.runner), tokenizer=BrittleTokenizer())


def _make_client(model: ModelConfig, config: EngineConfig, **_: Any) -> ThreadClient:
    return ThreadClient(model.alias, partial(_load, config), config, on_plan=_GATE)


resources.make_client = _make_client  # type: ignore[assignment]


async def plain(request: HttpRequest) -> StreamingHttpResponse:
    """Stream as a site without streamserve does."""
    user = await request.auser()

    async def events() -> AsyncIterator[bytes]:
        yield f"data: {user.pk}\n\n".encode()
        await _running.wait()

    return StreamingHttpResponse(events(), content_type="text/event-stream")


urlpatterns = [path("plain", plain), path("", include("project.urls"))]


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve the site, and /control beside it without a thread of Django's."""
    _server()
    if scope["type"] != "http" or scope["path"] != "/control":
        await site(scope, receive, send)
        return
    if scope["query_string"] == b"hold=1":
        _GATE.allow(0)
        _running.clear()
    elif scope["query_string"] == b"hold=0":
        _GATE.open()
        _running.set()
    await begun()
    body = json.dumps(_state()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _state() -> dict[str, int]:
    client = next(iter(site_module.get_site().clients.values()))  # pipelines follow
    stats = client.stats()
    return {
        "connections": len(_server().connections),
        "deliveries": sum(task.get_name() == "delivery" for task in asyncio.all_tasks()),
        "running": stats.running + stats.waiting,
        "blocks_used": stats.blocks_used,
    }


@functools.cache
def _server() -> Any:
    """Return the object that holds the open connections: daphne's server, or uvicorn's state.

    The search runs once, before the engine runs: it would take a reference to a tuple that another thread is making,
    which Python ends with a SystemError (python/cpython#59313).
    """
    kinds = {("streamserve.asgi.flow.server", "FlowServer"), ("uvicorn.server", "ServerState")}
    for one in gc.get_objects():
        kind = type(one)
        if any((base.__module__, base.__name__) in kinds for base in kind.__mro__) and hasattr(one, "connections"):
            return one
    raise RuntimeError("no server that is known")
