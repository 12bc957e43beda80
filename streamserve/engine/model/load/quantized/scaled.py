"""FP8 and int8 weights with scales: of the whole weight, of each row, of each group of a row, or of each block.

    w[o, i] = scale[o // block rows, i // block columns] * (weight[o, i] - zero point)

The scales are called weight_scale, or weight_scale_inv (DeepSeek, Qwen3-FP8, whose blocks are 128 x 128). Scales of
inputs (input_scale) are left out: inputs are not rounded to FP8 here. Two formats of FP8 are stored, e4m3 and e5m2.

int8 weights stay as they are; FP8 weights have no steps of equal size and are rounded to int8, 32 inputs with a scale:
the largest of them by 0.4 % at most, where FP8 rounds to 6 %.
"""

from __future__ import annotations

from functools import cached_property

import torch

from streamserve.engine.model.load.quantized.parts import GROUP, Groups, Parts, as_halves, by_rows
from streamserve.engine.model.load.quantized.scheme import Scheme

SCALES = (".weight_scale", ".weight_scale_inv")
ZERO_POINT = ".weight_zero_point"
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


class ScaledMatrix:
    """A matrix in 8 bits."""

    suffixes = (".weight", *SCALES, ZERO_POINT)
    kind = "int8"

    def __init__(self, parts: Parts, scheme: Scheme) -> None:
        self.parts = parts
        shape = parts.shape(".weight")
        if len(shape) != 2 or 0 in shape:
            raise parts.broken(f"has the shape {shape}, which is no matrix")
        self.shape = (shape[0], shape[1])
        self.scale_name = next((name for name in SCALES if parts.has(name)), SCALES[0])
        self.scale_shape = self._scale_shape(parts.shape(self.scale_name))
        given = (scheme.block if self.scale_shape != (1, 1) else None) or (0, 0)
        self.block = (self._block(0, given[0]), self._block(1, given[1]))
        if parts.has(ZERO_POINT):
            parts.require(ZERO_POINT, parts.shape(self.scale_name))

    def _scale_shape(self, stored: tuple[int, ...]) -> tuple[int, int]:
        if stored in ((), (1,)):
            return 1, 1
        if len(stored) == 1:
            return stored[0], 1
        if len(stored) != 2:
            raise self.parts.broken(f"has {self.scale_name[1:]} of the shape {stored}")
        return stored[0], stored[1]

    def _block(self, axis: int, given: int) -> int:
        """Return how many rows (columns) have a scale."""
        size, num_scales = self.shape[axis], self.scale_shape[axis]
        if given and -(-size // given) == num_scales:
            return given
        if num_scales and size % num_scales == 0 and not given:
            return size // num_scales
        blocks = f", and blocks of {given}" if given else ""
        raise self.parts.broken(
            f"of the shape {self.shape} has {self.scale_name[1:]} of the shape {self.scale_shape}{blocks}"
        )

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight."""
        return by_rows(self.shape, dtype, self._rows)

    def _rows(self, first: int, last: int) -> torch.Tensor:
        numbers = self.parts.tensor(".weight")[first:last].float()
        if self._zeros is not None:
            numbers -= self._wide(self._zeros, first, last)
        return numbers * self._wide(self._scales, first, last)

    def _wide(self, values: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Return values (block rows, block columns) for each number of some rows."""
        rows = torch.arange(first, last) // self.block[0]
        if values.shape[1] == 1:
            return values[rows]
        return values.repeat_interleave(self.block[1], dim=1)[:, : self.shape[1]][rows]

    def groups(self) -> Groups | None:
        """Return q and scales of an int8 weight."""
        if self._numbers_dtype is not torch.int8 or self._zeros is not None:
            return None
        if self.block[1] % GROUP and self.scale_shape[1] > 1:
            return None
        numbers = self.parts.tensor(".weight")
        columns = torch.arange(0, self.shape[1], GROUP) // self.block[1]
        factors = as_halves(self._scales[torch.arange(self.shape[0]) // self.block[0]][:, columns])
        return None if factors is None or bool((numbers == -128).any()) else (numbers, *factors)

    @property
    def _numbers_dtype(self) -> torch.dtype:
        return self.parts.checkpoint.place(f"{self.parts.base}.weight").dtype

    @cached_property
    def _scales(self) -> torch.Tensor:
        return self.parts.tensor(self.scale_name).float().view(self.scale_shape)

    @cached_property
    def _zeros(self) -> torch.Tensor | None:
        return self.parts.tensor(ZERO_POINT).float().view(self.scale_shape) if self.parts.has(ZERO_POINT) else None
