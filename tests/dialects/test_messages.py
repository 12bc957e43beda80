"""Laws of the `messages` field."""

from typing import Any

import pytest

from streamserve.dialects.messages import ROLES, messages
from streamserve.protocol.errors import BadRequest, PromptTooLong
from streamserve.protocol.requests import Limits, Message

LIMITS = Limits(max_prompt_chars=150)


def read(*turns: Any) -> tuple[Message, ...]:
    """Return the messages that `turns` become."""
    return messages(LIMITS)(list(turns), "messages")


@pytest.mark.parametrize("role", ROLES)
def test_known_roles_pass(role: str):
    """All six roles of the two APIs are valid."""
    assert read({"role": role, "content": "Hi"}) == (Message(role=role, content="Hi"),)


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_only_a_user_must_have_content(role: str):
    """A blank system prompt, an answer stopped before its first token and a tool without output are valid."""
    assert read({"role": role, "content": ""})[0].content == ""


def test_text_parts_are_joined_by_newlines():
    """Parts of type text become one text."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert read({"role": "user", "content": parts})[0].content == "one\ntwo"


def test_calls_and_their_results_reach_the_template():
    """Arguments are parsed, since templates print them with `tojson`; names and ids are kept."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    asked, answered = read(
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "f"},
    )
    parsed = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert asked == Message(role="assistant", content="", extra={"tool_calls": [parsed]})
    assert answered == Message(role="tool", content="2", extra={"name": "f", "tool_call_id": "c1"})


@pytest.mark.parametrize("arguments", ["", "{", "[]", "NaN", '{"a": 1e999}', "\ud800"])
def test_arguments_that_are_no_object_stay_text(arguments: str):
    """A model may have generated them; the template gets them unchanged."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert read({"role": "assistant", "tool_calls": [call]})[0].extra["tool_calls"] == [call]


def test_arguments_of_all_calls_have_a_bound_together():
    """They are parsed too: 1,000 arrays and objects pass, one more does not; brackets in their strings are text."""
    reader = messages(Limits(max_json_containers=1_000))

    def turns(arguments: str) -> list[dict[str, Any]]:
        calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}] * 2
        return [{"role": "assistant", "tool_calls": calls}, {"role": "assistant", "tool_calls": calls}]

    assert len(reader(turns('{"a": [' + "[]," * 248 + '"[[["]}'), "messages")) == 2
    with pytest.raises(BadRequest) as caught:
        reader(turns('{"a": [' + "[]," * 249 + '"[[["]}'), "messages")
    assert (caught.value.code, caught.value.param) == ("too_many_containers", "messages")
    assert "1,000" in caught.value.message


def test_a_reply_may_come_back_as_clients_dump_it():
    """What the official client and litellm add to a reply is ignored: the turn is the same without it."""
    function = {"name": "f", "arguments": '{"a": 1}'}
    plain = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    calls = [{"id": "c1", "type": "function", "index": 0, "function": {**function, "parsed_arguments": {"a": 1}}}]
    extra = {"parsed": {"b": [1]}, "provider_specific_fields": {"refusal": None}, "thinking_blocks": [], "audio": None}
    assert read({**plain, "tool_calls": calls, **extra, "function_call": None}) == read(plain)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_comes_back_under_one_name(field: str):
    """Both names are read; templates get `reasoning_content`."""
    (message,) = read({"role": "assistant", "content": "4", field: "2+2"})
    assert message.extra == {"reasoning_content": "2+2"}


def test_a_reply_of_the_official_client_may_be_sent_back_as_it_came():
    """Nulls and unused fields that it adds to a message are ignored."""
    reply = {"role": "assistant", "content": "4", "refusal": None, "annotations": [], "audio": None}
    assert read({**reply, "function_call": None, "tool_calls": None}) == (Message(role="assistant", content="4"),)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "refusal"])
def test_a_reply_without_text_may_be_sent_back(field: str):
    """One that was cut in its thought has no content, and neither has a refusal; a turn with nothing is no turn."""
    (message,) = read({"role": "assistant", "content": None, field: "Hm."})
    assert message.content == ""
    with pytest.raises(BadRequest, match="content is missing"):
        read({"role": "assistant", "content": None, field: ""})


def test_hints_for_caches_are_ignored():
    """`cache_control` of a message and of a part, as clients of other servers send it."""
    hint = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "Hi"}
    assert read({"role": "user", "content": [{**part, **hint}], **hint}) == read({"role": "user", "content": [part]})


def test_the_length_limit_counts_all_turns_and_is_inclusive():
    """150 characters pass, 151 do not; other fields for the template count too."""
    half = {"role": "user", "content": "a" * 75}
    assert len(read(half, half)) == 2
    with pytest.raises(PromptTooLong, match="151 characters; the limit is 150"):
        read(half, half, {"role": "user", "content": "b"})
    with pytest.raises(PromptTooLong):
        read(half, {"role": "assistant", "content": "", "reasoning_content": "a" * 75})


def test_the_message_limit_is_inclusive():
    """512 turns pass."""
    turn = {"role": "user", "content": "a"}
    assert len(messages(Limits())([turn] * 512, "messages")) == 512
    with pytest.raises(BadRequest, match="513 items"):
        messages(Limits())([turn] * 513, "messages")
