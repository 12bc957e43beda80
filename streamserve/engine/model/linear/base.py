"""What a linear layer is here, and what a back end that makes such layers says of itself.

    y = linear(x)      x (num_rows, in_features), contiguous -> y (num_rows, out_features), both in the model's dtype

Invariant: a row of y depends on its row of x alone, bit for bit: a neighbour in the batch changes no answer. Where a
back end is `is_batch_invariant` it does not depend on the number of rows either. Knows one layer at a time. Engine
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import linear


class Linear(Protocol):
    """y = x @ weight.T + bias, with the weight in whatever form its back end reads.

    `name` is the back end's; `num_bytes` is the memory of weight and bias; `is_float`: it computes in float32 whatever
    the model's dtype, and `floats` gives that result before it is rounded.
    """

    name: str
    in_features: int
    out_features: int
    num_bytes: int
    is_float: bool

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (num_rows, in_features) to (num_rows, out_features), both in the model's dtype."""
        ...

    def floats(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (num_rows, in_features) to float32 (num_rows, out_features)."""
        ...


class DoesNotFit(Exception):
    """A back end cannot hold this weight: its numbers, or its shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackEnd:
    """A way to compute linear layers. `bytes_per_weight` is what its form of a weight takes.

    `serves` says whether it computes a dtype on a device of this machine; `make` builds a layer of a weight
    (out_features, in_features) and a bias (out_features,), and raises `DoesNotFit`. `rounding`: what it may change by
    rounding weights and inputs, as a share of the largest output. `makes_steps`: with its layers alone, a dense
    decoder's decodes are computed in one call (decoder/step.py). `has_rows`: an embedding can read its weights' rows
    (table.py).
    """

    name: str
    is_batch_invariant: bool
    bytes_per_weight: Callable[[torch.dtype], float]
    serves: Callable[[torch.dtype, torch.device], bool]
    make: Callable[[torch.Tensor, torch.Tensor | None], Linear]
    rounding: float = 0.0
    makes_steps: bool = False
    has_rows: bool = False


class PlainLinear:
    """`F.linear`: the reference of the others, and what serves where none of them does."""

    name = "plain"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.is_float = weight.dtype is torch.float32

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (num_rows, in_features) to (num_rows, out_features)."""
        return linear(inputs, self.weight, self.bias)

    def floats(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (num_rows, in_features) to float32 (num_rows, out_features)."""
        return linear(inputs, self.weight, self.bias).float()


PLAIN = BackEnd(
    name=PlainLinear.name,
    is_batch_invariant=False,  # BLAS takes another kernel for one row than for many
    bytes_per_weight=lambda dtype: dtype.itemsize,
    serves=lambda _dtype, _device: True,
    make=PlainLinear,
)
