"""Laws of `POST /ai/chat` bodies: what of a page's messages a model gets, and under which ids."""

from __future__ import annotations

from typing import Any

import pytest

from streamserve.dialects.ai_sdk.request import ChatRequest, parse
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits

LIMITS = Limits()
ASKED = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "Why?"}]}
CALL = {"type": "tool-weather", "toolCallId": "call_1", "state": "output-available", "input": {"city": "Oslo"}}
ANSWERED = {
    "id": "a1",
    "role": "assistant",
    "parts": [
        {"type": "step-start"},
        {"type": "reasoning", "text": "Hm."},
        {"type": "text", "text": "Let me see."},
        {**CALL, "output": {"sun": True}},
        {"type": "source-url", "sourceId": "s", "url": "/"},
        {"type": "step-start"},
        {"type": "text", "text": "It is sunny."},
        {"type": "data-mood", "data": 1},
    ],
}


def parsed(*messages: Any, **fields: Any) -> ChatRequest:
    return parse({"id": "chat", "messages": list(messages), **fields}, LIMITS)


def turns_of(asked: ChatRequest) -> list[Any]:
    return [(one.id, one.message.role, one.message.content) for one in asked.sent]


def refused(body: dict[str, Any]) -> BadRequest:
    with pytest.raises(BadRequest) as raised:
        parse(body, LIMITS)
    return raised.value


def test_a_message_of_several_steps_is_several_turns() -> None:
    """Each under the id of its message and its piece; thoughts, sources and data are the page's."""
    asked = parsed(ASKED, ANSWERED, {**ASKED, "id": "u2"})
    assert turns_of(asked) == [
        ("u1", "user", "Why?"),
        ("a1", "assistant", "Let me see."),
        ("a1/call_1", "tool", '{"sun": true}'),
        ("a1:1", "assistant", "It is sunny."),
        ("u2", "user", "Why?"),
    ]
    call = asked.sent[1].message.extra["tool_calls"][0]
    assert call == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    assert asked.sent[2].message.extra == {"tool_call_id": "call_1", "name": "weather"}


def test_results_of_the_pages_tools_ask_for_an_answer() -> None:
    """The answer goes on with the message that has the call; an error is told as such."""
    failed = {
        **CALL,
        "type": "dynamic-tool",
        "toolName": "weather",
        "state": "output-error",
        "errorText": "No network.",
    }
    asked = parsed(ASKED, {"id": "a1", "role": "assistant", "parts": [failed]}, messageId="a1")
    assert asked.continued_id == "a1"
    assert asked.edited_id == ""
    assert turns_of(asked)[-1] == ("a1/call_1", "tool", "Error: No network.")


def test_calls_without_results_and_of_the_server_are_left_out() -> None:
    """A template wants calls with their results; the server has its own."""
    parts = [
        {**CALL, "state": "input-available"},
        {**CALL, "output": 1, "providerExecuted": True},
        {"type": "text", "text": "Done."},
    ]
    asked = parsed(ASKED, {"id": "a1", "role": "assistant", "parts": parts}, {**ASKED, "id": "u2"})
    assert turns_of(asked)[1] == ("a1", "assistant", "Done.")
    assert asked.sent[1].message.extra == {}


def test_the_last_message_alone_is_taken() -> None:
    """As `message`, or as the one of `messages`."""
    alone = parse({"id": "chat", "message": ASKED}, LIMITS)
    assert turns_of(alone) == turns_of(parsed(ASKED)) == [("u1", "user", "Why?")]


def test_an_edit_names_what_it_replaces() -> None:
    """`messageId` is the last message's own, which a regenerate or a continuation has not."""
    assert parsed(ASKED, messageId="u1", trigger="submit-message").edited_id == "u1"
    assert parsed(ASKED, messageId="u1", trigger="regenerate-message").edited_id == ""
    assert parsed(ASKED, trigger="submit-message").edited_id == ""


def test_a_regenerate_leaves_the_answer_out() -> None:
    """Also where the page has sent it."""
    asked = parsed(ASKED, ANSWERED, trigger="regenerate-message", messageId="a1")
    assert turns_of(asked) == [("u1", "user", "Why?")]
    assert asked.continued_id == ""


