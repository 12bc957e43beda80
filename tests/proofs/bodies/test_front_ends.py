"""Twenty thousand random bodies on the routes for front ends and agents: none is a 5xx, each refusal is in the route's
dialect and has a code, and the site answers as before.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve import Run, pipeline, routing, tool
from streamserve.api.routes import ROUTES, Route
from streamserve.clients.pipeline.client import forget
from streamserve.protocol.codes import CODES
from streamserve.protocol.errors import ErrorBody
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.proofs.bodies.front_ends import BODIES, CALL_ID, IDS, OTHERS
from tests.proofs.bodies.mutations import mutated
from tests.proofs.bodies.test_fuzz import CAPACITY, FAULTS, SETTINGS, check_sound
from tests.proofs.scale import IS_SOAK, scaled
from tests.support.apps.asgi_app import Client
from tests.support.checks.stream_checks import parse_sse

pytest.importorskip("llguidance", reason="needs llguidance: pip install streamserve[grammar]")
pytest.importorskip("jsonschema", reason="needs jsonschema: pip install streamserve[mcp]")

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(3600 if IS_SOAK else 300),
    pytest.mark.sampled("random bodies may ask for ids that are no text"),
]

# Routes that were there before: test_fuzz.py, tests/api/test_bad_input.py and their own tests have them.
EARLIER = {
    *("streams", "stop_stream", "ack_stream", "pipeline", "jobs", "cancel_job", "conversations", "conversation"),
    *("conversation_messages", "conversation_message", "conversation_shares", "attachments", "chat_completions"),
    *("chat_completion", "completions", "completions_stream", "messages", "count_tokens", "message_batches"),
    *("cancel_message_batch", "files", "batches", "cancel_batch"),
}
NEW = [route for route in ROUTES if route.name and "POST" in route.methods and route.name not in EARLIER]
NUM_BODIES = scaled(20_000) // len(NEW) + 1  # of each route
NUM_AT_ONCE = 4


def scores_of(texts: list[str]) -> list[dict[str, float]]:
    """Return a verdict for each text: the site's hook of moderations."""
    return [{"violence": float("kill" in text)} for text in texts]


SITE = {
    **SETTINGS,
    **dict.fromkeys(("CONVERSATIONS", "STORE", "MCP_ENDPOINT"), True),
    "TITLES": "words",
    "LIMITS": {"MAX_TOKENS": 120},
    "ENGINE": {"DEFAULT_MAX_TOKENS": 8},  # of a body that names none: the echo engine would fill its context
    "EMBEDDING_MODELS": {"embedder": {"PATH": "echo"}},
    "MODERATION": f"{__name__}.scores_of",
}
SCHEMA = {
    "type": "object",
    "properties": {"year": {"type": "integer"}, "of": {"type": "array", "items": {"type": "string"}}},
    "required": ["year"],
    "additionalProperties": False,
}
_BLAMED = re.compile(r"log has the cause")


async def retelling(run: Run) -> None:
    """Answer with a source, whatever was asked."""
    await run.step("Reading", str, run.question, of=2)
    run.cite("help", id="7", title="Bills", url="/help/7/")
    await run.generate(None if run.messages else run.question or "-", max_tokens=6)


async def listing(run: Run) -> str:
    """List."""
    return json.dumps(dict(run.input))


@tool(confirm=True)
def look_up(city: str) -> str:
    """Return a city's weather."""
    return f"Rain in {city}."


async def asking(run: Run) -> None:
    """Ask before it goes on."""
    await run.generate("call", model="scripted", tools=[look_up], max_tokens=120)


@pytest.fixture
async def key(alice_key: str) -> AsyncIterator[str]:
    """The key of a caller of the site, whose models are ready; at the end it answers still and holds nothing."""
    pipeline("retelling")(retelling)
    pipeline("listing", input_schema=SCHEMA)(listing)
    pipeline("asking")(asking)
    try:
        await site.reset()
        with override_settings(STREAMSERVE=SITE):
            await until_ready()
            yield alice_key
            await check_sound(alice_key)
            await site.reset()
    finally:
        for name in ("retelling", "listing", "asking"):
            forget(name)


