"""Twenty thousand random bodies on every route that starts an answer: none is a 5xx, and the site answers as before."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from channels.testing import WebsocketCommunicator
from django.test.utils import override_settings

from streamserve import Run, pipeline, routing
from streamserve.clients.pipeline.client import forget
from streamserve.clients.thread.client import ThreadClient
from streamserve.web import site
from tests.conftest import until, until_ready
from tests.proofs.bodies.mutations import ROUTES, SOCKET, random_body
from tests.proofs.scale import IS_SOAK, scaled
from tests.support.apps.asgi_app import Client
from tests.support.checks.stream_checks import parse_sse

pytest.importorskip("llguidance", reason="needs llguidance: pip install streamserve[grammar]")

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(3600 if IS_SOAK else 300),
    pytest.mark.sampled("biases and allowed ids force bytes that are no text"),
]

NUM_BODIES = scaled(20_000) // len(ROUTES) + 1  # of each route
NUM_AT_ONCE = 4
CAPACITY = (503, 504, 507)  # the server's load, or the request's own timeout_seconds
FAULTS = {"internal_error", "pipeline_failed", "engine_died", "engine_closed", "numerical_error", "out_of_memory"}
_CALL = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Bern"}}\n</tool_call>'
_ANSWERS = {"think": "<think>\nLet me see.\n</think>\n\nIt rains.", "call": "<think>\nI look.\n</think>\n\n" + _CALL}
SETTINGS: dict[str, Any] = {
    "MODELS": {
        "echo": {"PATH": "echo", "ANSWERS": None, "FORMAT": "qwen3"},
        "plain-tools": {"PATH": "echo", "ANSWERS": None, "FORMAT": "llama3"},
        "scripted": {"PATH": "echo", "ANSWERS": _ANSWERS, "FORMAT": "qwen3"},
    },
    "TESTING": True,
    "LIMITS": {"MAX_TOKENS": 24},  # short answers, whatever maximum a body asks for
}

Ask = Callable[[bytes], Awaitable[list[str]]]


async def retelling(run: Run) -> None:
    """Answer with a source, whatever was asked."""
    await run.step("Reading", str, run.question)
    run.cite("help", id="7", title="Bills", url="/help/7/")
    await run.generate(None if run.messages else json.dumps(dict(run.input)) + run.question, max_tokens=6)


@pytest.fixture
async def key(alice_key: str) -> AsyncIterator[str]:
    """The key of a caller of the site, whose models are ready; at the end it answers still and holds nothing."""
    pipeline("retelling")(retelling)
    try:
        await site.reset()
        with override_settings(STREAMSERVE=SETTINGS):
            await until_ready()
            yield alice_key
            await check_sound(alice_key)
            await site.reset()
    finally:
        forget("retelling")


async def check_sound(key: str) -> None:
    """No engine has failed or holds a block that no sequence needs, and a plain question is answered."""
    for client in site.get_site().clients.values():
        assert client.describe().state == "ready"
        if isinstance(client, ThreadClient):
            await until(lambda client=client: client.stats().blocks_used == 0)  # type: ignore[misc]
    [status, body] = await post("/streams", b'{"prompt": "still there?", "max_tokens": 4, "ignore_eos": true}', key)
    assert (status, parse_sse(body)[-1].event) == (200, "done")


async def post(path: str, body: bytes, key: str) -> tuple[int, bytes]:
    """Post to the site's ASGI application; return status and body."""
    headers = [(b"host", b"testserver"), (b"authorization", f"Bearer {key}".encode())]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers, "http_version": "1.1"}
    client = Client(routing.application, method="POST", body=body, scheme="http", **scope)
    await client.task
    return client.start["status"], client.body


async def ask_http(path: str, key: str, body: bytes, counts: Counter[str]) -> list[str]:
    """Return what is wrong with the response to one body."""
    status, answer = await post(path, body, key)
    counts[str(status)] += 1
    if status >= 500 and status not in CAPACITY:
        return [f"{status}: {answer[:300]!r}"]
    if status >= 400:
        error = json.loads(answer)["error"]
        return [] if error["message"] and error["code"] else [f"{status} without code or message"]
    return [f"200 with {fault}: {answer[-300:]!r}" for fault in FAULTS if f'"code":"{fault}"'.encode() in answer]


async def ask_socket(socket: WebsocketCommunicator, body: bytes, counts: Counter[str]) -> list[str]:
    """Start an answer with one body as the request, read it to its end, and return what is wrong with it."""
    text = '{"type": "start", "ref": "r", "request": ' + body.decode(errors="replace") + "}"
    await socket.send_input({"type": "websocket.receive", "text": text})
    while True:
        message = json.loads(await socket.receive_from(timeout=60))
        is_error = "error" in (message.get("type"), message.get("event"))
        if is_error:
            code = message.get("error", message.get("data", {})).get("code")
            counts[f"error {code}"] += 1
            return [f"{code}: {message}"] if code in FAULTS or not code else []
        if message.get("event") == "done":
            counts["done"] += 1
            return []


@pytest.mark.parametrize("route", ROUTES)
async def test_no_body_is_a_500(route: str, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each is answered or refused by name; nothing unexpected is logged; afterwards the engines are as before."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    numbers = iter(range(NUM_BODIES))

    async def ask_many(ask: Ask) -> None:
        for number in numbers:
            body = random_body(random.Random(f"{route} {number}"), route)
            wrong.extend(f"{route} {number} {body[:600]!r}: {fault}" for fault in await ask(body))

    if route == SOCKET:
        headers = [(b"host", b"testserver"), (b"authorization", f"Bearer {key}".encode())]
        socket = WebsocketCommunicator(routing.application, "/ws/streams", headers=headers)
        assert (await socket.connect())[0]
        await ask_many(lambda body: ask_socket(socket, body, counts))
        await socket.disconnect()
    else:
        asks = [ask_many(lambda body: ask_http(route, key, body, counts)) for _ in range(NUM_AT_ONCE)]
        await asyncio.gather(*asks)
    print(f"\n{route}: {NUM_BODIES:,} bodies; {dict(counts.most_common())}")
    assert wrong == []
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR or one.exc_info] == []
    assert sum(counts.values()) == NUM_BODIES
    num_answered = counts["200"] + counts["done"]
    assert NUM_BODIES // 10 < num_answered < NUM_BODIES * 9 // 10
