"""Configuration values of the engine, apart from the things that run. Unknown keys are refused in conf.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Shape and limits of one engine.

    `num_blocks` None: computed from `kv_cache_bytes`, which None means the default share of memory (a quarter of RAM up
    to 4 GiB on CPU, 0.9 of what is free after weights on a GPU). `max_model_len` None: the model's own.
    `itl_target_seconds` bounds how much prefill may join a step that also decodes.
    """

    block_size: int = 32
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    prefill_chunk: int = 256
    prefix_caching: bool = True
    max_waiting: int = 256
    default_max_tokens: int | None = None
    step_seconds: float = 30.0
    check_integrity: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and in what numeric form. `path` is a folder or a hub id, or "echo" for the engine without weights.

    `dtype`: "auto" (the checkpoint's), "float32" or "bfloat16". `device`: "auto" (CUDA if there is one), "cpu", "cuda".
    `packed` None: oneDNN-packed linears wherever they apply (CPU).
    """

    alias: str
    path: str
    dtype: str = "auto"
    device: str = "auto"
    packed: bool | None = None
    parity_probe: bool = True
    num_threads: int | None = None
