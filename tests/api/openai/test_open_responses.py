"""The cases of the Open Responses specification (2026-04-24): those of its 17 acceptance templates that are not of a
WebSocket or of compaction, which this server lacks.

The suite itself is TypeScript for Bun with schemas that it generates. What its schemas require of a response and of an
event is in `REQUIRED` and `EVENTS`, written from the specification; the official client's types check the rest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from django.test.utils import override_settings
from openai.types.responses import Response

from streamserve.web import site
from tests.api.openai.test_responses import CALLING, TOOL, refusal
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.response_checks import check_response, events_of
from tests.support.checks.sse_reader import read_events

pytestmark = pytest.mark.django_db(transaction=True)

PATH = "/v1/responses"
MODELS = {"calls": {"PATH": "echo", "FORMAT": "qwen3", "ANSWERS": {"weather": CALLING, "": "Hello there, friend."}}}
# The fields of a response that must be there, with the types that they may have.
REQUIRED: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "object": (str,),
    "created_at": (int,),
    "completed_at": (int, type(None)),
    "status": (str,),
    "incomplete_details": (dict, type(None)),
    "model": (str,),
    "previous_response_id": (str, type(None)),
    "instructions": (str, type(None)),
    "output": (list,),
    "error": (dict, type(None)),
    "tools": (list,),
    "tool_choice": (str, dict),
    "truncation": (str,),
    "parallel_tool_calls": (bool,),
    "text": (dict,),
    "top_p": (float, int),
    "presence_penalty": (float, int),
    "frequency_penalty": (float, int),
    "top_logprobs": (int,),
    "temperature": (float, int),
    "reasoning": (dict, type(None)),
    "usage": (dict, type(None)),
    "max_output_tokens": (int, type(None)),
    "max_tool_calls": (int, type(None)),
    "store": (bool,),
    "background": (bool,),
    "service_tier": (str,),
    "metadata": (dict,),
    "safety_identifier": (str, type(None)),
    "prompt_cache_key": (str, type(None)),
}
# The fields of an item's events beside `type` and `sequence_number`.
EVENTS = {
    "response.output_item.added": {"output_index", "item"},
    "response.output_item.done": {"output_index", "item"},
    "response.content_part.added": {"item_id", "output_index", "content_index", "part"},
    "response.content_part.done": {"item_id", "output_index", "content_index", "part"},
    "response.output_text.delta": {"item_id", "output_index", "content_index", "delta", "logprobs"},
    "response.output_text.done": {"item_id", "output_index", "content_index", "text", "logprobs"},
    "response.reasoning_summary_part.added": {"item_id", "output_index", "summary_index", "part"},
    "response.reasoning_summary_part.done": {"item_id", "output_index", "summary_index", "part"},
    "response.reasoning_summary_text.delta": {"item_id", "output_index", "summary_index", "delta"},
    "response.reasoning_summary_text.done": {"item_id", "output_index", "summary_index", "text"},
    "response.function_call_arguments.delta": {"item_id", "output_index", "delta"},
    "response.function_call_arguments.done": {"item_id", "output_index", "arguments"},
}
LIFE = ("response.created", "response.in_progress", "response.completed")
_TOOL = {**TOOL, "parameters": {"type": "object", "properties": {"location": {"type": "string"}}}}


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text, **fields}


@pytest.fixture
async def serves(tmp_path: Any, transactional_db: Any) -> AsyncIterator[None]:
    with override_settings(STREAMSERVE={"MODELS": MODELS, "CLIENT": "thread", "STATE_DIR": tmp_path}):
        await until_ready()
        yield
        await site.reset()


def checked(response: dict[str, Any]) -> dict[str, Any]:
    """Check a response by the specification, and by the client's types."""
    for name, types in REQUIRED.items():
        assert type(response[name]) in types, name
    for tool in response["tools"]:
        assert {"type", "name", "description", "parameters", "strict"} <= tool.keys()
    assert {"input_tokens", "output_tokens", "total_tokens"} <= response["usage"].keys()
    assert "cached_tokens" in response["usage"]["input_tokens_details"]
    assert "reasoning_tokens" in response["usage"]["output_tokens_details"]
    assert response["output"] != []
    Response.model_validate(response)
    return response


