"""A remote client of our own endpoint, whatever feature changes the making there: what a plain local engine answers.

No token ids come over a remote. Compared are the text and the blocks of every choice, how it ended, and the usage.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")
pytest.importorskip("llguidance", reason="needs llguidance: pip install streamserve[grammar]")
pytest.importorskip("uvicorn", reason="needs uvicorn: pip install uvicorn")

import uvicorn

from streamserve.asgi import anyone, app
from streamserve.clients.base import EngineClient
from streamserve.clients.remote.client import RemoteClient
from streamserve.clients.remote.config import RemoteConfig
from streamserve.protocol.events import BlockStart, ChoiceDone, Done, Error, Token, Usage
from streamserve.protocol.requests import GenerateRequest, Grammar, Message
from tests.proofs.answers.test_block_pairs import workload as conversations
from tests.proofs.scale import IS_SOAK, scaled
from tests.proofs.support.engines import ECHO, Model, serving, tiny_model
from tests.proofs.support.engines import thinking_model as load_thinking_model
from tests.proofs.support.pairs import (
    CACHE,
    FEATURES,
    MOST_CHOICES,
    OVERLAP,
    PARK,
    PREEMPTION,
    Feature,
    PlanCounts,
    ReceivedChoice,
    config_of,
    workload,
)
from tests.support.clients import collect, until
from tests.support.thinking_model import thinking_model
from tests.support.tiny_models import save_model

MOST_TRIES = 10
WORDS = ("river", "wood", "lake", "hill")
SCHEMA = json.dumps({"type": "array", "items": {"enum": WORDS}, "minItems": 1, "maxItems": 2})
FREE = 2  # the number of a neighbour without a schema, which need not wait for its tokens
each_way = pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])


@dataclass(frozen=True, slots=True)
class Told:
    """What a client tells of an answer: of each choice its blocks (kind, name, text) and its end; and the usage."""

    choices: tuple[tuple[tuple[tuple[str, str | None, str], ...], str | None], ...]
    usage: Usage  # without cached tokens: where they are is no part of the answer


@each_way
async def test_each_feature_behind_a_remote_on_the_echo_engine(is_greedy: bool) -> None:
    """Stop strings, rules, seeds and several choices; then chats, all but one with a schema."""
    fields: set[str] = set()
    for seed in range(scaled(20)):
        free = workload(seed, is_greedy=is_greedy, num_ids=ECHO.num_ids, max_tokens=ECHO.max_tokens)
        told = await prove(ECHO, free, FEATURES)
        fields |= await fields_with_effect(ECHO, free, told)
        told = await prove(ECHO, with_schemas(free), FEATURES if IS_SOAK else FEATURES[is_greedy::2])
        told.pop(FREE)
        for one in told:
            [(blocks, end)] = one.choices
            assert end == "stop"
            assert set(json.loads(blocks[0][2])) <= set(WORDS)
    assert fields >= {"stop", "allowed_token_ids"}


@pytest.mark.sampled("half a code point is a token of the random model")
@each_way
async def test_each_feature_behind_a_remote_on_a_real_model(is_greedy: bool, tmp_path: Path) -> None:
    """The same with a random transformer, which counts penalties; in CI each feature is tried one way."""
    model = tiny_model(save_model(tmp_path, "llama"), "llama")
    fields: set[str] = set()
    for seed in range(scaled(4)):
        requests = workload(seed, is_greedy=is_greedy, num_ids=model.num_ids, max_tokens=model.max_tokens)
        told = await prove(model, requests, FEATURES if IS_SOAK else FEATURES[is_greedy::2])
        fields |= await fields_with_effect(model, requests, told)
    assert fields >= {"frequency_penalty", "allowed_token_ids"}


@each_way
async def test_blocks_with_each_feature_behind_a_remote(is_greedy: bool) -> None:
    """Thoughts, calls with their arguments, and text, of the model that is trained to think and to call tools."""
    model = load_thinking_model(thinking_model())
    features = FEATURES if IS_SOAK else (PARK, CACHE) if is_greedy else (PREEMPTION, OVERLAP)
    told = await prove(model, conversations(is_greedy=is_greedy), features)
    kinds = {kind for one in told for blocks, _ in one.choices for kind, _, _ in blocks}
    assert kinds == {"text", "thinking", "tool_use"}
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


async def prove(model: Model, requests: list[GenerateRequest], features: Sequence[Feature]) -> list[Told]:
    """Try each feature alone, until it has had an effect, and compare; return what the plain engine told."""
    many = [replace(one, n=MOST_CHOICES) for one in requests]
    plans = PlanCounts()
    async with serving(model, config_of(), (), plans) as client:
        plain = {1: [await ask(client, one) for one in requests]}
        assert not [one.name for one in FEATURES if one.had_effect(client.stats(), plans)]
        if any(one.n > 1 for one in features):
            plain[MOST_CHOICES] = [await ask(client, one) for one in many]
    for feature in features:
        for _ in range(MOST_TRIES):
            if await has_effect(model, feature, requests if feature.n == 1 else many, plain[feature.n]):
                break
        else:
            raise AssertionError(f"{feature.name}, {model.name}: it did nothing")
    return plain[1]


async def has_effect(model: Model, feature: Feature, requests: list[GenerateRequest], plain: list[Told]) -> bool:
    """Compare with the plain answers over a remote of a new engine; return whether its feature had an effect.

    The first request runs alone; the rest, all at once, find its prefix.
    """
    plans = PlanCounts()
    async with (
        serving(model, config_of([feature]), [feature], plans) as engine,
        endpoint(engine) as url,
        remote(url) as client,
    ):
        first, *others = requests
        told = [await ask(client, first), *await asyncio.gather(*(ask(client, one) for one in others))]
        for number, (one, reference) in enumerate(zip(told, plain, strict=True)):
            assert one == reference, f"{feature.name}, {model.name}: request {number} is answered otherwise"
        counts = client.stats().upstream
        assert (counts["requests"], counts["lost"], counts["continued"]) == (len(requests), 0, 0)
        await until(lambda: engine.stats().running == engine.stats().waiting == engine.stats().blocks_used == 0)
        return feature.had_effect(engine.stats(), plans)


async def fields_with_effect(model: Model, requests: list[GenerateRequest], told: list[Told]) -> set[str]:
    """Return which sampling fields change an answer: without them the plain engine tells another one."""
    found = set()
    async with serving(model, config_of()) as client:
        for name, off in (("stop", ()), ("frequency_penalty", 0.0), ("allowed_token_ids", ()), ("min_tokens", 0)):
            for one, with_it in zip(requests, told, strict=True):
                without = replace(one, sampling=replace(one.sampling, **{name: off}))
                if without != one and await ask(client, without) != with_it:
                    found.add(name)
    return found


async def ask(client: EngineClient, request: GenerateRequest) -> Told:
    """Return what a client tells of the whole answer."""
    choices, usage = [ReceivedChoice()] * request.n, None
    for event in await collect(await client.generate(request)):  # type: ignore[arg-type]
        assert not isinstance(event, Error), event
        if isinstance(event, Token):
            choices[event.choice] = choices[event.choice].take(event)
        elif isinstance(event, BlockStart):
            choices[event.choice] = choices[event.choice].begin(event)
        elif isinstance(event, ChoiceDone):
            choices[event.choice] = replace(choices[event.choice], finish_reason=event.finish_reason)
        elif isinstance(event, Done):
            usage = replace(event.usage, cached_tokens=0)
            if request.n == 1:
                choices[0] = replace(choices[0], finish_reason=event.finish_reason)
    assert usage is not None, "it ended without an end"
    return Told(tuple((_blocks_of(one), one.finish_reason) for one in choices), usage)


def _blocks_of(choice: ReceivedChoice) -> tuple[tuple[str, str | None, str], ...]:
    """Return the blocks that have begun for a reader: an empty text is none."""
    blocks = (choice.blocks[index] for index in sorted(choice.blocks))
    return tuple(block for block in blocks if block[2] or block[0] == "tool_use")


@asynccontextmanager
async def endpoint(engine: EngineClient) -> AsyncIterator[str]:
    """Serve our routes by uvicorn on a thread and event loop of its own; yields the base of OpenAI's routes."""
    listener = socket.create_server(("127.0.0.1", 0))
    site = app(models={"proof": engine}, authenticate=anyone)
    server = uvicorn.Server(uvicorn.Config(site, log_config=None, access_log=False, timeout_graceful_shutdown=5))
    thread = Thread(target=server.run, kwargs={"sockets": [listener]}, name="endpoint", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        await asyncio.to_thread(thread.join, 60)
        assert not thread.is_alive()


@asynccontextmanager
async def remote(url: str) -> AsyncIterator[RemoteClient]:
    """Start a remote client that has found the endpoint ready."""
    client = RemoteClient(RemoteConfig(alias="proof", url=url))
    try:
        client.start()
        await until(lambda: client.describe().state != "loading")
        assert client.describe().dtype == "streamserve"
        yield client
    finally:
        await client.aclose()
