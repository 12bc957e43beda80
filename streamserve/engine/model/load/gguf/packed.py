"""Quantised weights of a GGUF file as groups that our linear layers are packed from, not rounded where that can be.

Layers take groups of 32 inputs: int4 `w = scale * q + minimum`, q 0..15, or int8 `w = scale * q` (linear/native.py).

    Q4_0, Q4_1                int4, exactly
    Q4_K                      int4; its scales and minima, products of 6 bits and a half, are rounded to halves
    Q8_0, Q5_0, MXFP4         int8, exactly
    Q5_1, Q5_K, Q6_K          no groups: to be dequantised and rounded to int8, whose steps are finer than theirs

Knows blocks, no names.
"""

from __future__ import annotations

import torch

from streamserve.engine.model.load.gguf.dequantize import (
    NUMBERS_AT_ONCE,
    k_numbers,
    k_scales,
    legacy_parts,
    mxfp4_parts,
)
from streamserve.engine.model.load.gguf.types import TensorType

GROUP = 32
INT4, INT8 = ("Q4_0", "Q4_1", "Q4_K"), ("Q8_0", "Q5_0", "MXFP4")
# What the layers of each type are packed to.
KINDS = {**dict.fromkeys(INT4, "int4"), **dict.fromkeys((*INT8, "Q5_1", "Q5_K", "Q6_K"), "int8")}
Groups = tuple[torch.Tensor, ...]


def groups_of(data: torch.Tensor, kind: TensorType, shape: tuple[int, int]) -> Groups | None:
    """Return q (out, in), scales and for int4 minima (out, in / 32), both fp16; None for a type that has no such form.

    `data` (num_bytes,) holds the blocks of a matrix of `shape` (out, in).
    """
    if kind.name not in (*INT4, *INT8):
        return None
    blocks = data.view(-1, kind.block_bytes)
    num_numbers = len(blocks) * kind.block_size
    at_once, found = max(1, NUMBERS_AT_ONCE // kind.block_size), None
    for first in range(0, len(blocks), at_once):
        part = _flat_groups(blocks[first : first + at_once], kind.name)
        if part is None:
            return None
        if found is None:
            lengths = (num_numbers, *[num_numbers // GROUP] * (len(part) - 1))
            found = tuple(column.new_empty(length) for column, length in zip(part, lengths, strict=True))
        begin = first * kind.block_size
        for column, new in zip(found, part, strict=True):
            start = begin * len(column) // num_numbers
            column[start : start + len(new)] = new
    assert found is not None
    q, *factors = found
    return (q.view(shape), *(factor.view(shape[0], shape[1] // GROUP) for factor in factors))


def _flat_groups(blocks: torch.Tensor, name: str) -> Groups | None:
    """Return q (num_numbers,) and halves (num_numbers / 32,) of a few blocks."""
    if name == "Q4_K":
        scales, minima = k_scales(blocks)
        q: torch.Tensor = k_numbers(blocks, name)
        found: Groups = (q, scales, -minima)
    elif name == "MXFP4":
        found = mxfp4_parts(blocks)
    else:
        q, scale, minimum = legacy_parts(blocks, name)
        if name == "Q4_0":
            q, minimum = (q + 8).to(torch.uint8), -8 * scale
        found = (q, scale) if minimum is None else (q, scale, minimum)
    q, *parts = found
    factors = [part.reshape(-1).half() for part in parts]
    if name == "MXFP4" and bool((factors[0].float() != parts[0].reshape(-1)).any()):
        return None  # a power of two that is no half
    if not all(bool(part.isfinite().all()) for part in factors) or bool((q.view(torch.int8) == -128).any()):
        return None
    return (q.reshape(-1), *factors)
