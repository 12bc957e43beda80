"""gpt-oss' MXFP4: the experts' weights of a layer in one tensor, 32 inputs with a power of two as their scale.

    <name>_blocks (num_experts, out, in / 32, 16), uint8     two inputs a byte, the first in the low bits
    <name>_scales (num_experts, out, in / 32), uint8         the power, biased by 127
    w = VALUES[4 bits] / 2 * 2^(scale - 127)                 as a weight of the checkpoint: (num_experts, in, out)

Twice a value is a whole number of at most 12, so that int8 with half the scale holds it as it is. (Source: the OCP
Microscaling specification 1.0, sections 5.3.3 and 6.3.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from streamserve.engine.model.load.quantized.parts import GROUP, Groups, Parts, as_halves, by_rows
from streamserve.engine.model.load.quantized.scheme import Scheme

VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice what they stand for
BIAS = 127 + 1  # of the exponent, and the half


class MXFP4Stack:
    """All experts' weights of one part of a layer."""

    suffixes = ("_blocks", "_scales")
    kind = None

    def __init__(self, parts: Parts, _scheme: Scheme) -> None:
        self.parts = parts
        shape = parts.shape("_blocks")
        if len(shape) != 4 or 0 in shape or shape[3] != GROUP // 2:
            raise parts.broken(f"has blocks of the shape {shape}, which are not 16 bytes each")
        parts.require("_scales", shape[:3])
        self.num_experts = shape[0]
        self.shape = (shape[0], shape[2] * GROUP, shape[1])

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights (num_experts, in, out)."""
        found = torch.empty(self.shape, dtype=dtype)
        for expert in range(self.num_experts):
            found[expert] = self.expert(expert).tensor(dtype).t()
        return found

    def groups(self) -> Groups | None:
        """Return None: an expert has groups."""
        return None

    def expert(self, expert: int, rows: slice = slice(None)) -> MXFP4Matrix:
        """Return an expert's matrix (out, in), or some of its rows."""
        return MXFP4Matrix(self.parts.tensor("_blocks")[expert, rows], self.parts.tensor("_scales")[expert, rows])


@dataclass(frozen=True, slots=True)
class MXFP4Matrix:
    """One matrix: blocks (out, in / 32, 16) and scales (out, in / 32), views of the file."""

    blocks: torch.Tensor
    scales: torch.Tensor
    kind = "int8"

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return len(self.blocks), self.blocks.shape[1] * GROUP

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix."""
        return by_rows(self.shape, dtype, self._rows)

    def _rows(self, first: int, last: int) -> torch.Tensor:
        scales = powers(self.scales[first:last])
        return self._numbers(first, last).float() * scales.repeat_interleave(GROUP, dim=1)

    def groups(self) -> Groups | None:
        """Return q (out, in), int8, and scales; None where a scale is no half."""
        factors = as_halves(powers(self.scales))
        return None if factors is None else (self._numbers(0, len(self.blocks)), *factors)

    def _numbers(self, first: int, last: int) -> torch.Tensor:
        return pairs()[self.blocks[first:last].flatten(1).int()].view(torch.int8)


@cache
def pairs() -> torch.Tensor:
    """Return the two numbers of every byte (256,), each pair as one int16."""
    values = torch.tensor(VALUES, dtype=torch.int8)
    octets = torch.arange(256)
    return torch.stack((values[octets & 15], values[octets >> 4]), dim=1).view(torch.int16).flatten()


def powers(scales: torch.Tensor) -> torch.Tensor:
    """Return what doubled values are multiplied by, float32."""
    return torch.ldexp(torch.ones(scales.shape), scales.int() - BIAS)
