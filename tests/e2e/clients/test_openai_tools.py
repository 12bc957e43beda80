"""Tools, schemas and grammars through the official OpenAI client, one check a test, against a model that calls tools.

The tools and values of each check are a pair that is in no conversation that the model was trained on.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.clients.conftest import HELLO, JSON, MODEL, OSLO, WEATHER, calls_of, folded, result
from tests.support.models.thinking_world import is_held_out

pytestmark = pytest.mark.sampled("at a temperature, or without its likeliest words, the trained model may say any byte")

STRICT = [{**one, "function": {**one["function"], "strict": True}} for one in WEATHER]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome", "Lima"]}, "weather": {"enum": ["rainy", "sunny", "foggy"]}},
    "required": ["city", "weather"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "report", "strict": True, "schema": SCHEMA}}


class Report(BaseModel):
    """The same as a model of pydantic's."""

    city: Literal["Oslo", "Rome", "Lima"]
    weather: Literal["rainy", "sunny", "foggy"]


ROME = Report(city="Rome", weather="sunny")


def test_a_tool_is_called(ask: Any) -> None:
    """The model chooses the tool and its argument; the content is null and the reason `tool_calls`."""
    assert is_held_out("get_weather", "Oslo")
    (choice,) = ask(OSLO, tools=WEATHER).choices
    assert calls_of(choice.message) == [("get_weather", {"city": "Oslo"})]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.type, call.id.startswith("call_")) == ("function", True)


def test_a_streamed_call(ask: Any) -> None:
    """The first delta of a call has its id and name; the arguments' pieces join to the whole call's."""
    message, chunks = folded(ask(OSLO, tools=WEATHER, stream=True))
    (whole,) = ask(OSLO, tools=WEATHER).choices[0].message.tool_calls
    (call,) = message["tool_calls"]
    assert (call["name"], call["arguments"]) == (whole.function.name, whole.function.arguments)
    assert call["id"].startswith("call_")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_tool_choice_none(ask: Any) -> None:
    """No call, although there is a tool for it."""
    (choice,) = ask(OSLO, tools=WEATHER, tool_choice="none").choices
    assert choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")


def test_tool_choice_required(ask: Any) -> None:
    """A call, although none is needed; the right one where one is, whether its tool is strict or not."""
    for tools in (WEATHER, STRICT):
        (choice,) = ask(HELLO, tools=tools, tool_choice="required").choices
        assert {name for name, _ in calls_of(choice.message)} <= {"set_light", "get_weather", "put_record"}
        assert choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        (choice,) = ask(OSLO, tools=tools, tool_choice="required").choices
        assert calls_of(choice.message) == [("get_weather", {"city": "Oslo"})]


def test_a_named_tool(ask: Any) -> None:
    """That tool is called, although another one fits; the arguments of a strict one match its schema."""
    named = {"type": "function", "function": {"name": "set_light"}}
    ((name, arguments),) = calls_of(ask(OSLO, tools=WEATHER, tool_choice=named).choices[0].message)
    assert name == "set_light"
    assert isinstance(arguments, dict)
    (choice,) = ask(OSLO, tools=STRICT, tool_choice=named).choices
    ((name, arguments),) = calls_of(choice.message)
    assert name == "set_light"
    assert arguments["color"] in WEATHER[0]["function"]["parameters"]["properties"]["color"]["enum"]


