"""The sampler: which tokens may be chosen, how often, and that each row's draw is independent of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from streamserve.engine.model import sampler
from streamserve.engine.model.sampler import exponential, raw_logprobs, row_key
from streamserve.engine.model.token_rules import PenaltyCounts, RuleTensors
from streamserve.engine.plan import SampleSpec, TokenRules
from streamserve.protocol.requests import check_sampling
from tests.support.engines.specs import spec_of

VOCAB = 40
NUM_DRAWS = 6000


def sample(
    logits: torch.Tensor, specs: Sequence[SampleSpec], last_token_ids: Sequence[int] | None = None
) -> sampler.Draws:
    """Draw, each spec with a penalty slot of its own; a spec with a prompt has the counts of its penalties."""
    rows = [replace(one, penalty_slot=row if one.prompt_token_ids else None) for row, one in enumerate(specs)]
    counts = PenaltyCounts(logits.shape[1], logits.device)
    newest = torch.tensor(last_token_ids or [0] * len(rows))
    counts.update(rows, newest)
    return sampler.sample(logits, rows, sampler.SamplingMetadata(newest, RuleTensors(logits.device), counts))


def some_logits(num_rows: int = 1, seed: int = 0, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def reference(logits: np.ndarray, one: SampleSpec) -> np.ndarray:
    """Probabilities (vocab_size,) by definition: rules, ban, penalties, temperature, top-k, top-p, min-p."""
    z = logits.astype(np.float64).copy()
    rules = one.rules or TokenRules()
    for token, bias in rules.logit_bias:
        z[token] += bias
    if rules.allowed_token_ids:
        z[[token for token in range(len(z)) if token not in rules.allowed_token_ids]] = -np.inf
    output = tuple(one.output_token_ids)
    for word in rules.bad_words:
        if len(output) >= len(word) - 1 and output[len(output) - len(word) + 1 :] == word[:-1]:
            z[word[-1]] = -np.inf
    z[list(one.banned_token_ids)] = -np.inf
    for token in {*one.prompt_token_ids, *one.output_token_ids}:
        z[token] = (
            z[token] / one.sampling.repetition_penalty if z[token] > 0 else z[token] * one.sampling.repetition_penalty
        )
    for token in set(one.output_token_ids):
        z[token] -= one.sampling.presence_penalty + one.sampling.frequency_penalty * list(one.output_token_ids).count(
            token
        )
    with np.errstate(over="ignore"):  # of the smallest temperatures: -inf, as it should be
        p = np.exp((z - z.max()) / one.sampling.temperature)
    p /= p.sum()
    if one.sampling.top_k:
        p[p < np.sort(p)[-one.sampling.top_k]] = 0
        p /= p.sum()
    above = np.array([p[p > p[token]].sum() for token in range(len(p))])
    kept = np.where(above < one.sampling.top_p, p, 0) if one.sampling.top_p < 1 else p
    kept = np.where(p < one.sampling.min_p * p.max(), 0, kept)
    return kept / kept.sum()


def draw(logits: torch.Tensor, one: dict[str, Any], num_draws: int = NUM_DRAWS) -> np.ndarray:
    """Counts (vocab_size,) of many draws from one row of logits."""
    counts = np.zeros(logits.shape[1], dtype=np.int64)
    for begin in range(0, num_draws, 500):
        specs = [spec_of(position=begin + i, seed=11, **one) for i in range(500)]
        tokens = sample(logits.expand(500, -1), specs).token_ids
        counts += np.bincount(tokens.numpy(), minlength=logits.shape[1])
    return counts


def chi_square_odds(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """The chance that fair draws lie this far from `probabilities` (Wilson-Hilferty; bins of at least five)."""
    expected = probabilities * counts.sum()
    large = expected >= 5
    bins = [(counts[i], expected[i]) for i in np.flatnonzero(large)]
    bins.append((counts[~large].sum(), expected[~large].sum()))
    bins = [(seen, wanted) for seen, wanted in bins if wanted > 0]
    chi2 = sum((seen - wanted) ** 2 / wanted for seen, wanted in bins)
    freedom = max(len(bins) - 1, 1)
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_p": {"top_p": 0.7},
    "top_p small": {"top_p": 0.05},
    "min_p": {"min_p": 0.1},
    "all three": {"top_k": 12, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
    "penalties": {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "prompt_token_ids": (1, 2, 3, 3),
        "output_token_ids": (3, 5, 5, 7),
    },
    "no output yet": {"presence_penalty": 1.0, "repetition_penalty": 1.2, "prompt_token_ids": (4,)},
    "banned": {"banned_token_ids": (0, 4, 9), "top_k": 20},
    "bias": {"rules": TokenRules(logit_bias=((3, 4.0), (9, -100.0), (20, 1.5)))},
    "allowed": {"rules": TokenRules(allowed_token_ids=(3, 5, 30, 31, 39)), "top_k": 4},
    "bad words": {"rules": TokenRules(bad_words=((7,), (0,), (12,)))},
    "all rules": {
        "rules": TokenRules(
            logit_bias=((3, 4.0), (4, 2.0)), allowed_token_ids=tuple(range(3, 20)), bad_words=((7,), (8,))
        ),
        "banned_token_ids": (4,),
        "min_p": 0.02,
        "repetition_penalty": 1.5,
        "prompt_token_ids": (1, 3),
        "output_token_ids": (5, 5),
    },
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_distribution(case: dict[str, Any]) -> None:
    """Tokens come as often as in the plain reference, and those it excludes never."""
    logits = some_logits(seed=4)
    wanted = reference(logits[0].numpy(), spec_of(**case))
    counts = draw(logits, case)
    impossible = np.flatnonzero((wanted == 0) & (counts > 0))
    assert impossible.size == 0, f"tokens {impossible.tolist()} were ruled out and came"
    odds = chi_square_odds(counts, wanted)
    assert odds > 1e-5, f"fair draws would be this far off once in {1 / max(odds, 1e-300):.3g} runs"


@pytest.mark.parametrize("vocab_size", [50, 3000])
def test_flat_distribution_over_many_tokens(vocab_size: int) -> None:
    """A nearly flat distribution with a small nucleus needs many cuts and stays exact."""
    logits = some_logits(seed=9, vocab_size=vocab_size) * 0.01
    wanted = reference(logits[0].numpy(), spec_of(top_p=0.02))
    counts = draw(logits, {"top_p": 0.02}, num_draws=2000)
    assert not ((wanted == 0) & (counts > 0)).any()
    odds = chi_square_odds(counts, wanted)
    assert odds > 1e-5, f"fair draws would be this far off once in {1 / max(odds, 1e-300):.3g} runs"


def test_sorting_chooses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cutting gives up and sorts, the draw is the one that cutting would have found."""
    logits = some_logits(64, seed=3)
    specs = [spec_of(position=i, top_p=0.3) for i in range(64)]
    by_cutting = sample(logits, specs).token_ids
    monkeypatch.setattr(sampler, "MAX_CUTS", 0)
    assert torch.equal(sample(logits, specs).token_ids, by_cutting)


