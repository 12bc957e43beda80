"""Whatever two features change the making of an answer: tokens, text and ends are those of the plain run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.proofs.scale import IS_SOAK, scaled
from tests.proofs.support.engines import ECHO, Model, serving, tiny_model
from tests.proofs.support.pairs import (
    FEATURES,
    Feature,
    PlanCounts,
    ask_all,
    assert_matching,
    assert_same,
    config_of,
    constrained,
    pairs_of,
    plain_answers,
    workload,
)
from tests.support.engines.clients import until
from tests.support.models.tiny_models import save_model

MOST_TRIES = 10
MODEL_TYPES = ("llama", "gemma3_text", "gpt2") if IS_SOAK else ("llama",)

each_way = pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])


@pytest.fixture(scope="module", params=MODEL_TYPES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny random model, loaded once."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")
    pytest.importorskip("transformers", reason="needs transformers: pip install streamserve[engine]")
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    return tiny_model(save_model(Path(tmp_path_factory.mktemp(request.param)), request.param), request.param)


@each_way
async def test_pairs_on_the_echo_engine(is_greedy: bool) -> None:
    """A wrong block, slot, position or order would give another text: with every pair the text is the same."""
    await prove(ECHO, is_greedy, pairs_of(FEATURES), num_seeds=scaled(20))


@each_way
async def test_pairs_on_a_real_model(tiny: Model, is_greedy: bool) -> None:
    """A transformer in fp32 gives the same tokens, whatever its steps hold and how often it starts again.

    In CI each pair is tried one way, greedy or seeded.
    """
    pairs = pairs_of(FEATURES) if IS_SOAK else pairs_of(FEATURES)[is_greedy::2]
    await prove(tiny, is_greedy, pairs, num_seeds=scaled(2))


@each_way
async def test_grammars_with_each_feature_on_the_echo_engine(is_greedy: bool) -> None:
    """Every request has a grammar: whatever else changes the making of its answer, it is the same, and matches."""
    pytest.importorskip("llguidance", reason="needs llguidance: pip install streamserve[grammar]")
    pairs = pairs_of(FEATURES) if IS_SOAK else [(one,) for one in FEATURES]
    await prove(ECHO, is_greedy, pairs, num_seeds=scaled(20), has_grammars=True)


@each_way
async def test_grammars_with_each_feature_on_a_real_model(tiny: Model, is_greedy: bool) -> None:
    """The same with a random transformer: its logits know nothing of the grammars."""
    pytest.importorskip("llguidance", reason="needs llguidance: pip install streamserve[grammar]")
    singles = [(one,) for one in FEATURES]
    await prove(tiny, is_greedy, singles if IS_SOAK else singles[is_greedy::2], scaled(2), has_grammars=True)


async def prove(
    model: Model, is_greedy: bool, pairs: Sequence[tuple[Feature, ...]], num_seeds: int, *, has_grammars: bool = False
) -> None:
    """Try every pair, or every feature alone, with every seed; return the counts."""
    counts: dict[str, int] = {}
    for seed in range(num_seeds):
        requests = workload(seed, is_greedy=is_greedy, num_ids=model.num_ids, max_tokens=model.max_tokens)
        requests = constrained(requests) if has_grammars else requests
        async with serving(model, config_of()) as client:
            plain = await plain_answers(client.generate, requests)
        if has_grammars:
            assert_matching(requests, plain)
        for pair in pairs:
            await prove_pair(model, pair, seed, (requests, plain), counts)
    how = ("greedy" if is_greedy else "seeded") + ", with grammars" * has_grammars
    counted = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    print(f"\npairs, {model.name}, {how}: {len(pairs)} pairs x {num_seeds} workloads; {counted}")


async def prove_pair(
    model: Model, pair: tuple[Feature, ...], seed: int, asked: tuple[Any, Any], counts: dict[str, int]
) -> None:
    """Try one pair until each feature has had an effect: which answers run together depends on the machine."""
    idle = {feature.name for feature in pair}
    for _ in range(MOST_TRIES):
        idle -= await features_with_effect(model, pair, seed, asked, counts)
        if not idle:
            return
    raise AssertionError(f"{_named(pair)}, {model.name}, workload {seed}: {idle} did nothing")


async def features_with_effect(
    model: Model, pair: tuple[Feature, ...], seed: int, asked: tuple[Any, Any], counts: dict[str, int]
) -> set[str]:
    """Compare with the plain answers on a new engine, which ends empty. Returns the features that had an effect."""
    what = f"{_named(pair)}, {model.name}, workload {seed}"
    requests, plain = asked
    plans = PlanCounts()
    async with serving(model, config_of(pair), pair, plans) as client:
        answers = await ask_all(client.generate, requests, pair, plans=plans)
        assert_same(answers, plain, what)
        await until(lambda: client.stats().running == client.stats().waiting == client.stats().blocks_used == 0)
        stats = client.stats()
    for name, count in (
        ("answers equal", sum(map(len, answers))),
        ("tokens", sum(len(choice.token_ids) for answer in answers for choice in answer)),
        ("steps", stats.steps),
        ("parks", stats.parks),
        ("preemptions", stats.preemptions),
        ("prefix hits", stats.prefix_hits),
    ):
        counts[name] = counts.get(name, 0) + count
    return {feature.name for feature in pair if feature.had_effect(stats, plans)}


def _named(features: tuple[Feature, ...]) -> str:
    return " x ".join(feature.name for feature in features)
