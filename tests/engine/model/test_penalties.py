"""The counts of penalties: token by token they are those of counting all tokens anew."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from streamserve.engine.model.token_rules import PenaltyCounts
from streamserve.engine.plan import SampleSpec
from tests.support.engines.specs import spec_of

VOCAB = 50
KINDS = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.25},
    {"repetition_penalty": 0.8, "presence_penalty": 1.5, "frequency_penalty": 0.5},
]


def by_the_book(logits: torch.Tensor, spec: SampleSpec, prompt: list[int], output: list[int]) -> torch.Tensor:
    """One row (vocab_size,) with penalties, from all tokens."""
    row = logits.clone()
    for token in {*prompt, *output}:
        penalty = spec.sampling.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token, count in Counter(output).items():
        row[token] -= spec.sampling.frequency_penalty * count + spec.sampling.presence_penalty
    return row


def penalised(number: int, **fields: object) -> SampleSpec:
    return spec_of(**{**KINDS[number % len(KINDS)], **fields})


def test_counting_on_is_counting_anew() -> None:
    """Sequences begin, continue, restart and release their rows, in changing batches: logits equal the reference."""
    rng = random.Random(3)
    counts = PenaltyCounts(VOCAB, torch.device("cpu"))
    texts: dict[int, tuple[list[int], list[int]]] = {}
    for step in range(400):
        batch = rng.sample(range(9), k=rng.randint(1, 6))
        specs, new = [], []
        for row in batch:
            token = rng.randrange(VOCAB)
            if row not in texts or rng.random() < 0.05:
                prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
                output = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 30, 700]))]
                texts[row] = prompt, output
                specs.append(penalised(row, penalty_slot=row, prompt_token_ids=prompt, output_token_ids=output))
            else:
                texts[row][1].append(token)
                specs.append(penalised(row, penalty_slot=row))
            new.append(token)
        specs.insert(len(specs) // 2, penalised(0, repetition_penalty=1.0))  # one without penalties is left alone
        new.insert(len(new) // 2, 0)
        logits = torch.randn(len(specs), VOCAB, generator=torch.Generator().manual_seed(step))
        wanted = [
            logits[place] if spec.penalty_slot is None else by_the_book(logits[place], spec, *texts[spec.penalty_slot])
            for place, spec in enumerate(specs)
        ]
        counts.update(specs, torch.tensor(new))
        counts.penalise(logits, specs)
        torch.testing.assert_close(logits, torch.stack(wanted), rtol=1e-6, atol=1e-6, msg=f"step {step}")


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_row_is_the_same_in_any_batch(kind: int) -> None:
    """To the last bit: the length of the other rows changes nothing."""
    one = penalised(kind, penalty_slot=0, prompt_token_ids=(1, 2, 3), output_token_ids=(3, 4, 4))
    other = penalised(kind + 1, penalty_slot=1, prompt_token_ids=tuple(range(40)), output_token_ids=(5,) * 900)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(kind))
    found = []
    for specs in ([one], [other, one], [one, other], [replace(one, penalty_slot=7)]):
        counts, batch = PenaltyCounts(VOCAB, torch.device("cpu")), logits.repeat(len(specs), 1)
        counts.update(specs, torch.zeros(len(specs), dtype=torch.int64))
        counts.penalise(batch, specs)
        found.append(batch[next(place for place, spec in enumerate(specs) if len(spec.prompt_token_ids) == 3)])
    assert all(torch.equal(found[0], row) for row in found[1:])


def test_what_cannot_be_chosen_stays_so() -> None:
    """A banned token that occurred before stays banned under its penalties."""
    counts = PenaltyCounts(4, torch.device("cpu"))
    spec = penalised(3, penalty_slot=0, prompt_token_ids=(1,), output_token_ids=(2, 1))
    logits = torch.tensor([[0.0, float("-inf"), 1.0, 2.0]])
    counts.update([spec], torch.zeros(1, dtype=torch.int64))
    counts.penalise(logits, [spec])
    assert logits[0, 1] == float("-inf")
