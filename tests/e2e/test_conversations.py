"""Conversations on a served site (daphne): one life of a conversation, and whatever is sent to its routes."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamserve.models import ApiKey
from streamserve.testing import DaphneServer
from tests.support.checks.stream_checks import check_native, text_of

pytestmark = pytest.mark.proof

UNKNOWN = "0" * 32
DEADLINE = 60.0


@pytest.fixture
def client(hard_server: DaphneServer, transactional_db: Any) -> Iterator[httpx.Client]:
    _row, key = ApiKey.objects.make()
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=hard_server.url, headers=headers, timeout=30, trust_env=False) as client:
        yield client


def test_a_conversation_on_a_served_site(client: httpx.Client, hard_server: DaphneServer) -> None:
    """Made, asked twice, listed, searched, shared, read by a stranger, deleted."""
    conversation = client.post("/conversations", json={}).json()["id"]
    head = f"/conversations/{conversation}"
    texts = []
    for question in ("Where is my invoice?", "And when is it due?"):
        answer = client.post(f"{head}/messages", json={"content": question, "max_tokens": 6, "seed": 7})
        texts.append(text_of(check_native(answer.content)))
        assert answer.headers["x-conversation-id"] == conversation
        until_written(client, head)
    messages = client.get(f"{head}/messages").json()["messages"]
    assert [one["role"] for one in messages] == ["user", "assistant"] * 2
    assert ["".join(block["text"] for block in one["blocks"]) for one in messages[1::2]] == texts
    assert [one["id"] for one in client.get("/conversations?q=invoice").json()["conversations"]] == [conversation]
    url = client.post(f"{head}/shares").json()["url"]
    page = httpx.get(hard_server.url + url, trust_env=False)
    assert page.status_code == 200
    assert texts[1] in page.text
    assert client.delete(head).json()["deleted"] is True
    assert httpx.get(hard_server.url + url, trust_env=False).status_code == 404


def until_written(client: httpx.Client, head: str) -> None:
    """Wait until no answer runs: its message is written after its readers have the last event."""
    until = time.monotonic() + DEADLINE
    while client.get(head).json()["running"]:
        assert time.monotonic() < until
        time.sleep(0.02)


# -- Anything ---------------------------------------------------------------------------------------------------------

FIELDS = [
    "content", "parent", "continue", "attachments", "conversation", "model", "title", "source", "pinned", "leaf",
    "deleted", "rating", "comment", "expires_in", "prompt", "messages", "n", "format", "sealed_system", "input",
]  # fmt: skip
IDS = st.sampled_from([UNKNOWN, "f" * 32, "", "x", "\0"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20) | IDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
BODIES = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), JSON, max_size=4)


ROUTES = [
    ("POST", "/conversations"),
    ("POST", "/conversations/{id}"),
    ("POST", "/conversations/{id}/messages"),
    ("POST", "/conversations/{id}/messages/{message}"),
    ("POST", "/conversations/{id}/shares"),
    ("POST", "/streams"),
    ("GET", "/conversations"),
    ("GET", "/conversations/{id}/messages"),
    ("GET", "/conversations/{id}/export"),
    ("GET", "/conversations/{id}/shares"),
    ("GET", "/shared/{any}"),
    ("DELETE", "/conversations/{id}/shares/{message}"),
    ("DELETE", "/conversations/{any}"),
]
PARAMETERS = st.dictionaries(
    st.sampled_from(["limit", "after", "q", "source", "format", "x"]), st.text(max_size=8) | IDS
)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_nothing_that_is_sent_is_a_5xx(client: httpx.Client, hard_server: DaphneServer, data: st.DataObject) -> None:
    """Whatever comes to any of the routes: an answer, or a 4xx in the dialect."""
    conversation = client.post("/conversations", json={}).json()["id"]
    asked = client.post(f"/conversations/{conversation}/messages", json={"content": "hello", "max_tokens": 1})
    ids = {"id": conversation, "message": asked.headers["x-message-id"], "any": "x" * 43}
    for (method, path), _ in itertools.product(ROUTES, range(2)):
        body = json.dumps(data.draw(BODIES)).encode() if method == "POST" else None
        response = client.request(
            method,
            path.format(**ids),
            params=data.draw(PARAMETERS),
            content=body,
            headers={"Content-Type": "application/json"},
        )
        assert response.status_code < 500, (method, path, body, response.text)
        if response.status_code >= 400 and not path.startswith("/shared"):
            assert response.json()["error"]["code"], response.text
