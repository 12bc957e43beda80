"""Laws of `/ai/chat`: a page's chat is a thread; what is streamed, kept, resumed, stopped, edited and asked again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve import Run, pipeline, tool
from streamserve.clients.pipeline.client import forget
from streamserve.models import Conversation, Message
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.ui_message_checks import Page, check_chunks, read_chunks
from tests.support.streams.hand_made import Gate

pytestmark = pytest.mark.django_db(transaction=True)

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PAY = 'I pay.<tool_call>\n{"name": "pay", "arguments": {"euros": 5}}\n</tool_call>'
PAYS = {"Paid": "It is paid.", "refused": "Then I leave it.", "bill": PAY}
TOOLS = {
    "weather": {
        "description": "The weather in a city",
        "inputSchema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
}
MODELS = {
    "echo": {"PATH": "echo", "ANSWERS": None},
    "payer": {"PATH": "echo", "FORMAT": "qwen3", "ANSWERS": PAYS},
    "caller": {"PATH": "echo", "FORMAT": "qwen3", "ANSWERS": {"Sunny": "Go out.", "Oslo": CALL}},
}
KEEPS = {"TESTING": True, "CONVERSATIONS": True, "TITLES": "words", "MODELS": MODELS}
SHORT = {"model": "echo", "max_tokens": 6, "seed": 7}
DEADLINE = 60.0


@pytest.fixture
async def keeps(site_gate: Gate) -> AsyncIterator[None]:
    """A site that keeps conversations; its gate is open until a test closes it."""
    site_gate.open()
    with override_settings(STREAMSERVE=KEEPS):
        await site.reset()
        await until_ready()
        yield
        await site.reset()


@pytest.fixture
async def keeps_none(site_gate: Gate) -> AsyncIterator[None]:
    """A site without conversations, for visitors too."""
    site_gate.open()
    with override_settings(STREAMSERVE={**KEEPS, "CONVERSATIONS": False, "ANONYMOUS": True}):
        await site.reset()
        await until_ready()
        yield
        await site.reset()


@pytest.fixture
def other(bob: Any) -> Caller:
    return Caller(user=bob)


def user(text: str, id_: str) -> dict[str, Any]:
    return {"id": id_, "role": "user", "parts": [{"type": "text", "text": text}]}


async def send(caller: Caller, *messages: Any, chat: str = "chat-1", **fields: Any) -> Any:
    """Return the response to messages."""
    body = {"id": chat, "messages": list(messages), "trigger": "submit-message", **SHORT, **fields}
    headers = body.pop("headers", {})
    response = await caller.post("/ai/chat", body, **headers)
    assert response.status_code == 200, response.content
    return response


async def ask(caller: Caller, *messages: Any, **fields: Any) -> Page:
    """Ask to the end; return the page that has read it."""
    response = await send(caller, *messages, **fields)
    continued = messages[-1] if messages[-1]["role"] == "assistant" else None
    page = check_chunks(await body_of(response), None if continued is None else json.loads(json.dumps(continued)))
    await written()
    return page


async def written() -> None:
    """Wait until no answer's message is to be written: that is after its readers have the last event."""
    async with asyncio.timeout(DEADLINE):
        while await Message.objects.filter(state="running").aexists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def kept(caller: Caller, chat: str = "chat-1") -> list[dict[str, Any]]:
    found = (await caller.get(f"/ai/chat/{chat}")).json()
    assert found["id"] == chat
    return list(found["messages"])


