"""What lies between a layer's first linear layer and its attention, in one launch: norms of heads, rotation, storing.

    [ q | k | v ] -> norm of each head of q and k -> rotation -> q; k and v go to their slots

A program takes a head of a token. Shapes: T tokens, Hq query heads, Hkv key/value heads, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _heads(
    qkv, weights, cos, sin, scales, slots, query, keys, values,
    num_slots, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_SCALE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = qkv + (token * (HQ + 2 * HKV) + head) * D
    d = tl.arange(0, PADDED)
    inside = d < D
    own = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
    if head < HQ + HKV:
        if HAS_NORM:
            rms = tl.rsqrt(tl.sum(own * own, 0) / D + eps)
            own = own * rms * tl.load(weights + head * D + d, mask=inside, other=0.0).to(tl.float32)
        if TURNED > 0:
            turns = d < TURNED
            other = tl.where(d < TURNED // 2, d + TURNED // 2, d - TURNED // 2)  # each number turns with this one
            partner = tl.load(source + other, mask=turns, other=0.0).to(tl.float32)
            if HAS_NORM:
                partner = partner * rms * tl.load(weights + head * D + other, mask=turns, other=0.0).to(tl.float32)
            c = tl.load(cos + token * TURNED + d, mask=turns, other=1.0).to(tl.float32)
            s = tl.load(sin + token * TURNED + d, mask=turns, other=0.0).to(tl.float32)
            own = own * c + partner * s
    if head < HQ:
        if HAS_SCALE:
            own = own * tl.load(scales + token).to(tl.float32)
        tl.store(query + (token * HQ + head) * D + d, own.to(query.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if head < HQ + HKV:
            place = ((head - HQ).to(tl.int64) * num_slots + slot) * D
            tl.store(keys + place + d, own.to(keys.dtype.element_ty), mask=inside)
        else:
            place = ((head - HQ - HKV).to(tl.int64) * num_slots + slot) * D
            tl.store(values + place + d, own.to(values.dtype.element_ty), mask=inside)


def turn_and_store(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_heads: int,
    turn: tuple[torch.Tensor, torch.Tensor] | None,
    weights: torch.Tensor | None,
    eps: float,
    query_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Store keys and values of qkv (T, (Hq + 2 Hkv) D) at slots (T,); return the queries (Hq, T, D).

    `turn`: cos and sin (T, 1, dim), sin with its sign, of the first `dim` numbers of a head; `weights` (Hq + Hkv, D) of
    norms of heads; `query_scale` T numbers. Pools (Hkv, num_slots, D).
    """
    num_kv_heads, num_slots, head_dim = keys.shape
    num_tokens = len(qkv)
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    cos, sin = (qkv, qkv) if turn is None else turn
    _heads[(num_tokens, num_heads + 2 * num_kv_heads)](
        qkv, qkv if weights is None else weights, cos, sin, qkv if query_scale is None else query_scale, slots,
        query, keys, values, num_slots, eps,
        HQ=num_heads, HKV=num_kv_heads, D=head_dim, TURNED=0 if turn is None else cos.shape[-1],
        HAS_NORM=weights is not None, HAS_SCALE=query_scale is not None, PADDED=triton.next_power_of_2(head_dim),
        num_warps=1,
    )  # fmt: skip
    return query.transpose(0, 1)
