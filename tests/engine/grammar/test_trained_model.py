"""A grammar changes nothing where the model's own answer is valid: the trained model, held and free, id by id."""

from __future__ import annotations

import json
from asyncio import gather
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")
pytest.importorskip("llguidance", reason="needs llguidance: pip install streamserve[grammar]")

from streamserve.clients.factory import make_client
from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.protocol.events import BlockStart, Done, Event, Token
from streamserve.protocol.requests import GenerateRequest, Grammar, Message, SamplingParams, Tool, ToolChoice
from tests.conftest import until
from tests.support.engines.clients import collect, ids, text
from tests.support.models import thinking_world as world
from tests.support.models.test_thinking_model import questions
from tests.support.models.thinking_model import thinking_model

REQUIRED = ToolChoice(mode="required")
REPORT = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome", "Lima"]}, "weather": {"enum": ["rainy", "sunny", "foggy"]}},
    "required": ["city", "weather"],
}


@pytest.fixture
async def client() -> AsyncIterator[ThreadClient]:
    """The model in the engine, ready."""
    model = ModelConfig(alias="thinker", path=str(thinking_model()))
    client = make_client(model, EngineConfig(num_blocks=256))
    client.start()
    await until(lambda: client.describe().state == "ready", 60)
    yield client
    await client.aclose()


async def answer(
    client: ThreadClient, question: str, names: Sequence[str] = (), *, strict: bool = False, **fields: Any
) -> list[Event]:
    """Return the events of a greedy answer with tools of these names."""
    request = GenerateRequest(
        model="thinker",
        messages=(Message(role="user", content=question),),
        tools=tuple(Tool(**world.tool(name)["function"], strict=strict) for name in names),
        sampling=SamplingParams(temperature=0, max_tokens=120),
        **fields,
    )
    return await collect(await client.generate(request))


def calls_of(events: list[Event]) -> list[tuple[str | None, str]]:
    """Return the name and the arguments of each call."""
    found: dict[int, tuple[str | None, str]] = {}
    for event in events:
        if isinstance(event, BlockStart) and event.kind == "tool_use":
            found[event.index] = (event.name, "")
        elif isinstance(event, Token) and event.index in found:
            name, read = found[event.index]
            found[event.index] = (name, read + event.text)
    return list(found.values())


@pytest.mark.parametrize(("num_questions", "num_right"), [(5, 3), pytest.param(12, 10, marks=pytest.mark.proof)])
async def test_what_a_model_answers_rightly_it_answers_under_a_grammar(
    client: ThreadClient, num_questions: int, num_right: int
) -> None:
    """Strict tools, a forced call, a named one: each id of the free answer is allowed, and is the answer."""
    asked = questions()[:num_questions]
    free = await gather(*(answer(client, question, names) for question, names, _, _ in asked))
    right = [(one, ids(events)) for one, events in zip(asked, free, strict=True) if calls_of(events) == [one[2:]]]
    assert len(right) >= num_right

    async def check(question: str, names: list[str], name: str, call: str, free: tuple[int, ...]) -> None:
        named = ToolChoice(mode="required", names=(name,))
        ways = ({"strict": True}, {"tool_choice": REQUIRED}, {"tool_choice": named, "strict": True})
        single = {"tool_choice": REQUIRED, "parallel_tool_calls": False}
        *held, one = await gather(*(answer(client, question, names, **fields) for fields in (*ways, single)))
        for fields, events in zip(ways, held, strict=True):
            assert ids(events) == free, (question, fields)
        assert calls_of(one) == [(name, call)]
        assert free[: len(ids(one))] == ids(one)  # complete: it needs no end

    await gather(*(check(*one, free=token_ids) for one, token_ids in right))


async def test_calls_side_by_side_are_the_same_when_held(client: ThreadClient) -> None:
    """Two calls, strict or forced; and the first of them alone where only one may come."""
    question = "Tell me the weather in Paris, and turn the lamp red."
    names = ("set_light", "get_weather", "put_record")
    ways: list[dict[str, Any]] = [{}, {"strict": True}, {"tool_choice": REQUIRED}, {"parallel_tool_calls": False}]
    free, *held, one = await gather(*(answer(client, question, names, **fields) for fields in ways))
    weather, light = ("get_weather", '{"city":"Paris"}'), ("set_light", '{"color":"red"}')
    assert calls_of(free) == [weather, light]
    assert [ids(events) for events in held] == [ids(free)] * 2
    assert calls_of(one) == [weather]


@pytest.mark.parametrize("strict", [False, True])
async def test_a_forced_call_ends_though_no_tool_fits(client: ThreadClient, strict: bool) -> None:
    """Arguments that no schema holds end like the strict ones: the model closes its strings, before max_tokens."""
    events = await answer(client, "Hello!", ("set_light", "get_weather"), strict=strict, tool_choice=REQUIRED)
    [(name, arguments)] = calls_of(events)
    assert name in ("set_light", "get_weather")
    assert isinstance(json.loads(arguments), dict)
    assert isinstance(events[-1], Done)
    assert events[-1].finish_reason == "tool_calls"


async def test_a_schema_keeps_what_the_model_read(client: ThreadClient) -> None:
    """The value is the prompt's, not the schema's first."""
    grammar = Grammar(kind="json_schema", value=json.dumps(REPORT))
    events = await answer(client, "As JSON: Rome, sunny.", grammar=grammar)
    assert text(events).endswith('{"city":"Rome","weather":"sunny"}')
