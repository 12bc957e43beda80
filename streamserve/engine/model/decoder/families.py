"""The families of decoders, as data: what each has beside Llama's decoder, and what its weights are called.

A new family of the same parts is a row here. (Read from the modelling code of transformers 5.23, which stays the
reference: the parity probe compares at each load.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu")


class Windows(Enum):
    """Which layers look back only so far."""

    NONE = "none"
    ALL = "all, if the config has a window"
    BY_TYPE = "those whose type is sliding_attention"


class Bias(Enum):
    """Which linear layers of attention have one."""

    NONE = "none"
    QKV = "those of queries, keys and values"
    BY_CONFIG = "all, if the config's attention_bias says so"


class HeadNorm(Enum):
    """What the norms of queries and keys are over."""

    HEAD = "each head"
    ROW = "all heads together"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Weights and config fields of experts. `{}` stands for the expert's number; without it one tensor holds all.

    `is_interleaved`: (num_experts, in, out) with gate and up in turns, as gpt-oss stores them. `switch`: the field that
    says whether there are experts.
    """

    router: str
    gate_up: tuple[str, ...]
    down: str
    num_experts: str
    num_taken: str
    intermediate_size: str
    routing: str
    switch: str = ""
    router_scale: str = ""
    expert_scale: str = ""
    norms: tuple[str, ...] = ()  # of the dense part's output, of the experts' input and output
    is_sparse_by_step: bool = False
    is_interleaved: bool = False
    has_bias: bool = False
    is_clamped: bool = False
    is_beside_dense: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a layer's weights are called, after its prefix. A part that has no name is absent."""

    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = ""
    key_norm: str = ""
    sinks: str = ""
    out: str = "self_attn.o_proj"
    after_attention_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    after_mlp_norm: str = ""
    layer_scale: str = ""
    layer_input_gate: str = ""
    layer_input_out: str = ""
    layer_input_norm: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family. A norm multiplies by `norm_offset` + its weight.

    `attention_scaling`: a number, or the config's field; None: 1 / sqrt(head_dim). `has_mlp_bias`: by the config's
    mlp_bias. `has_multipliers`: Granite's fields.
    `turns_a_part`: partial_rotary_factor counts with plain rotation too. `has_value_norm`: values are normalised,
    without a weight. `has_unlike_layers`: shapes are in `per_layer_config`.
    """

    names: Names = field(default_factory=Names)
    experts: ExpertNames | None = None
    norm_offset: float = 0.0
    head_norm: HeadNorm | None = None
    windows: Windows = Windows.NONE
    bias: Bias = Bias.BY_CONFIG
    has_mlp_bias: bool = False
    attention_scaling: str | float | None = None
    scales_embeddings: bool = False
    has_multipliers: bool = False
    caps_attention: bool = False
    caps_logits: bool = False
    scales_queries: bool = False
    turns_a_part: bool = False
    skips_rotation: bool = False
    has_value_norm: bool = False
    has_unlike_layers: bool = False
    shares_keys: bool = False
    has_layer_inputs: bool = False


LLAMA = Names()
HEAD_NORMED = Names(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
NORMED_TWICE = Names(
    after_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    after_mlp_norm="post_feedforward_layernorm",
)
GEMMA_3 = replace(NORMED_TWICE, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
OLMO = replace(GEMMA_3, attention_norm="", mlp_norm="")
GEMMA_4 = replace(
    GEMMA_3,
    layer_scale="layer_scalar",
    layer_input_gate="per_layer_input_gate",
    layer_input_out="per_layer_projection",
    layer_input_norm="post_per_layer_input_norm",
)
PHI_3 = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))

MIXTRAL_EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
    num_experts="num_local_experts",
    num_taken="num_experts_per_tok",
    intermediate_size="intermediate_size",
    routing="SOFTMAX_ALL_NORMALISED",
)
QWEN_EXPERTS = ExpertNames(
    router="mlp.gate",
    gate_up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    down="mlp.experts.{}.down_proj",
    num_experts="num_experts",
    num_taken="num_experts_per_tok",
    intermediate_size="moe_intermediate_size",
    routing="SOFTMAX_ALL",
    is_sparse_by_step=True,
)
GPT_OSS_EXPERTS = ExpertNames(
    router="mlp.router",
    gate_up=("mlp.experts.gate_up_proj",),
    down="mlp.experts.down_proj",
    num_experts="num_local_experts",
    num_taken="num_experts_per_tok",
    intermediate_size="intermediate_size",
    routing="SOFTMAX_TOP",
    is_interleaved=True,
    has_bias=True,
    is_clamped=True,
)
GEMMA_4_EXPERTS = ExpertNames(
    router="router.proj",
    gate_up=("experts.gate_up_proj",),
    down="experts.down_proj",
    num_experts="num_experts",
    num_taken="top_k_experts",
    intermediate_size="moe_intermediate_size",
    routing="SOFTMAX_ALL_NORMALISED",
    switch="enable_moe_block",
    router_scale="router.scale",
    expert_scale="router.per_expert_scale",
    norms=("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
    is_beside_dense=True,
)

FAMILIES: dict[str, Family] = {
    "llama": Family(has_mlp_bias=True),
    "mistral": Family(windows=Windows.ALL, bias=Bias.NONE),
    "ministral": Family(windows=Windows.BY_TYPE, bias=Bias.NONE),
    "ministral3": Family(windows=Windows.ALL, scales_queries=True, bias=Bias.NONE),
    "qwen2": Family(windows=Windows.BY_TYPE, bias=Bias.QKV),
    "qwen3": Family(names=HEAD_NORMED, head_norm=HeadNorm.HEAD, windows=Windows.BY_TYPE),
    "qwen3_moe": Family(names=HEAD_NORMED, head_norm=HeadNorm.HEAD, windows=Windows.ALL, experts=QWEN_EXPERTS),
    "smollm3": Family(windows=Windows.BY_TYPE, skips_rotation=True, has_mlp_bias=True),
    "mixtral": Family(windows=Windows.ALL, experts=MIXTRAL_EXPERTS, bias=Bias.NONE),
    "gpt_oss": Family(names=replace(LLAMA, sinks="self_attn.sinks"), windows=Windows.BY_TYPE, experts=GPT_OSS_EXPERTS),
    "gemma": Family(norm_offset=1.0, scales_embeddings=True),
    "gemma2": Family(
        names=NORMED_TWICE,
        norm_offset=1.0,
        scales_embeddings=True,
        windows=Windows.BY_TYPE,
        attention_scaling="query_pre_attn_scalar",
        caps_attention=True,
        caps_logits=True,
    ),
    "gemma3_text": Family(
        names=GEMMA_3,
        norm_offset=1.0,
        head_norm=HeadNorm.HEAD,
        scales_embeddings=True,
        windows=Windows.BY_TYPE,
        attention_scaling="query_pre_attn_scalar",
        caps_logits=True,
    ),
    "gemma4_text": Family(
        names=GEMMA_4,
        experts=GEMMA_4_EXPERTS,
        head_norm=HeadNorm.HEAD,
        scales_embeddings=True,
        windows=Windows.BY_TYPE,
        attention_scaling=1.0,
        caps_logits=True,
        has_value_norm=True,
        has_unlike_layers=True,
        shares_keys=True,
        has_layer_inputs=True,
    ),
    "phi3": Family(names=PHI_3, windows=Windows.ALL, turns_a_part=True, bias=Bias.NONE),
    "olmo2": Family(names=OLMO, head_norm=HeadNorm.ROW),
    "olmo3": Family(names=OLMO, head_norm=HeadNorm.ROW, windows=Windows.BY_TYPE),
    "granite": Family(has_multipliers=True, attention_scaling="attention_multiplier", has_mlp_bias=True),
}
