"""Decoder layers of Llama's shape, computed in fewer and wider operations than Hugging Face's modelling code takes.

A layer is replaced if it has the parts of such a layer, packed, and if both give the same numbers on the model's own
inputs: parts propose, numbers decide. So a norm that adds 1, a scaled residual or rotary pairs that are interleaved
keep their own code. Outside of a step (the parity probe's reference) the layer's own code runs. Engine thread.

    x -> norm -> [ q | k | v ] -> rotate q and k together -> paged attention -> o_proj, + x = y
    y -> norm -> [ gate | up ] -> silu(gate) * up -> down_proj, + y

Shapes: T packed tokens, C hidden size, Hq query heads, Hkv key/value heads, D head dim, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu

from streamserve.engine.model.attention import PagedAttention, Variant, attending_by
from streamserve.engine.model.linear import FusedPart, PackedLinear

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of each token's queries, keys, values, and what is added
NUM_CHECKED = 8  # tokens, spread over all positions

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class RMSNorm:
    """x / rms(x) * weight over the last axis, in one call."""

    def __init__(self, norm: Any) -> None:
        """`norm` is a module with a weight and an epsilon."""
        self.weight = norm.weight.detach()
        self.eps = float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalise inputs (..., C)."""
        return rms_norm(inputs, self.weight.shape, self.weight, self.eps)


class HeadNorm:
    """The norms of the query heads and of the key heads, as one norm over both."""

    def __init__(self, query_norm: Any, key_norm: Any, num_query_heads: int, num_kv_heads: int) -> None:
        """Each head has the weight (D,) of its kind."""
        query, key = RMSNorm(query_norm), RMSNorm(key_norm)
        query_weights, key_weights = query.weight.expand(num_query_heads, -1), key.weight.expand(num_kv_heads, -1)
        self.weights = torch.cat([query_weights, key_weights])  # (Hq + Hkv, D)
        self.eps = query.eps

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Normalise heads (T, Hq + Hkv, D)."""
        return rms_norm(heads, heads.shape[-1:], None, self.eps).mul_(self.weights)


class Rotation:
    """Turns pairs of a head's numbers by the token's position. Made ready once for all layers of a step."""

    def __init__(self) -> None:
        self._source: torch.Tensor | None = None  # held, so that no other tensor can take its identity

    def prepare(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Take what the model's rotary embedding gives, both (1, T, D)."""
        if self._source is sin:
            return
        first, second = sin[0].chunk(2, dim=-1)
        self._cos = cos[0][:, None]  # (T, 1, D)
        self._sin = torch.cat((-first, second), dim=-1)[:, None]
        self._source = sin

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate heads (T, Hq + Hkv, D): [a | b] becomes [a cos - b sin | b cos + a sin]."""
        swapped = heads.roll(heads.shape[-1] // 2, -1)
        return torch.addcmul(heads * self._cos, swapped, self._sin)


class LeanLayer(nn.Module):  # type: ignore[misc]  # torch is not type-checked here
    """A decoder layer whose parts `layer` holds. It takes and gives what `layer` does, in steps of `paged` only."""

    def __init__(self, layer: Any, paged: Any, rotation: Rotation, variant: Variant) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer, self.paged, self.rotation, self.variant = layer, paged, rotation, variant
        self.layer_idx: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.num_query_heads = attention.q_proj.out_features // self.head_dim
        num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.num_rotated = self.num_query_heads + num_kv_heads
        self.input_norm, self.post_norm = RMSNorm(layer.input_layernorm), RMSNorm(layer.post_attention_layernorm)
        self.head_norm = None
        if hasattr(attention, "q_norm"):
            self.head_norm = HeadNorm(attention.q_norm, attention.k_norm, self.num_query_heads, num_kv_heads)
        # Bound methods: a module's call costs more than a step's work on a few tokens.
        self.qkv, self.out = attention.q_proj.group.packed.forward, attention.o_proj.forward
        self.gate_up, self.down = mlp.gate_proj.group.packed.forward, mlp.down_proj.forward
        self.intermediate_size: int = mlp.gate_proj.out_features

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Map hidden (1, T, C) to (1, T, C)."""
        if self.paged.batch is None:
            return self.layer(hidden, **kwargs)
        return self.compute(hidden, *kwargs["position_embeddings"])

    def compute(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attend and feed forward. hidden (1, T, C), cos and sin (1, T, D)."""
        self.rotation.prepare(cos, sin)
        tokens = hidden[0]
        heads = self.qkv(self.input_norm(tokens)).view(len(tokens), -1, self.head_dim)  # (T, Hq + 2 Hkv, D)
        rotated = heads[:, : self.num_rotated]
        if self.head_norm is not None:
            rotated = self.head_norm(rotated)
        rotated = self.rotation(rotated).transpose(0, 1)  # (Hq + Hkv, T, D)
        query, key = rotated[: self.num_query_heads], rotated[self.num_query_heads :]
        value = heads[:, self.num_rotated :].transpose(0, 1)
        attended = self.paged(self.layer_idx, query, key, value, self.variant)  # (T, Hq, D)
        tokens = self.out(attended.reshape(len(tokens), -1)).add_(tokens)
        both = self.gate_up(self.post_norm(tokens))  # (T, 2 I)
        inner = silu(both[:, : self.intermediate_size]).mul_(both[:, self.intermediate_size :])
        return self.down(inner).add_(tokens)[None]

    def __getattr__(self, name: str) -> Any:
        """Models ask their layers for what is theirs, as `attention_type`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


@dataclass(frozen=True, slots=True)
class Call:
    """What one layer passed to attention."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    variant: Variant


class CallRecorder:
    """Stands in for `PagedAttention`: keeps its calls and answers each with the query, which depends on all before."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, variant: Variant
    ) -> torch.Tensor:
        """Record the call. query (Hq, T, D) -> (T, Hq, D)."""
        self.calls[layer] = Call(layer, query, key, value, variant)
        return query.transpose(0, 1).contiguous()


