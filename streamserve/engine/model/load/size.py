"""How much memory an engine takes, from its files' headers and its config: before anything is loaded, without torch.

What a process takes beside weights and keys was measured (docs/engines.md#several-models-on-one-machine): PyTorch,
transformers, the tokenizer, and what the steps work with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamserve.engine.capacity import (
    CPU_SHARE,
    DTYPE_BYTES,
    GIB,
    MIB,
    UnknownShape,
    capacity,
    num_parameters,
    text_config,
)
from streamserve.engine.config import EmbedderConfig, EngineConfig, ModelConfig
from streamserve.engine.model.load.adapter_config import WEIGHTS
from streamserve.engine.model.load.quantized.scheme import read_scheme
from streamserve.engine.model.load.source import is_gguf, read_config, read_headers

PROCESS_BYTES = 700 * MIB  # of a process with PyTorch, without weights
EMBEDDER_FILES = ("*.json", "*.txt", "*.model", "tokenizer*", "*.safetensors", "*/config.json", "*/*.safetensors")
# Of the bytes of weights in 16 bits: linear layers that are rounded, with their scales, and what is not rounded.
_ROUNDED = {"int8": 0.6, "int4": 0.45}
_HALF = ("BF16", "F16")


def sized(model: ModelConfig, engine: EngineConfig, folder: Path, budget: int) -> tuple[int, EngineConfig]:
    """Return what a model's engine takes, and its config with the size of its KV memory. Raises ModelLoadError.

    Where the config names no size of the KV memory, it is a share of the budget instead of all memory. A draft model
    has its keys in that memory, too.
    """
    config = read_config(folder)
    weight_bytes, dtype = _weights(model, folder, config)
    try:
        pool = capacity(
            config,
            engine,
            dtype=dtype,
            memory_bytes=budget,
            on_gpu=False,
            parameters=weight_bytes // DTYPE_BYTES[dtype],
        ).pool_bytes
    except UnknownShape:
        pool = engine.kv_cache_bytes or int(budget * (engine.memory_share or CPU_SHARE))
    fitted = engine if engine.num_blocks is not None else replace(engine, kv_cache_bytes=pool)
    return PROCESS_BYTES + weight_bytes + _extra_bytes(model, engine) + pool, fitted


def _extra_bytes(model: ModelConfig, engine: EngineConfig) -> int:
    """Return the bytes of the weights of a draft model and of adapters. A load reports those that are missing."""
    num_bytes, draft = 0, Path(model.draft).expanduser()
    if model.draft and engine.speculation != "off" and draft.exists():
        num_bytes = _weights(replace(model, quantize=model.draft_quantize), draft, read_config(draft))[0]
    adapters = [Path(path).expanduser() / WEIGHTS for path in model.adapters.values()]
    return num_bytes + sum(adapter.stat().st_size for adapter in adapters if adapter.is_file())


def oversize(model: ModelConfig, engine: EngineConfig, folder: Path, limit: int) -> str:
    """Return why a model's weights alone are more than `limit` bytes, with both sizes and what helps; "" if they fit.

    Raises ModelLoadError. Quantised weights count as they are in the files: the load finds what they take beyond that.
    """
    config = {} if is_gguf(folder) else read_config(folder)
    extra = _extra_bytes(model, engine)
    if is_gguf(folder) or config.get("quantization_config"):
        files = [folder] if is_gguf(folder) else folder.glob("*.safetensors")
        num_bytes, form, ways = sum(file.stat().st_size for file in files), "in its files", []
    else:
        num_bytes, dtype = _weights(model, folder, config)
        form = f"as {model.quantize}" if model.quantize else f"in {dtype}"
        smaller = {
            '"DTYPE": "bfloat16"': replace(model, dtype="bfloat16"),
            '"QUANTIZE": "int8"': replace(model, quantize="int8"),
            '"QUANTIZE": "int4"': replace(model, quantize="int4"),
        }
        sizes = {setting: _weights(other, folder, config)[0] for setting, other in smaller.items()}
        fitting = {setting: size for setting, size in sizes.items() if size < num_bytes and size + extra <= limit}
        ways = [f"set {setting} ({size / GIB:,.1f} GiB)" for setting, size in fitting.items()]
    if num_bytes + extra <= limit:
        return ""
    ways += ["take a smaller model", "serve it elsewhere with llama-server or vLLM, as a model with a URL"]
    others = f", and {extra / GIB:,.1f} GiB for its draft model and adapters" if extra else ""
    return (
        f"The weights of the model {model.alias} take {num_bytes / GIB:,.1f} GiB {form}{others}, and this machine, or "
        f"its container, has {limit / GIB:,.1f} GiB. To serve it, {', '.join(ways[:-1])}, or {ways[-1]}."
    )


def embedder_bytes(model: EmbedderConfig, folder: Path) -> int:
    """Return what an embedding model's process takes. Raises ModelLoadError."""
    config, headers = read_config(folder), read_headers(folder)
    return PROCESS_BYTES + num_parameters_of(config, headers) * DTYPE_BYTES[_dtype(model.dtype, config, headers)]


def num_parameters_of(config: Mapping[str, Any], headers: Sequence[Mapping[str, Any]]) -> int:
    """Return a model's numbers, in quantised weights as many as they stand for."""
    quantization = text_config(config).get("quantization_config") or config.get("quantization_config")
    bits = read_scheme(quantization).bits if quantization else 32
    return sum(num_parameters(header, bits) for header in headers)


def _weights(model: ModelConfig, folder: Path, config: Mapping[str, Any]) -> tuple[int, str]:
    """Return the bytes of a model's weights as they are computed with, and the dtype of the keys."""
    headers = read_headers(folder)
    dtype = _dtype(model.dtype, config, headers)
    is_quantized = is_gguf(folder) or bool(config.get("quantization_config"))
    if is_quantized and model.native and model.packed is not False and model.device != "cuda":
        files = [folder] if is_gguf(folder) else folder.glob("*.safetensors")
        return sum(file.stat().st_size for file in files), dtype
    plain = num_parameters_of(config, headers) * DTYPE_BYTES[dtype]
    return int(plain * 2 / DTYPE_BYTES[dtype] * _ROUNDED[model.quantize]) if model.quantize else plain, dtype


def _dtype(asked: str, config: Mapping[str, Any], headers: Sequence[Mapping[str, Any]]) -> str:
    """Return the dtype of a load; one of 16 bits stands for the other."""
    if asked in DTYPE_BYTES:
        return asked
    given = config.get("dtype") or config.get("torch_dtype") or text_config(config).get("dtype")
    if given is None:
        stored = {entry.get("dtype") for header in headers for entry in header.values() if "shape" in entry}
        return "bfloat16" if stored & set(_HALF) else "float32"
    return "float32" if str(given).removeprefix("torch.") == "float32" else "bfloat16"
