"""The numbers that a tensor's blocks stand for, in torch: each type by its formula, the same bits as llama.cpp's.

    legacy types, 32 numbers:   d (fp16) [m (fp16)] [qh: fifth bits, 4 bytes] qs      w = d * q, or d * q + m
    K types, 256 numbers:       scales (and minima) of 32 or 16 numbers, 6 or 8 bits, times d (and dmin) of the block
    MXFP4, 32 numbers:          a power of two, and 4 bits that index ten magnitudes and their signs

q of two nibbles of a byte are half a block (K types: half of 64 numbers) apart. Bits are taken with shifts over a new
axis. Knows blocks, no names. (The layouts: ggml-common.h and ggml-quants.c of llama.cpp.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from streamserve.engine.model.load.gguf.types import TensorType

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NUMBERS_AT_ONCE = 1 << 22  # in float32: 16 MiB, whatever the tensor
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice what they stand for


def dequantize(data: torch.Tensor, kind: TensorType, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of `shape` in `dtype` whose blocks `data` (num_bytes,) holds; floats of `dtype` are no copy."""
    if kind.name in FLOATS:
        return data.view(FLOATS[kind.name]).view(*shape).to(dtype)
    blocks = data.view(-1, kind.block_bytes)
    out = torch.empty(len(blocks), kind.block_size, dtype=dtype)
    at_once = max(1, NUMBERS_AT_ONCE // kind.block_size)
    for first in range(0, len(blocks), at_once):
        part = blocks[first : first + at_once]
        out[first : first + at_once] = FORMULAS[kind.name](part).view(len(part), kind.block_size)
    assert out.numel() == prod(shape)
    return out.view(*shape)


def _halves(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """Return the fp16 at byte `begin` of each block (num_blocks, block_bytes) as float32 (num_blocks, 1)."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _fields(data: torch.Tensor, width: int, shifts: Sequence[int], mask: int) -> torch.Tensor:
    """Return bit fields of bytes (num_blocks, n): of each `width` bytes all at shifts[0], then all at shifts[1], ….

    The result is (num_blocks, n / width * len(shifts), width), uint8.
    """
    by = torch.tensor(shifts, dtype=torch.uint8).view(1, 1, -1, 1)
    return ((data.reshape(len(data), -1, 1, width) >> by) & mask).view(len(data), -1, width)


def legacy_parts(blocks: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return q (num_blocks, 32) as integers, d (num_blocks, 1) and m (num_blocks, 1) or None: w = d * q + m.

    q is centred on 0 where there is no m: int8; else it counts from 0.
    """
    scale = _halves(blocks, 0)
    if name == "Q8_0":
        return blocks[:, 2:].contiguous().view(torch.int8), scale, None
    has_minimum, has_fifth_bit = name.endswith("1"), name.startswith("Q5")
    begin = 4 if has_minimum else 2
    minimum = _halves(blocks, 2) if has_minimum else None
    fifth, begin = (blocks[:, begin : begin + 4], begin + 4) if has_fifth_bit else (None, begin)
    q = _fields(blocks[:, begin:], 16, (0, 4), 15).view(len(blocks), 32)
    if fifth is not None:
        q = q | (_fields(fifth, 1, range(8), 1).view(len(blocks), 32) << 4)
    return (q.to(torch.int8) - (16 if has_fifth_bit else 8), scale, None) if minimum is None else (q, scale, minimum)


def _legacy(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def formula(blocks: torch.Tensor) -> torch.Tensor:
        q, scale, minimum = legacy_parts(blocks, name)
        return scale * q.float() if minimum is None else scale * q.float() + minimum

    return formula


def k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and the minima (num_blocks, 8) of Q4_K's and Q5_K's blocks, float32: w = scale * q - minimum.

    Twelve bytes hold 8 + 8 numbers of 6 bits: bytes 0-3 and 4-7 the first four of each and, in their upper two bits,
    the upper bits of the last four; bytes 8-11 those's lower bits, the minima's above the scales'.
    """
    low, high, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, (rest & 15) | ((low >> 2) & 48)), dim=1)
    minima = torch.cat((high & 63, (rest >> 4) | ((high >> 2) & 48)), dim=1)
    return _halves(blocks, 0) * scales.float(), _halves(blocks, 2) * minima.float()


def k_numbers(blocks: torch.Tensor, name: str) -> torch.Tensor:
    """Return q (num_blocks, 8, 32), uint8, of Q4_K's and Q5_K's blocks."""
    if name == "Q4_K":
        return _fields(blocks[:, 16:], 32, (0, 4), 15)
    return _fields(blocks[:, 48:], 32, (0, 4), 15) | (_fields(blocks[:, 16:48], 32, range(8), 1) << 4)


def _k(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def formula(blocks: torch.Tensor) -> torch.Tensor:
        scales, minima = k_scales(blocks)
        return scales[:, :, None] * k_numbers(blocks, name).float() - minima[:, :, None]

    return formula


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _fields(blocks[:, :128], 64, (0, 4), 15).view(len(blocks), 256)
    high = _fields(blocks[:, 128:192], 32, (0, 2, 4, 6), 3).view(len(blocks), 256)
    q = (low | (high << 4)).to(torch.int8) - 32
    scales = _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()  # (num_blocks, 16)
    return scales[:, :, None] * q.view(len(blocks), 16, 16).float()


def mxfp4_parts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q (num_blocks, 32), int8, twice the values, and half the scales (num_blocks, 1): w = scale * q."""
    exponent = blocks[:, :1].to(torch.int32)  # of 2, biased by 127; one less, since the values are doubled
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp_max(1), (exponent - 1) << 23)
    q = _fields(blocks[:, 1:], 16, (0, 4), 15).view(len(blocks), 32)
    return torch.tensor(MXFP4_VALUES, dtype=torch.int8)[q.int()], bits.view(torch.float32)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    q, scale = mxfp4_parts(blocks)
    return scale * q.float()


FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: _legacy(name) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")},
    **{name: _k(name) for name in ("Q4_K", "Q5_K")},
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