def test_fields_of_streams_go_with_it() -> None:
    """Model, sampling, class, pace; tools as there, or by name."""
    asked = parsed(
        ASKED,
        model="chat",
        temperature=0.5,
        max_tokens=20,
        latency_class="document",
        interval_ms=100,
        tools={"weather": {"description": "It", "inputSchema": {"type": "object", "properties": {}}}},
    )
    assert (asked.generate.model, asked.generate.sampling.temperature) == ("chat", 0.5)
    assert (asked.latency_class, asked.pace.interval_ms, asked.on_disconnect) == ("document", 100, "park")
    assert [tool.name for tool in asked.generate.tools] == ["weather"]
    assert asked.generate.messages is None


def test_files_of_a_user_are_passed_on() -> None:
    """To models elsewhere, in their form."""
    files = [
        {"type": "file", "mediaType": "image/png", "url": "data:image/png;base64,AA=="},
        {"type": "file", "mediaType": "application/pdf", "url": "https://x/a.pdf", "filename": "a.pdf"},
    ]
    (turn,) = parsed({**ASKED, "parts": [*ASKED["parts"], *files]}).sent
    assert turn.message.content == "Why?"
    assert [part["type"] for part in turn.message.parts] == ["text", "image_url", "file"]
    assert turn.message.parts[2]["file"] == {"file_data": "https://x/a.pdf", "filename": "a.pdf"}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"messages": [ASKED]}, "missing_field", "id"),
        ({"id": "chat"}, "missing_field", "messages"),
        ({"id": "chat", "messages": []}, "invalid_value", "messages"),
        ({"id": "chat", "messages": [ASKED], "message": ASKED}, "conflicting_fields", "message"),
        ({"id": "chat", "messages": [ASKED, ANSWERED]}, "empty_prompt", "messages"),
        ({"id": "chat", "messages": [ANSWERED], "trigger": "regenerate-message"}, "empty_prompt", "messages"),
        ({"id": "chat", "messages": [{"role": "user"}]}, "missing_field", "messages[0].parts"),
        ({"id": "chat", "messages": [{"role": "tool", "parts": []}]}, "invalid_value", "messages[0].role"),
        ({"id": "chat", "messages": [{**ASKED, "id": "x" * 121}]}, "invalid_value", "messages[0].id"),
        ({"id": "chat", "messages": [{**ASKED, "id": "\n"}]}, "invalid_value", "messages[0].id"),
        ({"id": "chat", "messages": [{**ASKED, "parts": [{}]}]}, "missing_field", "messages[0].parts[0].type"),
        (
            {"id": "chat", "messages": [{**ASKED, "parts": [{"type": "text", "text": 1}]}]},
            "invalid_type",
            "messages[0].parts[0].text",
        ),
        (
            {"id": "chat", "messages": [{**ANSWERED, "parts": [{"type": "tool-x", "state": "odd"}]}]},
            "invalid_value",
            "messages[0].parts[0].state",
        ),
        ({"id": "chat", "messages": [ASKED], "trigger": "resume"}, "invalid_value", "trigger"),
        ({"id": "chat", "messages": [ASKED], "n": 2}, "unknown_field", "n"),
        ({"id": "chat", "messages": [ASKED], "on_disconnect": "never"}, "invalid_value", "on_disconnect"),
        ({"id": "chat", "messages": [ASKED], "tools": {"a b": {}}}, "invalid_value", "tools[0].function.name"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], code: str, param: str) -> None:
    """A 400 with the place in the body."""
    error = refused(body)
    assert (error.code, error.param) == (code, param)


def test_long_ids_of_calls_become_short() -> None:
    """A page may give any; the name of a piece is kept in a column."""
    long = {**CALL, "toolCallId": "c" * 500, "output": 1}
    asked = parsed(ASKED, {"id": "a" * 120, "role": "assistant", "parts": [long]})
    assert max(len(one.id) for one in asked.sent) <= 200
