"""The trained model does what the tests that use it need: on pairs of tool and value that it was never trained on."""

from __future__ import annotations

import json
from itertools import islice
from random import Random
from typing import Any

import pytest

from streamserve.clients.factory import make_client
from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.protocol.events import BlockStart, Token
from streamserve.protocol.requests import GenerateRequest, Message, SamplingParams, Tool
from tests.conftest import until
from tests.support.models import thinking_world as world
from tests.support.models.thinking_exam import failed, turns
from tests.support.models.thinking_model import encode, thinking_model

NUM_QUESTIONS, NUM_RIGHT = 40, 36


def questions() -> list[tuple[str, list[str], str, str]]:
    """Return questions, each with the names of its tools, and the call that answers it, which is held out."""
    rng, out = Random(5), []
    for _ in range(NUM_QUESTIONS):
        topic = rng.choice(list(world.TOPICS.values()))
        name = rng.choice([name for name in topic.names if any(world.is_held_out(name, v) for v in topic.values)])
        value = rng.choice([value for value in topic.values if world.is_held_out(name, value)])
        others = rng.sample([other for other in world.TOPICS.values() if other is not topic], rng.randint(1, 2))
        names = [name, *(rng.choice(other.names) for other in others)]
        rng.shuffle(names)
        call = json.dumps({topic.parameter: value}, separators=(",", ":"))
        out.append((world.question(rng, rng.choice(topic.asked).format(v=value)), names, name, call))
    return out


async def blocks_of(client: ThreadClient, question: str, names: list[str]) -> dict[str, str]:
    """Return the texts of a greedy answer by the kind of their block; `name` is the last call's."""
    functions = [world.tool(name)["function"] for name in names]
    request = GenerateRequest(
        model="thinker",
        messages=(Message(role="user", content=question),),
        tools=tuple(Tool(**function) for function in functions),
        sampling=SamplingParams(temperature=0, max_tokens=120),
    )
    kinds, out = {0: "text"}, {"text": "", "thinking": "", "tool_use": "", "name": ""}
    async for event in await client.generate(request):
        if isinstance(event, BlockStart):
            kinds[event.index] = event.kind
            out["name"] = event.name or ""
        elif isinstance(event, Token):
            out[kinds[event.index]] += event.text
    return out


@pytest.fixture
async def client() -> Any:
    """The model in the engine, ready."""
    model = ModelConfig(alias="thinker", path=str(thinking_model()))
    client = make_client(model, EngineConfig(num_blocks=256))
    client.start()
    await until(lambda: client.describe().state == "ready", 300)
    yield client
    await client.aclose()


def test_no_pair_that_is_held_out_is_trained() -> None:
    """The conversations of the training have no call of such a pair, in any turn; the questions have nothing else."""
    seen = set()
    for turn in islice(world.turns(7), 5_000):
        made = [call["function"] for message in turn.messages for call in message.get("tool_calls", [])]
        for call in (*turn.calls, *made):
            (value,) = call["arguments"].values()
            seen.add((call["name"], value))
    assert len(seen) > 80
    assert not any(world.is_held_out(*pair) for pair in seen)
    assert all(world.is_held_out(name, *json.loads(call).values()) for _, _, name, call in questions())


async def test_it_calls_what_it_was_never_trained_on(client: ThreadClient) -> None:
    """It thinks, chooses the tool among those of the prompt and the value among its words; nine in ten are right."""
    wrong = []
    for question, names, name, call in questions():
        answer = await blocks_of(client, question, names)
        assert answer["thinking"]
        if (answer["name"], answer["tool_use"]) != (name, call):
            wrong.append((question, names, answer))
    assert len(wrong) <= NUM_QUESTIONS - NUM_RIGHT, wrong


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any]:
    """The tokenizer and the model, as transformers loads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = thinking_model()
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)


def test_the_kept_model_passes_the_exam(trained: tuple[Any, Any]) -> None:
    """What the tests ask it is right by a margin. Else the world has changed: train the model anew, see its module."""
    tokenizer, model = trained
    wrong = failed(model, [encode(tokenizer, turn) for turn in turns()])
    assert [tokenizer.decode(ids) for ids, _ in wrong] == []


def test_the_exam_finds_a_wrong_word(trained: tuple[Any, Any]) -> None:
    """A turn is passed as the model answers it, and failed with another city in its call."""
    tokenizer, model = trained
    wish = world.Wish(world.TOPICS["weather"], "get_weather", "Oslo", "foggy", "foggy")
    question, tools = {"role": "user", "content": "Tell me the weather in Oslo."}, [world.tool("get_weather")]
    turn, *_ = world.ask([question], tools, wish)
    right = encode(tokenizer, turn)
    turn.calls[0]["arguments"]["city"] = "Rome"
    wrong = encode(tokenizer, turn)
    assert failed(model, [right, wrong]) == [wrong]
