"""The official anthropic client at our site: messages, streams, tools, thinking, counts, errors, models, batches.
Arguments: URL, key, model.

The Messages API of the version that this client speaks has no temperature in its methods: it goes as extra_body.
"""

import asyncio
import json
import sys
import time

import anthropic
from anthropic.types import Message

URL, KEY, NAME = sys.argv[1:]
HELLO = [{"role": "user", "content": "Hello!"}]
OSLO = [{"role": "user", "content": "Tell me the weather in Oslo."}]
JSON = [{"role": "user", "content": "As JSON: Rome, sunny."}]
CITIES = ["Oslo", "Rome", "Cairo", "Lima", "Paris"]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "enum": CITIES}}, "required": ["city"]}
TOOLS = [
    {"name": "get_weather", "description": "The sky over a city.", "input_schema": SCHEMA},
    {
        "name": "set_light",
        "strict": True,
        "input_schema": {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"]},
    },
]
THINK = {"type": "enabled", "budget_tokens": 100}
GREEDY = {"temperature": 0}
client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)


def ask(messages, by=client, **fields):
    fields = {"model": NAME, "max_tokens": 120, "extra_body": GREEDY, **fields}
    return by.messages.create(messages=messages, **fields)


def strict(message):
    """Return the message, after a check against the client's own types, which it does not make itself."""
    return Message.model_validate(message.to_dict(), strict=False)


def kinds(message):
    return [block.type for block in message.content]


def refused(error_class, **fields):
    """Return the error that a call raises."""
    try:
        ask(fields.pop("messages", HELLO), **fields)
    except error_class as error:
        return error
    raise AssertionError(f"no {error_class.__name__}")


