"""RMS norms of rows, and of the sum of two, in one launch, in float32.

Shapes: T rows, C numbers in each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WIDE = 2048  # rows from here on take more threads


@triton.jit
def _norm(rows, change, weight, total, out, size, eps, HAS_CHANGE: tl.constexpr, PADDED: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * size
    i = tl.arange(0, PADDED)
    inside = i < size
    x = tl.load(rows + start + i, mask=inside, other=0.0).to(tl.float32)
    if HAS_CHANGE:
        x += tl.load(change + start + i, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total.dtype.element_ty)
        tl.store(total + start + i, rounded, mask=inside)
        x = rounded.to(tl.float32)
    rms = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + i, (x * rms * w).to(out.dtype.element_ty), mask=inside)


def norm(inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight over the last axis of inputs (..., C)."""
    rows = inputs if inputs.is_contiguous() else inputs.contiguous()
    out = torch.empty_like(rows)
    _launch(rows, rows, weight, rows, out, eps, has_change=False)
    return out


def add_norm(
    tokens: torch.Tensor, change: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens + change (T, C), and the norm of that."""
    total, out = torch.empty_like(tokens), torch.empty_like(tokens)
    _launch(tokens, change, weight, total, out, eps, has_change=True)
    return total, out


def _launch(
    rows: torch.Tensor,
    change: torch.Tensor,
    weight: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    *,
    has_change: bool,
) -> None:
    size = rows.shape[-1]
    _norm[(rows.numel() // size,)](
        rows, change, weight, total, out, size, eps,
        HAS_CHANGE=has_change, PADDED=triton.next_power_of_2(size), num_warps=8 if size >= WIDE else 4,
    )  # fmt: skip
