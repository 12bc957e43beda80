"""A remote client of our own endpoint, whichever two features change the making there: the plain local answer.

A run has each feature alone or some pairs, the long version all pairs.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")
pytest.importorskip("llguidance", reason="needs llguidance: pip install streamserve[grammar]")
pytest.importorskip("uvicorn", reason="needs uvicorn: pip install uvicorn")

from streamserve.protocol.requests import GenerateRequest, Grammar, Message
from tests.proofs.answers.test_block_pairs import SLOW
from tests.proofs.answers.test_block_pairs import workload as conversations
from tests.proofs.scale import IS_SOAK, scaled
from tests.proofs.support.engines import ECHO, Model, serving, tiny_model
from tests.proofs.support.engines import thinking_model as load_thinking_model
from tests.proofs.support.pairs import (
    CACHE,
    CHUNKS,
    FEATURES,
    LITTLE_MEMORY,
    MOST_CHOICES,
    OVERLAP,
    PARK,
    PREEMPTION,
    Feature,
    PlanCounts,
    config_of,
    constrained,
    pairs_of,
    workload,
)
from tests.proofs.support.remotes import Told, ask, endpoint, remote
from tests.support.engines.clients import until
from tests.support.models.thinking_model import thinking_model
from tests.support.models.tiny_models import save_model
from tests.support.servers.upstreams import counts

MOST_TRIES = 10
WORDS = ("river", "wood", "lake", "hill")
SCHEMA = json.dumps({"type": "array", "items": {"enum": WORDS}, "minItems": 1, "maxItems": 2})
SINGLES = [(one,) for one in FEATURES]
PAIRS = pairs_of(FEATURES)
FREE = 2  # the number of a neighbour without a schema, which need not wait for its tokens
each_way = pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])


@each_way
async def test_each_feature_behind_a_remote_on_the_echo_engine(is_greedy: bool) -> None:
    """Stop strings, rules, seeds and several choices; then chats, all but one with a schema."""
    fields: set[str] = set()
    for seed in range(scaled(20)):
        free = workload(seed, is_greedy=is_greedy, num_ids=ECHO.num_ids, max_tokens=ECHO.max_tokens)
        told = await prove(ECHO, free, SINGLES)
        fields |= await fields_with_effect(ECHO, free, told)
        told = await prove(ECHO, with_schemas(free), SINGLES if IS_SOAK else SINGLES[is_greedy::2])
        told.pop(FREE)
        for one in told:
            [(blocks, end)] = one.choices
            assert end == "stop"
            assert set(json.loads(blocks[0][2])) <= set(WORDS)
    assert fields >= {"stop", "allowed_token_ids"}


@each_way
async def test_pairs_behind_a_remote_on_the_echo_engine(is_greedy: bool) -> None:
    """Two features at a time, with regular expressions for all requests but those that need none."""
    pairs = PAIRS if IS_SOAK else PAIRS[is_greedy::4]
    for seed in range(scaled(4)):
        free = workload(seed, is_greedy=is_greedy, num_ids=ECHO.num_ids, max_tokens=ECHO.max_tokens)
        requests = constrained(free)
        told = await prove(ECHO, requests, pairs)
        assert any(one.grammar is not None for one in requests)
        for request, plain, one in zip(requests, free, told, strict=True):
            [(blocks, end)] = one.choices
            if (
                request.grammar is not None
                and end == "stop"
                and not (plain.sampling.stop or plain.sampling.stop_token_ids)
            ):
                assert re.fullmatch(request.grammar.value, blocks[0][2])


@pytest.mark.sampled("half a code point is a token of the random model")
@each_way
async def test_each_feature_behind_a_remote_on_a_real_model(is_greedy: bool, tmp_path: Path) -> None:
    """The same with a random transformer, which counts penalties; in CI each feature is tried one way."""
    model = tiny_model(save_model(tmp_path, "llama"), "llama")
    fields: set[str] = set()
    for seed in range(scaled(4)):
        requests = workload(seed, is_greedy=is_greedy, num_ids=model.num_ids, max_tokens=model.max_tokens)
        told = await prove(model, requests, (*SINGLES, *PAIRS) if IS_SOAK else SINGLES[is_greedy::2])
        fields |= await fields_with_effect(model, requests, told)
    assert fields >= {"frequency_penalty", "allowed_token_ids"}


@pytest.mark.sampled("at a temperature, the trained model may say any byte")
@each_way
async def test_blocks_with_each_feature_behind_a_remote(is_greedy: bool) -> None:
    """Thoughts, calls with their arguments, and text, of the model that is trained to think and to call tools."""
    model = load_thinking_model(thinking_model())
    few = [(PARK, CACHE), (PREEMPTION, CHUNKS[2])] if is_greedy else [(PREEMPTION, OVERLAP), (PARK, LITTLE_MEMORY)]
    fast = [pair for pair in (*SINGLES, *PAIRS) if SLOW not in pair]
    told = await prove(model, conversations(is_greedy=is_greedy), fast if IS_SOAK else few)
    assert set.union(*(one.kinds for one in told)) == {"text", "thinking", "tool_use"}
    assert {end for one in told for _, end in one.choices} >= {"stop", "tool_calls"}
    assert all(one.usage.reasoning_tokens for one in told[:3])


def with_schemas(requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
    """Return chats that begin alike, whose schema ends each but one; none has the rules of these requests."""
    grammar = Grammar(kind="json_schema", value=SCHEMA)
    return [
        replace(
            one,
            prompt_token_ids=None,
            messages=(Message(role="user", content="Which words? " + "So? " * number),),
            sampling=requests[0].sampling,
            grammar=grammar if number != FREE else None,
        )
        for number, one in enumerate(requests)
    ]


async def prove(model: Model, requests: list[GenerateRequest], pairs: Sequence[tuple[Feature, ...]]) -> list[Told]:
    """Try each pair, or feature alone, until each has had an effect, and compare; return what the plain engine told."""
    many = [replace(one, n=MOST_CHOICES) for one in requests]
    plans = PlanCounts()
    async with serving(model, config_of(), (), plans) as client:
        plain = {1: [await ask(client, one) for one in requests]}
        assert not [one.name for one in FEATURES if one.had_effect(client.stats(), plans)]
        if any(one.n > 1 for pair in pairs for one in pair):
            plain[MOST_CHOICES] = [await ask(client, one) for one in many]
    for pair in pairs:
        n = max(one.n for one in pair)
        idle = {one.name for one in pair}
        for _ in range(MOST_TRIES):
            idle -= await features_with_effect(model, pair, requests if n == 1 else many, plain[n])
            if not idle:
                break
        else:
            raise AssertionError(f"{named(pair)}, {model.name}: {idle} did nothing")
    return plain[1]


async def features_with_effect(
    model: Model, pair: tuple[Feature, ...], requests: list[GenerateRequest], plain: list[Told]
) -> set[str]:
    """Compare with the plain answers over a remote of a new engine; return which of its features had an effect.

    The first request runs alone; the rest, all at once, find its prefix.
    """
    plans = PlanCounts()
    async with (
        serving(model, config_of(pair), pair, plans) as engine,
        endpoint(engine) as port,
        remote(port) as client,
    ):
        first, *others = requests
        told = [await ask(client, first), *await asyncio.gather(*(ask(client, one) for one in others))]
        for number, (one, reference) in enumerate(zip(told, plain, strict=True)):
            assert one == reference, f"{named(pair)}, {model.name}: request {number} is answered otherwise"
        found = counts(client)
        assert (found["requests"], found["lost"], found["continued"]) == (len(requests), 0, 0)
        await until(lambda: engine.stats().running == engine.stats().waiting == engine.stats().blocks_used == 0)
        return {one.name for one in pair if one.had_effect(engine.stats(), plans)}


def named(pair: tuple[Feature, ...]) -> str:
    return " x ".join(one.name for one in pair)


async def fields_with_effect(model: Model, requests: list[GenerateRequest], told: list[Told]) -> set[str]:
    """Return which sampling fields change an answer: the plain engine answers otherwise without them."""
    found = set()
    async with serving(model, config_of()) as client:
        for name, off in (("stop", ()), ("frequency_penalty", 0.0), ("allowed_token_ids", ()), ("min_tokens", 0)):
            for one, with_it in zip(requests, told, strict=True):
                without = replace(one, sampling=replace(one.sampling, **{name: off}))
                if without != one and await ask(client, without) != with_it:
                    found.add(name)
    return found
