"""How much an engine holds: bytes and blocks from plain numbers, before anything is loaded.

A load allocates memory by the same functions, so that `streamserve_capacity` reports what a load gives.
Pure: no files, no torch. config.json is a mapping here; its keys are transformers'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from streamserve.engine.config import EngineConfig
from streamserve.engine.kv.groups import ONE_GROUP, Windows, most_tokens

MIB, GIB = 1 << 20, 1 << 30
ECHO_BYTES = 64 * MIB  # of an echo engine's process
MAX_DEFAULT_CPU_BYTES = 4 * GIB
CPU_SHARE = 0.25
LEFT_SHARE = 0.8  # of what the weights leave; the rest is for steps, and for others
GPU_SHARE = 0.9
NULL_BLOCKS = 1
DEFAULT_MODEL_LEN = 4096
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
KV_SCALE_BYTES = 4  # of a key or value in eight bits, beside its numbers
# What quantised weights have beside their numbers.
SCALES = ("weight_scale", "scale_inv", "input_scale", "scales", "qzeros", "zero_point", "g_idx", "weight_shape")
LENGTHS = (1024, 4096, 8192)


class UnknownShape(Exception):
    """config.json lacks a number that the size of the KV memory depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one engine holds in one dtype. `weight_bytes` None: not known.

    `streams[n]`: how many sequences of n tokens are admitted at once; None: the model takes none that long. A step
    holds `max_num_seqs` of them.
    """

    dtype: str
    bytes_per_token: int
    weight_bytes: int | None
    pool_bytes: int
    num_blocks: int
    streams: Mapping[int, int | None]


def capacity(
    model: Mapping[str, Any],
    engine: EngineConfig,
    *,
    dtype: str,
    memory_bytes: int,
    on_gpu: bool,
    parameters: int | None,
    draft: Mapping[str, Any] | None = None,
) -> Capacity:
    """Compute the capacity of an engine on a device with `memory_bytes`. `model` is its config.json.

    `draft` is its draft model's, whose `parameters` are counted too.
    """
    models = [model] if draft is None else [model, draft]
    bytes_per_token = sum(kv_bytes_per_token(one, dtype, engine.kv_dtype) for one in models)
    weight_bytes = None if parameters is None else parameters * DTYPE_BYTES[dtype]
    block_bytes, longest = bytes_per_token * engine.block_size, engine.max_model_len or model_len(model)
    useful = most_useful_blocks(most_whole(engine), longest, engine.block_size)
    num_blocks = engine.num_blocks
    if num_blocks is None:
        budget = _pool_budget(engine, memory_bytes, weight_bytes or 0, on_gpu)
        num_blocks = num_blocks_for(budget, block_bytes, most_useful=useful)
    return Capacity(
        dtype=dtype,
        bytes_per_token=bytes_per_token,
        weight_bytes=weight_bytes,
        pool_bytes=num_blocks * block_bytes,
        num_blocks=num_blocks,
        streams={n: _streams(n, num_blocks, engine) if n <= longest else None for n in LENGTHS},
    )


def _pool_budget(engine: EngineConfig, memory_bytes: int, weight_bytes: int, on_gpu: bool) -> int:
    if engine.kv_cache_bytes is not None:
        return engine.kv_cache_bytes
    if on_gpu:
        return pool_bytes_on_gpu(memory_bytes - weight_bytes, engine.memory_share)
    return pool_bytes_on_cpu(memory_bytes, engine.memory_share, weight_bytes)


def _streams(num_tokens: int, num_blocks: int, engine: EngineConfig) -> int:
    fitting = max(0, num_blocks - NULL_BLOCKS) // blocks_for_tokens(num_tokens, engine.block_size)
    return fitting if engine.max_admitted is None else min(fitting, engine.max_admitted)


def pool_bytes_on_cpu(total_bytes: int, share: float | None, weight_bytes: int = 0) -> int:
    """Bytes for KV out of all RAM; without a `share`, a quarter of it up to 4 GiB, and at most what weights leave."""
    if share is not None:
        return int(total_bytes * share)
    left = int((total_bytes - weight_bytes) * LEFT_SHARE)
    return max(0, min(int(total_bytes * CPU_SHARE), MAX_DEFAULT_CPU_BYTES, left))


def pool_bytes_on_gpu(free_bytes: int, share: float | None) -> int:
    """Bytes for KV out of what the weights leave free."""
    return max(0, int(free_bytes * (GPU_SHARE if share is None else share)))


def num_blocks_for(budget_bytes: int, block_bytes: int, *, most_useful: int) -> int:
    """Return how many blocks the budget holds, with the null block: at most `most_useful` and the null block."""
    return min(budget_bytes // block_bytes, most_useful + NULL_BLOCKS)


def most_whole(engine: EngineConfig) -> int:
    """Return for how many of the longest sequences there is memory at most: for a step's, or for the `max_admitted`."""
    return max(engine.max_num_seqs, engine.max_admitted or 0)


