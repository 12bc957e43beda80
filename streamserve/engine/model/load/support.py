"""Which architectures this engine runs, by their config, before any weight is read.

Two nets. This module refuses by name what is known to come out wrong without an exception; the parity probe refuses by
numbers whatever slips through. (Both are needed: research/engine.md 3.2.)
"""

from __future__ import annotations

from typing import Any

from streamserve.engine.capacity import BATCH_DEPENDENT_ROPE, DEFAULT_MODEL_LEN
from streamserve.engine.model.load.quantized.scheme import scheme_of
from streamserve.engine.model.load.source import ModelLoadError, UnsupportedModel

WINDOWED = {"full_attention", "sliding_attention"}

RECURRENT = "it keeps a recurrent state beside attention, which this engine does not hold"
CHUNKED = "its chunked attention mask never reaches an external attention"
OWN_ATTENTION = "its attention cannot be replaced from outside (ALiBi, or code of its own)"
SHARED_INDEX = "its layers call attention twice under one index"
ENCODER = "it is an encoder, not a causal language model"

REFUSED = {
    "llama4_text": CHUNKED,
    "llama4": CHUNKED,
    "qwen3_next": RECURRENT,
    "qwen3_5_text": RECURRENT,
    "qwen3_5": RECURRENT,
    "qwen3_5_moe": RECURRENT,
    "qwen3_5_moe_text": RECURRENT,
    "kimi_linear": RECURRENT,
    "minimax": RECURRENT,
    "jamba": RECURRENT,
    "falcon_h1": RECURRENT,
    "nemotron_h": RECURRENT,
    "recurrent_gemma": RECURRENT,
    "bamba": RECURRENT,
    "zamba": RECURRENT,
    "zamba2": RECURRENT,
    "granitemoehybrid": RECURRENT,
    "mamba": RECURRENT,
    "mamba2": RECURRENT,
    "falcon_mamba": RECURRENT,
    "rwkv": RECURRENT,
    "xlstm": RECURRENT,
    "lfm2": RECURRENT,
    "lfm2_moe": RECURRENT,
    "diffllama": SHARED_INDEX,
    "bloom": OWN_ATTENTION,
    "mpt": OWN_ATTENTION,
    "falcon": OWN_ATTENTION,
    "gpt_neo": OWN_ATTENTION,
    "xglm": OWN_ATTENTION,
    "cpmant": OWN_ATTENTION,
    "bert": ENCODER,
    "bert-generation": ENCODER,
    "big_bird": ENCODER,
    "camembert": ENCODER,
    "data2vec-text": ENCODER,
    "electra": ENCODER,
    "ernie": ENCODER,
    "megatron-bert": ENCODER,
    "modernbert-decoder": OWN_ATTENTION,
    "rembert": ENCODER,
    "roberta": ENCODER,
    "roberta-prelayernorm": ENCODER,
    "roc_bert": ENCODER,
    "roformer": ENCODER,
    "xlm": ENCODER,
    "xlm-roberta": ENCODER,
    "xlm-roberta-xl": ENCODER,
    "xlnet": ENCODER,
    "xmod": ENCODER,
}

# Types whose answers the tests compare with transformers' own, token by token (test_parity.py, test_variants.py). Any
# other that is not refused is tried by the parity probe at each load.
PROVEN = frozenset(
    {
        *("cohere2", "exaone4", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm4", "gpt2", "gpt_oss", "granite"),
        *(
            "llama",
            "ministral3",
            "mistral",
            "mixtral",
            "olmo2",
            "olmo3",
            "opt",
            "phi",
            "phi3",
            "qwen2",
            "qwen3",
            "qwen3_moe",
        ),
        *("smollm3", "stablelm"),
    }
)


def require_supported(config: Any) -> None:
    """Raise `UnsupportedModel` for an architecture that would come out wrong, or weights quantised as none here are."""
    for part in (config, config.get_text_config()):
        reason = REFUSED.get(part.model_type)
        if reason is not None:
            raise _refusal(part.model_type, reason)
    if config.is_encoder_decoder:
        raise _refusal(config.model_type, "it is an encoder-decoder")
    layer_types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if layer_types - WINDOWED:
        names = ", ".join(sorted(layer_types - WINDOWED))
        raise _refusal(config.model_type, f"it has layers of type {names}, not full or sliding attention")
    scheme_of(config)


def _refusal(model_type: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"Models of type {model_type} are not supported: {reason}. Choose another model, or serve this model with "
        "another engine and point streamserve's remote client at it."
    )


def max_model_len(config: Any, wanted: int | None) -> int:
    """The longest sequence: the model's own limit, or `wanted` where that is shorter."""
    text = config.get_text_config()
    limit = _own_limit(text)
    if wanted is None:
        return limit or DEFAULT_MODEL_LEN
    if limit is not None and wanted > limit:
        raise ModelLoadError(
            f"max_model_len is {wanted:,}, but this {text.model_type} model takes {limit:,} tokens. Lower it."
        )
    return wanted


def _own_limit(text: Any) -> int | None:
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for parameters in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if parameters.get("rope_type") in BATCH_DEPENDENT_ROPE:
            original = parameters.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            limit = min((length for length in (limit, original) if length), default=None)
    return int(limit) if limit else None


def eos_token_ids(generation_config: Any, config: Any) -> tuple[int, ...]:
    """Tokens that end an answer, by the generation config, else by the model's."""
    for source in (generation_config, config.get_text_config()):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()
