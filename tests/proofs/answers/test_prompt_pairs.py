"""With the prompt's log-probabilities, whatever two features change the making of an answer: all is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from streamserve.clients.base import Generation
from streamserve.protocol.events import Event, PositionLogprobs, Token
from streamserve.protocol.requests import Admission, GenerateRequest, Resume
from tests.proofs.scale import IS_SOAK, scaled
from tests.proofs.support.engines import ECHO, Model, serving, tiny_model
from tests.proofs.support.pairs import (
    FEATURES,
    Admit,
    Answer,
    Feature,
    PlanCounts,
    assert_same,
    config_of,
    pairs_of,
    plain_answers,
    whole_answer,
    workload,
)
from tests.support.engines.clients import until
from tests.support.models.tiny_models import save_model

MOST_TRIES = 10
TOP = 3
SINGLES = [(one,) for one in FEATURES]
PAIRS = pairs_of(FEATURES)
each_way = pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])
Positions = tuple[PositionLogprobs, ...]


@each_way
async def test_pairs_on_the_echo_engine(is_greedy: bool) -> None:
    """Every second prompt is scored; in CI some of the pairs are tried."""
    await prove(ECHO, is_greedy, PAIRS if IS_SOAK else PAIRS[is_greedy::3], num_seeds=scaled(10))


@each_way
async def test_each_feature_on_a_real_model(is_greedy: bool, tmp_path: Path) -> None:
    """A transformer in fp32: the same tokens at each place, and numbers that differ by rounding only."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")
    pytest.importorskip("transformers", reason="needs transformers: pip install streamserve[engine]")
    torch.set_num_threads(1)
    model = tiny_model(save_model(tmp_path, "llama"), "llama")
    await prove(model, is_greedy, (*SINGLES, *PAIRS) if IS_SOAK else SINGLES[is_greedy::2], num_seeds=1)


async def prove(model: Model, is_greedy: bool, pairs: Sequence[tuple[Feature, ...]], num_seeds: int) -> None:
    """Try each pair until each of its features has had an effect."""
    num_positions = 0
    for seed in range(num_seeds):
        requests = scored(workload(seed, is_greedy=is_greedy, num_ids=model.num_ids, max_tokens=model.max_tokens))
        async with serving(model, config_of()) as client:
            plain = await plain_answers(client.generate, requests)
            of_prompts = [(await ask(client.generate, one, ()))[1] for one in requests]
        for request, positions in zip(requests, of_prompts, strict=True):
            is_scored = request.sampling.prompt_logprobs is not None
            expected = request.prompt_token_ids if is_scored else ()
            assert tuple(one.chosen.token_id for one in positions) == expected
        for pair in pairs:
            idle = {one.name for one in pair}
            for _ in range(MOST_TRIES):
                idle -= await features_with_effect(model, pair, requests, plain, of_prompts)
                if not idle:
                    break
            else:
                raise AssertionError(f"{named(pair)}, {model.name}, workload {seed}: {idle} did nothing")
            num_positions += sum(map(len, of_prompts))
    print(f"\nprompt_logprobs, {model.name}: {len(pairs)} x {num_seeds} workloads, {num_positions:,} positions equal")


def scored(requests: list[GenerateRequest]) -> list[GenerateRequest]:
    """Return the requests, every second of which asks for the log-probabilities of its prompt."""
    return [
        replace(one, sampling=replace(one.sampling, prompt_logprobs=TOP)) if number % 2 == 0 else one
        for number, one in enumerate(requests)
    ]


async def ask(admit: Admit, request: GenerateRequest, pair: tuple[Feature, ...]) -> tuple[Answer, Positions]:
    """Return the answer as its readers have it, and what they were shown of the prompt, also over parks."""
    positions: list[PositionLogprobs] = []

    def note(event: Event) -> None:
        if isinstance(event, Token) and not event.token_ids:
            positions.extend(event.logprobs or ())

    async def again(one: GenerateRequest, admission: Admission, resume: Resume) -> Generation:
        return await admit(one, admission, replace(resume, num_prompt_logprobs=len(positions)))

    n = max((one.n for one in pair), default=1)
    has_reader = any(one.has_reader for one in pair)
    answer = await whole_answer(again, replace(request, n=n), has_reader=has_reader, on_event=note)
    return answer, tuple(positions)


async def features_with_effect(
    model: Model,
    pair: tuple[Feature, ...],
    requests: list[GenerateRequest],
    plain: list[Answer],
    of_prompts: list[Positions],
) -> set[str]:
    """Compare on a new engine, which ends empty; return which of the features had an effect."""
    plans = PlanCounts()
    async with serving(model, config_of(pair), pair, plans) as client:
        first, *others = requests
        found = [await ask(client.generate, first, pair)]
        plans.together.expect(len(others) * max(one.n for one in pair))
        found += await asyncio.gather(*(ask(client.generate, one, pair) for one in others))
        assert_same([answer for answer, _ in found], plain, f"{named(pair)}, {model.name}")
        for number, ((_, positions), expected) in enumerate(zip(found, of_prompts, strict=True)):
            assert_close(positions, expected, f"{named(pair)}, {model.name}: request {number}")
        await until(lambda: client.stats().running == client.stats().waiting == client.stats().blocks_used == 0)
        return {one.name for one in pair if one.had_effect(client.stats(), plans)}


def assert_close(positions: Positions, expected: Positions, what: str) -> None:
    """Each place once and in order, with the same candidates."""
    assert [one.chosen.token_id for one in positions] == [one.chosen.token_id for one in expected], what
    for one, other in zip(positions, expected, strict=True):
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4), what
        assert [top.logprob for top in one.top] == pytest.approx([top.logprob for top in other.top], abs=1e-4), what


def named(pair: tuple[Feature, ...]) -> str:
    return " x ".join(one.name for one in pair)
