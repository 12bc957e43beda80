"""Laws of the `messages` field."""

from typing import Any

import pytest

from streamserve.dialects.messages import ROLES, messages
from streamserve.protocol.errors import BadRequest, PromptTooLong
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Message

LIMITS = Limits(max_prompt_chars=400)


def read(*turns: Any) -> tuple[Message, ...]:
    """Return the messages that `turns` become."""
    return messages(LIMITS)(list(turns), "messages")


@pytest.mark.parametrize("role", ROLES)
def test_known_roles_pass(role: str):
    """All six roles of the two APIs are valid."""
    assert read({"role": role, "content": "Hi"}) == (Message(role=role, content="Hi"),)


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
@pytest.mark.parametrize("role", ROLES)
def test_an_empty_content_is_valid(role: str, content: Any):
    """A blank system prompt, an empty question, an answer stopped before its first token, a tool without output."""
    assert read({"role": role, "content": content})[0].content == ""


@pytest.mark.parametrize("role", ROLES)
def test_only_an_answer_and_a_tool_may_have_no_content(role: str):
    """A cut answer and a tool that returned nothing may come back as null; a question of nothing is a mistake."""
    if role in ("assistant", "tool", "function"):
        assert read({"role": role, "content": None}) == read({"role": role}) == (Message(role=role, content=""),)
        return
    with pytest.raises(BadRequest, match="content is missing") as caught:
        read({"role": role, "content": None})
    assert (caught.value.code, caught.value.param) == ("missing_field", "messages[0].content")


def test_text_parts_are_joined_by_newlines():
    """Parts of the types that hold text become one text."""
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert read({"role": "user", "content": parts})[0].content == "one\ntwo"
    answered = [{"type": "output_text", "text": "one"}, {"type": "refusal", "refusal": "No."}]
    assert read({"role": "assistant", "content": answered})[0].content == "one\nNo."


def test_calls_and_their_results_reach_the_template():
    """Names, ids and arguments are kept; arguments stay the text that they are."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    asked, answered = read(
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "f"},
    )
    assert asked == Message(role="assistant", content="", extra={"tool_calls": [call]})
    assert answered == Message(role="tool", content="2", extra={"name": "f", "tool_call_id": "c1"})


@pytest.mark.parametrize(
    "arguments", ["", "{", '{"city": "Os', "null", "[]", "NaN", '{"a": 1e999}', '{"a": 1, "a": 2}', r'{"a": "\ud800"}']
)
def test_arguments_may_be_any_text(arguments: str):
    """A model may have written them, cut or broken: the history is no stricter than the answers were."""
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


def test_arguments_may_be_absent_or_an_object():
    """Some servers leave out arguments that are none, and some clients have read them already."""
    plain = {"name": "f"}
    none, null, given = ({**plain, **more} for more in ({}, {"arguments": None}, {"arguments": {"a": 10**23}}))
    calls = [{"id": "c1", "function": function} for function in (none, null, given)]
    (message,) = read({"role": "assistant", "tool_calls": calls})
    assert [one["function"]["arguments"] for one in message.extra["tool_calls"]] == ["", "", f'{{"a": {10**23}}}']


def test_a_reply_may_come_back_as_clients_keep_it():
    """What clients and other servers add to a turn, its parts and calls is left out: the turn is the same without."""
    function = {"name": "f", "arguments": '{"a": 1}'}
    call = {"id": "c1", "type": "function", "function": function}
    plain = {"role": "assistant", "content": [{"type": "text", "text": "Hi"}], "tool_calls": [call]}
    signed = {"extra_content": {"google": {"thought_signature": "c2ln"}}}
    more = {
        "id": "msg_1", "timestamp": 1764100000.5, "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
        "parsed": {"b": [1]}, "provider_specific_fields": {"refusal": None}, "thinking_blocks": [], "annotations": None,
        "audio": None, "function_call": None, "refusal": None, "token_ids": [1, 2], "usage": {"total_tokens": 3},
    }  # fmt: skip
    calls = [{**call, **signed, "index": 0, "function": {**function, **signed, "parsed_arguments": {"a": 1}}}]
    parts = [{"type": "text", "text": "Hi", "annotations": [], "logprobs": None}]
    assert read({**plain, "tool_calls": calls, "content": parts, **more}) == read(plain)


@pytest.mark.parametrize("empties", [{"tool_calls": []}, {"tool_call_id": "", "name": "", "reasoning_content": ""}])
def test_fields_of_other_roles_may_be_empty(empties: dict[str, Any]):
    """A client that writes every field into every turn sends no call and no thought with the user's."""
    assert read({"role": "user", "content": "Hi", **empties}) == (Message(role="user", content="Hi"),)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_comes_back_under_one_name(field: str):
    """Both names are read; templates get `reasoning_content`."""
    (message,) = read({"role": "assistant", "content": "4", field: "2+2"})
    assert message.extra == {"reasoning_content": "2+2"}


def test_a_reply_of_the_official_client_may_be_sent_back_as_it_came():
    """Nulls and unused fields that it adds to a message are ignored."""
    reply = {"role": "assistant", "content": "4", "refusal": None, "annotations": [], "audio": None}
    assert read({**reply, "function_call": None, "tool_calls": None}) == (Message(role="assistant", content="4"),)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_a_reply_without_text_may_be_sent_back(field: str):
    """One that was cut in its thought has no content."""
    (message,) = read({"role": "assistant", "content": None, field: "Hm."})
    assert (message.content, message.extra) == ("", {"reasoning_content": "Hm."})


def test_a_refusal_is_what_was_said():
    """A reply that is a refusal has no other content: the model is shown that it has refused."""
    assert read({"role": "assistant", "content": None, "refusal": "No."})[0].content == "No."


def test_a_turn_knows_its_place_in_the_body():
    """Errors that are found later name it."""
    assert [one.param for one in read(*[{"role": "user", "content": "Hi"}] * 2)] == ["messages[0]", "messages[1]"]


def test_hints_for_caches_are_ignored():
    """`cache_control` of a message and of a part, as clients of other servers send it."""
    hint = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "Hi"}
    assert read({"role": "user", "content": [{**part, **hint}], **hint}) == read({"role": "user", "content": [part]})


def test_the_length_limit_counts_all_turns_and_is_inclusive():
    """400 characters pass, 401 do not; other fields for the template count too."""
    half = {"role": "user", "content": "a" * 200}
    assert len(read(half, half)) == 2
    with pytest.raises(PromptTooLong, match="401 characters; the limit is 400"):
        read(half, half, {"role": "user", "content": "b"})
    with pytest.raises(PromptTooLong):
        read(half, {"role": "assistant", "content": "", "reasoning_content": "a" * 200})


def test_the_message_limit_is_inclusive():
    """512 turns pass."""
    turn = {"role": "user", "content": "a"}
    assert len(messages(Limits())([turn] * 512, "messages")) == 512
    with pytest.raises(BadRequest, match="513 items"):
        messages(Limits())([turn] * 513, "messages")
