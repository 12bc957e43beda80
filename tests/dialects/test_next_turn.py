"""Laws of the next turn: the conversation grows by the answer and the input; fields that were set keep their value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streamserve.dialects import native
from streamserve.dialects.websocket import NextTurn
from streamserve.protocol.engine import Accepted
from streamserve.protocol.errors import BadRequest, StreamserveError
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GenerateRequest, Message, Tool, ToolChoice, with_system

LIMITS = Limits()
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello", "name": "ann"}]
GIVEN = {
    "temperature": 0.5,
    "top_k": 7,
    "seed": 3,
    "max_tokens": 20,
    "stop": ["x"],
    "logprobs": 2,
    "ignore_eos": True,
    "timeout_seconds": 9.0,
    "chat_template_kwargs": {"thinking": True},
}


def asked(**fields: Any) -> GenerateRequest:
    return native.parse({"messages": HELLO, **fields}, LIMITS, default_model="m").generate


def accepted(request: GenerateRequest) -> GenerateRequest:
    """Return the request as a stream keeps it, with the values that acceptance fills in (streams/stream.py)."""
    sampling = request.sampling
    return request.as_accepted(
        Accepted(num_prompt_tokens=1, seed=sampling.seed or 99, max_tokens=sampling.max_tokens or 99)
    )


def next_turn(before: GenerateRequest, answer: str = "Hi.", on_disconnect: str = "park", **fields: Any) -> Any:
    return NextTurn({"text": "More.", **fields} if "messages" not in fields else fields, LIMITS).after(
        before, answer, on_disconnect
    )


@pytest.mark.parametrize("fields", [{}, GIVEN, {"temperature": 0.0}, {"model": "other"}])
def test_the_next_turn_is_a_start_with_the_whole_conversation(fields: dict[str, Any]) -> None:
    """The next request equals that of a start with every turn; fields that were left open are open again."""
    turns = [*HELLO, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "More."}]
    expected = native.parse({**fields, "messages": turns}, LIMITS, default_model="m")
    assert next_turn(accepted(asked(**fields))) == expected


def test_fields_given_anew_count() -> None:
    """A field of the input replaces its value, the others keep theirs; a third turn builds on the second."""
    changed = next_turn(accepted(asked(**GIVEN)), request={"temperature": 1.5, "max_tokens": 5, "top_p": 0.5})
    turns = [*HELLO, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "More."}]
    fields = {**GIVEN, "temperature": 1.5, "max_tokens": 5, "top_p": 0.5}
    assert changed.generate == native.parse({**fields, "messages": turns}, LIMITS, default_model="m").generate
    third = next_turn(accepted(changed.generate), "Ok.", messages=[{"role": "tool", "content": "4"}]).generate
    assert [turn.content for turn in third.messages] == ["Be brief.", "Hello", "Hi.", "More.", "Ok.", "4"]
    assert (third.sampling, third.n) == (changed.generate.sampling, 1)


def test_a_conversation_keeps_its_tools() -> None:
    """The next turn may call the tools of the one before, and shows the model the calls that it has answered."""
    tools = (Tool(name="add"),)
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    before = replace(accepted(asked()), tools=tools, parallel_tool_calls=False)
    answer = Message(role="assistant", content="", extra={"tool_calls": [call]})
    result = {"role": "tool", "content": "4", "tool_call_id": "call_1"}
    after = NextTurn({"messages": [result]}, LIMITS).after(before, answer, "park").generate
    assert (after.tools, after.tool_choice, after.parallel_tool_calls) == (tools, ToolChoice(), False)
    assert after.messages[-2:] == (answer, Message(role="tool", content="4", extra={"tool_call_id": "call_1"}))


def test_a_conversation_keeps_its_class() -> None:
    """The next turn has the class of the one before, unless it names another."""
    before = accepted(asked(latency_class="document"))
    assert next_turn(before).generate.latency_class == "document"
    assert next_turn(before, request={"latency_class": "batch"}).generate.latency_class == "batch"


def test_an_answer_that_was_not_begun_is_an_empty_turn() -> None:
    """An empty answer is an assistant turn: templates require the roles to alternate."""
    turns = next_turn(asked(), "").generate.messages
    assert [(turn.role, turn.content) for turn in turns[-2:]] == [("assistant", ""), ("user", "More.")]


def test_what_a_readers_leaving_means() -> None:
    """`on_disconnect` is as before, or as the input has it; `finish` becomes `park`."""
    assert next_turn(asked(), on_disconnect="abort").on_disconnect == "abort"
    assert next_turn(asked(), on_disconnect="abort", request={"on_disconnect": "park"}).on_disconnect == "park"
    assert next_turn(asked(), on_disconnect="finish").on_disconnect == "park"


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ({}, "missing_field", "text"),
        ({"text": "a", "messages": HELLO}, "conflicting_fields", "text"),
        ({"text": ""}, "empty_prompt", "text"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "user"}]}, "missing_field", "messages[0].content"),
        ({"text": "a", "request": {"messages": HELLO}}, "unknown_field", "messages"),
        ({"text": "a", "request": {"prompt": "x"}}, "unknown_field", "prompt"),
        ({"text": "a", "request": {"n": 2}}, "unknown_field", "n"),
        ({"text": "a", "request": {"top_p": 7}}, "invalid_value", "top_p"),
    ],
)
def test_an_input_is_checked_alone(message: dict[str, Any], code: str, param: str) -> None:
    """A wrong input is refused before any answer is stopped."""
    with pytest.raises(BadRequest) as caught:
        NextTurn(message, LIMITS)
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    ("before", "code"),
    [
        (GenerateRequest(model="m", prompt="once upon"), "no_conversation"),
        (GenerateRequest(model="m", prompt_token_ids=(1, 2)), "no_conversation"),
        (GenerateRequest(model="m", prompt=""), "conversation_gone"),
        (asked(n=2), "conflicting_fields"),
    ],
)
def test_what_has_no_conversation_is_refused(before: GenerateRequest, code: str) -> None:
    """The refusal names the way out: start."""
    with pytest.raises(StreamserveError) as caught:
        next_turn(before)
    assert caught.value.code == code
    assert "with start" in caught.value.message


@pytest.mark.parametrize(
    ("limits", "code"),
    [(Limits(max_messages=3), "invalid_value"), (Limits(max_prompt_chars=20), "context_length_exceeded")],
)
def test_the_whole_conversation_is_bounded(limits: Limits, code: str) -> None:
    """A conversation cannot grow turn by turn past the limits of one body."""
    turn = NextTurn({"text": "More."}, limits)
    with pytest.raises(BadRequest) as caught:
        turn.after(asked(), "Hi.", "park")
    assert (caught.value.code, caught.value.param) == (code, "messages")


def test_the_servers_own_system_prompt_is_no_turn() -> None:
    """It is left out of the next request, which gets it anew: so it stays the server's."""
    before = with_system(asked(messages=[{"role": "user", "content": "Hello"}]), "Be kind.")
    after = NextTurn({"text": "Go on"}, LIMITS).after(before, "Hi.", "park").generate
    assert [one.role for one in after.messages or ()] == ["user", "assistant", "user"]
    assert not after.has_public_system
    assert with_system(after, "Be kind.").has_public_system
