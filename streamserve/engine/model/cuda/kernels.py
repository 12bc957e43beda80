"""The GPU's kernels as functions of tensors: attention over block tables, a layer's heads, norms, gates, draws.

Each computes what a function of `engine/model/` does with torch, which is its reference and serves where there is no
Triton. Nothing here waits for the GPU. Knows tensors; no sequences. Engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, partial

import torch

from streamserve.engine.model.batch import on_device

_logger = logging.getLogger(__name__)


class GPUKernels:
    """The Triton kernels for one device. Opened by `open_gpu_kernels`."""

    def __init__(self, device: torch.device, num_programs: int) -> None:
        """`num_programs` keep the device busy."""
        from streamserve.engine.model.cuda import draw, gate, heads, norm, paged_attention

        self.device = device
        self.attend_decodes = partial(paged_attention.attend_decodes, num_programs=num_programs)
        self.attend_prompt = paged_attention.attend_prompt
        self.turn_and_store = heads.turn_and_store
        self.gated = gate.gated
        self.norm, self.add_norm = norm.norm, norm.add_norm
        self._draw = draw.draw

    def write_slots(self, pool: torch.Tensor, slots: torch.Tensor, vectors: torch.Tensor) -> None:
        """Store vectors (num_heads, num_tokens, dim) at slots (num_tokens,) of pool (num_heads, num_slots, dim)."""
        pool.index_copy_(1, slots, vectors)

    def draw(
        self, logits: torch.Tensor, shapes: Sequence[tuple[float, float, float]], keys: Sequence[tuple[int, int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw from each row of float32 logits (num_rows, vocab_size): token ids (num_rows,), and which are finite.

        shapes are each row's (temperature, top_p, min_p), a temperature of 0 greedy; keys each row's (top_k, and the
        two numbers of `sampler.row_key`).
        """
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        table = on_device([(*shape, float("-inf")) for shape in shapes], torch.float32, logits.device)
        limits = [top_k if 0 < top_k < logits.shape[1] else 0 for top_k, *_ in keys]
        if any(limits):
            largest = logits.topk(max(limits), dim=-1).values
            rows = [row for row, limit in enumerate(limits) if limit]
            row_index = on_device(rows, torch.int64, logits.device)
            places = on_device([limits[row] - 1 for row in rows], torch.int64, logits.device)
            table[:, 3].index_copy_(0, row_index, largest.index_select(0, row_index).gather(1, places[:, None])[:, 0])
        row_keys = on_device([key[1:] for key in keys], torch.int32, logits.device)
        return self._draw(logits, table, row_keys)


def open_gpu_kernels(device: torch.device) -> GPUKernels | None:
    """Return the kernels for a GPU, if Triton is here and compiles for it; None, and a warning, without."""
    try:
        kernels = GPUKernels(device, 2 * torch.cuda.get_device_properties(device).multi_processor_count)
        kernels.gated(torch.zeros(1, 2, device=device), "silu")
    except Exception as error:  # Triton asks the driver, ptxas and a C compiler: each raises in its own way
        _warn(f"{type(error).__name__}: {error}".splitlines()[0])
        return None
    return kernels


@cache
def _warn(reason: str) -> None:
    """Say once that a slower path serves."""
    _logger.warning(
        "GPU kernels are off: %s. Without them a step takes several times as long. They need the package triton, "
        "which PyTorch's CUDA build brings, and a C compiler.",
        reason,
    )
