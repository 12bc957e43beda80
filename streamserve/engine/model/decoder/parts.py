"""The parts of a decoder that are no linear layers: norms, rotation, activation, routing.

Shapes: T packed tokens, C hidden size, I inner size, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import gelu, relu, rms_norm, silu

from streamserve.engine.model.cuda.kernels import GPUKernels
from streamserve.engine.model.decoder.spec import RotarySpec, Routing

Activation = Callable[[torch.Tensor], torch.Tensor]
ACTIVATION: dict[str, Activation] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}


def gated(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return act(gate) * up of both (T, 2 I), side by side."""
    gate, up = both.chunk(2, dim=-1)
    return activation(gate).mul_(up)


class Norm:
    """x / rms(x) * weight over the last axis. A weight in float32 beside x in half precision is applied in float32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self.kernels: GPUKernels | None = None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalise inputs (..., C)."""
        if self.kernels is not None:
            return self.kernels.norm(inputs, self.weight, self.eps)
        if self.weight.dtype is inputs.dtype:
            return rms_norm(inputs, self.weight.shape, self.weight, self.eps)
        return rms_norm(inputs.float(), self.weight.shape, self.weight, self.eps).to(inputs.dtype)


class HeadsNorm:
    """Norms over each head, with weights (H, D) of its own."""

    def __init__(self, weights: torch.Tensor, eps: float) -> None:
        self.weights, self.eps = weights, eps

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Normalise heads (T, H, D)."""
        if self.weights.dtype is heads.dtype:
            return rms_norm(heads, heads.shape[-1:], None, self.eps).mul_(self.weights)
        return rms_norm(heads.float(), heads.shape[-1:], None, self.eps).mul_(self.weights).to(heads.dtype)


class Turn:
    """One rotation at the positions of a step, the same for all its layers: heads [a | b] turn by their angles."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Take cos and sin (T, dim / 2)."""
        self.dim = 2 * cos.shape[1]
        self.cos = torch.cat((cos, cos), dim=-1)[:, None]  # (T, 1, dim)
        self.sin = torch.cat((-sin, sin), dim=-1)[:, None]

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate heads (T, H, D): [a | b | c] becomes [a cos - b sin | b cos + a sin | c]."""
        turned = heads if self.dim == heads.shape[-1] else heads[..., : self.dim]
        swapped = turned.roll(self.dim // 2, -1)
        out = torch.addcmul(turned * self.cos, swapped, self.sin)
        return out if turned is heads else torch.cat((out, heads[..., self.dim :]), dim=-1)


class Rotary:
    """A `RotarySpec` on a device."""

    def __init__(self, spec: RotarySpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.dtype = spec, dtype
        self.frequencies = torch.tensor(spec.frequencies, dtype=torch.float32, device=device)  # (dim / 2,)

    def at(self, positions: torch.Tensor) -> Turn:
        """Return the rotation at positions (T,)."""
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.spec.scaling != 1.0:
            cos, sin = cos * self.spec.scaling, sin * self.spec.scaling
        return Turn(cos.to(self.dtype), sin.to(self.dtype))


def route(logits: torch.Tensor, num_taken: int, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and the numbers of the experts that each token takes, both (T, num_taken).

    logits (T, num_experts), in the model's dtype, as the weights are.
    """
    if routing is Routing.SOFTMAX_TOP:
        values, chosen = logits.topk(num_taken, dim=-1)
        return values.softmax(dim=-1), chosen
    shares, chosen = logits.float().softmax(dim=-1).topk(num_taken, dim=-1)
    if routing is Routing.SOFTMAX_ALL_NORMALISED:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares.to(logits.dtype), chosen
