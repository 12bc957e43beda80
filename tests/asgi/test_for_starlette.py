"""Laws of `StreamResponse`: it streams through any Starlette middleware, and notices when its reader leaves."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamserve.asgi.for_starlette import StreamResponse
from streamserve.asgi.handover import hand_over
from streamserve.asgi.middleware import StreamMiddleware
from streamserve.dialects.native import NativeEncoder
from streamserve.protocol.events import Done
from streamserve.protocol.requests import Admission
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.registry import Streams
from tests.support.apps.asgi_app import Client
from tests.support.checks.joined import with_joined_text
from tests.support.checks.stream_checks import check_native
from tests.support.servers.web_servers import ROOT
from tests.support.streams.hand_made import ScriptedClient, ask, tok, until

DONE = Done(finish_reason="stop")


async def pass_on(request: Request, call_next: Any) -> Response:
    """A middleware that many sites have."""
    response: Response = await call_next(request)
    response.headers["x-site"] = "1"
    return response


class Site:
    """A Starlette site over the scripted engine, with middleware; `ends` is what its background tasks did."""

    def __init__(self, streams: Streams, *, is_wrapped: bool) -> None:
        self._streams = streams
        self.ends: list[str] = []
        middleware = [Middleware(GZipMiddleware, minimum_size=1), Middleware(BaseHTTPMiddleware, dispatch=pass_on)]
        starlette = Starlette(routes=[Route("/", self.ask), Route("/handed", self.handed)], middleware=middleware)
        self.app: Any = StreamMiddleware(starlette) if is_wrapped else starlette

    async def ask(self, request: Request) -> Response:
        return StreamResponse(
            await self._delivery(), headers={"set-cookie": "a=1"}, background=BackgroundTask(self._work)
        )

    async def handed(self, request: Request) -> Response:
        return Response(headers=hand_over(await self._delivery()))

    async def _delivery(self) -> Delivery:
        stream = await self._streams.start(ask("scripted"), Admission(owner="u1", tenant="t1"))
        return Delivery(self._streams, stream, NativeEncoder(stream.log_id))

    async def _work(self) -> None:
        self.ends.append("background")


@pytest.fixture(params=[False, True], ids=["alone", "wrapped"])
def site(request: pytest.FixtureRequest, streams: Streams) -> Site:
    return Site(streams, is_wrapped=request.param)


def get(site: Site, path: str = "/") -> Client:
    return Client(site.app, path=path, query_string=b"", headers=[(b"accept-encoding", b"gzip")])


async def test_a_stream_passes_all_middleware(site: Site, scripted: ScriptedClient) -> None:
    """The stream passes frame by frame, uncompressed, with the site's headers; background tasks run."""
    client = get(site)
    await until(lambda: bool(client.messages) and b"event: meta" in client.body, "the first event, at once")
    scripted.last.push(tok("a"), tok("b"), DONE)
    await client.task
    assert [frame["event"] for frame in with_joined_text(check_native(client.body))] == ["meta", "token", "done"]
    headers = dict(client.headers)
    assert (headers[b"content-encoding"], headers[b"set-cookie"], headers[b"x-site"]) == (b"identity", b"a=1", b"1")
    assert b"content-length" not in headers
    assert site.ends == ["background"]


async def test_a_disconnect_is_noticed(site: Site, scripted: ScriptedClient, streams: Streams) -> None:
    """The generation is cancelled, the stream is parked."""
    client = get(site)
    await until(lambda: bool(client.messages) and b"event: meta" in client.body, "it reads")
    client.leave()
    await asyncio.wait({client.task})
    assert scripted.last.is_cancelled
    assert [stream.state for stream in streams.all()] == ["parked"]


async def test_a_hand_over_needs_the_middleware(streams: Streams, scripted: ScriptedClient) -> None:
    """With the middleware it streams; the header never reaches the client."""
    client = get(Site(streams, is_wrapped=True), "/handed")
    await until(lambda: bool(client.messages), "the head is sent")
    scripted.last.push(tok("a"), DONE)
    await client.task
    assert check_native(client.body)[-1].event == "done"
    assert b"streamserve-handover" not in dict(client.headers)


def test_the_shortest_example_of_the_docs() -> None:
    """The example in docs/other-frameworks.md, "Endpoints of your own", runs as written."""
    text = Path(ROOT / "docs" / "other-frameworks.md").read_text()
    example = text.split("## Endpoints of your own")[1].split("```python\n")[1].split("```")[0]
    program = f"""
import asyncio
from starlette.applications import Starlette
from starlette.routing import Route
{example}
async def main():
    sent = []
    async def receive():
        if sent:
            await asyncio.Event().wait()
        return {{"type": "http.request", "body": b""}}
    async def send(message):
        sent.append(message)
    engine.start()
    while engine.describe().state != "ready":
        await asyncio.sleep(0.01)
    scope = {{"type": "http", "method": "GET", "path": "/ask", "query_string": b"q=hi", "headers": []}}
    await application(scope, receive, send)
    await streams.aclose()
    await engine.aclose()
    print(sent[0]["status"], b"".join(message["body"] for message in sent[1:]).count(b"event: done"))

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "200 1\n"), done.stderr