def words_of(messages: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return id, role and text of messages."""
    return [
        (one["id"], one["role"], "".join(part["text"] for part in one["parts"] if part["type"] == "text"))
        for one in messages
    ]


def text_of(page: Page) -> str:
    return words_of([page.message])[0][2]


def prompt_of(page: Page) -> list[tuple[str, str]]:
    """Return what the model was asked: roles and contents."""
    stream = site.get_site().streams.find(page.message["metadata"]["streamId"])
    assert stream is not None
    return [(turn.role, turn.content) for turn in stream.request.messages or ()]


async def test_a_chat_is_a_conversation_of_the_caller(caller: Caller, keeps: None) -> None:
    """The second question has the history before it, whether the page sends all or the last alone."""
    response = await send(caller, user("one", "u1"))
    assert response["Content-Type"] == "text/event-stream; charset=utf-8"
    assert response["x-vercel-ai-ui-message-stream"] == "v1"
    first = check_chunks(await body_of(response))
    assert response["X-Message-Id"] == first.message["id"]
    await written()
    whole = await ask(caller, user("one", "u1"), first.message, user("two", "u2"))
    asked = [("user", "one"), ("assistant", text_of(first)), ("user", "two")]
    assert prompt_of(whole) == asked
    alone = await ask(caller, user("three", "u3"))
    assert prompt_of(alone) == [*asked, ("assistant", text_of(whole)), ("user", "three")]
    assert (await Conversation.objects.aget()).source == "ai-sdk"
    assert words_of(await kept(caller)) == [
        ("u1", "user", "one"),
        (first.message["id"], "assistant", text_of(first)),
        ("u2", "user", "two"),
        (whole.message["id"], "assistant", text_of(whole)),
        ("u3", "user", "three"),
        (alone.message["id"], "assistant", text_of(alone)),
    ]


async def test_what_is_kept_is_what_was_streamed(caller: Caller, keeps: None) -> None:
    """Parts and metadata of a message, but for the figures, which are of the moment."""
    page = await ask(caller, user("one", "u1"))
    _, answer = await kept(caller)
    assert answer["parts"] == page.message["parts"]
    figures = {"latency", "ttft", "tokensPerSecond"}
    assert {**page.message["metadata"], **answer["metadata"]} == page.message["metadata"]
    assert page.message["metadata"].keys() - answer["metadata"].keys() <= figures


async def test_without_conversations_the_page_has_the_history(keeps_none: None) -> None:
    """All that was sent is the prompt; nothing is kept, and the chat names the last answer."""
    visitor = Caller()
    answer = {"id": "a1", "role": "assistant", "parts": [{"type": "text", "text": "Yes."}]}
    page = await ask(visitor, user("one", "u1"), answer, user("two", "u2"))
    assert prompt_of(page) == [("user", "one"), ("assistant", "Yes."), ("user", "two")]
    assert page.message["id"] == page.message["metadata"]["streamId"]
    assert await kept(visitor) == []
    assert (await visitor.get("/ai/chat/another")).json() == {"id": "another", "messages": []}


async def test_another_callers_chat_is_another_chat(caller: Caller, other: Caller, keeps: None) -> None:
    """The same id is a thread of each caller's own."""
    await ask(caller, user("one", "u1"))
    assert await kept(other) == []
    assert (await other.get("/ai/chat/chat-1/stream")).status_code == 204
    assert prompt_of(await ask(other, user("two", "u1"))) == [("user", "two")]
    assert len(await kept(caller)) == 2


async def test_a_running_answer_is_replayed_from_its_beginning(caller: Caller, keeps: None, site_gate: Gate) -> None:
    """A page that is loaded anew gets all of it, under the same message id; the messages are without it."""
    site_gate.allow(4)
    response = await send(caller, user("one", "u1"))
    first = await anext(aiter(response.streaming_content))
    assert first == b": ok\n\n"
    assert words_of(await kept(caller)) == [("u1", "user", "one")]
    again = await caller.get("/ai/chat/chat-1/stream")
    assert again.status_code == 200
    assert again["x-vercel-ai-ui-message-stream"] == "v1"
    site_gate.open()
    page = check_chunks(await body_of(again))
    assert page.message["id"] == response["X-Message-Id"]
    response.close()
    await written()
    assert (await kept(caller))[1]["parts"] == page.message["parts"]


async def test_an_answer_that_may_have_ended_unseen_is_replayed(caller: Caller, keeps: None) -> None:
    """Nothing runs, and it is shown all the same, under the same id: 204 is for a chat in which nothing has run."""
    assert (await caller.get("/ai/chat/chat-1/stream")).status_code == 204
    page = await ask(caller, user("one", "u1"))
    assert check_chunks(await body_of(await caller.get("/ai/chat/chat-1/stream"))) == page


async def test_a_reader_that_names_its_last_frame_gets_the_rest(caller: Caller, keeps: None) -> None:
    """By Last-Event-ID or `after`, cut after each frame; 204 once it has all."""
    response = await send(caller, user("one", "u1"))
    body = await body_of(response)
    frames = [part + b"\n\n" for part in body.split(b"\n\n") if b"data: " in part]
    for place in range(1, len(frames)):
        (line,) = [one for one in frames[place - 1].splitlines() if one.startswith(b"id: ")]
        rest = await caller.get("/ai/chat/chat-1/stream", **{"last-event-id": line[4:].decode()})
        assert check_chunks(b"".join(frames[:place]) + await body_of(rest)) == check_chunks(body)
    (line,) = [one for one in frames[-1].splitlines() if one.startswith(b"id: ")]
    over = await caller.get("/ai/chat/chat-1/stream", **{"last-event-id": line[4:].decode()})
    assert over.status_code == 204
    seq = int(line.rpartition(b"-")[2])
    assert (await caller.get(f"/ai/chat/chat-1/stream?after={seq}")).status_code == 204
    assert (await caller.get("/ai/chat/chat-1/stream?after=1")).status_code == 200
    assert (await caller.get("/ai/chat/chat-1/stream?after=x")).status_code == 400
    for other in ("abcdefghijkl-3", "no id"):  # of the chat's answer before: the reader lacks all of this
        again = await caller.get("/ai/chat/chat-1/stream", **{"last-event-id": other})
        assert check_chunks(await body_of(again)) == check_chunks(body)


async def test_a_stop_ends_the_answer_and_keeps_its_beginning(caller: Caller, keeps: None, site_gate: Gate) -> None:
    """Its readers get an abort; the chat goes on after it. Stopping again, or a chat without an answer, is no error."""
    site_gate.allow(5)
    response = await send(caller, user("one", "u1"), max_tokens=40)
    reading = asyncio.ensure_future(body_of(response))
    async with asyncio.timeout(DEADLINE):
        while not site_gate.is_holding:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await caller.post("/ai/chat/chat-1/stop")).json() == {"id": "chat-1", "stopped": True}
    page = check_chunks(await reading)
    assert page.reason == "interrupted"
    site_gate.open()
    await written()
    assert (await caller.post("/ai/chat/chat-1/stop")).json() == {"id": "chat-1", "stopped": False}
    assert (await caller.post("/ai/chat/never/stop", {})).json() == {"id": "never", "stopped": False}
    assert (await caller.post("/ai/chat/chat-1/stop", {"now": True})).status_code == 400
    assert len(words_of(await kept(caller))) == 2
    await ask(caller, user("one", "u1"), page.message, user("two", "u2"))


