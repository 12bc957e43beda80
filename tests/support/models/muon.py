"""Muon in float32: torch.optim.Muon computes in bfloat16, on a machine without AVX-512 seven times as long in all.

Source: Keller Jordan, Muon: an optimizer for hidden layers in neural networks (2024), whose coefficients these are.
"""

from __future__ import annotations

from typing import Any

import torch

_COEFFICIENTS, _NUM_ITERATIONS, _MOMENTUM, _EPSILON = (3.4445, -4.7750, 2.0315), 3, 0.95, 1e-7


class Muon(torch.optim.Optimizer):
    """Steps along the orthogonal factor of each matrix's momentum, with Nesterov's correction and decoupled decay."""

    def __init__(self, matrices: list[torch.Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move each matrix that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - _MOMENTUM)
                ahead = weight.grad.lerp(momentum, _MOMENTUM)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.add_(_orthogonal(ahead), alpha=-group["lr"] * scale)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return about the orthogonal factor of `matrix`, by Newton and Schulz's iteration."""
    if matrix.shape[0] > matrix.shape[1]:
        return _orthogonal(matrix.T).T
    a, b, c = _COEFFICIENTS
    near = matrix / matrix.norm().clamp(min=_EPSILON)
    for _ in range(_NUM_ITERATIONS):
        gram = near @ near.T
        near = torch.addmm(near, torch.addmm(gram, gram, gram, beta=b, alpha=c), near, beta=a)
    return near
