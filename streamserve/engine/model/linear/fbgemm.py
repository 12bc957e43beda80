"""Weights in float16, arithmetic in float32: FBGEMM, for half precision on processors that only have float32.

Two bytes a weight are read instead of four. float16 has three more bits of mantissa than bfloat16, and so holds each of
its numbers exactly between 6e-5 and 65,504; below that it rounds by 3e-8 at most. Whether a weight fits is checked when
it is packed. (Measured in docs/log.md: 1.7 times the speed of weights in float32 at one row, 1.2 times at 32.)
"""

from __future__ import annotations

import torch

from streamserve.engine.model.linear.base import BackEnd, DoesNotFit

# The largest change of a weight by its rounding, as a share of the largest weight of its row.
MOST_ROUNDING = 2**-12


class HalfWeightLinear:
    """y = x @ weight.T + bias with a weight in float16, packed for FBGEMM."""

    name = "fbgemm_fp16"
    is_float = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Pack `weight` (out_features, in_features); raise `DoesNotFit` if float16 does not hold it."""
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        require_half(weight)
        self._packed = torch.ops.quantized.linear_prepack_fp16(
            weight.float(), None if bias is None else bias.float().contiguous()
        )
        self.num_bytes = 2 * weight.numel() + (0 if bias is None else 4 * bias.numel())

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (num_rows, in_features) to (num_rows, out_features)."""
        return self.floats(inputs).to(self.dtype)

    def floats(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (num_rows, in_features) to float32 (num_rows, out_features)."""
        return torch.ops.quantized.linear_dynamic_fp16(inputs.float(), self._packed)


def require_half(weight: torch.Tensor) -> None:
    """Raise `DoesNotFit` for a weight (out_features, in_features) that float16 changes by more than a trifle."""
    if weight.dtype is torch.float16:
        return
    for rows in weight.split(1024):  # so that no copy of the whole weight is made
        wanted, found = rows.float(), rows.half().float()
        allowed = MOST_ROUNDING * wanted.abs().amax(dim=1, keepdim=True)
        if not bool(((found - wanted).abs() <= allowed).all()):  # infinities and NaN do not pass
            raise DoesNotFit("float16 does not hold all of its numbers")


FBGEMM_FP16 = BackEnd(
    name=HalfWeightLinear.name,
    is_batch_invariant=True,  # every kernel sums along in_features in one order
    bytes_per_weight=lambda _dtype: 2,
    serves=lambda dtype, device: (
        device.type == "cpu"
        and dtype in (torch.bfloat16, torch.float16)
        and torch.backends.quantized.engine in ("x86", "fbgemm")
    ),
    make=HalfWeightLinear,
)
