"""Laws of the framework-free app's life: lifespan, going away, loops, engines; and what it does not import."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamserve.asgi import anyone, app
from streamserve.asgi.application import StreamApp
from streamserve.asgi.drain import Drain
from streamserve.asgi.middleware import StreamMiddleware
from streamserve.asgi.types import Message
from streamserve.clients.thread.client import ThreadClient
from tests.support.apps.app_calls import GOOD, ask, by_header, call, error_of, until_ready
from tests.support.checks.stream_checks import check_native
from tests.support.servers.web_servers import ROOT
from tests.support.streams.hand_made import Gate, until


class Lifespan:
    """The server's side of the lifespan protocol."""

    def __init__(self, app: Any) -> None:
        self.asked: asyncio.Queue[Message] = asyncio.Queue()
        self.answers: asyncio.Queue[Message] = asyncio.Queue()
        self.task = asyncio.create_task(app({"type": "lifespan"}, self.asked.get, self.answers.put))

    async def exchange(self, what: str) -> None:
        self.asked.put_nowait({"type": f"lifespan.{what}"})
        async with asyncio.timeout(60):
            assert await self.answers.get() == {"type": f"lifespan.{what}.complete"}


@pytest.mark.parametrize("is_wrapped", [False, True])
async def test_lifespan_ends_what_runs(echo: ThreadClient, gate: Gate, is_wrapped: bool) -> None:
    """A shutdown, of the app's own lifespan or of an outer StreamMiddleware's, ends streams and closes the engine."""
    ai = app(models={"echo": echo}, authenticate=by_header)
    serving = StreamMiddleware(ai) if is_wrapped else ai
    lifespan = Lifespan(serving)
    await lifespan.exchange("startup")
    gate.allow(0)
    reader = call(serving, "POST", "/streams", GOOD)
    await until(lambda: b"event: meta" in reader.body if reader.messages else False, "the first event is there")
    stopping = asyncio.create_task(lifespan.exchange("shutdown"))
    await reader.task
    gate.open()
    await stopping
    await lifespan.task
    assert check_native(reader.body)[-1].json["code"] == "engine_unavailable"
    assert echo.describe().state == "failed"


async def test_without_lifespan_it_works_and_can_be_closed_by_hand() -> None:
    """Engines are made on first use; a shutdown, even twice, ends them; the next request makes them anew."""
    ai = app(models={"echo": "echo"}, authenticate=anyone)
    await ai.shutdown()
    for _ in range(2):
        await until_ready(ai)
        assert check_native((await ask(ai, "POST", "/streams", GOOD)).body)[-1].event == "done"
        await ai.shutdown()
        await ai.shutdown()


def test_it_serves_one_loop_at_a_time() -> None:
    """A second loop gets an error with its remedy; after a shutdown it is served."""
    ai = app(models={"echo": "echo"}, authenticate=anyone)

    async def touch(*, closes: bool) -> int:
        client = await ask(ai, "GET", "/v1/models")
        if closes:
            await ai.shutdown()
        return int(client.start["status"])

    async def leave_open() -> tuple[int, Any]:
        return await touch(closes=False), ai._site

    status, site = asyncio.run(leave_open())
    assert status == 200
    assert asyncio.run(touch(closes=False)) == 500
    asyncio.run(site.aclose())
    ai._site = None
    assert asyncio.run(touch(closes=True)) == 200


_PROGRAM = """
import asyncio, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"django", "channels", "daphne", "asgiref", "twisted", "torch", "starlette"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import streamserve.asgi.application
from streamserve.asgi import anyone, app
from streamserve.asgi.drain import Drain
from streamserve.asgi.middleware import StreamMiddleware
from streamserve.asgi.handover import hand_over, respond

async def main():
    sent, received = [], []
    async def receive():
        if received:
            await asyncio.Event().wait()
        received.append("body")
        return {"type": "http.request", "body": b""}
    async def send(message):
        sent.append(message)
    async with app(models={"echo": "echo"}, authenticate=anyone, prompt_in_url=True) as ai:
        scope = {"type": "http", "method": "GET", "path": "/streams/new", "headers": []}
        scope["query_string"] = b"prompt=hi&max_tokens=4"
        while ai.clients["echo"].describe().state != "ready":
            await asyncio.sleep(0.01)
        await StreamMiddleware(ai)(scope, receive, send)
    print(sent[0]["status"], b"".join(message["body"] for message in sent[1:]).count(b"event: done"))

asyncio.run(main())
print(sorted({name.split(".")[0] for name in sys.modules} & {"django", "channels", "daphne", "asgiref", "torch"}))
"""


def test_nothing_of_django_is_needed() -> None:
    """Without Django, Channels, daphne and torch installed the app is imported, and streams."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "200 1\n[]\n"), done.stderr


async def test_engines_of_their_own(tmp_path: Path) -> None:
    """With `state_dir` the engine is a process that a second app finds; it outlives the first."""
    pids = set()
    for _ in range(2):
        async with app(models={"echo": "echo"}, authenticate=anyone, state_dir=tmp_path) as ai:
            await until_ready(ai)
            assert check_native((await ask(ai, "POST", "/streams", GOOD)).body)[-1].event == "done"
            pids.add(ai.clients["echo"].engine_pid)  # type: ignore[attr-defined]
    (pid,) = pids
    os.kill(pid, signal.SIGTERM)


@pytest.mark.parametrize("is_wrapped", [False, True])
async def test_flow_server_going_away(ai: StreamApp, gate: Gate, is_wrapped: bool) -> None:
    """When the drain's time is up streams end with a going-away event, and a new one is refused."""
    drain, serving = Drain(), StreamMiddleware(ai) if is_wrapped else ai
    gate.allow(0)
    reader = call(serving, "POST", "/streams", GOOD, scope={"extensions": {"streamserve.flow": {"drain": drain}}})
    await until(lambda: b"event: meta" in reader.body if reader.messages else False, "the first event is there")
    (go_away,) = drain._on_going_away
    go_away()
    await reader.task
    last = check_native(reader.body)[-1]
    assert (last.json["code"], last.json["retryable"]) == ("engine_unavailable", True)
    gate.open()
    assert error_of(await ask(serving, "POST", "/streams", GOOD)) == (503, "engine_unavailable")
    assert is_wrapped or drain.serves("/readyz")


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
async def test_a_draining_app_is_not_ready(ai: StreamApp, is_wrapped: bool, is_late: bool) -> None:
    """/readyz is a 503 with the reason, also where the drain began before the app's first request."""
    drain, serving = Drain(), StreamMiddleware(ai) if is_wrapped else ai
    scope = {"extensions": {"streamserve.flow": {"drain": drain}}}
    if not is_late:
        assert (await ask(serving, "GET", "/readyz", scope=scope)).start["status"] == 200
    drain.is_draining = True
    for hook in drain._on_drain:
        hook()
    probe = await ask(serving, "GET", "/readyz", scope=scope)
    assert (probe.start["status"], json.loads(probe.body)["reason"]) == (503, "this process is going down")
    assert (await ask(serving, "GET", "/livez", scope=scope)).start["status"] == 200