async def test_a_closed_tab_stops_nothing(caller: Caller, keeps: None, site_gate: Gate) -> None:
    """The answer waits for its reader, and goes on when it is there again."""
    response = await left_in_the_middle(caller, site_gate)
    assert not check_chunks(await body_of(await caller.get("/ai/chat/chat-1/stream"))).error
    await written()
    assert (await kept(caller))[1]["id"] == response["X-Message-Id"]


async def test_an_answer_may_be_made_to_its_end_without_a_reader(caller: Caller, keeps: None, site_gate: Gate) -> None:
    """With `finish` it waits for no tab."""
    await left_in_the_middle(caller, site_gate, on_disconnect="finish")
    await written()
    assert (await kept(caller))[1]["metadata"]["finishReason"] == "length"


async def left_in_the_middle(caller: Caller, site_gate: Gate, **fields: Any) -> Any:
    """Ask, and close the tab before the answer is made; return the response."""
    site_gate.allow(2)
    response = await send(caller, user("one", "u1"), **fields)
    await anext(aiter(response.streaming_content))
    response.close()
    stream = site.get_site().streams.find(response["X-Stream-Id"])
    assert stream is not None
    assert stream.terminal is None
    site_gate.open()
    return response


async def test_an_edited_question_is_a_branch(caller: Caller, keeps: None) -> None:
    """Also of the first question; the page keeps its id, which from then on names the new words."""
    first = await ask(caller, user("one", "u1"))
    second = await ask(caller, user("one", "u1"), first.message, user("two", "u2"))
    edited = await ask(caller, user("one", "u1"), first.message, user("second", "u2"), messageId="u2")
    assert prompt_of(edited) == [("user", "one"), ("assistant", text_of(first)), ("user", "second")]
    assert edited.message["id"] != second.message["id"]
    again = await ask(caller, user("first", "u1"), messageId="u1")
    assert prompt_of(again) == [("user", "first")]
    assert words_of(await kept(caller))[0] == ("u1", "user", "first")
    other = await ask(caller, user("first", "u1"), trigger="regenerate-message")
    assert prompt_of(other) == [("user", "first")]
    assert await Message.objects.filter(role="user").acount() == 4