def check_answers():
    whole = strict(ask(HELLO))
    assert whole.content[0].text == "Hello! What can I do?", whole
    assert (whole.role, whole.type, whole.model, whole.stop_reason) == ("assistant", "message", NAME, "end_turn")
    assert whole.id.startswith("msg_")
    assert ask(HELLO)._request_id
    usage = whole.usage
    counted = client.messages.count_tokens(model=NAME, messages=HELLO).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == counted, (usage, counted)
    more = client.messages.count_tokens(model=NAME, messages=HELLO, system="Be brief.", tools=TOOLS)
    assert more.input_tokens > counted

    assert ask(HELLO, max_tokens=3).stop_reason == "max_tokens"
    stopped = ask(HELLO, stop_sequences=["never", "What"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "What")
    assert stopped.content[0].text.strip() == "Hello!"
    blocks = [{"role": "user", "content": [{"type": "text", "text": "Hello!", "cache_control": {"type": "ephemeral"}}]}]
    assert ask(blocks).content == whole.content
    longer = ask(HELLO, system=[{"type": "text", "text": "You are a helpful assistant."}])
    assert longer.content == whole.content
    assert longer.usage.input_tokens + longer.usage.cache_read_input_tokens > counted
    continued = ask([*HELLO, {"role": "assistant", "content": "Hello! What"}])
    assert continued.content[0].text.startswith(" can I do?"), continued


def check_streams():
    whole = ask(HELLO, thinking=THINK)
    raw = list(ask(HELLO, thinking=THINK, stream=True))
    assert [raw[0].type, raw[-2].type, raw[-1].type] == ["message_start", "message_delta", "message_stop"]
    with client.messages.stream(
        model=NAME, max_tokens=120, messages=HELLO, thinking=THINK, extra_body=GREEDY
    ) as stream:
        events = [event.type for event in stream]
        final = strict(stream.get_final_message())
    assert final.content == whole.content
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert {"thinking", "text", "signature", "content_block_stop", "message_stop"} <= set(events), set(events)
    with client.messages.stream(model=NAME, max_tokens=120, messages=HELLO, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == "Hello! What can I do?"
        assert stream.get_final_text() == "Hello! What can I do?"
    with ask(HELLO, stream=True) as stream:
        next(iter(stream))  # and left
    assert ask(HELLO).stop_reason == "end_turn"


def check_thinking():
    thought, text = strict(ask(HELLO, thinking=THINK)).content
    assert (thought.type, thought.thinking.strip()) == ("thinking", "No tool is needed.")
    assert (text.type, text.text) == ("text", "Hello! What can I do?")
    assert ask(HELLO, thinking=THINK).usage.output_tokens_details.thinking_tokens > 0
    assert ask(HELLO, thinking={"type": "adaptive"}).content == [thought, text]
    omitted, same = strict(ask(HELLO, thinking={"type": "adaptive", "display": "omitted"})).content
    assert (omitted.type, omitted.thinking, same) == ("thinking", "", text)
    switched = {**GREEDY, "chat_template_kwargs": {"enable_thinking": True}}
    assert ask(HELLO, extra_body=switched).content == [thought, text]
    agent = {"type": "enabled", "budget_tokens": 31_999}
    assert ask(HELLO, max_tokens=32_000, thinking=agent, stream=False, timeout=60).content == [thought, text]
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"}]
    extra = {**GREEDY, "context_management": {"edits": edits}}
    assert ask(HELLO, thinking=THINK, extra_body=extra).content == [thought, text]
    clearing = {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": -1}}
    extra = {**GREEDY, "context_management": {"edits": [{**clearing, "trigger": {"type": "input_tokens", "value": 1}}]}}
    assert refused(anthropic.BadRequestError, extra_body=extra).status_code == 400
    for thinking in ({"type": "disabled"}, anthropic.NOT_GIVEN):
        assert kinds(ask(HELLO, thinking=thinking)) == ["text"]


def check_tools():
    first = strict(ask(OSLO, tools=TOOLS, thinking=THINK))
    assert (kinds(first), first.stop_reason) == (["thinking", "tool_use"], "tool_use"), first
    call = first.content[1]
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "foggy"}]}
    answered = [*OSLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = ask(answered, tools=TOOLS, thinking=THINK)
    assert (last.content[-1].text, last.stop_reason) == ("It is foggy in Oslo.", "end_turn"), last

    with client.messages.stream(
        model=NAME, max_tokens=120, messages=OSLO, tools=TOOLS, thinking=THINK, extra_body=GREEDY
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(pieces)) == {"city": "Oslo"}
    assert [block.to_dict() for block in final.content if block.type == "tool_use"] == [
        {**call.to_dict(), "id": final.content[-1].id}
    ]

    one = {"type": "tool", "name": "set_light", "disable_parallel_tool_use": True}
    (forced,) = [block for block in ask(HELLO, tools=TOOLS, tool_choice=one).content if block.type == "tool_use"]
    assert forced.name == "set_light"
    assert forced.input["color"] in ("red", "blue")
    for choice, expected in (({"type": "any"}, True), ({"type": "none"}, False)):
        assert ("tool_use" in kinds(ask(OSLO, tools=TOOLS, tool_choice=choice))) == expected


def check_the_tool_runner():
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The sky over a city."""
        return "foggy"

    runner = client.beta.messages.tool_runner(
        model=NAME, max_tokens=120, messages=OSLO, tools=[get_weather], extra_body=GREEDY
    )
    assert [message.stop_reason for message in runner] == ["tool_use", "end_turn"]


def check_a_schema():
    properties = {"city": {"type": "string", "enum": CITIES}, "weather": {"type": "string", "enum": ["rainy", "sunny"]}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    text = ask(JSON, output_config={"format": {"type": "json_schema", "schema": schema}}).content[0].text
    assert json.loads(text) == {"city": "Rome", "weather": "sunny"}, text


def check_errors():
    bad = refused(anthropic.BadRequestError, extra_body={"temperature": 9})
    assert (bad.type, bad.error_code, bad.body["error"]["param"]) == (
        "invalid_request_error", "invalid_value", "temperature"
    )  # fmt: skip
    assert bad.request_id == bad.body["request_id"]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    seen = refused(anthropic.BadRequestError, messages=[{"role": "user", "content": [image]}])
    assert seen.error_code == "unsupported_content"
    long = refused(anthropic.BadRequestError, messages=[{"role": "user", "content": "Hello! " * 3000}])
    assert long.error_code == "context_length_exceeded"
    assert refused(anthropic.NotFoundError, model="claude-9").type == "not_found_error"
    stranger = anthropic.Anthropic(base_url=URL, api_key="sk-wrong", max_retries=0)
    assert refused(anthropic.AuthenticationError, by=stranger).type == "authentication_error"
    older = anthropic.Anthropic(
        base_url=URL,
        api_key="unused",
        max_retries=0,
        default_headers={"Authorization": anthropic.Omit(), "x-api-key": KEY, "anthropic-version": "2023-06-01"},
    )
    assert ask(HELLO, by=older, max_tokens=3).stop_reason == "max_tokens"


def check_models():
    model = next(iter(client.models.list()))  # pipelines follow
    assert (model.id, model.type, model.display_name) == (NAME, "model", NAME)
    assert model.max_input_tokens > 0
    assert client.models.retrieve(NAME) == model


def until_ended(batch):
    """Return the batch when it has ended; the site's own worker runs it."""
    deadline = time.monotonic() + 60
    while batch.processing_status != "ended":
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
        batch = client.messages.batches.retrieve(batch.id)
    return batch


def check_batches():
    def request(custom_id, **params):
        return {"custom_id": custom_id, "params": {"model": NAME, "max_tokens": 60, "messages": HELLO, **params}}

    requests = [*(request(f"hello-{index}", temperature=0) for index in range(4)), request("wrong", temperature=9)]
    batch = until_ended(client.messages.batches.create(requests=requests))
    counts = batch.request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (4, 1, 0), batch
    results = {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}
    assert list(results) == [one["custom_id"] for one in requests]
    for index in range(4):
        assert strict(results[f"hello-{index}"].message).content[0].text == "Hello! What can I do?"
    assert results["wrong"].type == "errored"
    assert results["wrong"].error.error.type == "invalid_request_error"
    other = client.messages.batches.create(requests=[request("later")])
    other = until_ended(client.messages.batches.cancel(other.id))
    assert other.cancel_initiated_at is not None
    assert [one.id for one in client.messages.batches.list(limit=1)][:2] == [other.id, batch.id]
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    assert batch.id not in [one.id for one in client.messages.batches.list()]


async def check_the_async_client():
    other = anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0)
    async with other.messages.stream(model=NAME, max_tokens=120, messages=HELLO, extra_body=GREEDY) as stream:
        assert "".join([text async for text in stream.text_stream]) == "Hello! What can I do?"
    await other.close()


check_answers()
check_streams()
check_thinking()
check_tools()
check_the_tool_runner()
check_a_schema()
check_errors()
check_models()
check_batches()
asyncio.run(check_the_async_client())
print("anthropic: messages, streams, thinking, tools, schema, counts, errors, models, batches")
