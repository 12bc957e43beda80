"""`/v1/responses` through the official client and OpenAI's Agents SDK, against a model that thinks and calls tools."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.clients.conftest import MODEL, WEATHER
from tests.support.servers.web_servers import Server

pytestmark = pytest.mark.sampled("at a temperature, or without its likeliest words, the trained model may say any byte")

TOOLS: Any = [{"type": "function", "strict": True, **one["function"]} for one in WEATHER]
OSLO = "Tell me the weather in Oslo."
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 160}


class Report(BaseModel):
    """What the model is to fill in."""

    city: Literal["Oslo", "Rome", "Lima"]
    weather: Literal["rainy", "sunny", "foggy"]


def test_a_tool_loop_with_the_response_before(client: openai.OpenAI) -> None:
    """The result of the call is all that is sent."""
    first = client.responses.create(input=OSLO, tools=TOOLS, **GREEDY)
    (call,) = (one for one in first.output if one.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "foggy"}
    second = client.responses.create(input=[result], previous_response_id=first.id, tools=TOOLS, **GREEDY)
    assert second.output_text == "It is foggy in Oslo."


def test_the_snapshots_of_a_stream_end_as_the_retrieved_response(client: openai.OpenAI) -> None:
    """Of the helper of the client, item by item: thoughts, the call, and the whole."""
    with client.responses.stream(input=OSLO, tools=TOOLS, **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_response()
    retrieved = client.responses.retrieve(final.id)
    assert retrieved.to_dict() == events[-1].response.to_dict() | {"output": retrieved.to_dict()["output"]}  # type: ignore[union-attr]
    assert [one.type for one in retrieved.output] == ["reasoning", "function_call"]
    (call,) = (one for one in retrieved.output if one.type == "function_call")
    (last,) = (one for one in events if one.type == "response.function_call_arguments.done")
    assert last.arguments == call.arguments
    shown = [one.snapshot for one in events if one.type == "response.function_call_arguments.delta"]
    assert shown[-1] == call.arguments


def test_a_stream_is_read_on_after_any_of_its_events(client: openai.OpenAI) -> None:
    """By the helper, too, which is fed the whole again."""
    events = list(client.responses.create(input=OSLO, tools=TOOLS, stream=True, **GREEDY))
    response: Any = events[-1].response  # type: ignore[union-attr]
    for cut in events[:-1:3]:
        rest = list(client.responses.retrieve(response.id, stream=True, starting_after=cut.sequence_number))
        assert rest[-1].response == response  # type: ignore[union-attr]
        assert rest[0].sequence_number > cut.sequence_number
    with client.responses.stream(response_id=response.id, starting_after=events[2].sequence_number) as again:
        assert again.get_final_response().output[-1].id == response.output[-1].id  # type: ignore[union-attr]


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    """By a schema made of a model of pydantic's."""
    parsed = client.responses.parse(input="As JSON: Rome, sunny.", text_format=Report, **GREEDY)
    assert parsed.output_parsed == Report(city="Rome", weather="sunny")


def test_a_response_in_the_background(client: openai.OpenAI) -> None:
    """It is polled, cancelled and deleted by the client's own methods."""
    begun = client.responses.create(input="Hello!", background=True, **GREEDY)
    with client.responses.stream(response_id=begun.id) as stream:
        whole = stream.get_final_response()
    assert client.responses.retrieve(begun.id).output_text == whole.output_text
    assert client.responses.cancel(begun.id).status == "completed"
    (item,) = client.responses.input_items.list(begun.id).data
    assert item.type == "message"
    count = client.responses.input_tokens.count(model=MODEL, input="Hello!")
    assert count.input_tokens == whole.usage.input_tokens  # type: ignore[union-attr]
    client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)


def test_agents_of_openais_sdk(site: Server, key: str) -> None:
    """A tool loop, whole and streamed, and one that sends what is new alone."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    asked: list[str] = []

    @agents.function_tool
    def get_weather(city: Literal["Oslo", "Rome", "Lima", "Paris"]) -> str:
        """Look at the sky."""
        asked.append(city)
        return "foggy"

    async def run() -> None:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=key, http_client=http) as client:
            agent = agents.Agent(
                name="weather",
                model=agents.OpenAIResponsesModel(MODEL, openai_client=client),
                model_settings=agents.ModelSettings(temperature=0, max_tokens=160),
                tools=[get_weather],
            )
            whole = await agents.Runner.run(agent, OSLO)
            assert whole.final_output == "It is foggy in Oslo."
            streamed = agents.Runner.run_streamed(agent, "Tell me the weather in Rome.")
            types = [one.data.type async for one in streamed.stream_events() if one.type == "raw_response_event"]
            assert streamed.final_output == "It is foggy in Rome."
            assert types.count("response.completed") == 2
            chained = await agents.Runner.run(agent, "Tell me the weather in Lima.", auto_previous_response_id=True)
            assert chained.final_output == "It is foggy in Lima."

    asyncio.run(run())
    assert asked == ["Oslo", "Rome", "Lima"]
