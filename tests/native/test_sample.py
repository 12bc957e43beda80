"""The draws in C++ are those of the sampler in torch, token for token."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")

from streamserve.engine.model.kernels import Kernels  # noqa: E402  (after the skip)
from streamserve.engine.model.sampler import SamplingMetadata, sample  # noqa: E402
from streamserve.engine.model.token_rules import PenaltyCounts, RuleTensors  # noqa: E402
from streamserve.engine.plan import TokenRules  # noqa: E402
from streamserve.native.library import Library  # noqa: E402
from tests.support.engines.specs import spec_of  # noqa: E402

NUM_BATCHES = 250
CPU = torch.device("cpu")


def wish(rng: random.Random) -> dict[str, Any]:
    """Return the sampling parameters of a row."""
    return {
        "position": rng.randrange(10_000),
        "seed": rng.randrange(1 << 62),
        "temperature": rng.choice([0.0, 1e-35, 0.01, 0.3, 0.8, 1.0, 2.0]),
        "top_p": rng.choice([1.0, 1.0, 0.95, 0.5, 0.05, 1e-6]),
        "min_p": rng.choice([0.0, 0.0, 0.05, 0.3]),
        "top_k": rng.choice([0, 0, 1, 2, 20, 50, 900]),
    }


def some_logits(rng: random.Random, num_rows: int, vocab_size: int) -> torch.Tensor:
    """Return logits of several spreads, rounded so that many tie, some -inf."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * rng.choice([0.01, 1.0, 3.0, 10.0])
    if rng.random() < 0.4:
        logits = logits.bfloat16().float()
    if rng.random() < 0.2:
        logits[:, rng.randrange(vocab_size)] = float("-inf")
    return logits


@pytest.mark.parametrize("vocab_sizes", [(1, 5, 63, 64, 65, 1000), (49_152, 151_936)], ids=["narrow", "wide"])
def test_the_same_tokens(library: Library, vocab_sizes: tuple[int, ...]) -> None:
    """For every mixture of temperature, top-k, top-p and min-p, and for greedy rows beside them."""
    kernels, rng = Kernels(library), random.Random(len(vocab_sizes))
    for batch in range(NUM_BATCHES if vocab_sizes[-1] <= 1000 else NUM_BATCHES // 10):
        num_rows, vocab_size = rng.choice([1, 8, 32]), rng.choice(vocab_sizes)
        logits = some_logits(rng, num_rows, vocab_size)
        specs = [spec_of(**wish(rng)) for _ in range(num_rows)]
        wanted, found = sample(logits, specs), sample(logits, specs, kernels=kernels)
        assert found.token_ids.tolist() == wanted.token_ids.tolist(), f"batch {batch}: {specs}"
        assert torch.equal(found.finite, wanted.finite)


def test_rules_masks_penalties_and_logprobs(library: Library) -> None:
    """What changes logits before a draw changes the same tokens, and logprobs are of the logits before."""
    kernels, rng, vocab_size = Kernels(library), random.Random(5), 200
    for batch in range(NUM_BATCHES // 4):
        logits = some_logits(rng, 6, vocab_size)
        some = [rng.randrange(vocab_size) for _ in range(12)]
        fields: list[dict[str, Any]] = [
            {},
            {"rules": TokenRules(logit_bias=((some[0], 4.0), (some[1], -100.0)), bad_words=((some[2],),))},
            {"rules": TokenRules(allowed_token_ids=tuple(some)), "logprobs": 3},
            {"mask": bytes(rng.randrange(256) for _ in range(vocab_size // 8)), "mask_end_ids": (some[3],)},
            {"banned_token_ids": tuple(some[:4]), "logprobs": 0},
            {
                "penalty_slot": 0,
                "prompt_token_ids": some[:6],
                "output_token_ids": some[6:],
                "repetition_penalty": 1.4,
                "frequency_penalty": 0.7,
                "presence_penalty": 0.5,
            },
        ]
        specs = [spec_of(**{**wish(rng), **one}) for one in fields]
        newest = torch.zeros(6, dtype=torch.int64)
        counts = PenaltyCounts(vocab_size, CPU)
        counts.update(specs, newest)
        metadata = SamplingMetadata(newest, RuleTensors(CPU), counts)
        wanted, found = sample(logits, specs, metadata), sample(logits, specs, metadata, kernels)
        assert found.token_ids.tolist() == wanted.token_ids.tolist(), f"batch {batch}: {specs}"
        assert found.logprob_rows == wanted.logprob_rows
        assert torch.equal(found.top_ids, wanted.top_ids)
        assert torch.equal(found.chosen_logprobs, wanted.chosen_logprobs)


def test_a_row_is_the_same_alone(library: Library) -> None:
    """Other rows, and their number, change no draw."""
    kernels, rng = Kernels(library), random.Random(9)
    logits = some_logits(rng, 32, 5000)
    specs = [spec_of(**wish(rng)) for _ in range(32)]
    together = sample(logits, specs, kernels=kernels).token_ids.tolist()
    alone = [int(sample(logits[row : row + 1], [specs[row]], kernels=kernels).token_ids) for row in range(32)]
    assert alone == together


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 37, 99])
def test_broken_rows_are_seen(library: Library, number: float, place: int) -> None:
    """A row with NaN or +inf is not finite, nor is a row of -inf alone; its neighbours are."""
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    logits[0, place] = number
    logits[2] = float("-inf")
    specs = [spec_of(position=row, seed=1, temperature=0.8, top_p=0.9) for row in range(3)]
    assert sample(logits, specs, kernels=Kernels(library)).finite.tolist() == [False, True, False]
