"""Streams of every API match the events that `/openapi.json` has for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from streamserve.api.openapi.document import document
from streamserve.api.routes import CONVERTERS, ROUTES, SERVICES
from streamserve.protocol.limits import Limits
from tests.conftest import Caller, body_of

pytestmark = pytest.mark.django_db(transaction=True)

TURNS = [{"role": "user", "content": "Where is my invoice?"}]
ASKED: dict[str, dict[str, Any]] = {
    "/streams": {"messages": TURNS, "logprobs": 1},
    "/v1/chat/completions": {
        "messages": TURNS,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "logprobs": True,
        "top_logprobs": 1,
    },
    "/v1/completions": {"prompt": "Hi", "stream": True, "logprobs": 1},
    "/v1/completions/stream": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi", "stream": True},
    "/v1/messages": {"messages": TURNS, "max_tokens": 5, "stream": True},
    "/ai/chat": {
        "id": "c1",
        "messages": [{"id": "m1", "role": "user", "parts": [{"type": "text", "text": "Hi"}]}],
    },
    "/ag-ui/{name}": {"threadId": "t1", "runId": "r1", "messages": [{"id": "m1", **TURNS[0]}]},
}


def items_of(body: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the data of each event."""
    for block in body.decode().split("\n\n"):
        found = dict(line.split(":", 1) for line in block.splitlines() if not line.startswith(":"))
        data = found.get("data", "[DONE]").strip()
        if data != "[DONE]":
            yield found.get("event", "").strip(), json.loads(data)


@pytest.mark.parametrize("path", ASKED)
async def test_each_event_of_a_stream_matches(engine: None, alice_key: str, path: str) -> None:
    """Named events by their name and data, others by their data alone."""
    shown = document(ROUTES, converters=CONVERTERS, served=SERVICES, limits=Limits())
    reply = await Caller(key=alice_key).post(path.format(name="echo"), ASKED[path])
    assert reply.status_code == 200
    media = shown["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    validator = Draft202012Validator(
        {**shown["components"], **media["x-itemSchema"], "components": shown["components"]}
    )
    items = list(items_of(await body_of(reply)))
    assert items
    for name, data in items:
        validator.validate({"event": name, "data": data} if name else data)
