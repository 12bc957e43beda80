"""The output layer: float32 logits of a model in any precision."""

from __future__ import annotations

import torch

from streamserve.engine.model.linear.base import Linear

ROUNDINGS = 1.25  # of two numbers half an ulp each, and a little for the sums that they are rounded from
PLACES_AT_ONCE = 2_048  # logits that are computed again; with 4,096 features: 67 MB


class FloatHead:
    """The output layer of a model in half precision, with float32 logits.

    bfloat16 has 128 numbers between 8 and 16, so that the likeliest tokens often tie, and which of them is chosen is no
    choice of the model's. Where the device multiplies with a float32 result, that is the result. Elsewhere the layer
    computes all logits as it does, and those that are the largest but for rounding are computed again, in float32.
    Invariant: the largest logit of a row is that of the largest in float32.
    """

    def __init__(self, layer: Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`layer` computes with `weight` (out_features, in_features), packed or not; the plain weight is kept."""
        self.layer, self.weight = layer, weight
        self.name, self.num_bytes = layer.name, layer.num_bytes
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.float()
        self.is_float = True
        self._is_exact = weight.is_cuda and _multiplies_to_float(weight)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (num_rows, in_features) to float32 (num_rows, out_features)."""
        return self.floats(inputs)

    def floats(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (num_rows, in_features) to float32 (num_rows, out_features)."""
        if self.layer.is_float:
            return self.layer.floats(inputs)
        if self._is_exact:
            logits = torch.mm(inputs, self.weight.t(), out_dtype=torch.float32)
            return logits if self.bias is None else logits.add_(self.bias)
        logits = self.layer.floats(inputs)
        self._compute_largest(logits, inputs)
        return logits

    def _compute_largest(self, logits: torch.Tensor, inputs: torch.Tensor) -> None:
        """Put float32 numbers in the place of the largest logits (num_rows, out_features), which are rounded."""
        largest = logits.amax(dim=-1, keepdim=True)
        rounding = ROUNDINGS * torch.finfo(self.weight.dtype).eps * largest.abs()
        for places in (logits >= largest - rounding).nonzero().split(PLACES_AT_ONCE):
            rows, ids = places.unbind(dim=1)
            exact = (inputs[rows].float() * self.weight[ids].float()).sum(dim=-1)
            logits[rows, ids] = exact if self.bias is None else exact + self.bias[ids]


def _multiplies_to_float(weight: torch.Tensor) -> bool:
    """Return whether this device multiplies half precision with a float32 result, and rightly."""
    few = weight[:16]
    try:
        found = torch.mm(few, few.t(), out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool(torch.allclose(found, few.float() @ few.float().t(), rtol=1e-3, atol=1e-3))
