"""Paged attention: of our decoder layers by `attend`, of transformers' modelling code by `AttentionInterface`.

A call writes the step's keys and values to their slots, then attends: all decodes of similar length in one call, and
each prefill chunk. Kernels read the blocks where they are; without them keys and values are gathered, a chunk
attends in slices of queries. transformers' call finds its `PagedAttention` on the attention module (set at load). Knows
slots and numbers, not sequences. Lives on the engine thread. (Slices of queries with the group of heads packed into the
rows: twice as fast as torch's SDPA in bf16 on CPU.)

Shapes: Hq query heads = Hkv key/value heads x G; T packed tokens; S rows of a decode group; L keys; D, Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from streamserve.engine.model.batch import DecodeMetadata, PrefillMetadata, StepBatch
from streamserve.engine.model.kv_cache import KVCache, LayerShape

NAME = "streamserve_paged"
_ATTRIBUTE = "streamserve_attention"
QUERY_SLICE_CPU = 128  # scores of a slice stay in the L2 cache
QUERY_SLICE_CUDA = 1024  # fewer launches
SHORT_CONTEXT = 1024  # up to here torch's SDPA is faster for a single query in bf16


@dataclass(frozen=True, slots=True)
class Variant:
    """The parameters of one layer's attention."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # (Hq,)

    @property
    def is_plain(self) -> bool:
        """Whether torch's SDPA can compute it."""
        return self.softcap is None and self.sinks is None

    @property
    def arguments(self) -> dict[str, Any]:
        """What the native kernels are given."""
        return {"scaling": self.scaling, "window": self.window, "softcap": self.softcap, "sinks": self.sinks}


class AttentionKernels(Protocol):
    """What attends without gathering: `kernels.Kernels` on a CPU, `cuda.kernels.GPUKernels` on a GPU."""

    def write_slots(self, pool: torch.Tensor, slots: torch.Tensor, vectors: torch.Tensor) -> None:
        """Store vectors (num_heads, num_tokens, dim) at slots (num_tokens,) of pool (num_heads, num_slots, dim)."""
        ...

    @property
    def attend_decodes(self) -> Callable[..., torch.Tensor]:
        """See `kernels.Kernels.attend_decodes`."""
        ...

    @property
    def attend_prompt(self) -> Callable[..., torch.Tensor]:
        """See `kernels.Kernels.attend_prompt`."""
        ...


class PagedAttention:
    """The step that the attention function works on. Each loaded model has one. `kernels` None: torch computes."""

    def __init__(self, kernels: AttentionKernels | None = None) -> None:
        self.kernels = kernels
        self.kv: KVCache | None = None
        self.batch: StepBatch | None = None
        self.recorded: dict[int, LayerShape] | None = None
        self.num_calls = 0

    @contextmanager
    def step(self, kv: KVCache, batch: StepBatch) -> Iterator[None]:
        """Let the attention calls inside the block work on `batch` and `kv`."""
        self.kv, self.batch = kv, batch
        try:
            yield
        finally:
            self.kv = self.batch = None

    @contextmanager
    def recording(self) -> Iterator[dict[int, LayerShape]]:
        """Collect the shape of every layer that calls, instead of attending."""
        self.recorded, self.num_calls = {}, 0
        try:
            yield self.recorded
        finally:
            self.recorded = None

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, variant: Variant
    ) -> torch.Tensor:
        """Attend. query (Hq, T, D), key (Hkv, T, D), value (Hkv, T, Dv) -> (T, Hq, Dv)."""
        self.num_calls += 1
        if self.recorded is not None:
            self.recorded[layer] = LayerShape(
                num_kv_heads=key.shape[0],
                key_dim=key.shape[2],
                value_dim=value.shape[2],
                sliding_window=variant.window,
            )
            return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])
        assert self.kv is not None, "attention was called outside a step"
        assert self.batch is not None
        return attend(layer, query, key, value, variant, self.kv, self.batch, kernels=self.kernels)


