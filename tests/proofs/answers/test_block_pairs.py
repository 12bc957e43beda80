"""With thoughts and calls, whatever feature changes the making of an answer: tokens and blocks are the plain run's."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")
pytest.importorskip("llguidance", reason="needs llguidance: pip install streamserve[grammar]")

from streamserve.protocol.requests import GenerateRequest, Grammar, Message, SamplingParams, Tool, ToolChoice
from tests.proofs.answers.test_pairs import prove_pair
from tests.proofs.scale import IS_SOAK
from tests.proofs.support.engines import Model, serving
from tests.proofs.support.engines import thinking_model as load_thinking_model
from tests.proofs.support.pairs import CHUNKS, FEATURES, Answer, config_of, pairs_of, plain_answers
from tests.support.models import thinking_world as world
from tests.support.models.thinking_model import thinking_model

REPORT = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "weather": {"enum": ["rainy", "sunny"]}},
    "required": ["city", "weather"],
}
TOOLS = tuple(Tool(**world.tool(name)["function"]) for name in ("set_light", "get_weather", "put_record"))
STRICT = tuple(Tool(**world.tool(name)["function"], strict=True) for name in ("set_light", "get_weather"))
SLOW = CHUNKS[0]  # one token a step: only in a soak


@pytest.fixture(scope="module")
def thinker() -> Model:
    """The trained model, loaded once."""
    import torch

    torch.set_num_threads(1)
    return load_thinking_model(thinking_model())


def workload(*, is_greedy: bool) -> list[GenerateRequest]:
    """Calls free, strict, forced, one after the other and side by side; an object of JSON; prompts that share tools."""
    ways = [
        ("Tell me the weather in Oslo.", {"tools": TOOLS}),
        ("Tell me the weather in Paris, and turn the lamp red.", {"tools": TOOLS}),
        ("Tell me the weather in Dakar, then play some disco.", {"tools": TOOLS, "parallel_tool_calls": False}),
        ("Hello!", {"tools": TOOLS, "tool_choice": ToolChoice(mode="required")}),
        ("Show me the weather in Lima.", {"tools": STRICT}),
        ("As JSON: Rome, sunny.", {"grammar": Grammar(kind="json_schema", value=json.dumps(REPORT))}),
    ]
    sampling = SamplingParams(temperature=0.0 if is_greedy else 0.8, seed=11, max_tokens=90)
    return [
        GenerateRequest(
            model="proof",
            messages=(Message(role="user", content=asked),),
            sampling=sampling,
            **how,
        )
        for asked, how in ways
    ]


def kinds_of(answers: list[Answer]) -> set[str]:
    return {kind for answer in answers for choice in answer for kind, _, text in choice.blocks.values() if text}


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])
async def test_blocks_with_each_feature(thinker: Model, is_greedy: bool) -> None:
    """Parks, preemptions, chunks, memory, cache, n and overlap: the same ids, in blocks of the same kind and name."""
    requests = workload(is_greedy=is_greedy)
    async with serving(thinker, config_of()) as client:
        plain = await plain_answers(client.generate, requests)
    assert kinds_of(plain) == {"text", "thinking", "tool_use"}
    singles = [(one,) for one in FEATURES if one is not SLOW]
    counts: dict[str, int] = {}
    for features in pairs_of(FEATURES) if IS_SOAK else singles[is_greedy::2]:
        await prove_pair(thinker, features, 0, (requests, plain), counts)
    print(f"\nblocks: {counts}")
