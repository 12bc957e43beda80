"""Linear layers with weights packed for oneDNN: on a CPU two to four times the speed of `F.linear` in decode.

Packing is checked against the plain layer at load and left out where it is missing or wrong. Knows one layer at a time.
(Measured in research/performance.md: eager torch reads weights at a quarter of memory bandwidth; a batch hint of 32 is
good for all sizes.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from streamserve.engine.model.load.source import available_memory

BATCH_HINT = 32
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative to the largest output
EXTRA_SHARE = 0.1  # what one packed weight takes beyond the plain weight it frees, as a share of free memory

ROUNDINGS = 1.25  # of two numbers half an ulp each, and a little for the sums that they are rounded from
PLACES_AT_ONCE = 2_048  # logits that are computed again; with 4,096 features: 67 MB

FUSED_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedLinear(nn.Module):  # type: ignore[misc]  # torch is not type-checked here
    """y = x @ weight.T + bias with a weight only oneDNN can read. `weight` keeps shape and dtype, not numbers.

    `packed_dtype` float32 with bfloat16 weights: for processors without bfloat16 arithmetic, where torch's own path is
    ten times slower than this detour (and rounds more often).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, packed_dtype: torch.dtype) -> None:
        """Pack `weight` (out_features, in_features)."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.packed_dtype = packed_dtype
        self.weight = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        self.bias = None if bias is None else bias.detach().to(packed_dtype)
        dense = weight.detach().to(packed_dtype).contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(dense, BATCH_HINT)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features)."""
        if self.packed_dtype is not self.dtype:
            inputs = inputs.to(self.packed_dtype)
        outputs = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        return outputs if self.packed_dtype is self.dtype else outputs.to(self.dtype)


