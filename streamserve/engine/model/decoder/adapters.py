"""`Adapter`: small changes of a decoder's linear layers (LoRA), for the rows of the sequences that ask for them.

    y = linear(x) + up(down(x))        down (r, in), up (out, r): a rank r of some tens, so two small products

The decoder's own weights are computed once for all rows of a step, whatever adapters these have; each adapter's changes
follow for its rows. Holds weights; knows one layer's numbers at a time. Engine thread. (Source: Hu et al., "LoRA".)

Shapes: T packed tokens, n rows of one adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from streamserve.engine.model.linear.base import Linear

QKV, OUT, GATE_UP, DOWN = "qkv", "out", "gate_up", "down"  # the linear layers of a `DecoderLayer`


def of_expert(part: str, expert: int) -> str:
    """Return the name of an expert's GATE_UP or DOWN."""
    return f"{part}.{expert}"


@dataclass(frozen=True, slots=True)
class LoraLinear:
    """What an adapter adds to the outputs `begin` to `end` of one linear layer. `up` has alpha / r within it."""

    begin: int
    end: int
    down: Linear
    up: Linear


@dataclass(frozen=True, slots=True)
class Adapter:
    """The changes of one adapter: `layers[index]` has those of a layer by QKV, OUT, GATE_UP, DOWN, and `of_expert`."""

    name: str
    layers: Sequence[dict[str, tuple[LoraLinear, ...]]]

    @property
    def num_bytes(self) -> int:
        """What its weights take in memory."""
        changes = [change for layer in self.layers for found in layer.values() for change in found]
        return sum(change.down.num_bytes + change.up.num_bytes for change in changes)

    def has_experts(self, index: int) -> bool:
        """Whether it changes experts of a layer."""
        return any("." in part for part in self.layers[index])

    def add(self, index: int, part: str, rows: torch.Tensor, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Add to `rows` (n,) of a layer's outputs (T, out) what it changes of them. inputs (T, in)."""
        changes = self.layers[index].get(part)
        if not changes:
            return
        own = inputs if len(rows) == len(inputs) else inputs.index_select(0, rows)
        for change in changes:
            outputs[:, change.begin : change.end].index_add_(0, rows, change.up(change.down(own)))
