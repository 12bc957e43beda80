"""Counter-based noise: the same number for the same (seed, position, token), on every device, in every batch.

A sampled token is `argmax(log p + Gumbel)`; equally `argmin(E / p)` with E exponential, which saves a logarithm. The
constants are those of `splitmix64` and of `lowbias32` (C. Wellons, "Prospecting for hash functions", 2018). Everything
is in 32-bit integers that wrap; shifts keep the sign, which mixes as well and saves an operation on every token.
"""

from __future__ import annotations

import torch

_MASK64 = (1 << 64) - 1
_MIX_1, _MIX_2 = 0x7FEB352D, -2073254261  # the second is 0x846CA68B as a signed number


def row_key(seed: int, position: int) -> tuple[int, int]:
    """Return two signed 32-bit keys for one draw, the second odd. `seed` counts modulo 2^64."""
    mixed = _splitmix64(_splitmix64(seed & _MASK64) ^ (position & _MASK64))
    return _signed(mixed >> 32), _signed(mixed & 0xFFFFFFFF | 1)


def exponential(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return exponential noise (num_rows, vocab_size), mean 1, in (0, inf). keys (num_rows, 2) int32: `row_key`s."""
    bits = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    _mix_(bits.mul_(-1640531527), _MIX_1)  # 2^32 / golden ratio, as a signed number: the part that all rows share
    bits = bits[None, :] ^ keys[:, :1]  # (num_rows, vocab_size)
    _mix_(bits.mul_(keys[:, 1:]), _MIX_2)
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32)
    # Small values stay exact down to 2^-32, so that ties are rare even with the largest vocabularies.
    uniform.add_(0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1)
    return uniform.log1p_().neg_()


def _mix_(x: torch.Tensor, factor: int) -> torch.Tensor:
    x.bitwise_xor_(x >> 16).mul_(factor)
    return x.bitwise_xor_(x >> 15)


def _splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number
