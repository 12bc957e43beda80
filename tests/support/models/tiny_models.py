"""Builds tiny random models as safetensors folders: no hub, no weights in the repository.

Every config makes its architecture's feature take effect at a prompt of some 40 tokens: windows of 8 to 16, softcap 1,
large sinks. `FEATURE_OFF` holds the switch of the feature, so that a test can prove its effect.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB_SIZE = 128
SEED = 20_260
TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
        "layer_types": MIXED_LAYERS,
    },
    "qwen3": {"layer_types": MIXED_LAYERS, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    "gemma2": {
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 8,
        "sliding_window": 8,
        "layer_types": MIXED_LAYERS,
    },
    "gemma3_text": {"sliding_window": 8, "layer_types": MIXED_LAYERS, "query_pre_attn_scalar": 8},
    "phi3": {"sliding_window": 16},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 256,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "gpt_oss": {
        "sliding_window": 8,
        "layer_types": MIXED_LAYERS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "smollm3": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": MIXED_LAYERS,
        "no_rope_layers": [1, 0, 1, 0],
    },
    "olmo2": {},
    "cohere2": {"sliding_window": 8, "layer_types": MIXED_LAYERS, "logit_scale": 0.5},
}

FEATURE_OFF: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {"layer_types": ["full_attention"] * 4},
    "qwen3": {"layer_types": ["full_attention"] * 4},
    "gemma2": {"attn_logit_softcapping": None},
    "gemma3_text": {"sliding_window": 250},
    "phi3": {"sliding_window": None},
    "gpt2": {"scale_attn_by_inverse_layer_idx": False},
    "gpt_oss": {"sliding_window": 250},
    "smollm3": {"layer_types": ["full_attention"] * 4},
    "cohere2": {"sliding_window": 250},
}


# Sizes that a config class has beside those of `TINY`; their defaults make a gigabyte of weights.
MORE_SIZES = {"gemma4_text": {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16}}
# Fields of `TINY` that a config class computes itself.
NOT_TAKEN = {"falcon": ("head_dim",)}


def config_of(model_type: str, **overrides: Any) -> Any:
    """Return the tiny config of `model_type`."""
    from transformers import AutoConfig

    own = {**MORE_SIZES.get(model_type, {}), **CONFIGS.get(model_type, {})}
    if model_type == "gpt2":
        own = {"vocab_size": VOCAB_SIZE, "eos_token_id": 1, "bos_token_id": 0, **own}
    else:
        own = {**{key: value for key, value in TINY.items() if key not in NOT_TAKEN.get(model_type, ())}, **own}
    return AutoConfig.for_model(model_type, **{**own, **overrides})


def build_model(model_type: str, *, edit: Callable[[Any], None] | None = None, **overrides: Any) -> Any:
    """Return a random fp32 model whose weights are large enough for attention to matter."""
    import torch
    from transformers import AutoModelForCausalLM

    generator_state = torch.random.get_rng_state()
    torch.manual_seed(SEED)
    try:
        model = AutoModelForCausalLM.from_config(config_of(model_type, **overrides), dtype=torch.float32)
        _enlarge(model)
    finally:
        torch.random.set_rng_state(generator_state)
    if edit is not None:
        edit(model)
    return model.eval()


def save_model(folder: Path, model_type: str, **overrides: Any) -> Path:
    """Write a tiny model of `model_type` into `folder` as safetensors; return the folder."""
    model = build_model(model_type, **overrides)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder, safe_serialization=True)
    return folder


def _enlarge(model: Any) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.uniform_(2.0, 4.0)
            elif parameter.ndim >= 2 and "embed" not in name and "wte" not in name and "wpe" not in name:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
            elif parameter.ndim >= 2:
                parameter.normal_(0.0, 1.0)
