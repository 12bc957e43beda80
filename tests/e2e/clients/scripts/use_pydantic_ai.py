"""pydantic-ai at our site, by chat completions and by Responses: a tool loop, structured output of two kinds, thinking.

Arguments: URL, key, model.
"""

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ThinkingPart, ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEY, NAME = sys.argv[1:]
PROVIDER = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
RESPONSES = OpenAIResponsesModel(NAME, provider=PROVIDER)
GREEDY = {"temperature": 0.0, "max_tokens": 160}
City = Literal["Oslo", "Rome", "Cairo", "Lima", "Paris", "Tokyo", "Delhi", "Quito", "Dakar", "Perth", "Miami", "Seoul"]


class Report(BaseModel):
    """What the model is to fill in."""

    city: Literal["Oslo", "Rome", "Lima"]
    weather: Literal["rainy", "sunny", "foggy"]


def check(model: Model, *, name: str) -> None:
    """Ask what this file is about."""
    asked = []

    def get_weather(city: City) -> str:
        """Look at the sky."""
        asked.append(city)
        return "foggy"

    agent = Agent(model, tools=[get_weather], model_settings=GREEDY)
    result = agent.run_sync("Tell me the weather in Oslo.")
    assert asked == ["Oslo"], asked
    assert result.output == "It is foggy in Oslo.", result.output
    parts = [part for message in result.all_messages() for part in message.parts]
    assert any(isinstance(part, ToolCallPart) for part in parts)
    assert any(isinstance(part, ThinkingPart) and "weather" in part.content for part in parts), parts
    assert result.usage.input_tokens > 0

    with agent.run_stream_sync("Tell me the weather in Paris.") as streamed:
        assert streamed.get_output() == "It is foggy in Paris."
    assert asked == ["Oslo", "Paris"], asked

    if model is RESPONSES:
        chained = {**GREEDY, "openai_previous_response_id": "auto"}
        again = Agent(model, tools=[get_weather], model_settings=chained).run_sync("Tell me the weather in Lima.")
        assert again.output == "It is foggy in Lima.", again.output

    native = Agent(model, output_type=NativeOutput(Report), model_settings=GREEDY)
    assert native.run_sync("As JSON: Rome, sunny.").output == Report(city="Rome", weather="sunny")

    by_tool = Agent(model, output_type=Report, model_settings=GREEDY)
    assert isinstance(by_tool.run_sync("As JSON: Rome, sunny.").output, Report)
    print(f"pydantic-ai, {name}: tool loop, stream, native and tool output, thinking")


check(OpenAIChatModel(NAME, provider=PROVIDER), name="chat completions")
check(RESPONSES, name="Responses")
