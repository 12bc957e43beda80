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
from streamserve.engine.kv.groups import (
    ONE_GROUP,
    Windows,
    group_layers,
    most_blocks,
    most_sequences,
    most_tokens,
    windows_by_group,
    within,
)
from streamserve.engine.model.decoder.families import ACTIVATIONS, FAMILIES
from streamserve.engine.model.decoder.families import Windows as WindowedLayers

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
# What config.json may leave out: the window by transformers' config class, and that each so many-th layer has none.
DEFAULT_WINDOWS = {
    **dict.fromkeys(("mistral", "ministral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "olmo3"), 4096),
    "gemma4_text": 512,
    "gpt_oss": 128,
}
EACH_FULL = {"gemma2": 2, "gpt_oss": 2, "olmo3": 4, "gemma3_text": 6, "gemma4_text": 6}
BY_CONFIG = ("qwen2", "qwen3", "qwen3_moe", "smollm3")  # windows are off unless use_sliding_window says otherwise
# Rotary embeddings that depend on the longest position in the *batch*: a neighbour would change a sequence's answer.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope", "su"}


class UnknownShape(Exception):
    """config.json lacks a number that the size of the KV memory depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one engine holds in one dtype. `weight_bytes` None: not known.

    `streams[n]`: how many sequences of n tokens are admitted at once; None: the model takes none that long. A step
    holds `max_num_seqs` of them. `max_tokens`: the longest sequence that ever fits. `windows`: how far each group of
    layers looks back; a block is of one group. `kept`: the same if what lies before the windows were kept, None where
    it is.
    """

    dtype: str
    bytes_per_token: int
    weight_bytes: int | None
    pool_bytes: int
    num_blocks: int
    max_tokens: int
    streams: Mapping[int, int | None]
    windows: Windows = ONE_GROUP
    kept: Capacity | None = None


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
    longest = engine.max_model_len or model_len(model)
    layers = [layer for one in ([model] if draft is None else [model, draft]) for layer in _layers(one)]
    of_layers = [_layer_bytes(heads, dim, dtype, engine.kv_dtype) for heads, dim in layers]
    weight_bytes = None if parameters is None else parameters * DTYPE_BYTES[dtype]
    budget = _pool_budget(engine, memory_bytes, weight_bytes or 0, on_gpu)

    def held(groups: list[list[int]], windows: Windows, kept: Capacity | None = None) -> Capacity:
        block_bytes = engine.block_size * sum(of_layers[index] for index in groups[0])
        num_blocks = blocks_of(engine, budget, block_bytes, longest=longest, windows=windows)
        sizes = engine.block_size, windows, engine.max_num_batched_tokens
        return Capacity(
            dtype=dtype,
            bytes_per_token=sum(of_layers),
            weight_bytes=weight_bytes,
            pool_bytes=num_blocks * block_bytes,
            num_blocks=num_blocks,
            max_tokens=max(0, max_servable_tokens(longest, num_blocks, *sizes)),
            streams={n: _streams(n, num_blocks, engine, windows) if n <= longest else None for n in LENGTHS},
            windows=windows,
            kept=kept,
        )

    whole = held([list(range(len(layers)))], ONE_GROUP)
    if on_gpu or draft is not None or len(set(layers)) > 1:
        return whole
    by_layer = within(dict(enumerate(layer_windows(model)[: len(layers)])), longest)
    windows = windows_by_group(groups := group_layers(by_layer), by_layer)
    return held(groups, windows, whole) if any(windows) else whole


def _pool_budget(engine: EngineConfig, memory_bytes: int, weight_bytes: int, on_gpu: bool) -> int:
    if engine.kv_cache_bytes is not None:
        return engine.kv_cache_bytes
    if on_gpu:
        return pool_bytes_on_gpu(memory_bytes - weight_bytes, engine.memory_share)
    return pool_bytes_on_cpu(memory_bytes, engine.memory_share, weight_bytes)


def _streams(num_tokens: int, num_blocks: int, engine: EngineConfig, windows: Windows) -> int:
    fitting = most_sequences(
        num_blocks - NULL_BLOCKS, num_tokens, windows, engine.block_size, engine.max_num_batched_tokens
    )
    return fitting if engine.max_admitted is None else min(fitting, engine.max_admitted)


def blocks_of(engine: EngineConfig, budget_bytes: int, block_bytes: int, *, longest: int, windows: Windows) -> int:
    """Return how many blocks a pool has, with the null block: by NUM_BLOCKS, or as many as the budget holds.

    NUM_BLOCKS stands for as many bytes, in blocks of one group. No more than so many of the longest sequences fill.
    """
    if engine.num_blocks is not None:
        return (engine.num_blocks - NULL_BLOCKS) * len(windows) + NULL_BLOCKS
    of_longest = most_blocks(longest, windows, engine.block_size, engine.max_num_batched_tokens)
    return min(budget_bytes // block_bytes, most_whole(engine) * of_longest + NULL_BLOCKS)


def pool_bytes_on_cpu(total_bytes: int, share: float | None, weight_bytes: int = 0) -> int:
    """Bytes for KV out of all RAM; without a `share`, a quarter of it up to 4 GiB, and at most what weights leave."""
    if share is not None:
        return int(total_bytes * share)
    left = int((total_bytes - weight_bytes) * LEFT_SHARE)
    return max(0, min(int(total_bytes * CPU_SHARE), MAX_DEFAULT_CPU_BYTES, left))


def pool_bytes_on_gpu(free_bytes: int, share: float | None) -> int:
    """Bytes for KV out of what the weights leave free."""
    return max(0, int(free_bytes * (GPU_SHARE if share is None else share)))


def most_whole(engine: EngineConfig) -> int:
    """Return for how many of the longest sequences there is memory at most: for a step's, or for the `max_admitted`."""
    return max(engine.max_num_seqs, engine.max_admitted or 0)


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
    return sum(_layer_bytes(heads, dim, dtype, kv_dtype) for heads, dim in _layers(model))


def _layer_bytes(num_heads: int, dim: int, dtype: str, kv_dtype: str) -> int:
    """Return what a layer stores for a token."""
    return num_heads * (dim + 2 * KV_SCALE_BYTES if kv_dtype == "int8" else dim * DTYPE_BYTES[dtype])


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
    limit = text.get("max_position_embeddings") or text.get("n_positions")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) in BATCH_DEPENDENT_ROPE:
        original = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
        limit = min((length for length in (limit, original) if length), default=None)
    return limit or DEFAULT_MODEL_LEN


def layer_windows(model: Mapping[str, Any]) -> list[int | None]:
    """Return how far each layer looks back, None: to the start.

    Of families whose layers are not ours everything is kept. (spec.py reads the same from transformers' config.)
    """
    text = text_config(model)
    kind, num_layers = str(text.get("model_type")), _first(text, "num_hidden_layers", "n_layer")
    family, window = FAMILIES.get(kind), text.get("sliding_window", DEFAULT_WINDOWS.get(kind))
    activation = text.get("hidden_act") or text.get("hidden_activation") or ACTIVATIONS[0]
    is_off = not text.get("use_sliding_window", kind not in BY_CONFIG) or text.get("use_bidirectional_attention")
    if family is None or not window or is_off or activation not in ACTIVATIONS:
        return [None] * num_layers
    if family.windows is WindowedLayers.ALL:
        return [window] * num_layers
    if family.windows is WindowedLayers.NONE:
        return [None] * num_layers
    return [window if name == "sliding_attention" else None for name in _layer_types(text, kind, num_layers)]


def _layer_types(text: Mapping[str, Any], kind: str, num_layers: int) -> list[str]:
    if isinstance(text.get("layer_types"), list):
        return list(text["layer_types"])
    each = text.get("sliding_window_pattern") or EACH_FULL.get(kind)
    if each:
        is_windowed = [bool((index + 1) % each) for index in range(num_layers)]
    elif kind == "smollm3":  # the layers whose heads do not turn
        is_windowed = [not turns for turns in text.get("no_rope_layers") or []]
    elif kind in BY_CONFIG:
        is_windowed = [index >= text.get("max_window_layers", 28) for index in range(num_layers)]
    else:
        is_windowed = [True] * num_layers
    return ["sliding_attention" if one else "full_attention" for one in is_windowed]


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
