"""The sampler's draw on a GPU: a row's token in one program, without sorting, the same token as on a CPU.

A token belongs to the nucleus of top-p iff the tokens likelier than it hold less than `top_p`. The winner among all, if
it is in the nucleus, is the winner of the nucleus. If it is not, nothing less likely is: only what is likelier can win,
and the search is made again among that (see sampler.py, which this repeats: its reference).

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 4096  # that a program looks at together
_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(-1640531527), tl.constexpr(0x7FEB352D), tl.constexpr(-2073254261)


@triton.jit
def _mix(x, FACTOR: tl.constexpr):
    x = (x ^ (x >> 16)) * FACTOR
    return x ^ (x >> 15)


@triton.jit
def _exponential(ids, key, factor):
    """-log(1 - u), u uniform of the counter: sampler.exponential."""
    bits = _mix(ids * _GOLDEN, _MIX_1)
    bits = _mix((bits ^ key) * factor, _MIX_2)
    x = -((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    x = tl.maximum(x, -0.9999999403953552)  # 2^-24 - 1
    # log(1 + x): of a small x by the series of 2 atanh(x / (2 + x)), as the device's logarithm near 1 is rough.
    s = x / (2.0 + x)
    q = s * s
    series = 2.0 * s * (1.0 + q * (1.0 / 3 + q * (1.0 / 5 + q * (1.0 / 7 + q * (1.0 / 9)))))
    return -tl.where(x > -0.3, series, tl.log(1.0 + x))


@triton.jit
def _draw(logits, shapes, keys, token_ids, finite, row_stride, vocab_size, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    temperature, top_p = tl.load(shapes + row * 4), tl.load(shapes + row * 4 + 1)
    min_p, lowest = tl.load(shapes + row * 4 + 2), tl.load(shapes + row * 4 + 3)
    key, factor = tl.load(keys + row * 2), tl.load(keys + row * 2 + 1)
    columns = tl.arange(0, COLUMNS)

    largest, likeliest, num_bad = float("-inf"), 0, 0
    for start in range(0, vocab_size, COLUMNS):
        i = start + columns
        x = tl.load(logits + i, mask=i < vocab_size, other=float("-inf"))
        num_bad += tl.sum(((x != x) | (x == float("inf"))).to(tl.int32), 0)
        most, at = tl.max(x, 0, return_indices=True)
        if most > largest:
            largest, likeliest = most, start + at
    tl.store(finite + row, tl.where(num_bad == 0, largest > float("-inf"), False).to(tl.int8))

    winner = likeliest
    if temperature > 0:
        bound, above, budget = -1.0, 0.0, 0.0  # only weights above `bound` can win; `above` is what they hold
        is_open = True
        while is_open:
            best, weight, total = -1.0, -1.0, 0.0
            for start in range(0, vocab_size, COLUMNS):
                i = start + columns
                x = tl.load(logits + i, mask=i < vocab_size, other=float("-inf"))
                weights = tl.where(x < lowest, 0.0, tl.exp((x - largest) / temperature))
                total += tl.sum(weights, 0)
                scores = tl.where((weights > bound) & (weights >= min_p), weights / _exponential(i, key, factor), 0.0)
                scores = tl.where(i < vocab_size, scores, -1.0)
                most, at = tl.max(scores, 0, return_indices=True)
                if most > best:
                    best, winner = most, start + at
                    weight = tl.sum(tl.where(columns == at, weights, 0.0), 0)
            budget = top_p * total
            if top_p < 1:
                above = 0.0
                for start in range(0, vocab_size, COLUMNS):
                    i = start + columns
                    x = tl.load(logits + i, mask=i < vocab_size, other=float("-inf"))
                    weights = tl.where(x < lowest, 0.0, tl.exp((x - largest) / temperature))
                    above += tl.sum(tl.where(weights > weight, weights, 0.0), 0)
            is_open = (top_p < 1) & (above >= budget) & (weight > bound)
            bound = weight
    tl.store(token_ids + row, winner)


def draw(logits: torch.Tensor, shapes: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from each row of float32 logits (n, V): token ids (n,), and which rows are finite (n,).

    shapes (n, 4) float32: temperature (0: greedy), top_p, min_p, and the lowest logit that top-k leaves. keys (n, 2)
    int32: `sampler.row_key`s.
    """
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(num_rows, dtype=torch.int8, device=logits.device)
    _draw[(num_rows,)](
        logits, shapes, keys, token_ids, finite, logits.stride(0), vocab_size, COLUMNS=COLUMNS, num_warps=16
    )
    return token_ids, finite.bool()
