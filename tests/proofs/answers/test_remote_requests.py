"""Requests with two abilities at once, behind a remote of our own endpoint: blocks, ends, log-probabilities, usage are
those of a local engine, whatever changes their making there, and whatever happens to the connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")
pytest.importorskip("llguidance", reason="needs llguidance: pip install streamserve[grammar]")
pytest.importorskip("uvicorn", reason="needs uvicorn: pip install uvicorn")

from streamserve.clients.factory import ScriptedRunner, ScriptedTokenizer
from streamserve.clients.remote.client import RemoteClient
from streamserve.engine.config import EngineConfig
from streamserve.protocol.events import BlockText, Error, Event, Token
from streamserve.protocol.requests import (
    GenerateRequest,
    Grammar,
    Message,
    Resume,
    SamplingParams,
    ShownChoice,
    ToolChoice,
)
from tests.proofs.answers.test_block_pairs import REPORT, SLOW, STRICT, TOOLS
from tests.proofs.scale import IS_SOAK
from tests.proofs.support.engines import ECHO, Model, serving
from tests.proofs.support.engines import thinking_model as load_thinking_model
from tests.proofs.support.pairs import CACHE, FEATURES, PARK, PREEMPTION, Feature, config_of
from tests.proofs.support.remotes import Cutter, Told, ask, assert_close, endpoint, pairs, remote, told
from tests.support.engines.clients import until
from tests.support.models.thinking_model import thinking_model
from tests.support.servers.upstreams import counts

# What a request may ask for beside its question: fields of GenerateRequest, and of its sampling.
ABILITIES: Mapping[str, Mapping[str, Any]] = {
    "schema": {"grammar": Grammar(kind="json_schema", value=json.dumps(REPORT))},
    "regex": {"grammar": Grammar(kind="regex", value="(It|The)( [a-z]+){2,5}[.]")},
    "choice": {"grammar": Grammar(kind="choice", value='["It is sunny.","It is rainy."]')},
    "no thought": {"chat_template_kwargs": {"enable_thinking": False}},
    "tools": {"tools": TOOLS},
    "strict tools": {"tools": STRICT},
    "forced call": {"tools": TOOLS, "tool_choice": ToolChoice(mode="required")},
    "one call": {"tools": TOOLS, "parallel_tool_calls": False},
    "stop": {"stop": (" and", "is", "at"), "include_stop": True},
    "n": {"n": 3},
    "penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    "logprobs": {"logprobs": 2},
    "rules": {"bad_words": ("Oslo", "sunny"), "min_tokens": 12},
}
# One of each at most: they are the same fields, or one leaves the other nothing to do.
ALTERNATIVES = (
    frozenset({"schema", "regex", "choice"}),
    frozenset({"tools", "strict tools", "forced call", "one call"}),
)
PAIRS = pairs(tuple(ABILITIES), ALTERNATIVES)
QUESTIONS = (
    "Tell me the weather in Oslo.",
    "Tell me the weather in Paris, and turn the lamp red.",
    "As JSON: Rome, sunny.",
    "Hello!",
)
_OF_REQUEST = GenerateRequest.__slots__


def request_with(question: str, names: tuple[str, ...], sampling: SamplingParams) -> GenerateRequest:
    """Return a chat that asks for these abilities."""
    fields = {key: value for name in names for key, value in ABILITIES[name].items()}
    outer = {name: fields.pop(name) for name in list(fields) if name in _OF_REQUEST}
    messages = (Message(role="user", content=question),)
    return GenerateRequest(model="proof", messages=messages, sampling=replace(sampling, **fields), **outer)


def requests_of(found: Sequence[tuple[str, str]], sampling: SamplingParams) -> list[GenerateRequest]:
    """Return a request for each pair, with the questions in turns; the long version asks each of them."""
    return [
        request_with(question, pair, sampling)
        for number, pair in enumerate(found)
        for question in (QUESTIONS if IS_SOAK else [QUESTIONS[number % len(QUESTIONS)]])
    ]


@pytest.mark.sampled("without its likeliest words, the trained model says bytes that are no text")
@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])
async def test_each_pair_of_abilities_behind_a_remote(is_greedy: bool) -> None:
    """On the trained model, several at once, with a feature of the engine there as a third; refusals are the same too.

    In CI each pair is tried one way, greedy or seeded.
    """
    model, tried = load_thinking_model(thinking_model()), PAIRS if IS_SOAK else PAIRS[is_greedy::2]
    requests = requests_of(tried, SamplingParams(temperature=0.0 if is_greedy else 0.8, seed=5, max_tokens=80))
    async with serving(model, config_of()) as engine:
        plain = [await ask(engine, one) for one in requests]
    answered = [one for one in plain if one.refused is None]
    assert set.union(*(one.kinds for one in answered)) == {"text", "thinking", "tool_use"}
    assert {end for one in answered for _, end in one.choices} >= {"stop", "tool_calls"}
    assert any(any(one.logprobs) for one in answered)
    assert any(len(one.choices) == 3 for one in answered)
    constrained = [one for request, one in zip(requests, plain, strict=True) if request.grammar is not None]
    assert not any("\ufffd" in text for one in constrained for kind, text in one.texts if kind == "text")
    features = [one for one in FEATURES if one.n == 1 and one is not SLOW]
    for feature in features if IS_SOAK else [PREEMPTION if is_greedy else PARK]:
        await compare(model, feature, requests, plain)
    print(f"\nabilities: {len(tried)} pairs, {len(answered)} answered, {len(plain) - len(answered)} refused alike")


async def compare(model: Model, feature: Feature, requests: list[GenerateRequest], plain: list[Told]) -> None:
    """Ask a remote for all, six at a time, and compare."""
    places = asyncio.Semaphore(6)

    async def ask_in_turn(client: RemoteClient, request: GenerateRequest) -> Told:
        async with places:
            return await ask(client, request)

    async with (
        serving(model, config_of([feature, CACHE]), [feature]) as engine,
        endpoint(engine) as port,
        remote(port) as client,
    ):
        found = await asyncio.gather(*(ask_in_turn(client, one) for one in requests))
        for request, one, reference in zip(requests, found, plain, strict=True):
            assert one == reference, f"{feature.name}: {request}"
            assert_close(one, reference)
        await until(lambda: engine.stats().running == engine.stats().waiting == engine.stats().blocks_used == 0)


def repeating(config: EngineConfig) -> ScriptedRunner:
    """Return a runner that repeats the question, however its beginning is divided in tokens; it has no logits."""
    assert config.num_blocks is not None
    return ScriptedRunner(lambda asked: asked, num_blocks=config.num_blocks, block_size=config.block_size)


REPEATING = replace(
    ECHO,
    make_runner=repeating,
    tokenizer=ScriptedTokenizer(),
    eos_token_ids=ScriptedTokenizer().eos_token_ids,
    max_len=1024,
)
ECHOED = "The quiet river and the old boat go with the sea."
CARRIED = ("stop", "rules", "tools", "n", "schema", "choice")
WORDS = {
    **ABILITIES,
    "stop": {"stop": ("with",), "include_stop": True},
    "rules": {"bad_words": ("never",), "min_tokens": 12, "logit_bias": ((5, -3.0),)},
    "choice": {"grammar": Grammar(kind="choice", value=json.dumps([ECHOED, ECHOED.upper()]))},
}
CUT_PAIRS = pairs(CARRIED, ALTERNATIVES)
NUM_CHUNKS = 2  # of each choice before the disturbance: the role, and one with text


def chat_with(pair: tuple[str, ...]) -> GenerateRequest:
    fields = {key: value for name in pair for key, value in WORDS[name].items()}
    outer = {name: fields.pop(name) for name in list(fields) if name in _OF_REQUEST}
    sampling = SamplingParams(**{"temperature": 0.0, "seed": 3, "max_tokens": 120, **fields})
    return GenerateRequest(model="proof", messages=(Message(role="user", content=ECHOED),), sampling=sampling, **outer)


@pytest.mark.cut_streams("connections to the model's server are killed in the middle")
@pytest.mark.parametrize("how", ["park", "kill"])
async def test_pairs_with_a_park_or_a_kill_of_the_connection(how: str) -> None:
    """Text of one choice goes on where it was; what no server takes up is held, or ends in an error that says so."""
    async with serving(REPEATING, replace(config_of(), num_blocks=1025, speculation="off")) as engine:
        plain = {pair: await ask(engine, chat_with(pair)) for pair in CUT_PAIRS}
        async with endpoint(engine) as port:
            cutter = Cutter(port)
            try:
                through = await cutter.start()
                async with remote(through, lead_tokens=1, hold_seconds=0.01) as client:
                    for pair in CUT_PAIRS:
                        await prove_cut(client, cutter, chat_with(pair), plain[pair], how)
            finally:
                await cutter.stop()
        await until(lambda: engine.stats().running == engine.stats().waiting == engine.stats().blocks_used == 0)


async def prove_cut(client: RemoteClient, cutter: Cutter, request: GenerateRequest, plain: Told, how: str) -> None:
    """Ask with one disturbance, which must have happened, and compare."""
    continues = request.n == 1 and request.grammar is None
    before = counts(client), client.stats().parks
    cutter.disturb(is_cut=how == "kill", num_chunks=NUM_CHUNKS * request.n)
    events, num_asked = await read(client, cutter, request, is_slow=how == "park", continues=continues)
    after, parks = counts(client), client.stats().parks
    assert after["lost"] - before[0]["lost"] == (how == "kill")
    if how == "kill" and not continues:
        assert isinstance(events[-1], Error)
        assert (events[-1].code, num_asked) == ("cannot_continue", 1)
        return
    assert told(events, request.n).choices == plain.choices
    assert (num_asked, after["continued"] - before[0]["continued"]) == (1 + continues, continues)
    if how == "park":
        assert parks - before[1] == continues
        assert after["holds"] > before[0]["holds"]


async def read(
    client: RemoteClient, cutter: Cutter, request: GenerateRequest, *, is_slow: bool, continues: bool
) -> tuple[list[Event], int]:
    """Ask, and ask again with what was shown whenever the answer is parked; return the events, and how often.

    A slow reader has read nothing of the first response until its connection is held, or closed.
    """
    events: list[Event] = []
    for number in range(1, 10):
        tokens = [one for one in events if isinstance(one, Token)]
        num_shown = sum(bool(one.text) for one in tokens)
        block = BlockText(index=0, kind="text", text="".join(one.text for one in tokens), is_open=True)
        shown = (ShownChoice(blocks=(block,), num_tokens=num_shown),) if tokens else ()
        reader_tokens = (0,) * request.n if is_slow and number == 1 else None
        generation = await client.generate(request, resume=Resume(shown=shown, reader_tokens=reader_tokens))
        watch = asyncio.ensure_future(let_go(client, cutter, generation)) if reader_tokens and not continues else None
        try:
            async for event in generation:
                events.append(event)
        finally:
            if watch is not None:
                watch.cancel()
        if generation.parked is None:
            return events, number
    raise AssertionError("it never ends")


async def let_go(client: RemoteClient, cutter: Cutter, generation: Any) -> None:
    """Read on, once the connection has been held."""
    await until(lambda: not generation._source.has_room and counts(client)["holds"] > 0)
    generation.reader_at(None)
    cutter.go_on.set()
