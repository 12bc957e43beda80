"""Laws of `answer_refused`: each request for an answer that is refused is told of once, in every API."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from streamserve import acomplete, aenqueue_job
from streamserve.api.routes import ASKING, ROUTES
from streamserve.protocol.errors import StreamserveError
from streamserve.rows import orm
from streamserve.signals import answer_refused
from tests.conftest import Caller, body_of, until
from tests.web.sockets.conftest import connect, receive

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]

MESSAGES = [{"role": "user", "content": "hi"}]
NOPE: dict[str, Any] = {"model": "nope", "messages": MESSAGES, "max_tokens": 8}
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "streams": ("/streams", NOPE),
    "chat_completions": ("/v1/chat/completions", NOPE),
    "completions": ("/v1/completions", {"model": "nope", "prompt": "hi"}),
    "completions_stream": ("/v1/completions/stream", {"model": "nope", "prompt": "hi"}),
    "responses": ("/v1/responses", {"model": "nope", "input": "hi"}),
    "messages": ("/v1/messages", NOPE),
    "pipeline": ("/pipelines/nope", {"messages": MESSAGES}),
    "ai_chat": (
        "/ai/chat",
        {"id": "chat", "model": "nope", "messages": [{"role": "user", "parts": [{"type": "text", "text": "hi"}]}]},
    ),
    "ag_ui": (
        "/ag-ui/nope",
        {"threadId": "t", "runId": "r", "messages": [{"id": "m", "role": "user", "content": "hi"}]},
    ),
    "jobs": ("/jobs", {"pipeline": "nope", "messages": MESSAGES}),
}


@pytest.fixture
def told() -> Iterator[list[dict[str, Any]]]:
    """What `answer_refused` has told a receiver."""
    out: list[dict[str, Any]] = []

    def note(**values: Any) -> None:
        assert threading.current_thread().name.startswith("streamserve refusals")
        out.append(values)

    answer_refused.connect(note)
    yield out
    answer_refused.disconnect(note)


@pytest.mark.parametrize("name", ASKS)
async def test_an_unknown_model_and_an_unknown_caller(
    name: str, told: list[dict[str, Any]], alice: Any, alice_key: str
) -> None:
    """A 404 names the caller and the model; a 401 neither, as no body is read of a caller that is not known."""
    path, body = ASKS[name]
    refused = await Caller(key=alice_key).post(path, body)
    await until(lambda: told)
    key = told[0]["key_id"]
    assert (told[0]["status"], told[0]["model"], told[0]["transport"]) == (404, "nope", "http")
    assert (told[0]["owner"], told[0]["user_id"]) == (f"key:{key}", alice.pk)
    assert told[0]["code"] in (await body_of(refused)).decode() or name == "messages"
    assert (await Caller().post(path, body)).status_code == 401
    await until(lambda: len(told) == 2)
    assert (told[1]["status"], told[1]["code"]) == (401, "unauthorized")
    assert (told[1]["owner"], told[1]["user_id"], told[1]["key_id"]) == ("", None, None)


def test_every_route_that_asks_is_tried() -> None:
    """The routes of ASKING are those of ASKS, and those that take no model that could be unknown."""
    asking = {route.name for route in ROUTES if ASKING & set(route.endpoints.values())}
    assert asking - set(ASKS) <= {"new_stream", "conversation_messages", "approve_stream", "mcp"}


async def test_over_a_socket(told: list[dict[str, Any]], alice_key: str) -> None:
    """A start is told of as a request is; so is a handshake without a caller."""
    socket = connect(alice_key)
    await socket.connect()
    await socket.send_json_to({"type": "start", "request": NOPE})
    assert (await receive(socket))["type"] == "error"
    await until(lambda: told)
    await socket.disconnect()
    assert (told[0]["status"], told[0]["model"], told[0]["transport"]) == (404, "nope", "websocket")
    await connect("sk-wrong").connect()
    await until(lambda: len(told) == 2)
    assert (told[1]["status"], told[1]["owner"], told[1]["transport"]) == (401, "", "websocket")


async def test_from_python(told: list[dict[str, Any]], alice: Any) -> None:
    """Calls that are refused are told of, and raise as ever."""
    alice.is_active = False
    calls = [
        acomplete("hi", model="nope", tenant="reports"),
        aenqueue_job("nope", "hi", tenant="reports"),
        acomplete("hi", model="nope", user=alice),
    ]
    for call in calls:
        with pytest.raises(StreamserveError):
            await call
    await until(lambda: len(told) == 3)
    assert sorted((one["status"], one["owner"]) for one in told) == [
        (401, ""),
        (404, "site:reports"),
        (404, "site:reports"),
    ]
    assert {(one["model"], one["transport"]) for one in told} == {("nope", "python")}


async def test_what_is_no_refusal(told: list[dict[str, Any]], alice_key: str, ops_key: str) -> None:
    """An answer that begins, and another route's error, are not told of; a wrong body and a wrong scope are."""
    caller = Caller(key=alice_key)
    assert (await caller.get(f"/streams/{'0' * 32}")).status_code == 404
    assert (await caller.post("/v1/completions", {"model": "echo", "prompt": "hi", "max_tokens": 2})).status_code == 200
    assert (await caller.post("/streams", {"prompt": 3})).status_code == 400
    await until(lambda: told)
    assert (await Caller(key=ops_key).post("/streams", NOPE)).status_code == 403
    await until(lambda: len(told) == 2)
    assert [one["status"] for one in told] == [400, 403]


async def test_a_slow_receiver_holds_up_no_response(alice_key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals wait for their receivers, up to a bound, beyond which they are dropped; the responses do not wait."""
    go, told = threading.Event(), list[str]()
    monkeypatch.setattr(orm, "MAX_TOLD", 3)
    orm.close()

    def waits(**values: Any) -> None:
        go.wait()
        told.append(values["code"])

    answer_refused.connect(waits)
    try:
        for _ in range(5):
            assert (await Caller(key=alice_key).post("/streams", NOPE)).status_code == 404
        go.set()
        await until(lambda: len(told) == 3)
    finally:
        go.set()
        answer_refused.disconnect(waits)
    assert (await Caller(key=alice_key).post("/streams", NOPE)).status_code == 404
