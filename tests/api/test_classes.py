"""Laws of latency classes: where a class is named, and which name counts. Through Django to the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator
from django.test.utils import override_settings

from streamserve import routing
from streamserve.models import ApiKey
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
DEFAULTS = {
    "TESTING": True,
    "MODELS": {"plain": {"PATH": "echo"}, "slow": {"PATH": "echo", "LATENCY_CLASS": "batch"}},
    "ROUTE_CLASSES": {"chat_completions": "document"},
}


def answered() -> dict[str, int]:
    """Return how many answers of each class the engines gave."""
    clients = site.get_site().clients.values()
    counts = [(name, int(one["num_answers"])) for client in clients for name, one in client.stats().classes.items()]
    return {name: sum(count for other, count in counts if other == name) for name, count in counts if count}


@pytest.fixture
async def defaults() -> AsyncIterator[None]:
    """A site whose models and routes have classes."""
    await site.reset()
    with override_settings(STREAMSERVE=DEFAULTS):
        await until_ready()
        yield
        await site.reset()


@pytest.mark.parametrize("name", ["chat", "completion", "document", "batch"])
async def test_a_request_names_its_class(alice_key: str, name: str) -> None:
    """On both APIs and in a query, by the same field."""
    caller = Caller(key=alice_key)
    await body_of(await caller.post("/streams", {**CHAT, "latency_class": name}))
    await body_of(await caller.post("/v1/chat/completions", {**CHAT, "latency_class": name}))
    await body_of(await caller.get(f"/streams/new?prompt=Hi&max_tokens=2&latency_class={name}"))
    assert answered() == {name: 3}


@pytest.mark.parametrize(
    ("tier", "name"), [("auto", "document"), ("default", "chat"), ("flex", "batch"), ("priority", "completion")]
)
@pytest.mark.usefixtures("defaults")
async def test_a_tier_is_a_class(alice_key: str, tier: str, name: str) -> None:
    """The tiers of the public API; auto is the site's default."""
    caller = Caller(key=alice_key)
    await body_of(await caller.post("/v1/chat/completions", {**CHAT, "service_tier": tier}))
    assert answered() == {name: 1}


async def test_a_wrong_class_is_named(alice_key: str) -> None:
    """An unknown class is a 400 with the known ones; so are two fields that differ."""
    caller = Caller(key=alice_key)
    for path in ("/streams", "/v1/chat/completions"):
        response = await caller.post(path, {**CHAT, "latency_class": "vip"})
        assert response.status_code == 400
        assert b"completion" in response.content
    both = await caller.post("/v1/chat/completions", {**CHAT, "latency_class": "chat", "service_tier": "flex"})
    assert both.status_code == 400
    assert b"service_tier" in both.content


@pytest.mark.usefixtures("defaults")
async def test_defaults_of_model_and_route(alice_key: str) -> None:
    """A model's class applies to requests without one; a route's goes before it; the request's before both."""
    caller = Caller(key=alice_key)
    await body_of(await caller.post("/streams", {**CHAT, "model": "plain"}))
    await body_of(await caller.post("/streams", {**CHAT, "model": "slow"}))
    assert answered() == {"chat": 1, "batch": 1}
    await body_of(await caller.post("/v1/chat/completions", {**CHAT, "model": "slow"}))
    await body_of(await caller.post("/v1/chat/completions", {**CHAT, "model": "slow", "latency_class": "completion"}))
    assert answered() == {"chat": 1, "batch": 1, "document": 1, "completion": 1}


@pytest.mark.usefixtures("defaults")
async def test_a_key_has_a_class(alice: Any) -> None:
    """A key's class goes before route and model; a request with it may still name another."""
    key = (await _make(alice, "completion"))[1]
    caller = Caller(key=key)
    await body_of(await caller.post("/v1/chat/completions", {**CHAT, "model": "slow"}))
    assert answered() == {"completion": 1}
    await body_of(await caller.post("/v1/chat/completions", {**CHAT, "latency_class": "batch"}))
    assert answered() == {"completion": 1, "batch": 1}


async def _make(user: Any, latency_class: str) -> tuple[ApiKey, str]:
    return await sync_to_async(ApiKey.objects.make)(user=user, latency_class=latency_class)


async def test_a_socket_names_a_class(alice_key: str) -> None:
    """A start on a WebSocket has the field, or the route's default."""
    headers = [(b"host", b"testserver"), (b"authorization", f"Bearer {alice_key}".encode())]
    socket = WebsocketCommunicator(routing.application, "/ws/streams", headers=headers)
    assert (await socket.connect())[0]
    for fields in ({}, {"latency_class": "document"}):
        await socket.send_json_to({"type": "start", "request": {**CHAT, **fields}})
        while (await socket.receive_json_from(timeout=30)).get("event") != "done":
            pass
    await socket.disconnect()
    assert answered() == {"chat": 1, "document": 1}