async def asked(caller: Caller, **fields: Any) -> dict[str, Any]:
    response = await caller.post(PATH, {"model": "calls", **fields})
    assert response.status_code == 200, response.content
    return checked(response.json())


async def test_basic_response(serves: None, caller: Caller) -> None:
    """A message."""
    assert (await asked(caller, input=[user("Say hello in exactly 3 words.")]))["status"] == "completed"


async def test_streaming_response(serves: None, caller: Caller) -> None:
    """Each event has the fields that its type needs, and the last has the response."""
    body = {"model": "calls", "input": [user("Count from 1 to 5.")], "stream": True}
    wire = await body_of(await caller.post(PATH, body))
    for event in events_of(read_events(wire)):
        expected = {"response"} if event["type"] in LIFE else EVENTS[event["type"]]
        assert event.keys() == {"type", "sequence_number", *expected}
    assert checked(check_response(wire))["status"] == "completed"


async def test_system_prompt(serves: None, caller: Caller) -> None:
    """As an item of the input."""
    system = {"type": "message", "role": "system", "content": "You are a pirate."}
    assert (await asked(caller, input=[system, user("Say hello.")]))["status"] == "completed"


async def test_assistant_phase(serves: None, caller: Caller) -> None:
    """Labels of earlier messages are taken, and kept with the items."""
    earlier = [assistant("I should answer.", phase="commentary"), assistant("Four.", phase="final_answer")]
    whole = await asked(caller, input=[*earlier, user("Repeat only the number.")])
    assert whole["status"] == "completed"
    items = (await caller.get(f"{PATH}/{whole['id']}/input_items?order=asc")).json()["data"]
    assert [one.get("phase") for one in items] == ["commentary", "final_answer", None]


async def test_tool_calling(serves: None, caller: Caller) -> None:
    """A call, whole and streamed with its arguments, and the round trip of its result."""
    fields = {"input": [user("What's the weather like in San Francisco?")], "tools": [_TOOL]}
    whole = await asked(caller, **fields)
    call = next(one for one in whole["output"] if one["type"] == "function_call")
    wire = await body_of(await caller.post(PATH, {"model": "calls", **fields, "stream": True}))
    types = [event["type"] for event in events_of(read_events(wire))]
    assert {f"response.function_call_arguments.{part}" for part in ("delta", "done")} <= set(types)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "18 degrees"}
    after = await asked(caller, input=[*fields["input"], call, result, user("So?")], tools=[_TOOL])
    assert after["status"] == "completed"


async def test_image_input(serves: None, caller: Caller) -> None:
    """A model here takes text alone, and says where the image stands; models elsewhere may take it."""
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": "data:image/png;x"}]
    refused = await caller.post(PATH, {"model": "calls", "input": [{**user(""), "content": parts}]})
    assert await refusal(refused) == (400, "unsupported_content", "input[0].content[1]")


async def test_multi_turn(serves: None, caller: Caller) -> None:
    """The history is in the input, or in the response before."""
    turns = [user("My name is Alice."), assistant("Hello Alice!"), user("What is my name?")]
    assert (await asked(caller, input=turns))["status"] == "completed"
    first = await asked(caller, input="Remember papaya.")
    assert (await asked(caller, input="Which word?", previous_response_id=first["id"]))["status"] == "completed"


async def test_a_missing_previous_response(serves: None, caller: Caller) -> None:
    """By the code that the specification has for it."""
    body = {"model": "calls", "input": "Hi", "store": False, "previous_response_id": "resp_openresponses_missing_1"}
    refused = await refusal(await caller.post(PATH, body))
    assert refused == (400, "previous_response_not_found", "previous_response_id")
