"""Attention over block tables on a GPU, in Triton: of decodes, and of prompt chunks. Nothing is gathered.

A decode's keys are shared among programs ("splits"), each of which keeps a running softmax of its part; a second kernel
joins the parts by their log-sum-exps (flash decoding: Dao et al., 2023). A prompt's programs each take some queries of
a head, and all keys before them (FlashAttention 2: Dao, 2023). Masked loads give zeros, so that a NaN in a slot which
is not the sequence's own cannot reach it.

Shapes: S decodes, T tokens of a chunk, Hq query heads = Hkv key/value heads x G; D, Dv head dims. Pools are
(Hkv, num_slots, dim); a slot is block_table[i // block_size] * block_size + i % block_size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DOT = 16  # the least side of a matrix that `tl.dot` multiplies
MOST_SPLITS = 32
WIDE_HEAD = 128  # wider heads take fewer keys at once: they would not fit into shared memory


@triton.jit
def _capped(scores, SOFTCAP: tl.constexpr):
    if SOFTCAP > 0:
        scores = SOFTCAP * (2.0 / (1.0 + tl.exp(-2.0 * scores / SOFTCAP)) - 1.0)  # SOFTCAP * tanh(scores / SOFTCAP)
    return scores


@triton.jit
def _decode(
    query, keys, values, tables, positions, sinks, out, sums,
    query_row, query_head, num_slots, table_row, scaling,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    last = tl.load(positions + row)
    first = last * 0
    if WINDOW > 0:
        first = tl.maximum(last + 1 - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(last + 1 - first, SPLITS), KEYS) * KEYS
    begin = first + split * share
    end = tl.minimum(begin + share, last + 1)

    g, d, e = tl.arange(0, ROWS), tl.arange(0, PADDED), tl.arange(0, PADDED_V)
    heads = head * G + g
    mine = tl.load(
        query + row * query_row + heads[:, None] * query_head + d[None, :],
        mask=(g < G)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # noqa: SIM102  (the first is known when it is compiled)
        if split == 0:  # a key without a value
            largest = tl.load(sinks + heads, mask=g < G, other=0.0).to(tl.float32)
            total += 1.0
    found = tl.zeros([ROWS, PADDED_V], tl.float32)
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        inside = at < end
        block = tl.load(tables + row * table_row + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slots = head.to(tl.int64) * num_slots + block * BLOCK_SIZE + at % BLOCK_SIZE
        key = tl.load(keys + slots[None, :] * D + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
        scores = _capped(tl.dot(mine, key, input_precision="ieee") * scaling, SOFTCAP)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(largest - higher)
        value = tl.load(values + slots[:, None] * DV + e[None, :], mask=inside[:, None] & (e < DV)[None, :], other=0.0)
        found = found * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        largest = higher
    place = (row * num_kv_heads * G + heads) * SPLITS + split
    found = found / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + place[:, None] * DV + e[None, :],
        found.to(out.dtype.element_ty),
        mask=(g < G)[:, None] & (e < DV)[None, :],
    )
    if SPLITS > 1:
        tl.store(sums + place, tl.where(total == 0.0, float("-inf"), largest + tl.log(total)), mask=g < G)


@triton.jit
def _join(parts, sums, out, DV: tl.constexpr, SPLITS: tl.constexpr, PADDED_V: tl.constexpr):
    place = tl.program_id(0)  # of a row and a query head
    s, e = tl.arange(0, SPLITS), tl.arange(0, PADDED_V)
    own = tl.load(sums + place * SPLITS + s)
    weights = tl.exp(own - tl.max(own, 0))
    part = tl.load(parts + (place * SPLITS + s)[:, None] * DV + e[None, :], mask=(e < DV)[None, :], other=0.0)
    found = tl.sum(part * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + place * DV + e, found.to(out.dtype.element_ty), mask=e < DV)


@triton.jit(do_not_specialize=["start", "num_rows"])
def _prompt(
    query, keys, values, table, sinks, out,
    query_row, query_head, num_slots, start, num_rows, scaling,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    r, d, e = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED), tl.arange(0, PADDED_V)
    is_row = r < num_rows
    mine = tl.load(
        query + r.to(tl.int64)[:, None] * query_row + head * query_head + d[None, :],
        mask=is_row[:, None] & (d < D)[None, :],
        other=0.0,
    )
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        largest = tl.full([ROWS], 0.0, tl.float32) + tl.load(sinks + head).to(tl.float32)
        total += 1.0
    found = tl.zeros([ROWS, PADDED_V], tl.float32)
    first = tile * 0
    if WINDOW > 0:
        first = tl.maximum(start + tile * ROWS + 1 - WINDOW, 0)
    end = start + tl.minimum((tile + 1) * ROWS, num_rows)
    for begin in range(first, end, KEYS):
        at = begin + tl.arange(0, KEYS)
        inside = at < end
        block = tl.load(table + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slots = (head // G).to(tl.int64) * num_slots + block * BLOCK_SIZE + at % BLOCK_SIZE
        key = tl.load(keys + slots[None, :] * D + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
        scores = _capped(tl.dot(mine, key, input_precision="ieee") * scaling, SOFTCAP)
        seen = at[None, :] <= start + r[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > start + r[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has seen no key yet
        weights = tl.exp(scores - finite[:, None])
        shrink = tl.exp(largest - finite)
        value = tl.load(values + slots[:, None] * DV + e[None, :], mask=inside[:, None] & (e < DV)[None, :], other=0.0)
        found = found * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        largest = higher
    found = found / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + (r.to(tl.int64)[:, None] * num_heads + head) * DV + e[None, :],
        found.to(out.dtype.element_ty),
        mask=is_row[:, None] & (e < DV)[None, :],
    )


def attend_decodes(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    num_programs: int = 264,
) -> torch.Tensor:
    """One query per row, each over its own blocks. query (Hq, S, D), pools (Hkv, num_slots, dim) -> (S, Hq, Dv).

    positions (S,) are those of the queries, whose keys are stored; block_tables (S, num_blocks). The keys of a row are
    split until there are `num_programs` programs: two for each multiprocessor.
    """
    query = query if query.stride(2) == 1 else query.contiguous()
    num_heads, num_rows, key_dim = query.shape
    num_kv_heads, num_slots, value_dim = values.shape
    splits = min(MOST_SPLITS, triton.next_power_of_2(max(1, num_programs // (num_rows * num_kv_heads))))
    out = query.new_empty(num_rows, num_heads, value_dim)
    parts, sums = out, out
    if splits > 1:
        parts = query.new_empty(num_rows, num_heads, splits, value_dim, dtype=torch.float32)
        sums = query.new_empty(num_rows, num_heads, splits, dtype=torch.float32)
    group = num_heads // num_kv_heads
    _decode[(num_rows, num_kv_heads, splits)](
        query, keys, values, block_tables, positions, query if sinks is None else sinks, parts, sums,
        query.stride(1), query.stride(0), num_slots, block_tables.stride(0), scaling,
        G=group, D=key_dim, DV=value_dim, BLOCK_SIZE=block_size, WINDOW=window or 0, SOFTCAP=softcap or 0.0,
        HAS_SINKS=sinks is not None, SPLITS=splits, ROWS=max(DOT, triton.next_power_of_2(group)),
        KEYS=64 if max(key_dim, value_dim) <= WIDE_HEAD else 32, **_padded(key_dim, value_dim),
    )  # fmt: skip
    if splits > 1:
        _join[(num_rows * num_heads,)](
            parts, sums, out, DV=value_dim, SPLITS=splits, PADDED_V=triton.next_power_of_2(value_dim), num_warps=1
        )
    return out


def attend_prompt(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    block_table: torch.Tensor,
    block_size: int,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """A sequence's tokens from position `start` on, each over what is before it and itself, in its blocks.

    query (Hq, T, D), pools (Hkv, num_slots, dim) -> (T, Hq, Dv). Keys and values of the tokens are stored already.
    block_table (num_blocks,).
    """
    query = query if query.stride(2) == 1 else query.contiguous()
    num_heads, num_rows, key_dim = query.shape
    num_kv_heads, num_slots, value_dim = values.shape
    out = query.new_empty(num_rows, num_heads, value_dim)
    is_small = max(key_dim, value_dim) <= WIDE_HEAD and query.dtype is not torch.float32
    rows, keys_at_once = (64, 64) if is_small else (32, 32)
    _prompt[(triton.cdiv(num_rows, rows), num_heads)](
        query, keys, values, block_table, query if sinks is None else sinks, out,
        query.stride(1), query.stride(0), num_slots, start, num_rows, scaling,
        G=num_heads // num_kv_heads, D=key_dim, DV=value_dim, BLOCK_SIZE=block_size, WINDOW=window or 0,
        SOFTCAP=softcap or 0.0, HAS_SINKS=sinks is not None, ROWS=rows, KEYS=keys_at_once,
        **_padded(key_dim, value_dim),
    )  # fmt: skip
    return out


def _padded(key_dim: int, value_dim: int) -> dict[str, int]:
    return {
        "PADDED": max(DOT, triton.next_power_of_2(key_dim)),
        "PADDED_V": max(DOT, triton.next_power_of_2(value_dim)),
    }
