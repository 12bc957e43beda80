"""Laws of what the framework-free app gives requests that do not bring it: system prompts and latency classes."""

from __future__ import annotations

from typing import Any

import pytest

from streamserve.asgi import Caller, Defaults, anyone, app
from streamserve.asgi.types import Scope
from streamserve.clients.base import Generation
from streamserve.clients.thread.client import ThreadClient
from streamserve.protocol.requests import GenerateRequest
from tests.support.apps.app_calls import ask

SYSTEM = "You are a help desk."


class Noting:
    """The echo engine; `requests` are what it was asked."""

    def __init__(self, client: ThreadClient) -> None:
        self._client = client
        self.requests: list[GenerateRequest] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, request: GenerateRequest, *rest: Any) -> Generation:
        self.requests.append(request)
        return await self._client.generate(request, *rest)


def classed(scope: Scope) -> Caller:
    """Return the caller that the header names, with the class after the name."""
    name, _, latency_class = dict(scope["headers"])[b"x-user"].decode().partition(" ")
    return Caller(name, latency_class=latency_class)


async def test_defaults_of_models_and_routes(echo: ThreadClient) -> None:
    """A chat without a system prompt gets its model's; a request without a class its caller's, route's or model's."""
    client = Noting(echo)
    defaults = Defaults(
        systems={"one": SYSTEM},
        latency_classes={"one": "document", "two": "document"},
        route_classes={"chat_completions": "completion"},
    )
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    own = {**chat, "messages": [{"role": "system", "content": "Be brief."}, *chat["messages"]], "latency_class": "chat"}
    asked = [
        ("/streams", chat, "ann", (SYSTEM, "hi"), "document"),
        ("/streams", own, "ann", ("Be brief.", "hi"), "chat"),
        ("/streams", {**chat, "model": "two"}, "ann", ("hi",), "document"),
        ("/v1/chat/completions", chat, "ann", (SYSTEM, "hi"), "completion"),
        ("/v1/chat/completions", {**chat, "model": "two"}, "bob batch", ("hi",), "batch"),
    ]
    async with app(models={"one": client, "two": client}, authenticate=classed, defaults=defaults) as ai:
        for path, body, user, contents, latency_class in asked:
            assert (await ask(ai, "POST", path, body, user)).start["status"] == 200
            request = client.requests[-1]
            assert tuple(message.content for message in request.messages or ()) == contents
            assert request.latency_class == latency_class
            assert request.has_public_system == (contents[0] == SYSTEM)
    assert len(client.requests) == len(asked)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"systems": {"gpt": "x"}}, "model 'gpt'"),
        ({"latency_classes": {"gpt": "chat"}}, "model 'gpt'"),
        ({"latency_classes": {"one": "fast"}}, "'fast' is no latency class"),
        ({"route_classes": {"streams": "fast"}}, "'fast' is no latency class"),
        ({"route_classes": {"stream": "chat"}}, "routes are streams"),
    ],
)
def test_wrong_defaults(wrong: dict[str, dict[str, str]], message: str) -> None:
    """A default for what there is not is refused when the app is made."""
    with pytest.raises(ValueError, match=message):
        app(models={"one": "echo"}, authenticate=anyone, defaults=Defaults(**wrong))
