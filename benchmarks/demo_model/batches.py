"""Batches of about the same number of tokens, in an order that depends on the seed and the epoch alone.

Examples of like length go together and rows are padded to a multiple of 16: each new shape costs time on a CPU.
Padding is on the right, which causal attention never reads. Works on token ids only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Encoded = tuple[list[int], list[bool]]
_LENGTH_STEP = 16
# Lengths are sorted within a pool of this many examples, so a batch is still a mix of the corpus.
_POOL = 2048
# After this many examples the answers are mostly memorised, and the model still has to learn which one to begin. Then
# half of the single-turn answers end after a few tokens, so that more questions fit into the run.
_WHOLE_EXAMPLES, _CUT_SHARE, _CUT_LEN = 12 * _POOL, 0.5, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`num_tokens` counts real tokens, without padding."""

    input_ids: "torch.Tensor"  # (num_rows, row_len)
    is_learned: "torch.Tensor"  # (num_rows, row_len), true where the token is a target
    num_tokens: int


def groups(encoded: list[Encoded], *, seed: int, batch_tokens: int) -> Iterator[list[Encoded]]:
    """Yield the rows of one batch after another without end, epoch after epoch."""
    epoch = num_seen = 0
    while True:
        rng = Random(f"{seed}/{epoch}")
        order = rng.sample(range(len(encoded)), len(encoded))
        for start in range(0, len(order), _POOL):
            rows = [encoded[index] for index in order[start : start + _POOL]]
            if num_seen >= _WHOLE_EXAMPLES:
                rows = [_cut(row) if rng.random() < _CUT_SHARE else row for row in rows]
            num_seen += len(rows)
            pool = list(_groups(sorted(rows, key=lambda row: len(row[0])), batch_tokens))
            rng.shuffle(pool)
            yield from pool
        epoch += 1


def _cut(row: Encoded) -> Encoded:
    """End the only answer of a conversation early; no end of turn is learned there. Longer talks stay whole."""
    token_ids, is_learned = row
    start = is_learned.index(True)
    end = start + _CUT_LEN if all(is_learned[start:]) else len(row[0])
    return token_ids[:end], is_learned[:end]


def _padded_len(num_tokens: int) -> int:
    return -(-num_tokens // _LENGTH_STEP) * _LENGTH_STEP


def _groups(rows: list[Encoded], batch_tokens: int) -> Iterator[list[Encoded]]:
    """Cut sorted rows so that rows × padded length stays under `batch_tokens`."""
    group: list[Encoded] = []
    for row in rows:
        if group and _padded_len(len(row[0])) * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def to_batch(rows: list[Encoded], pad_id: int) -> Batch:
    """Pad the rows on the right and make tensors of them."""
    import torch

    row_len = _padded_len(max(len(token_ids) for token_ids, _ in rows))
    input_ids = torch.full((len(rows), row_len), pad_id)
    is_learned = torch.zeros((len(rows), row_len), dtype=torch.bool)
    for number, (token_ids, learned) in enumerate(rows):
        input_ids[number, : len(token_ids)] = torch.tensor(token_ids)
        is_learned[number, : len(learned)] = torch.tensor(learned)
    return Batch(input_ids=input_ids, is_learned=is_learned, num_tokens=sum(len(token_ids) for token_ids, _ in rows))
