"""The paged KV memory: for every layer one pool of keys and one of values, cut into blocks.

Knows shapes and bytes; not sequences, not attention. Lives on the engine thread. (Idea: vLLM's paged KV cache; block 0
is the null block, so that an unset table entry never names somebody's memory.)

    pool of one layer, head-major:    (num_kv_heads, num_blocks * block_size, head_dim)
    slot of position i of a sequence: block_table[i // block_size] * block_size + i % block_size
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

GIB = 1 << 30
MAX_DEFAULT_CPU_BYTES = 4 * GIB
CPU_SHARE = 0.25
CUDA_SHARE = 0.9
NULL_BLOCKS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one attention layer stores for a token. Value heads may be narrower than key heads (MLA)."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None = None

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of key and value for one token in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * int(dtype.itemsize)


class KVCache:
    """Key and value pools by layer index. Slots are written and read by index; nothing is ever cleared."""

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        num_slots = num_blocks * block_size

        def pool(num_heads: int, dim: int) -> torch.Tensor:
            # Empty: the system hands out the pages when they are first written. Slots nobody wrote are never read.
            return torch.empty(num_heads, num_slots, dim, dtype=dtype, device=device)

        self.keys = {index: pool(layer.num_kv_heads, layer.key_dim) for index, layer in layers.items()}
        self.values = {index: pool(layer.num_kv_heads, layer.value_dim) for index, layer in layers.items()}

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key (num_kv_heads, num_tokens, key_dim) and value of the packed tokens at `slots` (num_tokens,)."""
        self.keys[layer].index_copy_(1, slots, key)
        self.values[layer].index_copy_(1, slots, value)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of keys and values at `slots` (n,): two tensors (num_kv_heads, n, dim)."""
        return self.keys[layer].index_select(1, slots), self.values[layer].index_select(1, slots)

    def fill_block(self, block_id: int, number: float) -> None:
        """Overwrite one block in every layer (tests poison freed blocks with NaN)."""
        span = slice(block_id * self.block_size, (block_id + 1) * self.block_size)
        for pool in (*self.keys.values(), *self.values.values()):
            pool[:, span] = number


def bytes_per_block(layers: Mapping[int, LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes one block takes over all layers."""
    return block_size * sum(layer.bytes_per_token(dtype) for layer in layers.values())


def num_blocks_for(budget_bytes: int, block_bytes: int, *, most_useful: int) -> int:
    """Return how many blocks the budget holds, null block included, never more than `most_useful` plus the null one."""
    return min(budget_bytes // block_bytes, most_useful + NULL_BLOCKS)


def most_useful_blocks(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Blocks that the largest possible batch fills; more could only serve the prefix cache."""
    return max_num_seqs * blocks_for_tokens(max_model_len, block_size)


def blocks_for_tokens(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` positions touch."""
    return -(-num_tokens // block_size)


def max_tokens_that_fit(num_blocks: int, block_size: int) -> int:
    """The longest sequence the pool can ever hold: prompt + max_tokens above it never fits."""
    return (num_blocks - NULL_BLOCKS) * block_size


def default_budget(device: torch.device) -> int:
    """Bytes for KV when nobody said: a quarter of RAM up to 4 GiB on CPU, 0.9 of what is free on a GPU."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free * CUDA_SHARE)
    return min(int(total_memory() * CPU_SHARE), MAX_DEFAULT_CPU_BYTES)


def total_memory(cgroup_limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """RAM this process may use: the machine's, or its container's limit if that is lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(physical, int(cgroup_limit.read_text()))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return physical
