"""Laws of requests that come while the model loads: a native stream shows it, every other form holds its head."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator

import pytest

from streamserve.asgi import app
from streamserve.asgi.application import StreamApp
from streamserve.clients.thread.client import ThreadClient
from streamserve.clients.thread.engine_thread import LoadedEngine, Progress
from tests.support.apps.app_calls import GOOD, by_header, call, error_of
from tests.support.checks.stream_checks import check_native
from tests.support.engines.clients import CONFIG, echo_runner, load_of
from tests.support.streams.hand_made import until

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
HELD = [
    ("/streams", {**GOOD, "format": "text"}),
    ("/streams", {**GOOD, "format": "tokens"}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/completions", GOOD),
    ("/v1/completions/stream", {"prompt": "hi"}),
    ("/v1/messages", CHAT),
    ("/v1/messages", {**CHAT, "stream": True}),
    ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
]


@pytest.fixture
async def loading() -> AsyncIterator[tuple[StreamApp, ThreadClient, threading.Event]]:
    """The app, its engine, and the event that lets the load end."""
    may_end = threading.Event()

    def load(progress: Progress) -> LoadedEngine:
        assert may_end.wait(60)
        return load_of(echo_runner())(progress)

    client = ThreadClient("echo", load, CONFIG)
    try:
        async with app(models={"echo": client}, authenticate=by_header, prompt_in_url=True) as serving:
            yield serving, client, may_end
            may_end.set()
    finally:
        may_end.set()


async def test_a_native_stream_shows_the_load(loading: tuple[StreamApp, ThreadClient, threading.Event]) -> None:
    """Its head and `status: loading` are there before the model is; its tokens follow."""
    ai, client, may_end = loading
    reader = call(ai, "POST", "/streams", GOOD)
    await until(lambda: bool(reader.messages) and b'"loading"' in reader.body, "the status is shown")
    assert reader.start["status"] == 200
    assert client.describe().is_loading
    may_end.set()
    await reader.task
    events = [frame.event for frame in check_native(reader.body)]
    assert events[:2] == ["meta", "status"]
    assert events.count("status") == 1
    assert "token" in events


@pytest.mark.parametrize(("path", "body"), HELD, ids=[f"{path}-{len(body)}" for path, body in HELD])
async def test_every_other_form_holds_its_head(
    loading: tuple[StreamApp, ThreadClient, threading.Event], path: str, body: dict[str, object]
) -> None:
    """No byte is sent until the model is loaded, and then the answer is the usual one."""
    ai, client, may_end = loading
    held = call(ai, "POST", path, body)
    await until(lambda: client.describe().state == "loading", "the request has begun the load")
    shown = call(ai, "POST", "/streams", GOOD)
    await until(lambda: bool(shown.messages) and b'"loading"' in shown.body, "a later request has passed it")
    assert held.messages == []
    may_end.set()
    await held.task
    assert held.start["status"] == 200
    await shown.task


async def test_a_client_that_leaves_is_not_waited_for(
    loading: tuple[StreamApp, ThreadClient, threading.Event],
) -> None:
    """The request of a client that left while the model loads ends at once, and starts nothing."""
    ai, client, _ = loading
    held = call(ai, "POST", "/v1/chat/completions", CHAT)
    await until(lambda: client.describe().state == "loading", "the request has begun the load")
    held.leave()
    async with asyncio.timeout(60):
        await held.task
    assert client.describe().is_loading
    assert ai.streams.all() == []


async def test_a_model_that_cannot_be_loaded() -> None:
    """The held request is a 503 with Retry-After; the native stream ends in the same error."""

    def fail(progress: Progress) -> LoadedEngine:
        assert may_end.wait(60)
        raise OSError("no such folder")

    may_end = threading.Event()
    client = ThreadClient("echo", fail, CONFIG)
    async with app(models={"echo": client}, authenticate=by_header) as ai:
        held = call(ai, "POST", "/v1/chat/completions", CHAT)
        shown = call(ai, "POST", "/streams", GOOD)
        await until(lambda: bool(shown.messages) and b'"loading"' in shown.body, "the status is shown")
        may_end.set()
        await asyncio.gather(held.task, shown.task)
    status, code = error_of(held)
    assert status == 503
    assert b"retry-after" in dict(held.headers)
    last = check_native(shown.body)[-1]
    assert (last.event, json.loads(last.data)["code"]) == ("error", code)
