"""Laws of Messages API bodies: what a conversation becomes, what each field does, and what wrong bodies get."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.dialects.anthropic.request import IGNORED, MessagesRequest, body_fields, field_of, parse, parse_count
from streamserve.dialects.pace import PACE
from streamserve.protocol.errors import BadRequest, StreamserveError
from streamserve.protocol.json_body import decode_json
from streamserve.protocol.requests import Grammar, Message, Tool, ToolChoice
from tests.support.bodies.bad_fields import BadBody
from tests.support.bodies.wrong_bodies import CALL, HI, LIMITS, RESULT, WEATHER, assistant, bad_messages, said, user

OFF, ON = ({"enable_thinking": is_on, "thinking": is_on} for is_on in (False, True))


def ask(**fields: Any) -> MessagesRequest:
    body = {"max_tokens": 8, "messages": HI, **fields}
    return parse({name: one for name, one in body.items() if one is not None}, LIMITS, default_model="echo")


def messages(*turns: dict[str, Any], **fields: Any) -> tuple[Message, ...] | None:
    return ask(messages=list(turns), **fields).generate.messages


def test_a_tool_loop_as_the_client_sends_it_back():
    """Thought and call are the assistant's turn, the result is its own; a reply's other fields change nothing."""
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s1"}
    call = {**CALL, "caller": None, "toolset_name": None}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [said("foggy"), said("cold")]}
    turns = (
        user(said("Weather?", cache_control={"type": "ephemeral", "ttl": "5m"})),
        assistant(thought, said("So:", citations=None, parsed_output=None), call),
        user({**result, "is_error": False}, said("And now?")),
    )
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    extra = {
        "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        "reasoning_content": "Hm.",
    }
    assert messages(*turns, tools=[WEATHER]) == (
        Message(role="user", content="Weather?"),
        Message(role="assistant", content="So:", extra=extra),
        Message(role="tool", content="foggy\ncold", extra={"tool_call_id": "toolu_1"}),
        Message(role="user", content="And now?"),
    )


def test_a_history_may_have_fields_of_other_clients():
    """What they add to a turn or a block is left out: the turn is the same without."""
    more = {"id": "msg_1", "timestamp": 1, "extra_content": {"signature": "c2ln"}}
    turns = (user(said("Hi")), assistant(said("Yes?"), CALL), user({**RESULT, "content": "foggy"}))
    kept = [{**turn, **more, "content": [{**one, **{k: more[k] for k in list(more)[1:]}} for one in turn["content"]]}
            for turn in turns]  # fmt: skip
    assert messages(*kept, tools=[WEATHER]) == messages(*turns, tools=[WEATHER])


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ({}, "{}"),
        ({"partial_json": '{"city": "Os'}, '{"city": "Os'),
        ({"partial_json": 1}, '{"partial_json": 1}'),
        ({"n": 10**29}, f'{{"n": {10**29}}}'),
        ({"city": "Ålesund"}, '{"city": "Ålesund"}'),
    ],
)
def test_the_input_of_a_call_is_its_arguments(written: dict[str, Any], arguments: str):
    """As JSON text; what an answer shows as `partial_json` is the text that the model wrote."""
    (_, turn, _) = messages(*HI, assistant({**CALL, "input": written}), user(RESULT), tools=[WEATHER])
    assert turn.extra["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_number_of_any_size_comes_back() -> None:
    """A client that has read it as a number sends it as a number: 30 digits, and 4,000."""
    for digits in (30 * "7", 4_000 * "7"):
        turns = json.dumps([*HI, assistant({**CALL, "input": {"n": "N"}}), user(RESULT)]).replace('"N"', digits)
        body = decode_json(f'{{"max_tokens": 8, "messages": {turns}}}'.encode(), LIMITS)
        request = parse(body, LIMITS, default_model="echo").generate
        assert request.messages is not None
        assert request.messages[1].extra["tool_calls"][0]["function"]["arguments"] == f'{{"n": {digits}}}'
        assert msgspec.msgpack.encode(request)  # as the engine process gets it


def test_an_empty_question_is_a_turn():
    """Also of blocks without text, and of none; beside a result it adds nothing."""
    for content in ("", [], [said("")]):
        assert messages({"role": "user", "content": content}) == (Message(role="user", content=""),)
    turns = messages(*HI, assistant(CALL), user(RESULT, said("")), tools=[WEATHER])
    assert [turn.role for turn in turns] == ["user", "assistant", "tool"]


def test_a_turn_knows_its_place_in_the_body():
    """Errors that are found later name it, whatever was joined or parted."""
    turns = messages(*HI, *HI, assistant(CALL), user(RESULT, said("Well?")), system="Be brief.", tools=[WEATHER])
    assert [turn.param for turn in turns] == ["system", "messages[0]", "messages[2]", "messages[3]", "messages[3]"]


def test_neighbouring_turns_of_a_role_are_one():
    """As in the public API; a system turn in the middle stays where it is."""
    hi, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": [said("Be"), said("brief.")]}
    assert messages(hi, user(said("there")), assistant(said("Yes?")), assistant(said("Go on.")), system, hi) == (
        Message(role="user", content="Hi\nthere"),
        Message(role="assistant", content="Yes?\nGo on."),
        Message(role="system", content="Be\nbrief."),
        Message(role="user", content="Hi"),
    )


@pytest.mark.parametrize("system", ["Be brief.", [said("Be brief.", cache_control={"type": "ephemeral"})]])
def test_a_system_prompt_goes_first(system: Any):
    """A string or blocks of text; an empty one is none."""
    assert messages(*HI, system=system) == (Message(role="system", content="Be brief."), *messages(*HI))  # type: ignore[misc]
    assert messages(*HI, system="") == messages(*HI)


def test_a_last_turn_of_the_assistant_is_continued():
    """A prefill is the beginning of the answer; an empty one is nothing."""
    request = ask(messages=[*HI, assistant(said("The answer is ("))]).generate
    assert (request.continue_final_message, request.messages[-1].content) == (True, "The answer is (")  # type: ignore[index]
    for empty in (assistant(), {"role": "assistant", "content": ""}):
        assert ask(messages=[*HI, empty]).generate == ask().generate


@pytest.mark.parametrize(
    ("thinking", "effort", "kwargs", "asks"),
    [
        (None, None, OFF, False),
        ({"type": "disabled"}, None, OFF, True),
        ({"type": "enabled", "budget_tokens": 4}, None, ON, True),
        ({"type": "adaptive", "display": "summarized"}, "max", {"reasoning_effort": "high"}, True),
        ({"type": "adaptive"}, "low", {"reasoning_effort": "low"}, True),
        (None, "medium", {**OFF, "reasoning_effort": "medium"}, True),
    ],
)  # fmt: skip
def test_thinking_is_the_templates_switch(thinking: Any, effort: str | None, kwargs: dict[str, Any], asks: bool):
    """Off unless it is asked for; `adaptive` leaves it to the template; effort is its level."""
    asked = ask(thinking=thinking, output_config=None if effort is None else {"effort": effort})
    assert (asked.generate.chat_template_kwargs, asked.asks_for_thinking) == (kwargs, asks)


@pytest.mark.parametrize(
    ("choice", "expected", "is_parallel"),
    [
        (None, ToolChoice(), True),
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice(mode="required"), False),
        ({"type": "tool", "name": "get_weather"}, ToolChoice(mode="required", names=("get_weather",)), True),
        ({"type": "none"}, ToolChoice(mode="none"), True),
    ],
)
def test_tools(choice: Any, expected: ToolChoice, is_parallel: bool):
    """Tools and their choice are ours; what a tool has for the public API's own loop changes nothing."""
    tool = {
        **WEATHER,
        "type": "custom",
        "description": "The sky.",
        "strict": True,
        "cache_control": {"type": "ephemeral"},
    }
    request = ask(tools=[{**tool, "eager_input_streaming": True}], tool_choice=choice).generate
    schema = WEATHER["input_schema"]
    assert request.tools == (Tool(name="get_weather", description="The sky.", parameters=schema, strict=True),)  # type: ignore[arg-type]
    assert (request.tool_choice, request.parallel_tool_calls) == (expected, is_parallel)