async def test_a_regenerated_answer_is_a_sibling(caller: Caller, keeps: None) -> None:
    """It has an id of its own, and the chat goes on with it."""
    first = await ask(caller, user("one", "u1"))
    trigger = {"trigger": "regenerate-message", "messageId": first.message["id"]}
    second = await ask(caller, user("one", "u1"), **trigger)
    assert second.message["id"] != first.message["id"]
    assert [one[0] for one in words_of(await kept(caller))] == ["u1", second.message["id"]]
    assert await Message.objects.filter(role="user").acount() == 1


async def test_a_tool_of_the_page_is_called_and_answered(caller: Caller, keeps: None, site_gate: Gate) -> None:
    """Its result goes on with the page's message, which keeps its id, streamed, replayed and stored."""
    fields = {"model": "caller", "tools": TOOLS, "max_tokens": 80}
    called = await ask(caller, user("Oslo?", "u1"), **fields)
    assert called.reason == "tool-calls"
    (part,) = [one for one in called.message["parts"] if one["type"] == "tool-weather"]
    assert (part["state"], part["input"]) == ("input-available", {"city": "Oslo"})
    result = {**part, "state": "output-available", "output": "Sunny in Oslo"}
    answered = {**called.message, "parts": [result if one is part else one for one in called.message["parts"]]}
    site_gate.allow(3)
    again = {"model": None, "max_tokens": None, "tools": TOOLS}  # as a page sends by itself: the chat's model answers
    response = await send(caller, user("Oslo?", "u1"), answered, messageId=answered["id"], **again)
    await anext(aiter(response.streaming_content))
    replayed = await caller.get("/ai/chat/chat-1/stream")
    site_gate.open()
    page = check_chunks(await body_of(replayed))
    rest = read_chunks(b": ok\n\n" + await body_of(response), json.loads(json.dumps(answered)))
    assert page.message["id"] == rest.message["id"] == called.message["id"]
    assert page.message["parts"] == rest.message["parts"]
    assert [role for role, _ in prompt_of(page)] == ["user", "assistant", "tool"]
    assert text_of(page) == "Go out."
    await written()
    _, stored = await kept(caller)
    assert (stored["id"], stored["parts"]) == (page.message["id"], page.message["parts"])
    after = await ask(caller, user("Oslo?", "u1"), page.message, user("And now?", "u2"), **fields)
    assert [role for role, _ in prompt_of(after)] == ["user", "assistant", "tool", "assistant", "user"]


@pytest.fixture
def desk() -> Iterator[str]:
    """A pipeline with steps and sources."""

    @pipeline(model="echo")
    async def help_desk(run: Run) -> None:
        """Answer from passages."""
        await run.step("Looking up", lambda: None, of=2)
        run.cite("help", id="7", title="Prices", url="/help/7/")
        run.cite("notes", id="8")
        await run.step("Writing", run.generate, [{"role": "user", "content": run.question}], of=2)

    yield "help_desk"
    forget("help_desk")


async def test_a_pipeline_shows_steps_and_sources(caller: Caller, desk: str, keeps: None) -> None:
    """Steps as they come, sources as parts, also of the kept message."""
    page = await ask(caller, user("one", "u1"), model=desk, max_tokens=None)
    steps = [one["data"]["message"] for one in page.data if one["data"]["status"] == "step"]
    assert steps == ["Looking up", "Writing"]
    kinds = [part["type"] for part in page.message["parts"]]
    assert kinds == ["step-start", "source-url", "source-document", "text"]
    assert (await kept(caller))[1]["parts"] == page.message["parts"]


@pytest.fixture
def shop() -> Iterator[str]:
    """A pipeline whose tool asks its user first."""

    @tool(confirm=lambda euros: f"Pay {euros} euros?")
    def pay(euros: int) -> str:
        """Pay."""
        return f"Paid {euros} euros."

    @pipeline(model="payer")
    async def shop(run: Run) -> None:
        """Pay a bill."""
        await run.generate([{"role": "user", "content": run.question}], tools=[pay], max_tokens=200)

    yield "shop"
    forget("shop")


def responded(page: Page, *, approved: bool) -> dict[str, Any]:
    """Return the message after `addToolApprovalResponse`."""
    message: dict[str, Any] = json.loads(json.dumps(page.message))
    (part,) = [one for one in message["parts"] if one["type"] == "tool-pay"]
    assert (part["state"], part["providerExecuted"]) == ("approval-requested", True)
    assert part["approval"] == {"id": part["toolCallId"], "requestReason": "Pay 5 euros?"}
    part["state"] = "approval-responded"
    part["approval"]["approved"] = approved
    return message


ASKED = user("The bill?", "u1")


