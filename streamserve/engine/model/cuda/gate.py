"""act(gate) * up in one launch, in float32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 1024  # of a program
KINDS = {"silu": 0, "swish": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "relu": 3}


@triton.jit
def _gate(both, out, size, KIND: tl.constexpr, COLUMNS: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = i < size
    x = tl.load(both + row * 2 * size + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * size + size + i, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        x = x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:  # 0.5 x (1 + tanh(y)) is x sigmoid(2 y)
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        x = tl.where(x > 0.0, x, x * 0.0)  # NaN stays
    tl.store(out + row * size + i, (x * up).to(out.dtype.element_ty), mask=inside)


def gated(both: torch.Tensor, activation: str) -> torch.Tensor:
    """Return act(gate) * up (T, I) of both (T, 2 I), side by side; `activation` is one of KINDS."""
    num_rows, size = both.shape[0], both.shape[1] // 2
    out = both.new_empty(num_rows, size)
    _gate[(num_rows, triton.cdiv(size, COLUMNS))](both, out, size, KIND=KINDS[activation], COLUMNS=COLUMNS)
    return out
