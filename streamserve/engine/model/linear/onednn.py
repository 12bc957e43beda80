"""Weights packed for oneDNN: on a CPU two to four times the speed of `F.linear` in decode.

(Measured in docs/log.md: eager torch reads weights at a quarter of memory bandwidth; a batch hint of 32 is good for all
sizes.)
"""

from __future__ import annotations

from functools import cache

import torch

from streamserve.engine.model.linear.base import BackEnd

BATCH_HINT = 32


class OneDNNLinear:
    """y = x @ weight.T + bias with a weight that only oneDNN can read.

    In `packed_dtype` float32 with weights of half precision: for processors without arithmetic in that type, where
    torch's own path is ten times slower than this detour (and rounds more often).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, packed_dtype: torch.dtype) -> None:
        """Pack `weight` (out_features, in_features)."""
        self.name = "onednn" if packed_dtype is weight.dtype else "onednn_fp32"
        self.out_features, self.in_features = weight.shape
        self.dtype, self.packed_dtype = weight.dtype, packed_dtype
        self.is_float = packed_dtype is torch.float32
        self.bias = None if bias is None else bias.to(packed_dtype)
        self.num_bytes = weight.numel() * packed_dtype.itemsize + (0 if self.bias is None else self.bias.nbytes)
        dense = weight.to(packed_dtype).contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(dense, BATCH_HINT)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (num_rows, in_features) to (num_rows, out_features)."""
        if self.packed_dtype is self.dtype:
            return self._compute(inputs)
        return self._compute(inputs.to(self.packed_dtype)).to(self.dtype)

    def floats(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (num_rows, in_features) to float32 (num_rows, out_features)."""
        return self._compute(inputs.to(self.packed_dtype)).float()

    def _compute(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")


@cache
def is_native(dtype: torch.dtype) -> bool:
    """Return whether this processor computes in `dtype`."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def _has_onednn(device: torch.device) -> bool:
    return bool(device.type == "cpu" and torch.backends.mkldnn.is_available())


ONEDNN = BackEnd(
    name="onednn",
    is_batch_invariant=False,  # it takes another kernel for one row than for many
    bytes_per_weight=lambda dtype: dtype.itemsize,
    serves=lambda dtype, device: _has_onednn(device) and is_native(dtype),
    make=lambda weight, bias: OneDNNLinear(weight, bias, weight.dtype),
)
ONEDNN_FP32 = BackEnd(
    name="onednn_fp32",
    is_batch_invariant=False,
    bytes_per_weight=lambda _dtype: torch.float32.itemsize,
    serves=lambda dtype, device: _has_onednn(device) and dtype is torch.bfloat16 and not is_native(dtype),
    make=lambda weight, bias: OneDNNLinear(weight, bias, torch.float32),
)
