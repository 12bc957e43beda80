"""Laws of the sampler's masks: what a grammar forbids never comes, and something always does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from streamserve.engine.model.sampler import SamplingMetadata, raw_logprobs, sample
from streamserve.engine.model.token_rules import PenaltyCounts, RuleTensors
from streamserve.engine.plan import SampleSpec
from tests.support.engines.specs import spec_of

VOCAB_SIZE = 50


def mask_of(*ids: int, num_ids: int = VOCAB_SIZE) -> bytes:
    """The bits of these ids, as a matcher makes them: whole words of 32, and one id more than the model has."""
    out = bytearray(-(-(num_ids + 1) // 32) * 4)
    for one in ids:
        out[one // 8] |= 1 << one % 8
    return bytes(out)


def spec(position: int = 0, **fields: Any) -> SampleSpec:
    return spec_of(position, seed=5, **fields)


def some_logits(num_rows: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(2)) * 3


@pytest.mark.parametrize(
    "how",
    [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.01}, {"min_p": 0.9}, {"temperature": 1e-3}],
    ids=str,
)
def test_only_what_is_allowed_comes(how: dict[str, Any]) -> None:
    """Whatever comes after it: top-k and the rest choose among what the mask has left."""
    allowed = (3, 17, 49)
    logits = some_logits().expand(200, -1)
    specs = [spec(position, mask=mask_of(*allowed), **how) for position in range(200)]
    found = set(sample(logits, specs).token_ids.tolist())
    assert found <= set(allowed)
    best = max(allowed, key=lambda one: logits[0, one].item())
    assert best in found


def test_rows_without_a_mask_are_unchanged() -> None:
    """A neighbour's grammar changes no other row."""
    logits = some_logits(4)
    plain = [spec(position) for position in range(4)]
    mixed = [spec(position, mask=mask_of(1) if position == 2 else None) for position in range(4)]
    expected = sample(logits, plain).token_ids.tolist()
    expected[2] = 1
    assert sample(logits, mixed).token_ids.tolist() == expected


def test_the_draw_is_that_of_the_masked_distribution() -> None:
    """Allowed tokens come by their own probabilities: the same as if all others had none."""
    logits = some_logits().expand(300, -1)
    forbidden = logits.clone()
    forbidden[:, [one for one in range(VOCAB_SIZE) if one not in (4, 5, 6)]] = -math.inf
    masked = [spec(position, mask=mask_of(4, 5, 6)) for position in range(300)]
    assert torch.equal(
        sample(logits, masked).token_ids, sample(forbidden, [spec(position) for position in range(300)]).token_ids
    )


def test_ends_are_allowed_beside_the_mask() -> None:
    """Where the text may end, the ids that end an answer are candidates as well."""
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 9] = 5.0
    greedy = {"temperature": 0.0, "mask": mask_of(2)}
    assert sample(logits, [spec(**greedy)]).token_ids.tolist() == [2]
    assert sample(logits, [spec(**greedy, mask_end_ids=(9, 10))]).token_ids.tolist() == [9]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-3])
def test_a_ban_never_leaves_nothing(temperature: float) -> None:
    """Bans hold as long as the grammar leaves another token; where it does not, the grammar decides."""
    logits = some_logits()
    banned = {"banned_token_ids": (7, 8), "temperature": temperature}
    assert sample(logits, [spec(mask=mask_of(7, 8, 9), **banned)]).token_ids.tolist() == [9]
    assert sample(logits, [spec(mask=mask_of(7), **banned)]).token_ids.tolist() == [7]
    assert sample(logits, [spec(mask=mask_of(), mask_end_ids=(8,), **banned)]).token_ids.tolist() == [8]


def test_a_model_that_rules_out_all_that_is_allowed_still_gives_it() -> None:
    """Logits of minus infinity are no reason for a token that the grammar forbids."""
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 30] = -math.inf
    for temperature in (0.0, 0.7):
        draws = sample(logits, [spec(mask=mask_of(30), temperature=temperature, top_p=0.5, min_p=0.2)])
        assert draws.token_ids.tolist() == [30]


def test_penalties_cannot_bring_back_what_is_forbidden() -> None:
    """The mask comes before penalties, and neither a bonus nor a malus crosses it."""
    counts = PenaltyCounts(VOCAB_SIZE, torch.device("cpu"))
    for penalty in ({"presence_penalty": 100.0}, {"repetition_penalty": 1000.0}, {"frequency_penalty": -100.0}):
        one = spec(
            position=5,
            mask=mask_of(3, 4),
            temperature=0.0,
            penalty_slot=0,
            prompt_token_ids=(1, 2),
            output_token_ids=(3, 4, 3),
            **penalty,
        )
        counts.update([one], torch.tensor([3]))
        metadata = SamplingMetadata(torch.tensor([3]), RuleTensors(torch.device("cpu")), counts)
        assert sample(some_logits(), [one], metadata).token_ids.item() in (3, 4)


def test_logprobs_are_those_of_the_unmodified_logits() -> None:
    """What the model would have said, not what it was left with."""
    logits = some_logits()
    one = spec(mask=mask_of(40), logprobs=2)
    found = raw_logprobs(sample(logits, [one]), [one])[0]
    expected = torch.log_softmax(logits, dim=-1)[0]
    assert found.chosen == pytest.approx(expected[40].item())
    assert [token_id for token_id, _ in found.top] == expected.topk(2).indices.tolist()


def test_more_logits_than_ids_and_more_bits_than_logits() -> None:
    """A padded head's extra logits are forbidden; bits above the last logit do nothing."""
    logits = torch.zeros(1, 100)
    logits[0, 99] = 9.0
    assert sample(logits, [spec(mask=mask_of(3, num_ids=40), temperature=0.0)]).token_ids.tolist() == [3]
    wide = mask_of(3, 80, num_ids=90)
    assert sample(torch.zeros(1, 50), [spec(mask=wide, temperature=0.0)]).token_ids.tolist() == [3]


def test_numbers_that_are_not_finite_are_still_reported() -> None:
    """A mask does not hide a model that has gone wrong."""
    draws = sample(torch.full((1, VOCAB_SIZE), math.nan), [spec(mask=mask_of(1))])
    assert draws.finite.tolist() == [False]
