"""The paged KV memory: for every layer one pool of keys and one of values, cut into blocks.

Knows shapes and bytes; not sequences, not attention. Lives on the engine thread. (Idea: vLLM's paged KV cache; block 0
is the null block, so that an unset table entry never points at a sequence's memory.)

    pool of one layer, head-major:    (num_kv_heads, num_blocks * block_size, head_dim)
    slot of position i of a sequence: block_table[i // block_size] * block_size + i % block_size
    a vector of an int8 pool:         [ head_dim numbers, -127 to 127 | their scale, a float32 ]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from streamserve.engine import capacity
from streamserve.engine.config import EngineConfig
from streamserve.engine.kv.groups import Windows, group_layers, windows_by_group, within
from streamserve.engine.model.load.source import total_memory

Groups = tuple[tuple[int, ...], ...]  # the layers of each group

SCALE_BYTES = capacity.KV_SCALE_BYTES
_LEAST_SCALE = 1e-30  # below, a vector is stored as zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one attention layer stores for a token. Value heads may be narrower than key heads (MLA)."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None = None

    def bytes_per_token(self, dtype: torch.dtype, *, is_int8: bool = False) -> int:
        """Bytes of key and value for one token in this layer."""
        num = self.key_dim + self.value_dim
        return self.num_kv_heads * (num + 2 * SCALE_BYTES if is_int8 else num * int(dtype.itemsize))


class Slots:
    """Slots that every layer of a step reads, and their rows in a pool whose heads lie one below the other.

    Whole rows along the first axis are copied by all threads; the slots of each head are copied by one thread.
    """

    def __init__(self, slots: torch.Tensor) -> None:
        """`slots` (n,)."""
        self._slots = slots
        self._rows: dict[int, torch.Tensor] = {}

    def rows(self, num_heads: int, num_slots: int) -> torch.Tensor:
        """Return the rows (num_heads * n,) in a pool (num_heads * num_slots, dim)."""
        if num_heads not in self._rows:
            first = torch.arange(num_heads, device=self._slots.device)[:, None] * num_slots
            self._rows[num_heads] = (first + self._slots).view(-1)
        return self._rows[num_heads]


class KVCache:
    """Key and value pools by layer index. Slots are written and read by index; nothing is ever cleared.

    Layers are in `groups` (see kv/groups.py), whose layers of the same place have one pool: a block is of one group.
    `dtype` is that of the numbers that are written and read. `is_int8`: they are kept in eight bits, each vector with
    a scale of its own. Torch and the native step store the same bits.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        is_int8: bool = False,
        groups: Groups = (),
    ) -> None:
        groups = groups or (tuple(layers),)
        self.group_of = {layer: group for group, own in enumerate(groups) for layer in own}
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.is_int8 = is_int8
        num_slots = num_blocks * block_size

        def pool(num_heads: int, dim: int) -> torch.Tensor:
            # Empty: the system allocates the pages when they are first written. Unwritten slots are never read.
            if is_int8:
                return torch.empty(num_heads, num_slots, dim + SCALE_BYTES, dtype=torch.int8, device=device)
            return torch.empty(num_heads, num_slots, dim, dtype=dtype, device=device)

        shapes = [layers[index] for index in groups[0]]
        keys = [pool(shape.num_kv_heads, shape.key_dim) for shape in shapes]
        values = [pool(shape.num_kv_heads, shape.value_dim) for shape in shapes]
        self.keys = {layer: one for own in groups for layer, one in zip(own, keys, strict=False)}
        self.values = {layer: one for own in groups for layer, one in zip(own, values, strict=False)}

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key (num_kv_heads, num_tokens, key_dim) and value of the packed tokens at `slots` (num_tokens,)."""
        if self.is_int8:
            key, value = quantize(key), quantize(value)
        self.keys[layer].index_copy_(1, slots, key)
        self.values[layer].index_copy_(1, slots, value)

    def read(self, layer: int, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of keys and values at n slots: two tensors (num_kv_heads, n, dim)."""
        keys, values = self.keys[layer], self.values[layer]
        num_heads, num_slots, _ = keys.shape
        rows = slots.rows(num_heads, num_slots)
        found = (
            keys.view(num_heads * num_slots, -1).index_select(0, rows).view(num_heads, -1, keys.shape[2]),
            values.view(num_heads * num_slots, -1).index_select(0, rows).view(num_heads, -1, values.shape[2]),
        )
        return (dequantize(found[0], self.dtype), dequantize(found[1], self.dtype)) if self.is_int8 else found

    def fill_block(self, block_id: int, number: float) -> None:
        """Overwrite one block in every layer (tests poison freed blocks with NaN)."""
        span = slice(block_id * self.block_size, (block_id + 1) * self.block_size)
        for pool in (*self.keys.values(), *self.values.values()):
            pool[:, span] = (
                quantize(torch.full((1, 1, pool.shape[2] - SCALE_BYTES), number)) if self.is_int8 else number
            )


def quantize(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors (..., dim) as rows of an int8 pool (..., dim + SCALE_BYTES), bit for bit as the native step.

    A vector with a number that is not finite gets NaN as its scale.
    """
    numbers = vectors.float()
    lost = (numbers * 0).sum(dim=-1, keepdim=True)  # 0, but for what is not finite
    scale = torch.where(lost == 0, numbers.abs().amax(dim=-1, keepdim=True) / 127, lost)
    inverse = torch.where(scale > _LEAST_SCALE, 1 / scale, 0.0)
    codes = (numbers * inverse).nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((codes, scale.view(torch.int8)), dim=-1)


def dequantize(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the vectors (..., dim) that rows of an int8 pool stand for."""
    codes, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (codes.float() * scale).to(dtype)


def groups_for(layers: Mapping[int, LayerShape], max_model_len: int) -> Groups:
    """Return the groups of layers; one where their shapes differ, as a block then takes another number of bytes."""
    if len({replace(layer, sliding_window=None) for layer in layers.values()}) > 1:
        return (tuple(layers),)
    return tuple(map(tuple, group_layers(within(_windows(layers), max_model_len))))


def windows_of(groups: Groups, layers: Mapping[int, LayerShape], max_model_len: int) -> Windows:
    """Return the window of each group; None where its layers see everything, or not all as far."""
    return windows_by_group(groups, within(_windows(layers), max_model_len))


def _windows(layers: Mapping[int, LayerShape]) -> dict[int, int | None]:
    return {index: layer.sliding_window for index, layer in layers.items()}


def bytes_per_block(
    layers: Mapping[int, LayerShape],
    block_size: int,
    dtype: torch.dtype,
    *,
    is_int8: bool = False,
    groups: Groups = (),
) -> int:
    """Bytes one block takes over all layers of a group."""
    own = groups[0] if groups else layers
    return block_size * sum(layers[index].bytes_per_token(dtype, is_int8=is_int8) for index in own)


def pool_bytes(config: EngineConfig, device: torch.device, weight_bytes: int = 0) -> int:
    """Bytes for KV, after the weights are loaded: by the config, or its share of the memory.

    `weight_bytes` are what the weights take as they are packed.
    """
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return capacity.pool_bytes_on_gpu(free, config.memory_share)
    return capacity.pool_bytes_on_cpu(total_memory(), config.memory_share, weight_bytes)
