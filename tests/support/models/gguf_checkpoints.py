"""Writes a tiny safetensors model as GGUF, as llama.cpp's convert_hf_to_gguf.py would: for tests of what reads it.

Names of tensors are looked up in the `gguf` package's tables; keys of the metadata are written by its methods.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "llama": "LLAMA",
    "mixtral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "qwen3_moe": "QWEN3MOE",
    "gemma": "GEMMA",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
    "phi3": "PHI3",
    "granite": "GRANITE",
    "olmo2": "OLMO2",
    "smollm3": "SMOLLM3",
    "gpt_oss": "GPT_OSS",
}
PERMUTED = {"llama", "mixtral", "granite", "smollm3"}
_EXPERT = re.compile(r"(model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(\w+)\.weight")
_EXPERT_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def convert(folder: Path, path: Path, tensor_type: str = "F32", *, finer: Mapping[str, str] | None = None) -> Path:
    """Write the model of `folder` to `path`, matrices in `tensor_type` where their rows are whole blocks.

    `finer`: types of some tensors, by a part of their names.
    """
    import gguf
    import numpy as np
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    arch = gguf.MODEL_ARCH[ARCHITECTURES[kind]]
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[arch])
    _write_config(writer, config, kind)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])

    def add(name: str, values: Any) -> None:
        own_type = next((kind for part, kind in (finer or {}).items() if part in name), tensor_type)
        quantization = gguf.GGMLQuantizationType[own_type]
        block_size = gguf.GGML_QUANT_SIZES[quantization][0]
        values = np.ascontiguousarray(values.float().numpy())
        is_matrix = values.ndim > 1 and values.shape[-1] % block_size == 0 and "ffn_gate_inp" not in name
        if tensor_type == "F32" or not is_matrix:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, quantization), raw_dtype=quantization)

    state: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    stacked: dict[str, dict[int, Any]] = {}
    for name, values in state.items():
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            key = f"blk.{expert[2]}.ffn_{_EXPERT_PARTS[expert[4]]}_exps.weight"
            stacked.setdefault(key, {})[int(expert[3])] = values
        elif ".mlp.experts." in name:
            for key, part in _gpt_oss(name, values):
                add(key, part)
        elif name.endswith("self_attn.sinks"):
            add(f"blk.{name.split('.')[2]}.attn_sinks.weight", values)
        else:
            if kind in PERMUTED and name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
                values = _permuted(values, heads)
            if kind.startswith("gemma") and name.endswith("norm.weight"):
                values = values + 1
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            add(found, values)
    for key, experts in stacked.items():
        import torch

        add(key, torch.stack([experts[index] for index in sorted(experts)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _permuted(values: Any, num_heads: int) -> Any:
    """Return rows as `LlamaModel.permute` has them."""
    return values.reshape(num_heads, 2, len(values) // num_heads // 2, -1).swapaxes(1, 2).reshape(values.shape)


def _gpt_oss(name: str, values: Any) -> list[tuple[str, Any]]:
    """Return gpt-oss' experts as `GptOssModel` writes them."""
    block = f"blk.{name.split('.')[2]}"
    part = "bias" if name.endswith("_bias") else "weight"
    if part == "weight":
        values = values.transpose(-1, -2)
    if ".down_proj" in name:
        return [(f"{block}.ffn_down_exps.{part}", values)]
    return [(f"{block}.ffn_gate_exps.{part}", values[:, ::2]), (f"{block}.ffn_up_exps.{part}", values[:, 1::2])]


def _write_config(writer: Any, config: dict[str, Any], kind: str) -> None:
    import gguf

    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    if kind != "gpt_oss":
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "llama3":
        _write_llama_3_factors(writer, rope, head_dim)
    for field, method in (
        ("num_local_experts", writer.add_expert_count),
        ("num_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
    ):
        if config.get(field) is not None:
            method(config[field])
    if kind == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if kind in ("gemma2", "gemma3_text", "phi3", "gpt_oss") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def _write_llama_3_factors(writer: Any, rope: dict[str, Any], head_dim: int) -> None:
    """Write rope_freqs.weight as `LlamaModel.generate_extra_tensors` does."""
    import math

    import numpy as np

    factors = []
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    for index in range(0, head_dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (index / head_dim)
        if wave < original / high:
            factors.append(1.0)
        elif wave > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
