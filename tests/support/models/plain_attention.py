"""Paged attention in its plainest form: one query at a time, in float32. The reference of the tests.

The arguments are those of the fast functions in `attention`.
"""

from __future__ import annotations

import torch

from streamserve.engine.model.attention import Variant
from streamserve.engine.model.kv_cache import KVCache


def attend(
    query: torch.Tensor, kv: KVCache, layer: int, block_table: tuple[int, ...], start: int, variant: Variant
) -> torch.Tensor:
    """query (Hq, T, D) at positions start, start + 1, … of one sequence -> (T, Hq, Dv), float32."""
    rows = [
        attend_one(query[:, row].float(), kv, layer, block_table, start + row, variant) for row in range(query.shape[1])
    ]
    return torch.stack(rows)


def attend_one(
    query: torch.Tensor, kv: KVCache, layer: int, block_table: tuple[int, ...], position: int, variant: Variant
) -> torch.Tensor:
    """query (Hq, D) at `position` over all positions it may see -> (Hq, Dv)."""
    first = 0 if variant.window is None else max(0, position + 1 - variant.window)
    slots = [
        block_table[place // kv.block_size] * kv.block_size + place % kv.block_size
        for place in range(first, position + 1)
    ]
    heads = [_attend_head(head, query[head], kv, layer, slots, variant, len(query)) for head in range(len(query))]
    return torch.stack(heads)


def _attend_head(
    head: int, query: torch.Tensor, kv: KVCache, layer: int, slots: list[int], variant: Variant, num_heads: int
) -> torch.Tensor:
    """query (D,) -> (Dv,)."""
    kv_head = head // (num_heads // kv.keys[layer].shape[0])
    keys = kv.keys[layer][kv_head, slots].float()  # (L, D)
    values = kv.values[layer][kv_head, slots].float()  # (L, Dv)
    scores = keys @ query * variant.scaling  # (L,)
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    if variant.sinks is not None:
        scores = torch.cat([scores, variant.sinks[head].float()[None]])
    weights = torch.softmax(scores, dim=0)[: len(slots)]
    return weights @ values
