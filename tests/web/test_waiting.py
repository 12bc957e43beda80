"""Laws of waiting for a place, on a site: every way to begin an answer waits, and who leaves waits no more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve import acomplete, routing
from streamserve.api.ops import render_metrics
from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.web.conftest import PROMPT

pytestmark = pytest.mark.django_db(transaction=True)

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
HELD = {"prompt": "hi", "max_tokens": 2000, "ignore_eos": True}
WAYS = [
    ("/streams", PROMPT),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True, "n": 2}),
    ("/v1/completions", PROMPT),
    ("/v1/completions", {**PROMPT, "stream": True}),
    ("/v1/completions/stream", {"prompt": "hi", "max_tokens": 3}),
    ("/v1/messages", CHAT),
    ("/v1/messages", {**CHAT, "stream": True}),
]


@pytest.fixture
async def one_place(transactional_db: Any) -> AsyncIterator[None]:
    """A site where each caller has one place."""
    limits = {"MAX_STREAMS_PER_PRINCIPAL": 1, "MAX_QUEUED_PER_PRINCIPAL": 2}
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.01, "LIMITS": limits}):
        await until_ready()
        yield
        await site.reset()


class Held:
    """An answer of `caller` that runs until it is stopped."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def __aenter__(self) -> Held:
        response = await self._caller.post("/streams", HELD)
        assert response.status_code == 200
        self.id, self._frames = response["X-Stream-Id"], aiter(response)
        await anext(self._frames)
        return self

    async def stop(self) -> None:
        await self._caller.post(f"/streams/{self.id}/stop", {})

    async def __aexit__(self, *args: object) -> None:
        await self.stop()
        await self._frames.aclose()


def num_waiting() -> int:
    return site.get_streams().num_waiting


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_every_route_waits(one_place: None, alice_key: str, path: str, body: dict[str, Any]) -> None:
    """Its head is held while the caller has no place; then it is answered as any other."""
    caller = Caller(key=alice_key)
    async with Held(caller) as held:
        asking = asyncio.create_task(caller.post(path, body))
        await until(lambda: num_waiting() == 1)
        assert not asking.done()
        await held.stop()
        response = await asking
        assert response.status_code == 200
        assert await body_of(response)
        assert num_waiting() == 0


async def test_a_call_from_python_waits(one_place: None, alice: Any) -> None:
    """`acomplete` for a user waits for that user's place."""
    caller = Caller()
    await caller.client.aforce_login(alice)
    streams, asking = site.get_streams(), asyncio.create_task(acomplete("hi", user=alice, max_tokens=4000))
    await until(lambda: len(streams.all()) == 1)
    second = asyncio.create_task(acomplete("hi", user=alice, max_tokens=2))
    await until(lambda: num_waiting() == 1)
    asking.cancel()
    assert str(await second)


async def test_a_repeat_waits_for_nothing(one_place: None, alice_key: str) -> None:
    """A request with the key of an answer that runs shows that answer, and takes no place."""
    caller = Caller(key=alice_key)
    first = await caller.post("/streams", HELD, **{"idempotency-key": "one"})
    frames = aiter(first)
    await anext(frames)
    again = await caller.post("/streams", HELD, **{"idempotency-key": "one"})
    assert (again.status_code, again["X-Stream-Id"]) == (200, first["X-Stream-Id"])
    await caller.post(f"/streams/{first['X-Stream-Id']}/stop", {})
    await body_of(again)
    await frames.aclose()


async def test_beyond_the_queue_is_a_429(one_place: None, alice_key: str) -> None:
    """In the shape of its route, at once, with a time to come again that SDKs read."""
    caller = Caller(key=alice_key)
    async with Held(caller):
        asking = [asyncio.create_task(caller.post("/v1/chat/completions", CHAT)) for _ in range(2)]
        await until(lambda: num_waiting() == 2)
        refused = await caller.post("/v1/chat/completions", CHAT)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("too_many_streams", "rate_limit_error")
        assert 1 <= int(refused["Retry-After"]) <= 120
        here = site.get_site()
        assert "streamserve_num_requests_queued 2" in render_metrics(here.clients, here.streams)
    assert [(await one).status_code for one in asking] == [200, 200]


async def test_a_drain_refuses_what_waits(one_place: None, alice_key: str) -> None:
    """The server begins to shut down: the client is told at once to try another process."""
    caller = Caller(key=alice_key)
    async with Held(caller):
        asking = asyncio.create_task(caller.post("/v1/chat/completions", CHAT))
        await until(lambda: num_waiting() == 1)
        site.begin_to_drain()
        refused = await asking
        assert (refused.status_code, refused["Retry-After"]) == (503, "1")
    await site.reset()


@pytest.mark.parametrize("path", ["/streams", "/v1/chat/completions"])
async def test_a_client_that_leaves_waits_no_more(one_place: None, alice_key: str, path: str) -> None:
    """Its disconnect takes it from the queue, and no answer is begun for it."""
    caller = Caller(key=alice_key)
    async with Held(caller):
        leaving, sent = asyncio.Event(), []
        body = json.dumps(CHAT).encode()
        inbox = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if inbox:
                return inbox.pop()
            await leaving.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = {"host": "testserver", "content-type": "application/json", "authorization": f"Bearer {alice_key}"}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "scheme": "http",
            "server": ("testserver", 80),
            "client": ("203.0.113.7", 1),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        serving = asyncio.create_task(routing.application(scope, receive, send))
        await until(lambda: num_waiting() == 1)
        leaving.set()
        await until(lambda: num_waiting() == 0)
        await asyncio.wait([serving])
        assert len(site.get_streams().all()) == 1
