"""Layers of weights that a checkpoint has quantised: packed as they are, or rounded again where that is finer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from streamserve.engine.model.linear.native import NativeLinear, from_groups, quantize
from streamserve.native.library import Library


class QuantizedWeights(Protocol):
    """A checkpoint with quantised weights, by their names, and by `matrix_names`."""

    def kind(self, name: str) -> str | None:
        """Return what a weight's layer is packed to, "int8" or "int4"; None for a weight that is not quantised."""
        ...

    def groups(self, name: str) -> tuple[torch.Tensor, ...] | None:
        """Return a weight as `group_wise` does; None where groups of 32 do not hold it as it is."""
        ...

    def floats(self, name: str) -> torch.Tensor:
        """Return a weight (out_features, in_features) in float32."""
        ...


def matrix_names(stack: str, expert: int, *, is_interleaved: bool) -> tuple[str, ...]:
    """Return the names of an expert's matrix (out, in), where one tensor of the checkpoint has those of all experts.

    `is_interleaved`: its even rows are a matrix (gate), and its odd rows another (up).
    """
    name = f"{stack}.{expert}"
    return (f"{name}.even", f"{name}.odd") if is_interleaved else (name,)


def split_matrix_name(name: str) -> tuple[str, int, slice]:
    """Return the stack, the expert and the rows that a name of `matrix_names` stands for; "" for another name."""
    stem, _, end = name.rpartition(".")
    rows = {"even": slice(0, None, 2), "odd": slice(1, None, 2)}.get(end)
    stack, _, expert = (stem if rows else name).rpartition(".")
    return (stack, int(expert), rows or slice(None)) if expert.isdecimal() else ("", 0, slice(None))


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs for the kernels of `library`; inputs and outputs are in `dtype`."""

    library: Library
    weights: QuantizedWeights
    dtype: torch.dtype

    def takes(self, names: Sequence[str]) -> bool:
        """Return whether all of these weights are quantised."""
        return all(self.weights.kind(name) is not None for name in names)

    def pack(self, names: Sequence[str], bias: torch.Tensor | None) -> NativeLinear | None:
        """Return the layer of these weights, their outputs side by side; None if one of them is not quantised.

        Weights of unlike kinds are rounded to the finer one.
        """
        if not self.takes(names):
            return None
        kinds = [self.weights.kind(name) for name in names]
        kind = "int8" if "int8" in kinds else "int4"
        if len(set(kinds)) == 1:
            parts = [found for name in names if (found := self.weights.groups(name)) is not None]
            if len(parts) == len(names):
                columns = tuple(torch.cat(column) for column in zip(*parts, strict=True))
                return from_groups(self.library, columns, bias, self.dtype)
        return quantize(self.library, kind, torch.cat([self.weights.floats(name) for name in names]), bias, self.dtype)