def test_sorting_keeps_ties_together_and_bears_nan() -> None:
    """On a GPU every row is sorted: tokens as likely as the nucleus' last are in it; a row of NaN changes no other."""
    weights = torch.tensor([[0.2, 1.0, 0.5, 0.5], [math.nan] * 4])
    scores = torch.tensor([[9.0, 1.0, 2.0, 3.0], [math.nan] * 4])
    budget = torch.tensor([[1.2], [math.nan]])  # the first alone holds less than this, with one of the next it is full
    winners = sampler._winner_by_sorting(scores, weights, budget)
    assert winners[0] == 3
    assert 0 <= winners[1] < 4


def test_the_batch_is_invisible() -> None:
    """A row's token is the same alone, in any company, and in any place of the batch."""
    kinds = [*CASES.values(), {"temperature": 0.0}, {"logprobs": 3}]
    logits = some_logits(len(kinds), seed=5)
    specs = [spec_of(position=i, seed=i * 1_000_003, **kind) for i, kind in enumerate(kinds)]
    alone = [int(sample(logits[i : i + 1], [specs[i]]).token_ids[0]) for i in range(len(kinds))]
    assert sample(logits, specs).token_ids.tolist() == alone
    order = torch.randperm(len(kinds), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits[order], [specs[i] for i in order]).token_ids.tolist()
    assert shuffled == [alone[i] for i in order]


def test_seed_and_position_both_count() -> None:
    """Another seed, or another position, is another draw; huge and negative seeds are as good as any."""
    logits = torch.zeros(1, 1000)
    seeds = [0, 1, -1, 2**63]
    draws = {int(sample(logits, [spec_of(position=p, seed=s)]).token_ids[0]) for s in seeds for p in range(5)}
    assert len(draws) >= 19  # of 20; two may meet by chance
    assert row_key(2**80 + 1, 0) == row_key(1, 0)


def test_noise_is_fixed() -> None:
    """The noise is part of the interface (same answer after a restart, on any device): these numbers never change."""
    keys = torch.tensor([row_key(42, 7), row_key(-1, 0)], dtype=torch.int32)
    noise = exponential(keys, 49_152)[:, [0, 1, 49_151]]
    wanted = NOISE_OF_VERSION_ONE
    assert torch.allclose(noise, torch.tensor(wanted), rtol=1e-5), noise.tolist()