def test_fields_that_are_honoured():
    """Sampling, stop sequences, a schema, tier, metadata, and the engine's own."""
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    asked = ask(
        model="m", temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["END"], stream=True,
        service_tier="standard_only", metadata={"user_id": None}, seed=3,
        output_config={"format": {"type": "json_schema", "schema": schema}}, on_disconnect="park", timeout_seconds=9,
    )  # fmt: skip
    request = asked.generate
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
    assert (sampling.stop, sampling.max_tokens, request.model, request.timeout_seconds) == (("END",), 8, "m", 9)
    assert request.grammar == Grammar(kind="json_schema", value=json.dumps(schema, separators=(",", ":")))
    assert (asked.stream, asked.latency_class, asked.on_disconnect) == (True, "chat", "park")
    assert (ask().stream, ask().latency_class, ask().on_disconnect, ask().generate.model) == (False, None, "", "echo")


def test_fields_that_change_nothing():
    """Those of accounts and caches."""
    fields = {"cache_control": {"type": "ephemeral"}, "inference_geo": "eu", "speed": "fast", "workspace_id": "w"}
    assert ask(**fields, diagnostics={}, user_profile_id="p", mcp_servers=[], container=None, thread=None) == ask()
    for nothing in ({}, {"edits": []}):
        assert ask(context_management=nothing) == ask()


def test_counting_needs_no_max_tokens():
    """The prompt of a count is that of the message."""
    body = {"messages": HI, "system": "Be brief.", "tools": [WEATHER]}
    counted = parse_count(body, LIMITS, default_model="echo")
    asked = ask(**body).generate
    assert (counted.messages, counted.tools, counted.chat_template_kwargs) == (
        asked.messages, asked.tools, asked.chat_template_kwargs
    )  # fmt: skip


