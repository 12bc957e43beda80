"""`NativeExperts`: a layer's experts in one native call, router and weighted sum included (native/src/experts.h).

It computes what `Experts` does with torch, with states in float32 between its input and its output. A token's numbers
depend on no other token, bit for bit. The experts are described to the library once. Engine thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from streamserve.engine.model.decoder.experts import Experts
from streamserve.engine.model.decoder.parts import Norm
from streamserve.engine.model.decoder.spec import Routing
from streamserve.engine.model.kernels import ACTIVATIONS, DTYPES, Kernels
from streamserve.engine.model.linear.base import Linear
from streamserve.engine.model.linear.native import LinearRecord, NativeLinear, pack

LANES = 16  # gate and up begin at a panel of so many outputs
SOFTMAX_ALL, SOFTMAX_TAKEN = 0, 1  # Routing of native/src/abi.h

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class ExpertsRecord(ctypes.Structure):
    """`Experts` of native/src/abi.h."""

    _fields_ = (
        ("gate_up", _pointer),
        ("down", _pointer),
        ("router", LinearRecord),
        *((name, _pointer) for name in ("router_norm", "norm", "after_norm", "expert_scale")),
        *((name, _int) for name in ("num_experts", "num_taken", "routing", "activation")),
        *((name, _float) for name in ("limit", "alpha", "eps")),
    )


class NativeExperts:
    """The experts of one layer. What it has described it holds, so that the addresses stay good."""

    def __init__(self, kernels: Kernels, experts: Experts) -> None:
        """Describe experts that `can_compute` says yes of."""
        self.library = kernels.library
        spec = experts.spec
        self._router = pack(self.library, experts.router, experts.router_bias)
        self._gate_up, self._down = _records(experts.gate_up), _records(experts.down)
        self._floats: list[torch.Tensor] = []
        self.record = ExpertsRecord(
            gate_up=ctypes.addressof(self._gate_up),
            down=ctypes.addressof(self._down),
            router=self._router.record(),
            router_norm=self._address(experts.router_scale),
            norm=self._weight(experts.norm),
            after_norm=self._weight(experts.after_norm),
            expert_scale=self._address(experts.expert_scale),
            num_experts=spec.num_experts,
            num_taken=spec.num_taken,
            routing=SOFTMAX_ALL if spec.routing is Routing.SOFTMAX_ALL else SOFTMAX_TAKEN,
            activation=ACTIVATIONS[experts.activation],
            limit=spec.clamp[0] if spec.clamp else 0.0,
            alpha=spec.clamp[1] if spec.clamp else 0.0,
            eps=experts.eps,
        )

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (T, C) to (T, C)."""
        tokens = tokens.contiguous()
        out = torch.empty_like(tokens)
        self.library.experts(
            ctypes.byref(self.record), DTYPES[tokens.dtype], tokens.data_ptr(), len(tokens), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def _weight(self, norm: Norm | None) -> int | None:
        return None if norm is None else self._address(norm.weight)

    def _address(self, tensor: torch.Tensor | None) -> int | None:
        """Return the address of a tensor's numbers in float32, which are held from now on."""
        if tensor is None:
            return None
        self._floats.append(tensor.float().contiguous())
        return int(self._floats[-1].data_ptr())


def native_experts(kernels: Kernels | None, experts: Experts) -> NativeExperts | None:
    """Return what computes these experts in one call; None where nothing does."""
    return NativeExperts(kernels, experts) if kernels is not None and can_compute(experts) else None


def can_compute(experts: Experts) -> bool:
    """Return whether the library computes experts: all of their linear layers native, and of one kind."""
    return (
        experts.router.dtype in DTYPES
        and experts.spec.intermediate_size % LANES == 0
        and _is_native(experts.gate_up)
        and _is_native(experts.down)
    )


def _is_native(layers: Sequence[Linear]) -> bool:
    kinds = {layer.kind if isinstance(layer, NativeLinear) else None for layer in layers}
    return len(kinds) == 1 and None not in kinds


def _records(layers: Sequence[Linear]) -> ctypes.Array[LinearRecord]:
    return (LinearRecord * len(layers))(*(layer.record() for layer in layers if isinstance(layer, NativeLinear)))
