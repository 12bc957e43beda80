"""The tensors that one quantised weight is stored in: numbers, scales, zero points. And what all formats share.

A format is a class with the shape, the kind and the numbers of a weight (`StoredWeight`); its constructor compares the
shapes of the parts, which are in the files' headers, so that a checkpoint that is broken is refused before a load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from streamserve.engine.model.decoder.checkpoint import Checkpoint
from streamserve.engine.model.load.errors import ModelLoadError

GROUP = 32  # inputs that have a scale in our kernels (linear/native.py)
NUMBERS_AT_ONCE = 1 << 22  # in float32: 16 MiB, whatever the weight
ROWS = 128  # a multiple of what a word holds, and of the rows of a block
MOST_ROUNDING = 2**-10  # of a scale that becomes a half
Groups = tuple[torch.Tensor, ...]


class StoredWeight(Protocol):
    """A weight as a format stores it.

    `shape` is that of the weight; `kind`: what its layer is packed to, "int8" or "int4", None: it is no layer's by
    itself.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str | None: ...

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in `dtype`."""
        ...

    def groups(self) -> Groups | None:
        """Return q (out, in), and halves for 32 inputs: scales, for int4 minima; None where they do not hold it."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the weight whose tensors' names begin with `base`."""

    checkpoint: Checkpoint
    base: str

    def has(self, suffix: str) -> bool:
        """Return whether there is such a part."""
        return self.base + suffix in self.checkpoint

    def shape(self, suffix: str) -> tuple[int, ...]:
        """Return the shape of a part; raise `ModelLoadError` where it is not there."""
        if not self.has(suffix):
            raise self.broken(f"has no {self.base.rsplit('.', 1)[-1]}{suffix}")
        return self.checkpoint.place(self.base + suffix).shape

    def require(self, suffix: str, shape: tuple[int, ...]) -> None:
        """Raise `ModelLoadError` for a part of another shape."""
        found = self.shape(suffix)
        if found != shape:
            raise self.broken(f"has {suffix.strip('._')} of the shape {found} instead of {shape}")

    def tensor(self, suffix: str) -> torch.Tensor:
        """Return a part."""
        return self.checkpoint.tensor(self.base + suffix)

    def broken(self, problem: str) -> ModelLoadError:
        """Return the error for parts that do not belong together."""
        return ModelLoadError(
            f"{self.checkpoint.folder}: the quantised weight {self.base} {problem}. "
            "Download the checkpoint again, or quantise the model again."
        )


def by_rows(shape: tuple[int, int], dtype: torch.dtype, rows: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """Return a matrix (out, in) whose rows are computed some at a time; `rows` takes the first and the last + 1."""
    found = torch.empty(shape, dtype=dtype)
    at_once = max(1, NUMBERS_AT_ONCE // max(1, shape[1]) // ROWS) * ROWS
    for first in range(0, shape[0], at_once):
        last = min(first + at_once, shape[0])
        found[first:last] = rows(first, last)
    return found


def repeated(values: torch.Tensor, num_inputs: int, group_size: int) -> torch.Tensor:
    """Return values (out, num_groups) of `group_size` inputs each as those of groups of 32 (out, ceil(in / 32))."""
    num_groups = -(-num_inputs // GROUP)
    return values.repeat_interleave(-(-group_size // GROUP), dim=1)[:, :num_groups]


def as_halves(*parts: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Return float32 scales and minima as halves; None where one is out of their range, or too near to 0 for them."""
    halves = tuple(part.half() for part in parts)
    for half, part in zip(halves, parts, strict=True):
        if not bool(((half.float() - part).abs() <= MOST_ROUNDING * part.abs()).all()):
            return None
    return halves
