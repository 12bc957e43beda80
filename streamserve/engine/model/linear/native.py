"""Weights packed for our own kernels (streamserve/native/): any precision, one copy for any number of rows.

A number of a result is summed in one order whatever rows are beside it and however many they are: batch-invariant, bit
for bit. Weights of half precision are multiplied in float32, or in bfloat16 where the processor has that. int8 and int4
weights have a scale (int4: and a minimum) for 32 inputs; their inputs are rounded to int8 for each row and 32 inputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import partial

import torch

from streamserve.engine.model.linear.base import BackEnd
from streamserve.native.library import Library

# Kind of native/src/linear.h; the float kinds have their dtype's number.
KINDS = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3, "int4": 4}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT_KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
GROUP = 32  # inputs with a scale of their own
LANES = 16  # outputs of a panel
NUMBERS_AT_ONCE = 1 << 24  # are rounded, then packed
# What rounding to groups changes of an output, as a share of the largest: a sanity check, ten times what is seen.
ROUNDING = {"int8": 0.1, "int4": 0.5}
# A half-precision scale for 32 weights, and a minimum.
BYTES_PER_WEIGHT = {"int8": 1 + 2 / GROUP, "int4": 1 / 2 + 4 / GROUP}


class LinearRecord(ctypes.Structure):
    """`Linear` of native/src/linear.h: a layer that other native functions than its own compute."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
    )


class NativeLinear:
    """y = x @ weight.T + bias with a weight packed for the library. Made by `pack` or by `quantize`."""

    is_float = True

    def __init__(
        self,
        library: Library,
        kind: str,
        packed: torch.Tensor,
        shape: tuple[int, int],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """`packed` holds a weight of `shape` (out_features, in_features); `dtype` is the model's."""
        self.name = "native" if kind == FLOAT_KINDS[dtype] else f"native_{kind}"
        self.library, self.kind = library, kind
        self.out_features, self.in_features = shape
        self.dtype, self.packed = dtype, packed
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.num_bytes = packed.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (num_rows, in_features) to (num_rows, out_features)."""
        return self._compute(inputs, self.dtype)

    def floats(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (num_rows, in_features) to float32 (num_rows, out_features)."""
        return self._compute(inputs, torch.float32)

    def record(self) -> LinearRecord:
        """Return where the layer is in memory; valid while it lives."""
        return LinearRecord(
            kind=KINDS[self.kind],
            data=self.packed.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            num_outputs=self.out_features,
            num_inputs=self.in_features,
        )

    def _compute(self, inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        inputs = inputs.contiguous()
        outputs = torch.empty(len(inputs), self.out_features, dtype=dtype)
        self.library.linear(
            KINDS[self.kind], self.packed.data_ptr(), None if self.bias is None else self.bias.data_ptr(),
            self.out_features, self.in_features, DTYPES[inputs.dtype], inputs.data_ptr(), len(inputs),
            DTYPES[dtype], outputs.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return outputs


def pack(library: Library, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeLinear:
    """Return a linear with `weight` (out_features, in_features) in its own dtype."""
    kind, weight = FLOAT_KINDS[weight.dtype], weight.detach().contiguous()
    packed = _room(library, kind, weight.shape)
    library.pack_dense(KINDS[kind], weight.data_ptr(), *weight.shape, packed.data_ptr(), torch.get_num_threads())
    return NativeLinear(library, kind, packed, tuple(weight.shape), bias, weight.dtype)


def quantize(
    library: Library, kind: str, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None
) -> NativeLinear:
    """Return a linear with `weight` (out_features, in_features) rounded to `kind`, "int8" or "int4".

    `dtype` is that of its inputs and outputs, if it is not the weight's.
    """
    weight = weight.detach().contiguous()
    rows = max(1, NUMBERS_AT_ONCE // weight.shape[1] // LANES) * LANES
    parts = (group_wise(library, kind, part) for part in weight.split(rows))
    return _from_parts(library, kind, parts, tuple(weight.shape), bias, dtype or weight.dtype)


def group_wise(library: Library, kind: str, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return q (out_features, in_features), and half-precision scales (out_features, ceil(in_features / 32)).

    "int8": q -127..127 and weight ~ scale * q. "int4": q 0..15, a third tensor holds the minima, and weight ~ scale * q
    + minimum, with the pair of the least squared error among those that are tried.
    """
    num_groups = -(-weight.shape[1] // GROUP)
    q = torch.empty(weight.shape, dtype=torch.int8 if kind == "int8" else torch.uint8)
    parts = [torch.empty(len(weight), num_groups, dtype=torch.float16) for _ in range(1 if kind == "int8" else 2)]
    function = library.quantize_int8 if kind == "int8" else library.quantize_int4
    addresses = [part.data_ptr() for part in (q, *parts)]
    function(DTYPES[weight.dtype], weight.data_ptr(), *weight.shape, *addresses, torch.get_num_threads())
    return (q, *parts)


def from_groups(
    library: Library, groups: tuple[torch.Tensor, ...], bias: torch.Tensor | None, dtype: torch.dtype
) -> NativeLinear:
    """Return a linear of what `group_wise` returns, or of a checkpoint in that form."""
    kind = "int4" if len(groups) == 3 else "int8"
    return _from_parts(library, kind, [groups], tuple(groups[0].shape), bias, dtype)


def _from_parts(
    library: Library,
    kind: str,
    parts: Iterable[tuple[torch.Tensor, ...]],
    shape: tuple[int, int],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> NativeLinear:
    """Pack groups part after part, each but the last of whole panels: no more than a part is in memory twice."""
    packed, function = _room(library, kind, shape), library.pack_int4 if kind == "int4" else library.pack_int8
    panel_bytes, begin = packed.nbytes * LANES // (-(-shape[0] // LANES) * LANES), 0
    for groups in parts:
        q, *factors = (part.contiguous() for part in groups)
        addresses = [part.data_ptr() for part in (q, *factors)]
        panels = packed[begin // LANES * panel_bytes :]
        function(*addresses, *q.shape, panels.data_ptr(), torch.get_num_threads())
        begin += len(q)
    return NativeLinear(library, kind, packed, shape, bias, dtype)


def dequantized(groups: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the float32 weight (out_features, in_features) that the groups stand for."""
    q, *parts = groups
    wide = [part.float().repeat_interleave(GROUP, dim=1)[:, : q.shape[1]] for part in parts]
    return q.float() * wide[0] + (wide[1] if len(wide) == 2 else 0.0)


def native_back_end(library: Library) -> BackEnd:
    """Return the back end that keeps a weight's precision."""
    return BackEnd(
        name="native",
        is_batch_invariant=True,
        bytes_per_weight=lambda dtype: dtype.itemsize,
        serves=_serves,
        make=partial(pack, library),
        makes_steps=True,
        has_rows=True,
    )


def quantizing_back_end(library: Library, kind: str) -> BackEnd:
    """Return the back end that rounds weights to `kind`, "int8" or "int4"."""
    return BackEnd(
        name=f"native_{kind}",
        is_batch_invariant=True,
        bytes_per_weight=lambda _dtype: BYTES_PER_WEIGHT[kind],
        serves=_serves,
        make=partial(quantize, library, kind),
        rounding=ROUNDING[kind],
        has_rows=True,
    )


def _serves(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype in DTYPES


def _room(library: Library, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(library.arena.take(library.linear_bytes(KINDS[kind], *shape)), dtype=torch.uint8)
