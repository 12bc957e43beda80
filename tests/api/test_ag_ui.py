"""Laws of /ag-ui: a model or a pipeline as an AG-UI agent, in threads, resumed and stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve import Run, pipeline, tool
from streamserve.clients.pipeline.client import forget
from streamserve.models import Conversation, Message
from streamserve.models import Stream as StreamRow
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.joined import with_joined_text
from tests.support.checks.run_checks import Event, Page, check_run, events_of
from tests.support.checks.sse_reader import read_events
from tests.support.streams.hand_made import Gate

pytestmark = pytest.mark.django_db(transaction=True)

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWERS = {
    "Weather report": "It is sunny.",
    "refused": "As you like.",
    "sky": CALL,
    "cloud": CALL.replace("weather", "look"),
    "ponder": "<think>Hm. Let me see.</think>Yes.",
    "hello": "Hi!",
}
KEEPS = {
    "TESTING": True,
    "CONVERSATIONS": True,
    "TITLES": "words",
    "MODELS": {"echo": {"PATH": "echo", "ANSWERS": ANSWERS, "FORMAT": "qwen3"}},
}
DEADLINE = 60.0
WEATHER = {
    "name": "weather",
    "description": "Return the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"Weather report of {city}: sunny"


@tool(confirm=lambda city: f"Look at {city}?")
def look(city: str) -> str:
    """Return the weather of a city."""
    return f"Weather report of {city}: sunny"


async def asking(run: Run) -> None:
    """Ask before the only tool runs."""
    run.state["step"] = 1
    await run.step("Look", run.generate, "Any cloud?", tools=[look], max_tokens=100)
    run.state["step"] = 2
    run.emit("over")


async def guide(run: Run) -> None:
    """Answer with everything that a run can show."""
    run.state["asked"] = run.question
    run.state["input"] = run.input.get("page")
    found = await run.step("Look", lambda: [1, 2])
    run.cite("help", id="7", title="Prices", url="/help/7/")
    run.state["found"] = found
    run.emit("chart", {"points": found})
    await run.step("Write", run.generate, "How is the sky?", tools=[weather], max_tokens=100)


@pytest.fixture
async def keeps(site_gate: Gate) -> AsyncIterator[Gate]:
    """A site that keeps conversations; its gate is open until a test closes it."""
    pipeline("guide")(guide)
    pipeline("asking")(asking)
    site_gate.open()
    try:
        with override_settings(STREAMSERVE=KEEPS):
            await site.reset()
            await until_ready()
            yield site_gate
            await site.reset()
    finally:
        forget("guide")
        forget("asking")


@pytest.fixture
def other(bob: Any) -> Caller:
    return Caller(user=bob)


def said(text: str, id_: str = "u1", role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"id": id_, "role": role, "content": text, **fields}


def body(*messages: dict[str, Any], run: str = "r1", thread: str = "t1", **fields: Any) -> dict[str, Any]:
    props = {"max_tokens": 200, "seed": 7}
    return {"threadId": thread, "runId": run, "messages": list(messages), "forwardedProps": props, **fields}


async def asked(caller: Caller, content: dict[str, Any], name: str = "echo", **headers: str) -> tuple[list[Event], Any]:
    """Run to the end; return the events, which are in order, and the response."""
    response = await caller.post(f"/ag-ui/{name}", content, **headers)
    assert response.status_code == 200, response.content
    events = events_of(await body_of(response))
    check_run(events)
    return events, response


async def written(caller: Caller, num: int) -> None:
    """Wait until that many answers are in conversations."""
    async with asyncio.timeout(DEADLINE):
        while await Message.objects.filter(role="assistant", state="done").acount() < num:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_model_answers_as_an_agent(keeps: Gate, caller: Caller) -> None:
    """Ids are the client's, the message has the answer's id, usage and protocol are named."""
    events, response = await asked(caller, body(said("hello")))
    assert events[0] == {
        "type": "RUN_STARTED",
        "threadId": "t1",
        "runId": "r1",
        "protocolVersion": "1.0",
        "metadata": {"streamId": response["X-Stream-Id"], "model": "echo"},
    }
    page = Page().read(events)
    assert [(one["id"], one["role"], one["content"]) for one in page.messages] == [
        (response["X-Message-Id"], "assistant", "Hi!")
    ]
    assert page.end["outcome"] == {"type": "success"}
    assert page.end["usage"][0]["outputTokens"] > 0


async def test_thoughts_and_calls_of_a_model_are_shown(keeps: Gate, caller: Caller) -> None:
    """Thoughts are a message of their own; a call of the client's tools is pending, and its result continues."""
    page = Page().read((await asked(caller, body(said("ponder"), thread="t0")))[0])
    assert [(one["role"], one["content"]) for one in page.messages] == [
        ("reasoning", "Hm. Let me see."),
        ("assistant", "Yes."),
    ]
    events, _ = await asked(caller, body(said("How is the sky?"), tools=[WEATHER]))
    page = Page().read(events)
    (call,) = page.messages[-1]["toolCalls"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Oslo"})
    assert page.end["outcome"] == {"type": "success", "pendingToolCallIds": [call["id"]]}
    await written(caller, 2)
    history = [said("How is the sky?"), *as_sent(page.messages)]
    result = said("Weather report: sunny", "tool-1", "tool", toolCallId=call["id"])
    events, _ = await asked(caller, body(*history, result, run="r2", tools=[WEATHER]))
    assert Page().read(events).text == "It is sunny."
    stored = await Message.objects.aget(role="tool")
    branch = Message.objects.filter(conversation_id=stored.conversation_id).order_by("created_at")
    roles = [one.role async for one in branch]
    assert roles == ["user", "assistant", "tool", "assistant"]


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as a client sends them again."""
    out = []
    for one in messages:
        calls = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in one.get("toolCalls", ())
        ]
        out.append({**one, **({"toolCalls": calls} if calls else {})})
    return out


async def test_a_pipeline_shows_state_steps_tools_and_citations(keeps: Gate, caller: Caller) -> None:
    """A pipeline's run, with its state from the request's, and its own tools and their results."""
    content = body(said("Why?"), state={"page": 3}, forwardedProps={"page": "prices"}, tools=[WEATHER])
    events, response = await asked(caller, content, "guide")
    page = Page().read(events)
    assert page.state == {"page": 3, "asked": "Why?", "input": "prices", "found": [1, 2]}
    assert page.steps == ["Look", "Write"]
    cited = {"source": "help", "id": "7", "title": "Prices", "url": "/help/7/"}
    assert page.customs == [("streamserve.citation", cited), ("chart", {"points": [1, 2]})]
    call, result, last = page.messages
    answer_id = response["X-Message-Id"]
    assert [one["id"] for one in page.messages] == [answer_id, f"{answer_id}:result-1", f"{answer_id}:1"]
    assert result["content"] == "Weather report of Oslo: sunny"
    assert result["toolCallId"] == call["toolCalls"][0]["id"]
    assert last["content"] == "It is sunny."
    assert page.end["outcome"] == {"type": "success"}  # no call waits for the client
    await written(caller, 1)
    history = [said("Why?"), *as_sent(page.messages), said("And now?", "u2")]
    events, _ = await asked(caller, body(*history, run="r2"), "guide")
    assert Page().read(events).state["asked"] == "And now?"
    assert await Message.objects.filter(role="user").acount() == 2


async def test_a_run_is_started_once(keeps: Gate, caller: Caller) -> None:
    """The same `runId` shows the same run again, from any frame on, whatever messages come with it."""
    response = await caller.post("/ag-ui/echo", body(said("tell me of the hills and the sea")))
    whole = await body_of(response)
    again = await caller.post("/ag-ui/echo", body(said("tell me"), said("something else", "u2")))
    assert with_joined_text(events_of(await body_of(again))) == with_joined_text(events_of(whole))
    assert again["X-Stream-Id"] == response["X-Stream-Id"]
    assert again["X-Message-Id"] == response["X-Message-Id"]
    frames = read_events(whole)
    for index, frame in enumerate(frames[:-1]):
        rest = await caller.post("/ag-ui/echo", body(said("tell me")), **{"last-event-id": frame.id})
        content = await body_of(rest)
        got = [json.loads(one.data) for one in frames[: index + 1]] + events_of(content)
        check_run(got)
        assert Page().read(got).text == Page().read(events_of(whole)).text
    nothing = await caller.post("/ag-ui/echo", body(said("tell me")), **{"last-event-id": frames[-1].id})
    assert nothing.status_code == 204
    assert await StreamRow.objects.acount() == 1
    other = await caller.post("/ag-ui/guide", body(said("tell me")))
    assert other.status_code == 422, other.content
    assert other.json()["code"] == "idempotency_key_reused"


async def test_a_reader_that_returns_starts_no_run(keeps: Gate, caller: Caller) -> None:
    """With a Last-Event-ID of a run that is not known any more there is nothing to resume."""
    response = await caller.post("/ag-ui/echo", body(said("hello")), **{"last-event-id": "abcdefghijkl-4"})
    assert response.status_code == 410
    assert await StreamRow.objects.acount() == 0


async def test_an_idempotency_key_goes_before_the_run_id(keeps: Gate, caller: Caller) -> None:
    """The same key with the same body is the same run, with another body a mistake."""
    first, one = await asked(caller, body(said("hello")), **{"idempotency-key": "k1"})
    second, two = await asked(caller, body(said("hello")), **{"idempotency-key": "k1"})
    assert one["X-Stream-Id"] == two["X-Stream-Id"]
    assert with_joined_text(first) == with_joined_text(second)
    other = await caller.post("/ag-ui/echo", body(said("other")), **{"idempotency-key": "k1"})
    assert other.status_code == 422


async def test_the_server_s_history_wins(keeps: Gate, caller: Caller) -> None:
    """A second question follows the first; the whole history, or the last message alone, is the same to the server."""
    events, one = await asked(caller, body(said("hello")))
    await written(caller, 1)
    _, two = await asked(caller, body(said("hello"), *Page().read(events).messages, said("and?", "u2"), run="r2"))
    await written(caller, 2)
    _, three = await asked(caller, body(said("and so?", "u3"), run="r3"))
    assert one["X-Conversation-Id"] == two["X-Conversation-Id"] == three["X-Conversation-Id"]
    assert await Conversation.objects.acount() == 1
    await written(caller, 3)
    texts = [one.text async for one in Message.objects.filter(role="user").order_by("created_at")]
    assert texts == ["hello", "and?", "and so?"]
    listed = (await caller.get("/conversations")).json()["conversations"]
    assert [one["source"] for one in listed] == ["ag-ui"]


async def test_a_page_that_is_opened_again_has_its_thread(keeps: Gate, caller: Caller, other: Caller) -> None:
    """The messages as the page had them, the last run's state, and what it asks; nothing of another's thread."""
    nothing = {"threadId": "t1", "messages": [], "state": {}, "interrupts": []}
    assert (await caller.get("/ag-ui/guide/t1/messages")).json() == nothing
    first = Page().read((await asked(caller, body(said("Why?")), "guide"))[0])
    await written(caller, 1)
    whole = [said("Why?"), *as_sent(first.messages)]
    kept = (await caller.get("/ag-ui/guide/t1/messages")).json()
    assert kept == {**nothing, "messages": whole, "state": first.state}
    second = Page().read((await asked(caller, body(*whole, said("Go", "u2"), run="r2"), "asking"))[0])
    await written(caller, 2)
    kept = (await caller.get("/ag-ui/asking/t1/messages")).json()
    assert kept["messages"] == [*whole, said("Go", "u2"), *as_sent(second.messages)]
    assert (kept["state"], kept["interrupts"]) == (second.state, second.end["outcome"]["interrupts"])
    assert (await other.get("/ag-ui/guide/t1/messages")).json() == nothing


async def test_the_run_of_a_thread_is_followed_and_stopped(keeps: Gate, caller: Caller, other: Caller) -> None:
    """GET gives the run that goes on, to its owner alone; a stop ends it with the outcome `cancelled`."""
    keeps.allow(0)
    response = await caller.post("/ag-ui/echo", body(said("tell me of the hills"), forwardedProps={}))
    streamed = aiter(response.streaming_content)
    await anext(streamed)
    assert (await caller.get("/ag-ui/guide/t1/stream")).status_code == 204  # of another model
    assert (await other.get("/ag-ui/echo/t1/stream")).status_code == 204
    head = await caller.client.head("/ag-ui/echo/t1/stream", headers=caller.headers)
    assert (head.status_code, head["X-Stream-Id"]) == (200, response["X-Stream-Id"])
    followed = await caller.get("/ag-ui/echo/t1/stream?runId=r1")
    assert followed.status_code == 200
    stopped = await other.post("/ag-ui/echo/t1/stop", {})
    assert stopped.json() == {"threadId": "t1", "stopped": False}
    stopped = await caller.post("/ag-ui/echo/t1/stop", {})
    assert stopped.json() == {"threadId": "t1", "stopped": True}
    keeps.open()
    events = events_of(await body_of(followed))
    check_run(events)
    assert events[0]["runId"] == "r1"
    assert events[-1]["outcome"] == {"type": "cancelled"}
    assert events_of(b"".join([chunk async for chunk in streamed]))[-1] == events[-1]
    assert (await caller.post("/ag-ui/echo/t1/stop", {})).json() == {"threadId": "t1", "stopped": False}
    assert (await caller.get("/ag-ui/echo/t1/stream")).status_code == 204
    assert (await caller.get("/ag-ui/echo/none/stream")).status_code == 204


async def test_without_conversations_the_prompt_is_what_was_sent(keeps: Gate, caller: Caller) -> None:
    """The thread then names its last stream; nothing is kept of what was said."""
    await site.reset()
    with override_settings(STREAMSERVE={**KEEPS, "CONVERSATIONS": False}):
        await until_ready()
        events, response = await asked(caller, body(said("hello")))
        assert [one["id"] for one in Page().read(events).messages] == [response["X-Stream-Id"]]
        history = [said("hello"), *Page().read(events).messages, said("How is the sky?", "u2")]
        page = Page().read((await asked(caller, body(*history, run="r2", tools=[WEATHER])))[0])
        assert page.end["outcome"]["pendingToolCallIds"]
        assert (await caller.post("/ag-ui/echo/t1/stop", {})).json()["stopped"] is False
        assert await Conversation.objects.acount() == 0
        await site.reset()


async def test_the_events_of_any_stream_are_read_as_a_run(keeps: Gate, caller: Caller) -> None:
    """`format=ag-ui` of a stream's events: its ids are the stream's."""
    streamed = await caller.post("/streams", {"prompt": "hello", "max_tokens": 5})
    stream_id = streamed["X-Stream-Id"]
    await body_of(streamed)
    events = events_of(await body_of(await caller.get(f"/streams/{stream_id}/events?format=ag-ui")))
    check_run(events)
    assert (events[0]["threadId"], events[0]["runId"]) == (stream_id, stream_id)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"threadId": None}, "missing_field", "threadId"),
    ({"threadId": "a b"}, "invalid_value", "threadId"),
    ({"runId": "x" * 201}, "invalid_value", "runId"),
    ({"runId": "ü"}, "invalid_value", "runId"),
    ({"messages": None}, "missing_field", "messages"),
    ({"messages": []}, "empty_prompt", "messages"),
    ({"messages": [{"id": "a", "role": "robot"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user", "content": "a"}]}, "missing_field", "messages[0].id"),
    ({"messages": [{"id": "a", "role": "user"}]}, "missing_field", "messages[0].content"),
    (
        {"messages": [{"id": "a", "role": "user", "content": [{"type": "video"}]}]},
        "unsupported_content",
        "messages[0].content[0]",
    ),
    ({"messages": [{"id": "a", "role": "tool", "content": "a"}]}, "missing_field", "messages[0].toolCallId"),
    (
        {"messages": [{"id": "a", "role": "assistant", "toolCalls": [{"id": "b"}]}]},
        "missing_field",
        "messages[0].toolCalls[0].function",
    ),
    ({"tools": [{"description": "no name"}]}, "missing_field", "tools[0].name"),
    ({"context": [{"value": "a"}]}, "missing_field", "context[0].description"),
    ({"state": []}, "invalid_type", "state"),
    ({"forwardedProps": {"temperature": "hot"}}, "invalid_type", "forwardedProps.temperature"),
    ({"resume": [{"interruptId": "x", "status": "resolved"}]}, "invalid_value", "resume[0].interruptId"),
    (
        {"resume": [{"interruptId": f"{'0' * 32}:c", "status": "resolved"}]},
        "invalid_type",
        "resume[0].payload",
    ),
    (
        {"resume": [{"interruptId": f"{'0' * 32}:c", "status": "resolved", "payload": {"approved": 1}}]},
        "invalid_type",
        "resume[0].payload.approved",
    ),
]


async def test_a_wrong_body_is_named(keeps: Gate, caller: Caller) -> None:
    """The error is the event that the run would have ended in; `metadata.param` has the field."""
    wrong = []
    for fields, code, param in WRONG:
        content = {name: value for name, value in {**body(said("hello")), **fields}.items() if value is not None}
        response = await caller.post("/ag-ui/echo", content)
        error = response.json()
        found = (response.status_code, error["type"], error["code"], error["metadata"]["param"])
        if found != (400, "RUN_ERROR", code, param) or not error["message"].endswith("."):
            wrong.append((fields, found, error["message"]))
    assert wrong == []


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"status": "resolved", "payload": {"approved": True}}, "Weather report of Oslo: sunny"),
        ({"status": "resolved", "payload": False}, "refused"),
        ({"status": "cancelled"}, "refused"),
    ],
)
async def test_an_interrupt_is_answered_by_the_next_run(
    keeps: Gate, caller: Caller, other: Caller, answer: dict[str, Any], text: str
) -> None:
    """The run ends in `interrupt`; `resume` goes on with it, once, and shows only what comes after."""
    events, _ = await asked(caller, body(said("Go")), "asking")
    page = Page().read(events)
    (interrupt,) = page.end["outcome"]["interrupts"]
    assert interrupt["message"] == "Look at Oslo?"
    assert interrupt["toolCallId"] == page.messages[-1]["toolCalls"][0]["id"]
    assert page.state == {"step": 1}
    await written(caller, 1)
    entry = {"interruptId": interrupt["id"], **answer}
    history = [said("Go"), *as_sent(page.messages)]
    content = body(*history, run="r2", resume=[entry])
    refused = await other.post("/ag-ui/asking", content)
    assert refused.status_code == 404
    resumed, response = await asked(caller, content, "asking")
    assert [event["toolCallId"] for event in resumed if event["type"] == "TOOL_CALL_RESULT"] == [
        interrupt["toolCallId"]
    ]
    assert not [event for event in resumed if event["type"] in ("TOOL_CALL_START", "STEP_STARTED")]
    after = Page().read(resumed)
    assert text in after.messages[0]["content"]
    assert after.state == {"step": 2}
    assert after.customs == [("over", None)]
    assert not {one["id"] for one in after.messages} & {one["id"] for one in page.messages}
    again, same = await asked(caller, content, "asking")
    assert same["X-Stream-Id"] == response["X-Stream-Id"]
    assert with_joined_text(again) == with_joined_text(resumed)
    other_answer = await caller.post("/ag-ui/asking", {**content, "runId": "r3"})
    assert (other_answer.status_code, other_answer.json()["code"]) == (409, "approval_answered")
    assert await StreamRow.objects.acount() == 2


async def test_a_resume_of_an_unknown_run_is_not_found(keeps: Gate, caller: Caller) -> None:
    """As any stream that is not the caller's."""
    entry = {"interruptId": f"{'0' * 32}:call_1", "status": "resolved", "payload": True}
    response = await caller.post("/ag-ui/echo", body(resume=[entry]))
    assert response.status_code == 404
    assert (await caller.post("/ag-ui/none", body(said("hello")))).status_code == 404
