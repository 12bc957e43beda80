"""The engine process, killed at a random step, beside one other feature: tokens, text and ends of the plain run."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from streamserve.clients.base import Generation
from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import LaunchConfig
from streamserve.engine.config import ModelConfig
from streamserve.protocol.engine import EngineStats
from streamserve.protocol.errors import EngineUnavailable
from streamserve.protocol.events import Event, Token
from streamserve.protocol.requests import GenerateRequest
from tests.proofs.scale import IS_SOAK, scaled
from tests.proofs.support.engines import ECHO, serving
from tests.proofs.support.pairs import (
    CACHE,
    CHOICES,
    CHUNKS,
    LITTLE_MEMORY,
    MODEL_LEN,
    PARK,
    Answer,
    Feature,
    PlanCounts,
    ask_all,
    assert_matching,
    assert_same,
    config_of,
    constrained,
    plain_answers,
    workload,
)
from tests.support.engines.engine_processes import DEADLINE_SECONDS, connected, end_engine, ready, spec_in, until

pytestmark = [pytest.mark.timeout(3600 if IS_SOAK else 400)]

# Forced preemption reaches into a core; in another process too little memory has to cause it.
PREEMPTION = replace(LITTLE_MEMORY, name="preemption", had_effect=lambda stats, plans: stats.preemptions > 0)
# Nor can the test see the engine's plans. Steps of at most seven tokens are many; each choice computes its prompt.
SEVENS = replace(CHUNKS[1], had_effect=lambda stats, plans: 7 * stats.steps >= computed_tokens(stats) > 0)
THREE = replace(CHOICES, had_effect=lambda stats, plans: stats.prompt_tokens > MOST_PROMPT_TOKENS)
FEATURES = (PARK, PREEMPTION, CACHE, SEVENS, THREE)
# Whether little memory has an effect depends on which answers run together: on a busy machine, perhaps none.
MOST_TRIES = 5
# Greedy and seeded requests, and their undisturbed answers.
Asked = tuple[list[GenerateRequest], list[Answer]]


# Of an undisturbed run with one choice for each request: greedy and seeded ones.
MOST_PROMPT_TOKENS = 2 * (30 + 21 + 37 + 13 + 1 + 13)


def computed_tokens(stats: EngineStats) -> int:
    """Prompt tokens that were not cached, and all tokens but the last of each answer, approximately."""
    return stats.prompt_tokens - stats.prefix_hits + stats.generation_tokens


class Victim:
    """A client whose engine is killed at a token; it submits again, as a stream does, when there is another engine."""

    def __init__(self, client: ProcessClient) -> None:
        self._client = client
        self._num_left = 0
        self.num_kills = 0

    def kill_after(self, num_tokens: int) -> None:
        """Kill the engine after so many token events."""
        self._num_left = num_tokens

    async def generate(self, *asked: Any) -> Generation:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                await ready(self._client)
                with suppress(EngineUnavailable):
                    return await self._client.generate(*asked)

    def note(self, event: Event) -> None:
        """Count a token event, and kill the engine when it is due."""
        pid = self._client.engine_pid
        if isinstance(event, Token) and pid is not None and self._num_left:
            self._num_left -= 1
            if not self._num_left:
                os.kill(pid, SIGKILL)
                self.num_kills += 1


async def prove(spec: LaunchConfig, feature: Feature, asked: Asked, rng: random.Random, counts: Counter[str]) -> None:
    """Compare an undisturbed engine and one that dies; repeat if the feature has never had an effect."""
    for _ in range(MOST_TRIES):
        await ask_twice(spec, feature, asked, rng, counts)
        if counts[feature.name]:
            return


async def ask_twice(
    spec: LaunchConfig, feature: Feature, asked: Asked, rng: random.Random, counts: Counter[str]
) -> None:
    requests, plain = asked
    async with connected(spec) as client:
        victim = Victim(client)
        for is_killed in (False, True):
            what = f"process client{', killed' * is_killed} x {feature.name}"
            shown = sum(len(choice.token_ids) for answer in plain for choice in answer[: feature.n])
            victim.kill_after(rng.randint(1, shown // 2) if is_killed else 0)
            answers = await ask_all(victim.generate, requests, [feature], victim.note)
            assert_same(answers, plain, what)
            stats = await settled(client)
            counts[feature.name] += feature.had_effect(stats, PlanCounts())
            counts["answers"] += sum(map(len, answers))
            counts["tokens"] += shown
        assert victim.num_kills == 1
        counts["kills"] += victim.num_kills
    end_engine(spec)


async def settled(client: ProcessClient) -> EngineStats:
    """Return the metrics of an engine that has no work left."""
    seen = client.stats()
    await until(lambda: client.stats() is not seen)
    await until(lambda: client.stats().running == client.stats().waiting == client.stats().blocks_used == 0)
    return client.stats()


def both_ways(seed: int, num_ids: int, max_tokens: int) -> list[GenerateRequest]:
    """Greedy requests and seeded ones, to be answered together."""
    greedy, seeded = (workload(seed, is_greedy=way, num_ids=num_ids, max_tokens=max_tokens) for way in (True, False))
    return greedy + seeded


def print_counts(model: str, num_seeds: int, counts: Counter[str]) -> None:
    """Every feature must have had an effect at some time."""
    assert all(counts[feature.name] for feature in FEATURES), counts
    print(
        f"\npairs with the process client, {model}, greedy and seeded together: {len(FEATURES)} features x calm and"
        f" killed x {num_seeds} workloads; {counts['kills']:,} kills, {counts['answers']:,} answers and"
        f" {counts['tokens']:,} tokens equal the plain ones"
    )


async def test_pairs_on_the_echo_engine(folder: Path) -> None:
    """At any point of its work an engine may die, and another one takes over."""
    rng, counts = random.Random(0), Counter[str]()
    for seed in range(scaled(20)):
        requests = both_ways(seed, ECHO.num_ids, ECHO.max_tokens)
        async with serving(ECHO, config_of()) as client:
            plain = await plain_answers(client.generate, requests)
        for feature in FEATURES:
            spec = spec_in(folder, engine=config_of([feature]), hang_seconds=2.0)
            await prove(spec, feature, (requests, plain), rng, counts)
    print_counts("echo", scaled(20), counts)


async def test_grammars_on_the_echo_engine(folder: Path) -> None:
    """The next engine compiles each grammar again and feeds it what was shown: the rest is the same, and matches."""
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'streamserve[grammar]'")
    rng, counts = random.Random(1), Counter[str]()
    for seed in range(scaled(20)):
        requests = constrained(both_ways(seed, ECHO.num_ids, ECHO.max_tokens))
        async with serving(ECHO, config_of()) as client:
            plain = await plain_answers(client.generate, requests)
        assert_matching(requests, plain)
        for feature in (PARK, PREEMPTION, THREE):
            spec = spec_in(folder, engine=config_of([feature]), hang_seconds=2.0)
            await prove(spec, feature, (requests, plain), rng, counts)
    print(f"\ngrammars with the process client, killed: {dict(counts)}")
    assert counts[PARK.name]
    assert counts["kills"]


@pytest.mark.skipif(not IS_SOAK, reason="loads a model 11 times: needs STREAMSERVE_SOAK=1")
async def test_pairs_on_the_demo_model(folder: Path) -> None:
    """The same with a transformer in fp32."""
    pytest.importorskip("torch", reason="needs the engine extra: pip install 'streamserve[engine]'")
    from project.settings import HELPDESK

    rng, counts = random.Random(0), Counter[str]()
    model = ModelConfig(alias="echo", path=str(HELPDESK), dtype="float32", parity_probe=False, num_threads=1)

    def spec_of(*features: Feature) -> LaunchConfig:
        return spec_in(folder, model=model, engine=replace(config_of(features), max_model_len=MODEL_LEN))

    requests = both_ways(0, num_ids=3000, max_tokens=ECHO.max_tokens)
    async with connected(spec_of()) as client:
        plain = await plain_answers(client.generate, requests)
    end_engine(spec_of())
    for feature in FEATURES:
        await prove(spec_of(feature), feature, (requests, plain), rng, counts)
    print_counts("fp32 demo model", 1, counts)