def attend(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    variant: Variant,
    kv: KVCache,
    batch: StepBatch,
    *,
    kernels: AttentionKernels | None = None,
    is_new: bool = True,
) -> torch.Tensor:
    """Attend over `layer` of the KV memory. query (Hq, T, D), key (Hkv, T, D), value (Hkv, T, Dv) -> (T, Hq, Dv).

    The step's keys and values are stored first; not `is_new`: an earlier call of this step has stored them. `kernels`:
    None computes with torch.
    """
    if is_new and (kernels is None or kv.is_int8):
        kv.write(layer, batch.slot_mapping, key, value)
    elif is_new and kernels is not None:
        kernels.write_slots(kv.keys[layer], batch.slot_mapping, key)
        kernels.write_slots(kv.values[layer], batch.slot_mapping, value)
    parts = [_attend_group(layer, query[:, group.rows], variant, kv, group, kernels) for group in batch.decodes]
    for span in batch.prefills:
        rows = span.rows
        parts.append(_attend_span(layer, query[:, rows], key[:, rows], value[:, rows], variant, kv, span, kernels))
    parts = [part.to(query.dtype) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_stored(
    layer: int, query: torch.Tensor, variant: Variant, kv: KVCache, batch: StepBatch, kernels: AttentionKernels
) -> torch.Tensor:
    """Attend by kernels over keys and values that are stored already. query (Hq, T, D) -> (T, Hq, Dv)."""
    parts = [_kernels_on_group(layer, query[:, group.rows], variant, kv, group, kernels) for group in batch.decodes]
    parts += [_kernels_on_span(layer, query[:, span.rows], variant, kv, span, kernels) for span in batch.prefills]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_group(
    layer: int,
    query: torch.Tensor,
    variant: Variant,
    kv: KVCache,
    group: DecodeMetadata,
    kernels: AttentionKernels | None,
) -> torch.Tensor:
    if kernels is None or query.dtype != kv.dtype:
        return attend_decodes(query, kv, layer, group, variant)
    return _kernels_on_group(layer, query, variant, kv, group, kernels)


def _attend_span(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    variant: Variant,
    kv: KVCache,
    span: PrefillMetadata,
    kernels: AttentionKernels | None,
) -> torch.Tensor:
    """Attend with a chunk's tokens, whose keys and values are stored: query (Hq, T, D), key (Hkv, T, D)."""
    if kernels is not None and query.dtype == kv.dtype:
        return _kernels_on_span(layer, query, variant, kv, span, kernels)
    if span.start > 0 or kv.is_int8:  # a chunk sees its own as later chunks see it
        key, value = kv.read(layer, span.context)
    return attend_prefill(query, key, value, span, variant)


def _kernels_on_group(
    layer: int, query: torch.Tensor, variant: Variant, kv: KVCache, group: DecodeMetadata, kernels: AttentionKernels
) -> torch.Tensor:
    return kernels.attend_decodes(
        query,
        kv.keys[layer],
        kv.values[layer],
        group.positions,
        group.block_tables,
        group.block_size,
        **variant.arguments,
    )


def _kernels_on_span(
    layer: int, query: torch.Tensor, variant: Variant, kv: KVCache, span: PrefillMetadata, kernels: AttentionKernels
) -> torch.Tensor:
    return kernels.attend_prompt(
        query,
        kv.keys[layer],
        kv.values[layer],
        span.start,
        span.block_table,
        kv.block_size,
        **variant.arguments,
    )


def attend_decodes(
    query: torch.Tensor, kv: KVCache, layer: int, group: DecodeMetadata, variant: Variant
) -> torch.Tensor:
    """One query per row, each over its own pages. query (Hq, S, D) -> (S, Hq, Dv)."""
    dtype = compute_dtype(query)
    index = group.index(variant.window, dtype)
    num_rows = query.shape[1]
    keys, values = kv.read(layer, index.slots)  # (Hkv, S * L, D), (Hkv, S * L, Dv)
    num_kv_heads, _, key_dim = keys.shape
    keys = keys.view(num_kv_heads, num_rows, index.width, key_dim).to(dtype)
    values = values.view(num_kv_heads, num_rows, index.width, -1).to(dtype)
    query = query.reshape(num_kv_heads, -1, num_rows, key_dim).transpose(1, 2).to(dtype)  # (Hkv, S, G, D)
    if variant.is_plain and _sdpa_pays(query, values):
        return _decode_sdpa(query, keys, values, index.mask, variant)
    return _decode_matmul(query, keys, values, index.mask, variant)


@cache
def _has_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def compute_dtype(query: torch.Tensor) -> torch.dtype:
    """The dtype to attend in: the model's, or float32 on a processor without arithmetic in bfloat16 and float16."""
    if query.device.type != "cpu" or query.dtype is torch.float32:
        return query.dtype
    is_native = query.dtype is torch.bfloat16 and _has_bf16()
    return torch.bfloat16 if is_native else torch.float32


def _sdpa_pays(query: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether torch's SDPA is faster than two batched matmuls. query (Hkv, S, G, D), values (Hkv, S, L, Dv).

    On a CPU its flash kernel is slow with a handful of query rows: it pays for one row over a short context in bf16.
    """
    if query.shape[-1] != values.shape[-1]:
        return False
    if query.device.type != "cpu":
        return True
    return query.dtype is not torch.float32 and query.shape[1] == 1 and values.shape[2] <= SHORT_CONTEXT


def _decode_sdpa(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, variant: Variant
) -> torch.Tensor:
    out = scaled_dot_product_attention(
        query.transpose(0, 1),  # (S, Hkv, G, D): the head group takes the axis of the queries
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=None if mask is None else mask[:, None, None, :],
        scale=variant.scaling,
    )
    return out.reshape(out.shape[0], -1, out.shape[-1])  # (S, Hq, Dv)


def _decode_matmul(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, variant: Variant
) -> torch.Tensor:
    num_kv_heads, num_rows, num_groups, _ = query.shape
    hidden = None if mask is None else mask.repeat(num_kv_heads, 1)[:, None]  # (Hkv * S, 1, L)
    query, keys_t = query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)
    if hidden is None or variant.softcap is not None:
        scores = torch.baddbmm(query.new_zeros(1, 1, 1), query, keys_t, beta=0, alpha=variant.scaling)
    else:
        scores = torch.baddbmm(hidden, query, keys_t, alpha=variant.scaling)  # (Hkv * S, G, L)
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
        scores = scores if hidden is None else scores + hidden
    sinks = None
    if variant.sinks is not None:
        sinks = variant.sinks.view(num_kv_heads, 1, num_groups, 1).expand(-1, num_rows, -1, -1).flatten(0, 1)
    out = torch.bmm(_softmax(scores, sinks), values.flatten(0, 1))  # (Hkv * S, G, Dv)
    return out.view(num_kv_heads, num_rows, num_groups, -1).transpose(0, 1).flatten(1, 2)  # (S, Hq, Dv)


def attend_prefill(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: PrefillMetadata, variant: Variant
) -> torch.Tensor:
    """One sequence's chunk over its whole context. query (Hq, T, D), keys (Hkv, L, D) -> (T, Hq, Dv).

    keys     [ 0 ............ start )[ start .............. L )
    slice of queries at [begin, end):  ^ sees [first_key, end)
    """
    dtype = compute_dtype(query)
    num_kv_heads, _, key_dim = keys.shape
    num_tokens = query.shape[1]
    keys, values = keys.to(dtype), values.to(dtype)
    grouped = (query.to(dtype) * variant.scaling).reshape(num_kv_heads, -1, num_tokens, key_dim)  # (Hkv, G, T, D)
    out = grouped.new_empty(num_tokens, num_kv_heads, grouped.shape[1], values.shape[2])
    step = QUERY_SLICE_CPU if query.device.type == "cpu" else QUERY_SLICE_CUDA
    keys_t = keys.transpose(1, 2)
    for row in range(0, num_tokens, step):
        stop = min(row + step, num_tokens)
        begin, end = span.start + row, span.start + stop
        first = span.first_key(begin, variant.window)
        mask = _slice_mask(span, begin, end, variant.window, dtype)
        result = _attend_slice(grouped[:, :, row:stop], keys_t[:, :, first:end], values[:, first:end], mask, variant)
        out[row:stop] = result.permute(2, 0, 1, 3)
    return out.view(num_tokens, -1, values.shape[2])


def _slice_mask(span: PrefillMetadata, begin: int, end: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Mask for the last keys of the slice: the causal triangle, or all keys where the window bites."""
    if span.first_key(end - 1, window) == 0:
        window = None
    full = span.mask(begin, end, window, dtype) if window is not None else None
    return full if full is not None else span.triangle(end - begin, dtype)


def _attend_slice(
    query: torch.Tensor, keys_t: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, variant: Variant
) -> torch.Tensor:
    """query (Hkv, G, m, D), keys_t (Hkv, D, n), values (Hkv, n, Dv), mask (m, at most n) -> (Hkv, G, m, Dv)."""
    num_kv_heads, num_groups, num_rows, _ = query.shape
    scores = torch.bmm(query.reshape(num_kv_heads, num_groups * num_rows, -1), keys_t)  # (Hkv, G * m, n)
    scores = scores.view(num_kv_heads, num_groups, num_rows, -1)
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    scores[..., scores.shape[-1] - mask.shape[-1] :] += mask
    sinks = None
    if variant.sinks is not None:
        sinks = variant.sinks.view(num_kv_heads, num_groups, 1, 1)
    probs = _softmax(scores, sinks)
    out = torch.bmm(probs.view(num_kv_heads, num_groups * num_rows, -1), values)
    return out.view(num_kv_heads, num_groups, num_rows, -1)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last axis; a sink takes part in the sum and is then dropped."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1].contiguous()


def forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: query (1, Hq, T, D) -> (1, T, Hq, Dv)."""
    paged: PagedAttention = getattr(module, _ATTRIBUTE)
    variant = Variant(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or None,
        softcap=softcap or None,
        sinks=s_aux,
    )
    out = paged(module.layer_idx, query[0], key[0], value[0], variant)
    return out[None], None


def attach(model: torch.nn.Module, kernels: AttentionKernels | None = None) -> PagedAttention:
    """Register the function with transformers and give every attention module of `model` one `PagedAttention`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, forward)
    paged = PagedAttention(kernels)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, _ATTRIBUTE, paged)
    return paged


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """Run `model` with another attention implementation inside the block."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before
