"""Layers of weights that a checkpoint has quantised: packed as they are, or rounded again where that is finer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from streamserve.engine.model.linear.native import NativeLinear, from_groups, quantize
from streamserve.native.library import Library


class QuantizedWeights(Protocol):
    """A checkpoint with quantised weights."""

    def kind(self, name: str) -> str | None:
        """Return what a weight's layer is packed to, "int8" or "int4"; None for a weight that is not quantised."""
        ...

    def groups(self, name: str) -> tuple[torch.Tensor, ...] | None:
        """Return a weight as `group_wise` does; None where groups of 32 do not hold it as it is."""
        ...

    def floats(self, name: str) -> torch.Tensor:
        """Return a weight (out_features, in_features) in float32."""
        ...


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs for the kernels of `library`; inputs and outputs are in `dtype`."""

    library: Library
    weights: QuantizedWeights
    dtype: torch.dtype

    def pack(self, names: Sequence[str], bias: torch.Tensor | None) -> NativeLinear | None:
        """Return the layer of these weights, their outputs side by side; None if one of them is not quantised.

        Weights of unlike kinds are rounded to the finer one.
        """
        kinds = [self.weights.kind(name) for name in names]
        if any(kind is None for kind in kinds):
            return None
        kind = "int8" if "int8" in kinds else "int4"
        if len(set(kinds)) == 1:
            parts = [found for name in names if (found := self.weights.groups(name)) is not None]
            if len(parts) == len(names):
                columns = tuple(torch.cat(column) for column in zip(*parts, strict=True))
                return from_groups(self.library, columns, bias, self.dtype)
        return quantize(self.library, kind, torch.cat([self.weights.floats(name) for name in names]), bias, self.dtype)
