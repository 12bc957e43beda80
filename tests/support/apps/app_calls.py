"""Requests to the framework-free app by callers named in a header. conftest.py has the app, over the gated engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from streamserve.asgi import Caller
from streamserve.asgi.application import StreamApp
from streamserve.asgi.types import Scope
from tests.support.apps.asgi_app import Client
from tests.support.streams.hand_made import Gate, until

GOOD = {"prompt": "still there?", "max_tokens": 8, "seed": 7}


async def by_header(scope: Scope) -> Caller | None:
    """Return the caller that the header names; callers of one team share a tenant."""
    name = dict(scope["headers"]).get(b"x-user", b"").decode()
    return Caller(name, tenant=name.partition("@")[2]) if name else None


def call(
    ai: Any,
    method: str,
    path: str,
    body: Any = None,
    user: str = "ann",
    scope: dict[str, Any] | None = None,
    **headers: str,
) -> Client:
    """Begin a request. `body` is JSON or bytes; header names have _ for -."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    given = {"x-user": user, "content-type": "application/json", **headers}
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items() if value]
    path, _, query = path.partition("?")
    more = {"path": path, "query_string": query.encode(), "headers": raw, **(scope or {})}
    return Client(ai, method=method, body=data, **more)


async def ask(ai: Any, method: str, path: str, body: Any = None, user: str = "ann", **rest: Any) -> Client:
    """Make a request to its end."""
    client = call(ai, method, path, body, user, **rest)
    await client.task
    return client


def error_of(client: Client) -> tuple[int, str | None]:
    return client.start["status"], json.loads(client.body)["error"]["code"]


def header(client: Client, name: str) -> str | None:
    return dict(client.headers).get(name.encode(), b"").decode() or None


async def started(ai: StreamApp, gate: Gate, user: str = "ann", **body: Any) -> tuple[Client, str]:
    """Begin an answer that is held after its first event; return its reader and id."""
    gate.allow(0)
    client = call(ai, "POST", "/streams", {**GOOD, **body}, user)
    await until(lambda: b"event: meta" in client.body if client.messages else False, "the first event is there")
    stream_id = header(client, "x-stream-id")
    assert stream_id is not None
    return client, stream_id


async def until_ready(ai: StreamApp) -> None:
    """Load the models, as a probe does."""
    async with asyncio.timeout(60):
        while (probe := await ask(ai, "GET", "/readyz")).start["status"] != 200:
            assert json.loads(probe.body)["models"][0]["state"] != "failed"
            await asyncio.sleep(0.01)