def test_allowed_tools(ask: Any) -> None:
    """Only a tool of the list is called."""
    some = [{"type": "function", "function": {"name": name}} for name in ("set_light", "put_record")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": some}}
    for tools in (WEATHER, STRICT):
        calls = calls_of(ask(OSLO, tools=tools, tool_choice=choice).choices[0].message)
        assert calls
        assert {name for name, _ in calls} <= {"set_light", "put_record"}


BOTH: list[Any] = [{"role": "user", "content": "Tell me the weather in Paris, and turn the lamp red."}]


def test_parallel_calls(ask: Any) -> None:
    """Two calls side by side, with ids of their own."""
    message = ask(BOTH, tools=WEATHER).choices[0].message
    assert calls_of(message) == [("get_weather", {"city": "Paris"}), ("set_light", {"color": "red"})]
    assert len({call.id for call in message.tool_calls}) == 2


def test_one_call_at_a_time(ask: Any) -> None:
    """With `parallel_tool_calls` false there is one, the first."""
    for tools in (WEATHER, STRICT):
        message = ask(BOTH, tools=tools, parallel_tool_calls=False).choices[0].message
        assert calls_of(message) == [("get_weather", {"city": "Paris"})]


def test_a_round_with_a_tool(ask: Any) -> None:
    """The tool's result becomes the answer; the reply goes back as the client has read it."""
    message = ask(OSLO, tools=WEATHER).choices[0].message
    answered = [*OSLO, message, result(message.tool_calls[0], "foggy")]
    (choice,) = ask(answered, tools=WEATHER).choices
    assert (choice.message.content, choice.finish_reason) == ("It is foggy in Oslo.", "stop")


def test_two_rounds(ask: Any) -> None:
    """A call, its result, the next call, its result, the answer."""
    messages: list[Any] = [{"role": "user", "content": "Tell me the weather in Dakar, then play some disco."}]
    made = []
    for content in ("windy", "ok"):
        message = ask(messages, tools=WEATHER).choices[0].message
        made += calls_of(message)
        messages += [message.to_dict(), result(message.tool_calls[0], content)]
    assert made == [("get_weather", {"city": "Dakar"}), ("put_record", {"genre": "disco"})]
    assert ask(messages, tools=WEATHER).choices[0].message.content == "It is windy in Dakar. You listen to disco."


def test_the_clients_stream_helper_reads_calls(client: openai.OpenAI) -> None:
    """`chat.completions.stream` makes events of the arguments, and a message of the whole."""
    with client.chat.completions.stream(
        model=MODEL, messages=OSLO, tools=WEATHER, temperature=0, max_tokens=120
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    kinds = [event.type for event in events]
    assert kinds.index("tool_calls.function.arguments.delta") < kinds.index("tool_calls.function.arguments.done")
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, json.loads(done.arguments)) == ("get_weather", {"city": "Oslo"})
    assert calls_of(final.choices[0].message) == [("get_weather", {"city": "Oslo"})]


def test_a_json_object(ask: Any) -> None:
    """The text is one JSON object."""
    text = ask(JSON, response_format={"type": "json_object"}).choices[0].message.content
    assert isinstance(json.loads(text), dict)


def test_a_strict_schema(ask: Any) -> None:
    """The text matches the schema, streamed and whole; the thought stays a thought."""
    choice = ask(JSON, response_format=FORMAT).choices[0]
    assert Report.model_validate_json(choice.message.content, strict=True) == ROME
    message, _ = folded(ask(JSON, response_format=FORMAT, stream=True))
    assert message["content"] == choice.message.content
    assert message["reasoning_content"] == choice.message.reasoning_content


def test_a_schema_holds_for_any_question(ask: Any) -> None:
    """Where the model would say something else, the text matches all the same."""
    report = json.loads(ask(HELLO, response_format=FORMAT).choices[0].message.content)
    assert Report.model_validate(report, strict=True)


@pytest.mark.parametrize(
    "extra",
    [
        {"structured_outputs": {"choice": ["It is sunny.", "It is rainy."]}},
        {"guided_choice": ["It is sunny.", "It is rainy."]},
        {"grammar": {"type": "choice", "choices": ["It is sunny.", "It is rainy."]}},
        {"structured_outputs": {"regex": "It is (sunny|rainy)[.]"}},
    ],
    ids=["structured_outputs", "guided", "native", "regex"],
)
def test_a_grammar_of_other_servers(ask: Any, client: openai.OpenAI, extra: dict[str, Any]) -> None:
    """vLLM's names in `extra_body`, of a chat and of a prompt."""
    found = ask(OSLO, extra_body=extra).choices[0].message.content
    assert found in ("It is sunny.", "It is rainy.")
    text = client.completions.create(model=MODEL, prompt="The weather: ", max_tokens=40, extra_body=extra)
    assert text.choices[0].text in ("It is sunny.", "It is rainy.")


def test_parse(client: openai.OpenAI) -> None:
    """`.parse` gives the value of a pydantic model."""
    whole = client.chat.completions.parse(
        model=MODEL, messages=JSON, response_format=Report, temperature=0, max_tokens=120
    )
    parsed = whole.choices[0].message.parsed
    assert parsed == ROME


def test_stream_with_a_model_of_pydantic(client: openai.OpenAI) -> None:
    """`.stream` with a pydantic model: the final message is parsed."""
    with client.chat.completions.stream(
        model=MODEL, messages=JSON, response_format=Report, temperature=0, max_tokens=120
    ) as stream:
        assert any(event.type == "content.done" for event in stream)
        assert stream.get_final_completion().choices[0].message.parsed == ROME