NOISE_OF_VERSION_ONE = [
    [0.31539449095726013, 1.080177903175354, 0.7121286988258362],
    [2.5046944618225098, 0.427882581949234, 0.6620004773139954],
]


def test_noise_is_exponential() -> None:
    """Over many tokens and rows the noise has mean 1, variance 1, no correlation between neighbours, few ties."""
    keys = torch.tensor([row_key(3, position) for position in range(20)], dtype=torch.int32)
    noise = exponential(keys, 50_000).double()
    assert float(noise.min()) > 0
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 1) < 0.005
    assert abs(float(noise.var()) - 1) < 0.02
    for a, b in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1])):
        assert abs(float(((a - 1) * (b - 1)).mean())) < 0.005
    assert noise[0].unique().numel() > 49_900


def test_greedy_ignores_the_rest() -> None:
    """Temperature 0 gives the likeliest token after bans and penalties, whatever top-k and the like are."""
    logits = torch.tensor([[1.0, 5.0, 4.0, 3.0]])
    assert sample(logits, [spec_of(temperature=0.0, top_k=2, top_p=0.1)]).token_ids.tolist() == [1]
    assert sample(logits, [spec_of(temperature=0.0, banned_token_ids=(1,))]).token_ids.tolist() == [2]
    penalised = spec_of(temperature=0.0, frequency_penalty=1.0, prompt_token_ids=(0,), output_token_ids=(1, 1, 1))
    assert sample(logits, [penalised]).token_ids.tolist() == [2]


RULES = (
    TokenRules(logit_bias=((3, 1.5), (11, -2.0))),
    TokenRules(allowed_token_ids=tuple(range(0, VOCAB, 2))),
    TokenRules(bad_words=((5,), (1, 2), (2, 2, 3), (9, 9))),
    TokenRules(logit_bias=((2, 3.0),), allowed_token_ids=tuple(range(20)), bad_words=((1, 2), (7, 7, 7, 7))),
)


def test_rules_equal_the_reference_in_any_batch() -> None:
    """Rows with and without rules, at any point of their output, choose the token likeliest by the definition.

    The newest token is known on the device only: the spec has what the words began with before it.
    """
    rng = np.random.default_rng(5)
    tensors = RuleTensors(torch.device("cpu"))
    num_ended = 0
    for seed in range(60):
        specs, newest, wanted = [], [], []
        logits = some_logits(8, seed=seed)
        for row in range(8):
            output = tuple(rng.choice([1, 2, 3, 7, 9], size=rng.integers(0, 6)).tolist())
            rules = RULES[rng.integers(len(RULES))] if row % 3 else None
            is_pending = bool(output) and row % 2 == 0
            known = output[:-1] if is_pending else output
            endings = () if rules is None else rules.bad_endings(known, is_pending=is_pending)
            num_ended += any(before == output[-1] for before, _ in endings)
            specs.append(spec_of(temperature=0.0, rules=rules, bad_endings=endings))
            newest.append(output[-1] if output else 0)
            full = spec_of(temperature=1.0, rules=rules, output_token_ids=output)
            wanted.append(int(reference(logits[row].numpy(), full).argmax()))
        metadata = sampler.SamplingMetadata(torch.tensor(newest), tensors)
        assert sampler.sample(logits, specs, metadata).token_ids.tolist() == wanted, f"seed {seed}"
    assert num_ended > 20


def test_a_bad_word_comes_where_nothing_else_may() -> None:
    """A word is chosen all the same where only bad words are allowed."""
    logits = torch.tensor([[1.0, 5.0, 4.0, 3.0]])
    rules = TokenRules(allowed_token_ids=(2, 3), bad_words=((2,), (3,)))
    assert sample(logits, [spec_of(rules=rules)]).token_ids.tolist()[0] in (2, 3)
    one = TokenRules(allowed_token_ids=(3,), bad_words=((3, 3),))
    ended = spec_of(temperature=0.0, rules=one, bad_endings=one.bad_endings((3,), is_pending=False))
    assert sample(logits, [ended], [3]).token_ids.tolist() == [3]


def test_tensors_live_as_long_as_their_rules() -> None:
    """A sequence that is over leaves nothing on the device."""
    tensors = RuleTensors(torch.device("cpu"))
    for _ in range(3):
        rules = TokenRules(logit_bias=((1, 1.0),))
        sampler.sample(some_logits(), [spec_of(rules=rules)], sampler.SamplingMetadata(torch.tensor([0]), tensors))
        assert len(tensors._known) == 1
    del rules
    assert len(tensors._known) == 0


