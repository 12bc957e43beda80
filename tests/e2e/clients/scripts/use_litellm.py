"""litellm at our site: the tool loop, a schema, reasoning, streams, errors; by both of the APIs that it speaks.

Arguments: URL, key, model.
"""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a table of prices

import litellm

URL, KEY, NAME = sys.argv[1:]
OSLO = [{"role": "user", "content": "Tell me the weather in Oslo."}]
CITIES = ["Oslo", "Rome", "Cairo", "Lima", "Paris"]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "enum": CITIES}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]


def ask(messages, **fields):
    fields = {"temperature": 0, "max_tokens": 160, **fields}
    return litellm.completion(f"openai/{NAME}", messages, api_base=f"{URL}/v1", api_key=KEY, num_retries=0, **fields)


message = ask(OSLO, tools=TOOLS).choices[0].message
(call,) = message.tool_calls
assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
assert "weather" in message.reasoning_content
answered = [*OSLO, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "foggy"}]
whole = ask(answered, tools=TOOLS)
assert whole.choices[0].message.content == "It is foggy in Oslo.", whole
assert whole.choices[0].finish_reason == "stop"

chunks = list(ask(OSLO, tools=TOOLS, stream=True, stream_options={"include_usage": True}))
built = litellm.stream_chunk_builder(chunks, messages=OSLO)
ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
assert ends == ["tool_calls"], ends
(streamed,) = built.choices[0].message.tool_calls
assert (streamed.function.name, json.loads(streamed.function.arguments)) == ("get_weather", {"city": "Oslo"})

# Its builder takes the reason of the last chunk; with usage that is a chunk of litellm's own, which has none.
built = litellm.stream_chunk_builder(list(ask(OSLO, tools=TOOLS, stream=True)), messages=OSLO)
assert built.choices[0].finish_reason == "tool_calls", built

properties = {"city": {"enum": CITIES}, "weather": {"enum": ["rainy", "sunny"]}}
schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
format = {"type": "json_schema", "json_schema": {"name": "report", "strict": True, "schema": schema}}
text = ask([{"role": "user", "content": "As JSON: Rome, sunny."}], response_format=format).choices[0].message.content
assert json.loads(text) == {"city": "Rome", "weather": "sunny"}, text

refusal = ""
try:
    ask(OSLO, temperature=9)
except litellm.BadRequestError as error:
    refusal = str(error)
assert "temperature" in refusal


def claude(messages, **fields):
    """Ask by the Messages API."""
    fields = {"temperature": 0, "max_tokens": 160, **fields}
    return litellm.completion(f"anthropic/{NAME}", messages, api_base=URL, api_key=KEY, num_retries=0, **fields)


message = claude(OSLO, tools=TOOLS).choices[0].message
(call,) = message.tool_calls
assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
answered = [*OSLO, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "foggy"}]
assert claude(answered, tools=TOOLS).choices[0].message.content == "It is foggy in Oslo."
built = litellm.stream_chunk_builder(list(claude(OSLO, tools=TOOLS, stream=True)), messages=OSLO)
(streamed,) = built.choices[0].message.tool_calls
assert (streamed.function.name, json.loads(streamed.function.arguments)) == ("get_weather", {"city": "Oslo"})
thinking = {"type": "enabled", "budget_tokens": 50}
thought = (
    claude([{"role": "user", "content": "Hello!"}], thinking=thinking, allowed_openai_params=["thinking"])
    .choices[0]
    .message
)
assert (thought.reasoning_content.strip(), thought.content) == ("No tool is needed.", "Hello! What can I do?"), thought
print("litellm: tool loop, stream, schema, reasoning, errors; both APIs")