def lean_layers(model: Any, paged: PagedAttention, max_model_len: int) -> int:
    """Replace the decoder layers that can be; return how many. The model's attention is `attention.NAME` already."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if has_parts(child)
    ]
    if not places:
        return 0
    rotation = Rotation()
    num_replaced = 0
    with torch.inference_mode():
        seen, calls = observe(model, [layer for _, _, layer in places], max_model_len)
        for parent, name, layer in places:
            call = calls.get(layer.self_attn.layer_idx)
            if call is None or layer not in seen:
                continue
            lean = LeanLayer(layer, paged, rotation, call.variant)
            if agrees(lean, *seen[layer], call):
                setattr(parent, name, lean)
                num_replaced += 1
    return num_replaced


def restore_layers(model: nn.Module) -> int:
    """Put the layers back that lean layers replaced; return how many."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, LeanLayer)
    ]
    for parent, name, lean in places:
        setattr(parent, name, lean.layer)
    return len(places)


def has_parts(layer: Any) -> bool:
    """Whether a module has the parts of a Llama's decoder layer, all linears packed, and no other part."""
    if set(part_names(layer)) != LAYER_PARTS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    names = set(part_names(attention))
    if names not in (ATTENTION_PARTS, ATTENTION_PARTS | HEAD_NORMS) or set(part_names(mlp)) != MLP_PARTS:
        return False
    fused = (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
    packed = (attention.o_proj, mlp.down_proj)
    if not all(isinstance(part, FusedPart) for part in fused) or not all(
        isinstance(part, PackedLinear) for part in packed
    ):
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in HEAD_NORMS & names]
    return hasattr(attention, "head_dim") and all(is_norm(norm) for norm in norms)


def is_norm(norm: Any) -> bool:
    """Whether a module has what `RMSNorm` reads."""
    return getattr(norm, "weight", None) is not None and (hasattr(norm, "variance_epsilon") or hasattr(norm, "eps"))


def part_names(module: nn.Module) -> Iterator[str]:
    """Names of a module's children."""
    return (name for name, _ in module.named_children())


def observe(
    model: Any, layers: list[nn.Module], max_model_len: int
) -> tuple[dict[nn.Module, tuple[Any, Any, Any]], dict[int, Call]]:
    """Run a few tokens through the model; return each layer's (inputs, keywords, output), and its call of attention."""
    recorder = CallRecorder()
    seen: dict[nn.Module, tuple[Any, Any, Any]] = {}
    positions = torch.linspace(0, max_model_len - 1, NUM_CHECKED).long()[None]
    token_ids = 1 + torch.arange(NUM_CHECKED)[None] % (model.get_output_embeddings().out_features - 1)

    def note(layer: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        seen[layer] = (inputs, keywords, output)

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(attending_by(layer.self_attn, recorder))
            stack.callback(layer.register_forward_hook(note, with_kwargs=True).remove)
        model(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=1)
    return seen, recorder.calls


def agrees(lean: LeanLayer, inputs: Any, keywords: Any, output: Any, call: Call) -> bool:
    """Compare a lean layer with what the layer itself gave: what reaches attention, and what is added to the input."""
    position_embeddings = keywords.get("position_embeddings")
    if len(inputs) != 1 or not isinstance(output, torch.Tensor) or not isinstance(position_embeddings, tuple):
        return False
    recorder = CallRecorder()
    paged, lean.paged = lean.paged, recorder
    try:
        found = lean.compute(inputs[0], *position_embeddings)
    except (RuntimeError, IndexError):  # shapes that do not fit: only a part of the head is rotated
        return False
    finally:
        lean.paged = paged
    own = recorder.calls.get(call.layer)
    if own is None or own.variant != call.variant:
        return False
    pairs = ((own.query, call.query, call.query), (own.key, call.key, call.key), (own.value, call.value, call.value))
    return all(is_close(*pair) for pair in (*pairs, (found, output, output - inputs[0])))


def is_close(found: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether every vector along the last axis is within the tolerance of `scale`, and the rounding of `wanted`."""
    if found.shape != wanted.shape:
        return False
    difference = (found.float() - wanted.float()).norm(dim=-1)
    rounding = torch.finfo(wanted.dtype).eps * wanted.float().norm(dim=-1)
    allowed = TOLERANCE[wanted.dtype] * scale.float().norm(dim=-1) + rounding
    return bool((difference <= allowed).all())  # NaN does not pass