def test_the_engines_words_for_fields():
    """What acceptance finds wrong is named by this API's field."""
    plain = ask().generate
    formatted = ask(output_config={"format": {"type": "json_schema", "schema": {}}}).generate
    assert [field_of(one, plain) for one in ("stop", "grammar", "chat_template_kwargs", "messages", None)] == [
        "stop_sequences", "tools", "thinking", "messages", None
    ]  # fmt: skip
    assert field_of("grammar", formatted) == "output_config.format"


CORPUS = bad_messages()


@pytest.mark.parametrize("bad", [one for one in CORPUS if not one.by_server], ids=lambda bad: bad.name[:80])
def test_a_wrong_body_is_a_400(bad: BadBody):
    """Status, code and param are the corpus's; the message is a short sentence."""
    with pytest.raises(StreamserveError) as caught:
        parse(decode_json(bad.body, LIMITS), LIMITS, default_model="echo")
    assert (caught.value.http_status, caught.value.code, caught.value.param) == (bad.status, bad.code, bad.param)
    assert 10 < len(caught.value.message) < 500
    assert caught.value.message.endswith(".")


def test_every_field_is_in_the_corpus():
    """The corpus has a body for each field that is not the other dialects' or ignored."""
    params = {(bad.param or "").partition(".")[0].partition("[")[0] for bad in CORPUS}
    others = {"model", "top_p", "top_k", "min_p", "seed", "timeout_seconds", "latency_class", "input"}
    assert set(body_fields(LIMITS)) - params <= others | {*IGNORED, *PACE, "on_disconnect"}


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
KEYS = st.sampled_from(
    ["type", "text", "content", "name", "id", "input", "tool_use_id", "thinking", "schema", "format"]
)
KINDS = st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image", "enabled", "tool", "json_schema"])
VALUES = st.recursive(
    SCALARS | KINDS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=12
)
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": VALUES}), max_size=4
)
FIELDS = st.sampled_from(
    ["system", "tools", "tool_choice", "thinking", "output_config", "metadata", "stop_sequences", "x"]
)


@given(st.dictionaries(FIELDS, VALUES), TURNS)
def test_no_object_raises_anything_but_ours(body: dict[str, Any], turns: list[Any]):
    """Whatever the fields are, the result is a request or a `StreamserveError`."""
    try:
        asked = parse({"max_tokens": 8, "messages": turns, **body}, LIMITS, default_model="echo")
    except StreamserveError:
        return
    assert asked.generate.messages


def test_the_clients_own_maximum_is_lowered():
    """32,000 tokens, and a thinking budget just below: the default of agents is no error."""
    asked = ask(max_tokens=32_000, thinking={"type": "enabled", "budget_tokens": 31_999})
    assert asked.generate.sampling.max_tokens == LIMITS.max_tokens


def test_variables_of_the_template_can_be_named():
    """`chat_template_kwargs` go before what `thinking` means; they are kept where the template lacks a switch."""
    asked = ask(chat_template_kwargs={"reasoning_effort": "low"})
    assert asked.generate.chat_template_kwargs == {
        "enable_thinking": False, "thinking": False, "reasoning_effort": "low"
    }  # fmt: skip
    assert (asked.template_kwargs, asked.asks_for_thinking) == ({"reasoning_effort": "low"}, False)
    own = ask(thinking={"type": "adaptive"}, chat_template_kwargs={"enable_thinking": True})
    assert own.generate.chat_template_kwargs == {"enable_thinking": True}


def test_the_text_of_thoughts_can_be_left_out():
    """`display`: the thoughts are shown as they are, or their text is left out of the response."""
    for display, shows in ((None, True), ("summarized", True), ("omitted", False)):
        assert ask(thinking={"type": "adaptive", "display": display}).shows_thinking == shows


CALL_AND_RESULT = [
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."},
                                      {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Fog."}]},
]  # fmt: skip


@pytest.mark.parametrize(
    ("edit", "num_calls", "changes"),
    [
        ({"type": "clear_thinking_20251015", "keep": "all"}, 9, False),
        ({"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}, 2, False),
        ({"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}, 3, True),
        ({"type": "clear_thinking_20251015"}, 1, False),
        ({"type": "clear_thinking_20251015"}, 2, True),
        ({"type": "clear_tool_uses_20250919"}, 9, False),
        ({"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 100}}, 3, False),
        ({"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 100}}, 4, True),
        ({"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 4}}, 4, False),
        ({"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 4}}, 5, True),
        ({"type": "compact_20260112"}, 9, False),
        ({"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 100}}, 1, True),
        ({"type": "clear_everything"}, 0, True),
        ({}, 0, True),
    ],
)
def test_edits_that_change_nothing_are_accepted(edit: dict[str, Any], num_calls: int, changes: bool):
    """An edit that certainly leaves this conversation as it is, is accepted; any other is a 400, never silence."""
    messages = [*HI, *CALL_AND_RESULT * num_calls]
    if not changes:
        plain = ask(messages=messages, tools=[WEATHER])
        assert ask(messages=messages, tools=[WEATHER], context_management={"edits": [edit]}) == plain
        return
    with pytest.raises(BadRequest) as caught:
        ask(messages=messages, tools=[WEATHER], context_management={"edits": [edit]})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "context_management")
