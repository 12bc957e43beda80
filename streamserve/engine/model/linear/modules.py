"""Linear layers of ours in place of those of transformers' modelling code, for the architectures that run on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from streamserve.engine.model.linear.base import Linear, PlainLinear
from streamserve.engine.model.linear.choose import LinearMaker
from streamserve.engine.model.linear.head import FloatHead


class LinearModule(nn.Module):  # type: ignore[misc]  # torch is not type-checked here
    """A linear layer as a module. `weight` keeps shape and dtype, not numbers: modelling code asks for them."""

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = linear
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self.weight = torch.empty(self.out_features, self.in_features, dtype=dtype, device="meta")
        self.bias = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features)."""
        outputs = self.linear(inputs.reshape(-1, self.in_features).contiguous())
        return outputs.view(*inputs.shape[:-1], self.out_features)


def linear_weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights (out_features, in_features) of a model's linear layers, in order."""
    found = (_weight_of(module) for module in model.modules())
    return (weight for weight in found if weight is not None)


def pack_linears(
    model: nn.Module,
    maker: LinearMaker,
    on_progress: Callable[[float], None] = lambda _fraction: None,
    *,
    kept: torch.Tensor | None = None,
) -> list[Linear]:
    """Replace the model's linear layers by those of `maker` and free their weights, but for `kept`.

    A layer that only the plain back end computes is left as it is. Return the new layers.
    """
    shared = _shared_weights(model) | ({kept.data_ptr()} if kept is not None else set())
    # Names, not layers: a list of layers would keep every plain weight alive until the end.
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if _weight_of(child) is not None
    ]
    made: list[Linear] = []
    for number, (parent, name) in enumerate(places):
        layer = getattr(parent, name)
        weight, bias = _weight_of(layer), layer.bias
        assert weight is not None
        linear = maker.make(weight, None if bias is None else bias.detach(), is_kept=weight.data_ptr() in shared)
        if not isinstance(linear, PlainLinear):
            setattr(parent, name, LinearModule(linear, weight.dtype))
            made.append(linear)
        del layer, weight, bias
        on_progress((number + 1) / len(places))
    return made


def keep_float_logits(model: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Give the model a `FloatHead` over its output layer, whose plain weight is `weight`."""
    head = model.get_output_embeddings()
    linear = head.linear if isinstance(head, LinearModule) else PlainLinear(weight, bias)
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is head:
                setattr(parent, name, LinearModule(FloatHead(linear, weight, bias), weight.dtype))
                return


def _weight_of(layer: nn.Module) -> torch.Tensor | None:
    """The weight (out_features, in_features) of a layer that can be replaced, else None."""
    from transformers.pytorch_utils import Conv1D

    if type(layer) is nn.Linear:
        return layer.weight.detach()
    if type(layer) is Conv1D:  # GPT-2's linear, stored transposed
        return layer.weight.detach().t().contiguous()
    return None


def _shared_weights(model: nn.Module) -> set[int]:
    """Addresses of weights that more than one module holds (tied embeddings)."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (shared if parameter.data_ptr() in seen else seen).add(parameter.data_ptr())
    return shared
