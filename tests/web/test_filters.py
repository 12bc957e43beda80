"""Laws of FILTERS: whichever route asks the model, no reader sees a forbidden word; a wrong setting is named."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from channels.testing import WebsocketCommunicator
from django.core.exceptions import ImproperlyConfigured
from django.test.utils import override_settings

from streamserve import acomplete, routing
from streamserve.clients.pipeline.filters import Blocklist
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready

pytestmark = pytest.mark.django_db(transaction=True)

WORD = "bluebird"
QUESTION = f"Where does the {WORD} sing?"  # the echo engine repeats it, a character in each token
MESSAGES = [{"role": "user", "content": QUESTION}]
SHOWN = "Where does the "


def no_bluebird() -> Blocklist:
    return Blocklist([WORD])


def models(*filters: str) -> dict[str, Any]:
    return {"echo": {"PATH": "echo", "FILTERS": list(filters)}}


@pytest.fixture
async def caller(transactional_db: Any, alice_key: str) -> AsyncIterator[Caller]:
    await site.reset()
    with override_settings(
        STREAMSERVE={"CLIENT": "thread", "LOG": "memory", "MODELS": models(f"{__name__}.no_bluebird")}
    ):
        await until_ready()
        yield Caller(key=alice_key)
        await site.reset()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/streams", {"messages": MESSAGES}),
        ("/streams", {"messages": MESSAGES, "format": "text"}),
        ("/streams", {"messages": MESSAGES, "n": 2}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": QUESTION, "max_tokens": 60}),
        ("/v1/completions", {"prompt": QUESTION, "max_tokens": 60, "stream": True}),
    ],
)
async def test_no_route_shows_the_word(caller: Caller, path: str, body: dict[str, Any]) -> None:
    """The answer ends where the word begins, as `content_filter`."""
    response = await caller.post(path, {"model": "echo", **body})
    assert response.status_code == 200
    shown = (await body_of(response) if response.streaming else response.content).decode()
    assert "bird" not in shown
    assert "blue" not in shown
    assert "content_filter" in shown or body.get("format") == "text"
    assert "W" in shown


async def test_neither_do_the_socket_and_python(caller: Caller) -> None:
    """The same answer, and the same end."""
    headers = [(b"host", b"testserver"), (b"authorization", caller.headers["authorization"].encode())]
    socket = WebsocketCommunicator(routing.application, "/ws/streams", headers=headers)
    assert (await socket.connect())[0]
    await socket.send_json_to({"type": "start", "request": {"model": "echo", "messages": MESSAGES}})
    text, done = "", None
    while done is None:
        message = json.loads(await socket.receive_from(timeout=30))
        text += message["data"]["text"] if message.get("event") == "token" else ""
        done = message["data"] if message.get("event") == "done" else None
    await socket.disconnect()
    assert (text, done["finish_reason"]) == (SHOWN, "content_filter")
    whole = await acomplete(QUESTION, tenant="site", model="echo")
    assert (str(whole), whole.finish_reason) == (SHOWN, "content_filter")


async def test_logprobs_are_refused(caller: Caller) -> None:
    """A 400 that says why."""
    refused = await caller.post("/v1/chat/completions", {"model": "echo", "messages": MESSAGES, "logprobs": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        (models("nosuch.module"), "FILTERS of the model 'echo'"),
        (models("os.path.join"), "FILTERS of the model 'echo'"),
        ({"echo": {"PATH": "echo", "FILTERS": [7]}}, "dotted paths"),
        ({"far": {"URL": "http://127.0.0.1:1/v1", "FILTERS": ["a.b"]}}, "FILTERS of the model 'far'"),
    ],
)
async def test_a_wrong_setting_is_named(entry: dict[str, Any], match: str) -> None:
    """A model that would be served without its filters is not served."""
    await site.reset()
    settings = {"CLIENT": "thread", "LOG": "memory", "MODELS": entry}
    with override_settings(STREAMSERVE=settings), pytest.raises(ImproperlyConfigured, match=match):
        site.get_site()