class FloatHead(nn.Module):  # type: ignore[misc]  # torch is not type-checked here
    """The output layer of a model in half precision, with float32 logits.

    bfloat16 has 128 numbers between 8 and 16, so that the likeliest tokens often tie, and which of them is chosen
    is no choice of the model's. Where the device multiplies with a float32 result, that is the result. Elsewhere the
    layer computes all logits as it does, and those that are the largest but for rounding are computed again, in
    float32. Invariant: the largest logit of a row is the largest in float32, too.
    """

    def __init__(self, layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`layer` computes with `weight` (out_features, in_features), packed or not; the plain weight is kept."""
        super().__init__()
        self.layer, self.weight = layer, nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else bias.detach().float()
        self.out_features, self.in_features = weight.shape
        self._is_exact = weight.is_cuda and _multiplies_to_float(weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to float32 (..., out_features)."""
        states = inputs.reshape(-1, self.in_features)  # (num_rows, in_features)
        if self._is_exact:
            logits = torch.mm(states, self.weight.t(), out_dtype=torch.float32)
            logits = logits if self.bias is None else logits.add_(self.bias)
        else:
            logits = self.layer(states).float()
            self._compute_largest(logits, states)
        return logits.view(*inputs.shape[:-1], self.out_features)

    def _compute_largest(self, logits: torch.Tensor, states: torch.Tensor) -> None:
        """Put float32 numbers in the place of the largest logits (num_rows, out_features), which are rounded."""
        largest = logits.amax(dim=-1, keepdim=True)
        rounding = ROUNDINGS * torch.finfo(self.weight.dtype).eps * largest.abs()
        for places in (logits >= largest - rounding).nonzero().split(PLACES_AT_ONCE):
            rows, ids = places.unbind(dim=1)
            exact = (states[rows].float() * self.weight[ids].float()).sum(dim=-1)
            logits[rows, ids] = exact if self.bias is None else exact + self.bias[ids]


def _multiplies_to_float(weight: torch.Tensor) -> bool:
    """Return whether this device multiplies half precision with a float32 result, and rightly."""
    few = weight[:16]
    try:
        found = torch.mm(few, few.t(), out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool(torch.allclose(found, few.float() @ few.float().t(), rtol=1e-3, atol=1e-3))


def keep_float_logits(model: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Give the model a `FloatHead` over its output layer, whose plain weight is `weight`."""
    head = model.get_output_embeddings()
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is head:
                setattr(parent, name, FloatHead(head, weight, bias))
                return


class FusedLinears:
    """Layers that modelling code applies to the same input one after another, computed as one layer when the first is
    called.

    One wide matrix streams from memory better than three narrow matrices, and two calls are saved.
    """

    def __init__(self, layers: list[nn.Module], packed_dtype: torch.dtype) -> None:
        """Pack the layers' weights below each other; biases must be all there or all absent."""
        weights = [layer.weight.detach() for layer in layers]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.packed = PackedLinear(torch.cat(weights), torch.cat(biases) if biases else None, packed_dtype)
        self.sizes = [len(weight) for weight in weights]
        self.inputs: torch.Tensor | None = None
        self.outputs: tuple[torch.Tensor, ...] = ()

    def part(self, number: int, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs of layer `number`: a slice (..., its out_features) of the common outputs."""
        if self.inputs is not inputs:
            self.inputs, self.outputs = inputs, self.packed.forward(inputs).split(self.sizes, dim=-1)
        out = self.outputs[number]
        if number == len(self.sizes) - 1:
            self.forget()
        return out

    def forget(self) -> None:
        """Let go of the tensors: their memory and their identity may be reused from here on."""
        self.inputs, self.outputs = None, ()


class FusedPart(nn.Module):  # type: ignore[misc]  # torch is not type-checked here
    """One layer of a `FusedLinears`: the module that replaces it in the model."""

    def __init__(self, group: FusedLinears, number: int, layer: nn.Module) -> None:
        super().__init__()
        self.group, self.number = group, number
        self.out_features, self.in_features = layer.weight.shape
        self.weight = torch.empty(layer.weight.shape, dtype=layer.weight.dtype, device="meta")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return self.group.part(self.number, inputs)


def forget_inputs(model: nn.Module) -> None:
    """Let go of what a forward pass left behind that did not come to its end."""
    for module in model.modules():
        if isinstance(module, FusedPart):
            module.group.forget()


def choose_packed_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Return the dtype in which packed linears compute `dtype` on `device` rightly, None where they cannot."""
    if device.type != "cpu" or dtype not in TOLERANCE or not torch.backends.mkldnn.is_available():
        return None
    candidates = (dtype, torch.float32) if dtype is not torch.float32 else (dtype,)
    return next((candidate for candidate in candidates if _packs(dtype, candidate)), None)


def _packs(dtype: torch.dtype, packed_dtype: torch.dtype) -> bool:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    bias = weight[:, 0].contiguous()
    try:
        return agrees(PackedLinear(weight, bias, packed_dtype), weight, bias)
    except (AttributeError, RuntimeError):  # the private op is absent, or refuses this processor
        return False


def agrees(packed: PackedLinear, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Compare a packed layer with the plain layer on one row and on three."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(3, packed.in_features, generator=generator).to(weight.dtype)
    with torch.no_grad():
        wanted = linear(inputs, weight.detach(), bias)
        found = torch.cat([packed(inputs[:1]), packed(inputs)[1:]])
        error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
    return error <= TOLERANCE[weight.dtype]  # NaN does not pass


def pack_linears(
    model: nn.Module,
    packed_dtype: torch.dtype,
    on_progress: Callable[[float], None] = lambda _fraction: None,
    *,
    kept: torch.Tensor | None = None,
) -> int:
    """Replace the model's linear layers by packed layers and free their weights, but for `kept`.

    Return how many were replaced.
    """
    shared = _shared_weights(model) | ({kept.data_ptr()} if kept is not None else set())
    num_packed = sum(_fuse(parent, names, packed_dtype) for parent in model.modules() for names in FUSED_NAMES)
    # Names, not layers: a list of layers would keep every unpacked weight alive until the end.
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if _weight_of(child) is not None
    ]
    for number, (parent, name) in enumerate(places):
        packed = _pack(getattr(parent, name), packed_dtype, shared)
        if packed is not None:
            setattr(parent, name, packed)
            num_packed += 1
        on_progress((number + 1) / len(places))
    return num_packed


def _fuse(parent: nn.Module, names: tuple[str, ...], packed_dtype: torch.dtype) -> int:
    """Fuse the layers of these names, if `parent` has them all as plain linears; return how many that were."""
    layers: list[Any] = [getattr(parent, name, None) for name in names]
    if not all(type(layer) is nn.Linear for layer in layers):
        return 0
    if len({(layer.in_features, layer.bias is None) for layer in layers}) > 1:
        return 0
    if sum(layer.weight.numel() for layer in layers) * packed_dtype.itemsize > EXTRA_SHARE * available_memory():
        return 0
    group = FusedLinears(layers, packed_dtype)
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    if not agrees(group.packed, weight, bias):
        return 0
    for number, (name, layer) in enumerate(zip(names, layers, strict=True)):
        setattr(parent, name, FusedPart(group, number, layer))
    return len(names)


def _pack(layer: nn.Module, packed_dtype: torch.dtype, shared: set[int]) -> PackedLinear | None:
    weight = _weight_of(layer)
    assert weight is not None
    extra_bytes = weight.numel() * packed_dtype.itemsize - (0 if weight.data_ptr() in shared else weight.nbytes)
    if extra_bytes > EXTRA_SHARE * available_memory():
        return None
    bias: Any = layer.bias
    packed = PackedLinear(weight, bias, packed_dtype)
    return packed if agrees(packed, weight.detach(), bias) else None


def _weight_of(layer: nn.Module) -> torch.Tensor | None:
    """The weight (out_features, in_features) of a layer that we can pack, else None."""
    from transformers.pytorch_utils import Conv1D

    if type(layer) is nn.Linear:
        return layer.weight
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