async def parts_of(key: str) -> dict[str, str]:
    """Return what stands in paths: a run that waits for its user's approval, a response, and names."""
    caller = Caller(key=key)
    run = await caller.post("/streams", {"model": "asking", "prompt": "call"})
    (asked,) = [frame.json for frame in parse_sse(await body_of(run)) if frame.event == "approval"]
    response = await caller.post("/v1/responses", {"model": "echo", "input": "Why?", "max_output_tokens": 16})
    ids = {"stream_id": run["X-Stream-Id"], "call_id": asked["id"], "response_id": response.json()["id"]}
    if any(route.name == "response_conversations" for route in NEW):
        ids["conversation_id"] = (await caller.post("/v1/conversations", {})).json()["id"]
    return {"name": "retelling", "model": "retelling", "chat_id": "chat-1", "thread_id": "chat-1", **ids}


async def post(path: str, body: bytes, key: str, accept: str) -> tuple[int, bytes]:
    """Post to the site's ASGI application; return status and body."""
    headers = [(b"host", b"testserver"), (b"authorization", f"Bearer {key}".encode()), (b"accept", accept.encode())]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers, "http_version": "1.1"}
    client = Client(routing.application, method="POST", body=body, scheme="http", **scope)
    await client.task
    return client.start["status"], client.body


def faults_of(route: Route, status: int, answer: bytes) -> list[str]:
    """Return what is wrong with a response."""
    if status >= 500 and status not in CAPACITY:
        return [f"{status}: {answer[:300]!r}"]
    found = [fault for fault in FAULTS if f'"code":"{fault}"'.encode() in answer.replace(b'": "', b'":"')]
    if found or _BLAMED.search(answer.decode(errors="replace")):
        return [f"{status} with {found}: {answer[-300:]!r}"]
    if status < 400:
        return []
    error = json.loads(answer)
    wanted = route.error_json(ErrorBody(code="invalid_value", message="m", param=None, http_status=status))
    wrong = [] if shape_of(error) == shape_of(wanted) else [f"{status} in another dialect: {answer[:300]!r}"]
    has_code = any(code in CODES for code in texts_of(error))
    return wrong + ([] if has_code else [f"{status} without a code: {answer[:300]!r}"])


def shape_of(value: Any) -> Any:
    """Return the names of the objects in a JSON value, two levels deep."""
    if not isinstance(value, dict):
        return None
    return {name: set(one) if isinstance(one, dict) else None for name, one in value.items()}


def texts_of(value: Any) -> list[str]:
    """Return the texts in a JSON value."""
    if isinstance(value, dict):
        return [text for one in value.values() for text in texts_of(one)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("route", NEW, ids=[route.name for route in NEW])
async def test_no_body_is_a_500(route: Route, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each is answered or refused by name; nothing unexpected is logged; afterwards the engines are as before."""
    counts: Counter[int] = Counter()
    wrong: list[str] = []
    numbers = iter(range(NUM_BODIES))
    make = BODIES.get(route.name, OTHERS)
    parts = await parts_of(key)
    path = "/" + re.sub(r"<\w+:(\w+)>", lambda part: parts.get(part[1], "0" * 32), route.path)

    async def ask_many() -> None:
        for number in numbers:
            rng = random.Random(f"{route.name} {number}")
            body = mutated(rng, make(rng), junk=IDS).replace(CALL_ID.encode(), parts["call_id"].encode())
            accept = rng.choice(("application/json, text/event-stream", "text/event-stream", "application/json", "*/*"))
            status, answer = await post(path, body, key, accept)
            counts[status] += 1
            wrong.extend(f"{route.name} {number} {body[:600]!r}: {one}" for one in faults_of(route, status, answer))

    await asyncio.gather(*(ask_many() for _ in range(NUM_AT_ONCE)))
    print(f"\n{path}: {NUM_BODIES:,} bodies; {dict(counts.most_common())}")
    assert wrong == []
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR or one.exc_info] == []
    assert sum(counts.values()) == NUM_BODIES
