"""A GGUF file's metadata as the config that transformers has for the architecture: `config.json`'s fields.

One table an architecture, in llama.cpp's names and in transformers'. What a file leaves out is what its converter left
out: constants of the architecture, written down in `FIXED`. (Keys: gguf's constants.py; what llama.cpp assumes of each:
llama-model.cpp.) Knows metadata and the names of tensors, no weights, no torch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from math import isclose, pi
from typing import Any

from streamserve.engine.model.load.errors import ModelLoadError, UnsupportedModel
from streamserve.engine.model.load.gguf.file import GGUFFile

# Of all: transformers' field -> the key after the architecture's name.
FIELDS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
}
OPTIONAL = {"num_key_value_heads", "head_dim"}
# Fields that say a layer has a bias, and a tensor that shows it.
BIASES = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "granite": "granite",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "gpt-oss": "gpt_oss",
}
GEMMA_ACTIVATION = "gelu_pytorch_tanh"
# What no file of the architecture says.
FIXED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "gemma": {"hidden_act": GEMMA_ACTIVATION, "hidden_activation": GEMMA_ACTIVATION},
    "gemma2": {"hidden_activation": GEMMA_ACTIVATION},
    "gemma3_text": {"hidden_activation": GEMMA_ACTIVATION},
}
# Gemma's 27 billions divide queries by another number than the root of the head's size; they are known by their layers.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}
GEMMA_LOCAL_THETA = 10_000.0
LLAMA_3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CONTROL = 3  # a type of token
END_TOKENS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"),
        *("<|return|>", "<|call|>"),
    }
)
ROPE_FACTORS = "rope_freqs.weight"


def config_of(file: GGUFFile) -> dict[str, Any]:
    """Return config.json's fields. Raises `UnsupportedModel` for an architecture that is not in the table."""
    model_type = MODEL_TYPES.get(file.architecture)
    if model_type is None:
        raise UnsupportedModel(
            f"{file.path} is a GGUF file of the architecture {file.architecture or 'unknown'!r}; known are "
            f"{', '.join(MODEL_TYPES)}. Name the model's folder with safetensors, or serve the file with llama-server "
            "and point streamserve's remote client at it."
        )
    config: dict[str, Any] = {"model_type": model_type, **FIXED.get(model_type, {})}
    for field, key in FIELDS.items():
        value = file.get(key)
        if value is None and field not in OPTIONAL:
            if field == "intermediate_size" and file.get("expert_feed_forward_length") is not None:
                continue
            raise _lacks(file, key)
        if isinstance(value, list):  # one number a layer
            if len(set(value)) > 1:
                raise UnsupportedModel(
                    f"{file.path} has layers of unlike sizes ({key}: {sorted(set(value))}), which this engine does not "
                    "run. Serve it with llama-server and point streamserve's remote client at it."
                )
            value = value[0]
        if value is not None:
            config[field] = value
    config["vocab_size"] = _vocab_size(file)
    config["tie_word_embeddings"] = "output.weight" not in file
    config["rope_parameters"] = _rope(file, config)
    for field, tensor in BIASES.items():
        if f"blk.0.{tensor}.bias" in file:
            config[field] = True
    config["pad_token_id"] = None  # a default of transformers may lie outside of the vocabulary
    config["bos_token_id"] = file.metadata.get("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = _end_token_ids(file) or None
    own = OWN_FIELDS.get(model_type)
    return config if own is None else own(file, config)


def _end_token_ids(file: GGUFFile) -> list[int]:
    """Return the tokens that end an answer: those that the file names, and control tokens that end turns elsewhere.

    A file names one, and chats of the model may end with another. (llama.cpp knows these by their text too.)
    """
    ids = {file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    kinds = file.metadata.get("tokenizer.ggml.token_type") or ()
    tokens = file.strings("tokenizer.ggml.tokens")
    texts = END_TOKENS - {"<|end|>"} if "<|call|>" in tokens else END_TOKENS  # in Harmony that ends a message
    ids |= {
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == CONTROL and token in texts
    }
    return sorted(token_id for token_id in ids if isinstance(token_id, int))


def _lacks(file: GGUFFile, key: str) -> ModelLoadError:
    return ModelLoadError(
        f"{file.path} has no {file.architecture}.{key} in its metadata. Convert the model again with a current "
        "llama.cpp, or download another file of it."
    )


def _vocab_size(file: GGUFFile) -> int:
    """Return the rows of the embedding: what the vocabulary is padded to, in the model too."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(
            f"{file.path} has no token_embd.weight: it is no language model, or only a part of one. Name the file "
            "with the whole model."
        )
    return embedding.shape[0]


def _rope(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters`."""
    theta = float(file.get("rope.freq_base", 10_000.0))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    num_turned = file.get("rope.dimension_count", head_dim)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if num_turned != head_dim:
        rope["partial_rotary_factor"] = num_turned / head_dim
    kind, factor = file.get("rope.scaling.type", "none"), file.get("rope.scaling.factor")
    if kind == "linear" and factor not in (None, 0.0, 1.0):
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": file.get("rope.scaling.original_context_length"),
        }
        for field in ("beta_fast", "beta_slow"):
            value = file.get(f"rope.scaling.yarn_{field}")
            if value is not None:
                rope[field] = value
    elif "rope_factors_long.weight" in file:
        rope |= {
            "rope_type": "longrope",
            "long_factor": floats_of(file, "rope_factors_long.weight"),
            "short_factor": floats_of(file, "rope_factors_short.weight"),
            "original_max_position_embeddings": file.get("rope.scaling.original_context_length"),
        }
        attention_factor = file.get("rope.scaling.attn_factor")
        if attention_factor is not None:
            rope["attention_factor"] = attention_factor
    elif ROPE_FACTORS in file:
        rope |= _llama_3_rope(file, theta)
    elif kind not in ("none", "linear"):
        raise UnsupportedModel(
            f"{file.path} scales its positions by {kind!r}, which is not known of GGUF files. Name the model's folder "
            "with safetensors."
        )
    return rope


def floats_of(file: GGUFFile, name: str) -> list[float]:
    """Return the numbers of a small F32 tensor."""
    place = file.tensors[name]
    if place.type.name != "F32":
        raise ModelLoadError(f"{file.path} stores {name} as {place.type.name}, and it is to be F32. Convert it again.")
    with file.path.open("rb") as stream:
        stream.seek(place.begin)
        data = stream.read(place.num_bytes)
    return [value for (value,) in struct.iter_unpack("<f", data)]


def _llama_3_rope(file: GGUFFile, theta: float) -> dict[str, Any]:
    """Return the scaling that the factors of the frequencies come from: a file has the factors alone.

    Llama 3.1 and later divide frequencies of long waves by `factor`, the largest; what lies between is interpolated.
    """
    factors = floats_of(file, ROPE_FACTORS)
    found = {"rope_type": "llama3", "factor": max(factors), **LLAMA_3_ROPE}
    original, dim = LLAMA_3_ROPE["original_max_position_embeddings"], 2 * len(factors)
    for index, given in enumerate(factors):
        turns = original * theta ** (-2 * index / dim) / (2 * pi)
        share = (turns - LLAMA_3_ROPE["low_freq_factor"]) / (
            LLAMA_3_ROPE["high_freq_factor"] - LLAMA_3_ROPE["low_freq_factor"]
        )
        share = min(max(share, 0.0), 1.0)
        if not isclose(given, 1 / ((1 - share) / found["factor"] + share), rel_tol=1e-3):
            raise UnsupportedModel(
                f"{file.path} scales its positions by factors ({ROPE_FACTORS}) that are not Llama 3's. Name the "
                "model's folder with safetensors."
            )
    return found


def _llama(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    if not file.get("expert_count"):
        return config
    return config | {
        "model_type": "mixtral",
        "num_local_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "sliding_window": None,
    }


def _qwen3_moe(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    return config | {
        "num_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
        "intermediate_size": config.get("intermediate_size", file.get("expert_feed_forward_length")),
    }


def _gemma(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    config |= {
        "sliding_window": file.get("attention.sliding_window"),
        "attn_logit_softcapping": file.get("attn_logit_softcapping"),
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "query_pre_attn_scalar": config["head_dim"],
    }
    if config["num_hidden_layers"] == GEMMA_27B_LAYERS[config["model_type"]]:
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    if config["model_type"] == "gemma3_text":
        local = float(file.get("rope.freq_base_swa", GEMMA_LOCAL_THETA))
        config["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    return config


def _windowed(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    return config | {"sliding_window": file.get("attention.sliding_window") or None}


def _phi3(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    original = file.get("rope.scaling.original_context_length", config["max_position_embeddings"])
    return _windowed(file, config) | {"original_max_position_embeddings": original}


def _olmo2(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    if file.get("attention.sliding_window"):
        raise UnsupportedModel(
            f"{file.path} is an OLMo 3, whose GGUF files do not say all of its positions. Name the model's folder with "
            "safetensors."
        )
    return config


def _granite(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    scales = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return config | {field: file.get(key) for field, key in scales.items() if file.get(key) is not None}


def _gpt_oss(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
        rope.setdefault("beta_fast", 32.0)
        rope.setdefault("beta_slow", 1.0)
    return _windowed(file, config) | {
        "num_local_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "intermediate_size": file.get("expert_feed_forward_length", config.get("intermediate_size")),
    }


OWN_FIELDS: dict[str, Callable[[GGUFFile, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "granite": _granite,
    "gpt_oss": _gpt_oss,
}