def most_useful_blocks(num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Blocks that so many of the longest sequences fill. Most are shorter, so that more of them are admitted."""
    return num_seqs * blocks_for_tokens(max_model_len, block_size)


def blocks_for_tokens(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` positions touch."""
    return -(-num_tokens // block_size)


def max_tokens_that_fit(num_blocks: int, block_size: int, windows: Windows = ONE_GROUP, step_tokens: int = 0) -> int:
    """The longest sequence the pool can ever hold: prompt + max_tokens above it never fits.

    `windows`: of each group of layers (kv/groups.py); a step computes up to `step_tokens`.
    """
    return most_tokens(num_blocks - NULL_BLOCKS, windows, block_size, step_tokens)


def max_servable_tokens(
    max_model_len: int, num_blocks: int, block_size: int, windows: Windows = ONE_GROUP, step_tokens: int = 0
) -> int:
    """Return the largest prompt + max_tokens that can ever run."""
    return min(max_model_len, max_tokens_that_fit(num_blocks, block_size, windows, step_tokens))


def kv_bytes_per_token(model: Mapping[str, Any], dtype: str, kv_dtype: str = "auto") -> int:
    """What the KV memory stores for one token, over all layers (all of it, windows or not)."""
    if kv_dtype == "int8":
        return numbers_per_token(model) + sum(heads * 2 * KV_SCALE_BYTES for heads, _ in _layers(model))
    return numbers_per_token(model) * DTYPE_BYTES[dtype]


def numbers_per_token(model: Mapping[str, Any]) -> int:
    """How many numbers the KV memory stores for one token, over all layers (all of it, windows or not)."""
    return sum(heads * dim for heads, dim in _layers(model))


def _layers(model: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the heads of each layer that stores keys and values, and the numbers of a key and a value together."""
    text = text_config(model)
    unlike = _unlike_layers(text)
    num_stored = _first(text, "num_hidden_layers", "n_layer") - (text.get("num_kv_shared_layers") or 0)
    return (_heads_of_layer({**text, **unlike.get(index, {})}) for index in range(num_stored))


def _heads_of_layer(text: Mapping[str, Any]) -> tuple[int, int]:
    num_heads = _first(text, "num_attention_heads", "n_head")
    if "kv_lora_rank" in text and "v_head_dim" in text:  # MLA: transformers' code expands it to full heads
        key_dim = _first(text, "qk_nope_head_dim") + _first(text, "qk_rope_head_dim")
        return num_heads, key_dim + _first(text, "v_head_dim")
    num_kv_heads = 1 if text.get("multi_query") else text.get("num_key_value_heads") or num_heads
    head_dim = text.get("head_dim") or _first(text, "hidden_size", "n_embd") // num_heads
    return int(num_kv_heads), int(2 * head_dim)


def _unlike_layers(text: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return the fields of the layers with another shape, by their number (Gemma 4: those with full attention)."""
    if text.get("per_layer_config"):
        return {int(index): own for index, own in text["per_layer_config"].items()}
    if not text.get("global_head_dim"):
        return {}
    if not isinstance(text.get("layer_types"), list):
        raise UnknownShape("config.json has no list 'layer_types', and what a token takes depends on it.")
    own = {"head_dim": text["global_head_dim"]}
    if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads"):
        own["num_key_value_heads"] = text["num_global_key_value_heads"]
    return {index: own for index, kind in enumerate(text["layer_types"]) if kind == "full_attention"}


def model_len(model: Mapping[str, Any]) -> int:
    """Return the longest sequence by config.json, or the default of a load without it."""
    text = text_config(model)
    return text.get("max_position_embeddings") or text.get("n_positions") or DEFAULT_MODEL_LEN


def has_sliding_window(model: Mapping[str, Any]) -> bool:
    """Whether some layers look back only so far. All their keys and values are counted; a load may keep fewer."""
    text = text_config(model)
    return bool(text.get("sliding_window")) and text.get("use_sliding_window", True)


def text_config(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json about text, of a multimodal model."""
    nested = model.get("text_config")
    return nested if isinstance(nested, Mapping) else model


def num_parameters(header: Mapping[str, Any], packed_bits: int = 32) -> int:
    """Numbers in a safetensors file, by its header; in quantised weights as many as they stand for.

    `packed_bits` are those of a number in words of 32 (GPTQ, AWQ).
    """
    return sum(
        prod(entry["shape"]) * _numbers_in(name, packed_bits)
        for name, entry in header.items()
        if name != "__metadata__"
    )


def _numbers_in(name: str, packed_bits: int) -> int:
    """Return how many weights a stored number has; 0: it is a scale or the like."""
    if name.endswith((".qweight", ".weight_packed")):
        return 32 // packed_bits
    if name.endswith("_blocks"):  # MXFP4
        return 2
    return 0 if name.endswith(SCALES) else 1


def _first(text: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(text.get(name), int):
            return int(text[name])
    raise UnknownShape(f"config.json has no number {names[0]!r}, and what a token takes depends on it.")