@pytest.mark.parametrize(("approved", "state"), [(True, "output-available"), (False, "output-denied")])
async def test_a_tool_that_asks_first_goes_on_with_the_answer(
    caller: Caller, shop: str, keeps: None, approved: bool, state: str
) -> None:
    """The run ends, so that the page may send by itself; then it goes on in the same message, streamed and stored."""
    asking = await ask(caller, ASKED, model=shop, max_tokens=None)
    assert asking.reason == "tool-calls"
    assert (await kept(caller))[1]["parts"] == asking.message["parts"]
    answered = responded(asking, approved=approved)
    page = await ask(caller, ASKED, answered, messageId=answered["id"])
    (part,) = [one for one in page.message["parts"] if one["type"] == "tool-pay"]
    assert part["state"] == state
    assert part.get("output") == ("Paid 5 euros." if approved else None)
    assert text_of(page) == "I pay." + ("It is paid." if approved else "Then I leave it.")
    replayed = check_chunks(await body_of(await caller.get("/ai/chat/chat-1/stream")))
    assert replayed.message["parts"] == page.message["parts"]
    _, stored = await kept(caller)
    assert (stored["id"], stored["parts"]) == (page.message["id"], page.message["parts"])
    refused = await caller.post("/ai/chat", {"id": "chat-1", "messages": [ASKED, answered]})
    assert refused.status_code in (400, 409)


async def test_an_approval_that_is_sent_again_with_its_key_is_the_same_answer(
    caller: Caller, shop: str, keeps: None
) -> None:
    """The tool runs once; with another key it is a second answer to what was asked, and refused."""
    asking = await ask(caller, ASKED, model=shop, max_tokens=None)
    answered = responded(asking, approved=True)
    first, second = [
        await ask(caller, ASKED, answered, headers={"Idempotency-Key": "key-of-the-answer"}) for _ in range(2)
    ]
    assert first.message == second.message
    body = {"id": "chat-1", "messages": [ASKED, answered]}
    assert (await caller.post("/ai/chat", body, **{"Idempotency-Key": "another-key"})).status_code in (409, 422)


async def test_an_approval_needs_no_conversation(shop: str, keeps_none: None) -> None:
    """A visitor's page that rebuilds the message gets what was before the question, too."""
    visitor = Caller()
    asking = await ask(visitor, ASKED, model=shop, max_tokens=None)
    answered = responded(asking, approved=True)
    page = await ask(visitor, ASKED, answered, messageId=answered["id"])
    replayed = check_chunks(await body_of(await visitor.get("/ai/chat/chat-1/stream")))
    assert replayed.message["id"] == page.message["id"] == asking.message["id"]
    assert replayed.message["parts"] == page.message["parts"]


async def test_a_key_starts_one_answer(caller: Caller, keeps: None) -> None:
    """Sent again with its Idempotency-Key a question shows the same answer; with another body it is refused."""
    key = {"headers": {"Idempotency-Key": "key-of-the-page"}}
    first = await ask(caller, user("one", "u1"), **key)
    second = await ask(caller, user("one", "u1"), **key)
    assert second.message == first.message
    assert await Message.objects.acount() == 2
    body = {"id": "chat-1", "messages": [user("two", "u2")], **SHORT}
    refused = await caller.post("/ai/chat", body, **key["headers"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")


async def test_wrong_requests_are_refused_in_words(caller: Caller, keeps: None) -> None:
    """The body of the error is what `useChat` has as its message: JSON with code, message and field."""
    for body, param in (
        ({"id": "a b", "messages": [user("one", "u1")]}, "id"),
        ({"id": "a", "messages": []}, "messages"),
        ({"id": "a", "messages": [user("", "u1")]}, "messages"),
        ({"id": "a", "messages": [user("one", "u1")], "model": "nothing"}, "model"),
    ):
        refused = await caller.post("/ai/chat", body)
        assert 400 <= refused.status_code < 500
        assert refused.json()["error"]["param"] == param
    assert (await caller.get("/ai/chat/")).status_code == 404
    assert (await caller.get("/ai/chat/a%20b")).status_code == 400


async def test_a_head_starts_and_holds_nothing(caller: Caller, keeps: None) -> None:
    """The headers of the stream."""
    response = await send(caller, user("one", "u1"))
    await anext(aiter(response.streaming_content))
    head = await caller.client.head("/ai/chat/chat-1/stream", headers=caller.headers)
    assert (head.status_code, head["x-vercel-ai-ui-message-stream"]) == (200, "v1")
    response.close()
