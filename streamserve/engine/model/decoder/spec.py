"""What a decoder computes, as values: one `LayerSpec` a layer, read from a config by the table of families.

    x = embedding(token) * embedding_multiplier
    every layer:  x += residual_multiplier * norm?(attention(norm?(x)))
                  x += residual_multiplier * norm?(feed_forward(norm?(x)))
    logits = cap(head(norm(x)) * logit_multiplier)

Knows configs of transformers, no weights and no tensors: specs of two layers alike are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from streamserve.engine.model.decoder.families import ACTIVATIONS, FAMILIES, Bias, Family, Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """Pairs (i, i + dim / 2) of a head's first `dim` numbers turn by position * frequencies[i].

    cosines and sines are multiplied by `scaling` (yarn, longrope).
    """

    frequencies: tuple[float, ...]  # (dim / 2,), float32 numbers
    scaling: float = 1.0

    @property
    def dim(self) -> int:
        """How many numbers of a head turn."""
        return 2 * len(self.frequencies)


class Routing(Enum):
    """How a router's logits become the weights of the experts taken."""

    SOFTMAX_ALL = "softmax of all, of which the largest"
    SOFTMAX_ALL_NORMALISED = "softmax of all, of which the largest, divided by their sum"
    SOFTMAX_TOP = "softmax of the largest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A feed-forward part with experts, of which each token takes `num_taken`.

    `clamp` (limit, alpha): gpt-oss' gate, (up + 1) * gate * sigmoid(alpha * gate) with both clamped. `is_beside_dense`:
    Gemma 4 adds the experts' output to that of a dense part, each with norms of its own.
    """

    num_experts: int
    num_taken: int
    intermediate_size: int
    routing: Routing
    has_bias: bool = False
    clamp: tuple[float, float] | None = None
    is_beside_dense: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer. `rotary` is an index into `DecoderSpec.rotaries`, None: its heads do not turn.

    `kv_layer` is the layer whose keys and values it reads: itself, or with Gemma 4 an earlier one, and then it has none
    of its own. `is_read_later`: a later layer reads this layer's. `values_are_keys`: the values are the keys before
    their norm and rotation.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scaling: float
    rotary: int | None
    window: int | None
    softcap: float | None
    intermediate_size: int
    experts: ExpertsSpec | None
    kv_layer: int
    is_read_later: bool = False
    values_are_keys: bool = False

    @property
    def query_dim(self) -> int:
        """Numbers of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Numbers of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A whole decoder. `query_scale` (beta, length): queries grow with log(1 + position // length) (Ministral 3).

    `per_layer_size`: numbers of a token that each layer gets beside x (Gemma 4), 0: none.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    norm_eps: float
    activation: str
    layers: tuple[LayerSpec, ...]
    rotaries: tuple[RotarySpec, ...]
    is_head_tied: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    query_scale: tuple[float, int] | None = None
    per_layer_size: int = 0


def spec_of(config: Any) -> DecoderSpec | None:
    """Return what the decoder of a text config computes; None for what the layers here do not compute."""
    family = FAMILIES.get(config.model_type)
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if family is None or activation not in ACTIVATIONS or getattr(config, "use_bidirectional_attention", None):
        return None
    rotaries: list[RotarySpec] = []
    layers = [_layer(family, config, index, rotaries) for index in range(config.num_hidden_layers)]
    for index in {layer.kv_layer for place, layer in enumerate(layers) if layer.kv_layer != place}:
        layers[index] = replace(layers[index], is_read_later=True)
    attention_bias = family.bias is Bias.BY_CONFIG and bool(getattr(config, "attention_bias", False))
    return DecoderSpec(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        norm_eps=float(config.rms_norm_eps),
        activation=activation,
        layers=tuple(layers),
        rotaries=tuple(rotaries),
        is_head_tied=bool(config.tie_word_embeddings),
        qkv_bias=attention_bias or family.bias is Bias.QKV,
        out_bias=attention_bias,
        mlp_bias=family.has_mlp_bias and bool(getattr(config, "mlp_bias", False)),
        embedding_multiplier=config.hidden_size**0.5
        if family.scales_embeddings
        else _multiplier(family, config, "embedding_multiplier"),
        residual_multiplier=_multiplier(family, config, "residual_multiplier"),
        logit_multiplier=1.0 / _multiplier(family, config, "logits_scaling"),
        logit_softcap=(getattr(config, "final_logit_softcapping", None) or None) if family.caps_logits else None,
        query_scale=_query_scale(config) if family.scales_queries else None,
        per_layer_size=int(getattr(config, "hidden_size_per_layer_input", 0) or 0) if family.has_layer_inputs else 0,
    )


def _layer(family: Family, config: Any, index: int, rotaries: list[RotarySpec]) -> LayerSpec:
    kind = _layer_type(config, index)
    own = config.per_layer_config[index] if family.has_unlike_layers else config
    head_dim = int(getattr(own, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    kv_layer = _kv_layer(config, index) if family.shares_keys else index
    is_wide = kv_layer != index and bool(getattr(config, "use_double_wide_mlp", False))
    return LayerSpec(
        num_heads=config.num_attention_heads,
        num_kv_heads=own.num_key_value_heads,
        head_dim=head_dim,
        attention_scaling=_attention_scaling(family, config, head_dim),
        rotary=_rotary(family, config, index, kind, rotaries),
        window=_window(family, config, kind),
        softcap=(config.attn_logit_softcapping or None) if family.caps_attention else None,
        intermediate_size=config.intermediate_size * (2 if is_wide else 1),
        experts=_experts(family, config, index),
        kv_layer=kv_layer,
        values_are_keys=family.shares_keys and bool(config.attention_k_eq_v) and kind != "sliding_attention",
    )


def _layer_type(config: Any, index: int) -> str:
    kinds = getattr(config, "layer_types", None)
    return str(kinds[index]) if kinds else "full_attention"


def _window(family: Family, config: Any, kind: str) -> int | None:
    if family.windows is Windows.NONE or (family.windows is Windows.BY_TYPE and kind != "sliding_attention"):
        return None
    if not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None) or None


def _attention_scaling(family: Family, config: Any, head_dim: int) -> float:
    if family.attention_scaling is None:
        return float(head_dim**-0.5)
    given = family.attention_scaling
    if given == "query_pre_attn_scalar":
        return float(config.query_pre_attn_scalar**-0.5)
    return float(given if isinstance(given, float) else getattr(config, given))


def _multiplier(family: Family, config: Any, name: str) -> float:
    return float(getattr(config, name)) if family.has_multipliers else 1.0


def _query_scale(config: Any) -> tuple[float, int] | None:
    rope = config.rope_parameters
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return (float(beta), int(length)) if beta and length else None


def _rotary(family: Family, config: Any, index: int, kind: str, rotaries: list[RotarySpec]) -> int | None:
    """Return the place of the layer's rotation in `rotaries`, which is added to where it is new."""
    if family.skips_rotation and not config.no_rope_layers[index]:
        return None
    rope = config.rope_parameters
    if any(isinstance(part, Mapping) for part in rope.values()):  # one set of parameters for each type of layer
        rope = rope.get(kind)
    else:
        kind = ""
    if rope is None:
        return None
    own = config.per_layer_config[kind] if family.has_unlike_layers else config
    found = _rotary_spec(family, own, rope, kind)
    if found not in rotaries:
        rotaries.append(found)
    return rotaries.index(found)


def _rotary_spec(family: Family, config: Any, rope: Mapping[str, Any], kind: str) -> RotarySpec:
    import torch

    if rope.get("rope_type", "default") != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, layer_type=kind or None)
        return RotarySpec(frequencies=tuple(frequencies.tolist()), scaling=float(scaling))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(head_dim * (rope.get("partial_rotary_factor", 1.0) if family.turns_a_part else 1.0))
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    return RotarySpec(frequencies=tuple(frequencies.tolist()))


def _experts(family: Family, config: Any, index: int) -> ExpertsSpec | None:
    names = family.experts
    if names is None or (names.switch and not getattr(config, names.switch)):
        return None
    if names.is_sparse_by_step and (
        index in config.mlp_only_layers or config.num_experts < 1 or (index + 1) % config.decoder_sparse_step
    ):
        return None
    routing = Routing[names.routing]
    if names.routing == "SOFTMAX_ALL" and config.norm_topk_prob:
        routing = Routing.SOFTMAX_ALL_NORMALISED
    return ExpertsSpec(
        num_experts=getattr(config, names.num_experts),
        num_taken=getattr(config, names.num_taken),
        intermediate_size=getattr(config, names.intermediate_size),
        routing=routing,
        has_bias=names.has_bias,
        clamp=_clamp(config) if names.is_clamped else None,
        is_beside_dense=names.is_beside_dense,
    )


def _clamp(config: Any) -> tuple[float, float]:
    """Return the limit and alpha of gpt-oss' gate, which configs of older transformers do not name."""
    return float(getattr(config, "swiglu_limit", 7.0)), float(getattr(config, "swiglu_alpha", 1.702))


def _kv_layer(config: Any, index: int) -> int:
    """Return the layer whose keys and values layer `index` reads: of the last layers, the last of its type before."""
    first_shared = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    if index < first_shared:
        return index
    kinds = config.layer_types
    return max(place for place in range(first_shared) if kinds[place] == kinds[index])