def test_logits_are_left_alone() -> None:
    """Sampling does not modify the caller's logits."""
    logits = some_logits(2)
    before = logits.clone()
    sample(logits, [spec_of(**CASES["penalties"]), spec_of(top_p=0.5, banned_token_ids=(1,), **CASES["bias"])])
    assert torch.equal(logits, before)


def test_logprobs_are_of_the_unmodified_logits() -> None:
    """Log probabilities ignore temperature, bans and penalties; 0 asks for the chosen token's alone."""
    logits = some_logits(3)
    specs = [
        spec_of(temperature=0.0, logprobs=3, banned_token_ids=(int(logits[0].argmax()),)),
        spec_of(),
        spec_of(temperature=2.0, logprobs=0),
    ]
    draws = sample(logits, specs)
    found = raw_logprobs(draws, specs)
    wanted = torch.log_softmax(logits, -1)
    assert sorted(found) == [0, 2]
    assert found[0].chosen == pytest.approx(float(wanted[0, draws.token_ids[0]]), abs=1e-5)
    assert [token for token, _ in found[0].top] == wanted[0].topk(3).indices.tolist()
    assert [value for _, value in found[0].top] == pytest.approx(wanted[0].topk(3).values.tolist(), abs=1e-5)
    assert found[2].top == ()
    assert found[2].chosen == pytest.approx(float(wanted[2, draws.token_ids[2]]), abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_is_bad_alone(bad: float, temperature: float) -> None:
    """A row with NaN is flagged; its neighbours' draws do not change."""
    logits = some_logits(3)
    specs = [spec_of(position=i, temperature=temperature, top_p=0.9) for i in range(3)]
    healthy = sample(logits, specs)
    logits[1, 5] = bad
    spoiled = sample(logits, specs)
    assert spoiled.finite.tolist() == [True, False, True]
    assert spoiled.token_ids[[0, 2]].tolist() == healthy.token_ids[[0, 2]].tolist()


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 1e-30, 1e-6, 1.0, 100.0, 1e6])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_ends_of_every_range_give_a_token(temperature: float, scale: float) -> None:
    """Whatever `check_sampling` lets through: the draw is finite, and a token that the definition allows."""
    logits = some_logits(seed=3) * scale
    corners = product((1e-6, 0.5, 1 - 1e-12, 1.0), (0.0, 1e-45, 1.0), (-1e3, 1e3), (-1e3, 1e3), (1e-3, 1e3))
    specs = [
        spec_of(
            position,
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
            prompt_token_ids=(1, 2),
            output_token_ids=(3, 4, 4),
        )
        for position, (top_p, min_p, presence, frequency, repetition) in enumerate(corners)
    ]
    for one in specs:
        check_sampling(one.sampling)
    draws = sample(logits.expand(len(specs), -1), specs)
    assert draws.finite.all()
    for one, token in zip(specs, draws.token_ids.tolist(), strict=True) if temperature < 1e6 else ():
        # The highest makes all tokens equally likely in float32; at the edge of a nucleus it may differ too.
        wider = replace(one.sampling, top_p=min(1.0, one.sampling.top_p + 1e-6))
        allowed = reference(logits[0].numpy(), replace(one, sampling=wider))
        assert allowed[token] > 0, one


def test_the_smallest_temperature_is_greedy() -> None:
    """A temperature that float32 cannot hold chooses the likeliest token, also beside rows of other temperatures."""
    logits = some_logits(4, seed=5)
    specs = [spec_of(row, temperature=temperature) for row, temperature in enumerate((5e-324, 1e-45, 1.0, 1e-40))]
    token_ids = sample(logits, specs).token_ids.tolist()
    likeliest = logits.argmax(dim=-1).tolist()
    assert [token_ids[row] for row in (0, 1, 3)] == [likeliest[row] for row in (0, 1, 3)]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_model_that_loads_beside_changes_no_draw(temperature: float) -> None:
    """transformers sets the process's default dtype while it loads; a step of another model does not use it."""
    logits = some_logits(seed=7)
    rules = TokenRules(logit_bias=((4, 1.5),), allowed_token_ids=tuple(range(30)), bad_words=((5,), (6, 7)))
    one = spec_of(
        temperature=temperature, top_p=0.9, min_p=0.01, presence_penalty=0.5, rules=rules, bad_endings=((6, 7),),
        prompt_token_ids=(1, 2), output_token_ids=(3, 6), logprobs=2,
    )  # fmt: skip
    wanted = sample(logits, [one], [6])
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = sample(logits, [one], [6])
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.chosen_logprobs is not None
    assert wanted.chosen_logprobs is not None
    assert found.chosen_logprobs.tolist() == wanted.chosen_logprobs.tolist()
