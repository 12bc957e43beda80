"""Between host and device: plain numbers in, results out, and what is left when memory runs out.

On a GPU nothing here waits but `HostCopy.wait`, and that for its own step only: later launches continue. On a
CPU all of it is plain assignment. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# Messages of allocators that raise no type of their own: torch's on the CPU, C++, cuBLAS and cuDNN.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "ALLOC_FAILED", "out of memory")


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CPU tensor on `device`. Through pinned memory, as a copy from any other waits for the GPU."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def on_device(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of plain numbers on `device`."""
    return to_device(torch.tensor(numbers, dtype=dtype), device)


class HostCopy:
    """Tensors on their way to the host. Make it right after the work that gives them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        is_cuda = any(tensor.is_cuda for tensor in tensors.values())
        self._copies = {name: _begin_copy(tensor) if is_cuda else tensor for name, tensor in tensors.items()}
        self._arrived = torch.cuda.Event() if is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> dict[str, torch.Tensor]:
        """Return the tensors on the host, by name."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies


def _begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an exception of torch means too little memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def give_back_memory(device: torch.device) -> None:
    """Return what torch keeps for later to the GPU, so that it can be cut anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
