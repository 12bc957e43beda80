"""One decoder layer: its weights in plain sight, and what it computes of a step's tokens.

    x -> norm -> [ q | k | v ] -> norms of heads, rotation -> paged attention -> out -> norm, + x = y
    y -> norm -> [ gate | up ] -> act(gate) * up -> down -> norm, + y        (or experts)

A part that a family does not have is None. Engine thread.

Shapes: T packed tokens, C hidden size, Hq query heads, Hkv key/value heads, D head dim, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn.functional import rms_norm

from streamserve.engine.model import attention
from streamserve.engine.model.attention import AttentionKernels, Variant
from streamserve.engine.model.batch import StepBatch
from streamserve.engine.model.cuda.kernels import GPUKernels
from streamserve.engine.model.decoder.adapters import DOWN, GATE_UP, OUT, QKV, Adapter
from streamserve.engine.model.decoder.experts import Change, Experts
from streamserve.engine.model.decoder.parts import Activation, HeadsNorm, Norm, Turn
from streamserve.engine.model.decoder.spec import LayerSpec
from streamserve.engine.model.kv_cache import KVCache
from streamserve.engine.model.linear.base import Linear


@dataclass(slots=True, kw_only=True)
class Step:
    """What all layers share of one step. `turns` are the rotations at its positions, by `LayerSpec.rotary`.

    `gate` maps [ gate | up ] (T, 2 I) to act(gate) * up (T, I).
    `query_scale` (T, 1, 1) multiplies queries; `layer_inputs` (T, num_layers, per_layer_size); `stored` holds keys and
    values (Hkv, T, D) of layers that later layers read too. `adapters` are those of the step, each with its rows (n,).
    """

    kv: KVCache
    batch: StepBatch
    kernels: AttentionKernels | None
    gate: Callable[[torch.Tensor], torch.Tensor]
    turns: Sequence[Turn]
    query_scale: torch.Tensor | None = None
    layer_inputs: torch.Tensor | None = None
    stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    adapters: Sequence[tuple[Adapter, torch.Tensor]] = ()

    def adapted(self, index: int, part: str, inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Return a linear layer's outputs (T, out), with what the step's adapters add to their rows."""
        for adapter, rows in self.adapters:
            adapter.add(index, part, rows, inputs, outputs)
        return outputs

    def of_experts(self, index: int) -> list[tuple[Change, torch.Tensor]]:
        """Return what the step's adapters change of a layer's experts, each with its rows."""
        found = [(adapter, rows) for adapter, rows in self.adapters if adapter.has_experts(index)]
        return [(partial(_changed, adapter, index), rows) for adapter, rows in found]


def _changed(adapter: Adapter, index: int, part: str, inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    adapter.add(index, part, torch.arange(len(inputs)), inputs, outputs)
    return outputs


@dataclass(slots=True, kw_only=True)
class LayerInput:
    """Gemma 4: what a layer adds of its own embedding of the token."""

    gate: Linear
    out: Linear
    norm: Norm


@dataclass(slots=True, kw_only=True)
class DecoderLayer:
    """The weights of one layer, and the layer computed. `qkv` gives queries, keys and values side by side."""

    spec: LayerSpec
    index: int
    variant: Variant
    activation: Activation
    attention_norm: Norm | None
    qkv: Linear
    head_norm: HeadsNorm | None
    query_norm: Norm | None  # over all query heads together
    key_norm: Norm | None
    value_eps: float | None  # values are normalised
    out: Linear
    after_attention_norm: Norm | None
    mlp_norm: Norm | None
    gate_up: Linear | None
    down: Linear | None
    experts: Experts | None
    after_mlp_norm: Norm | None
    residual_multiplier: float = 1.0
    layer_input: LayerInput | None = None
    scale: torch.Tensor | None = None  # (1,)

    @property
    def norms(self) -> list[Norm]:
        """All norms over a token's numbers."""
        found = [self.attention_norm, self.after_attention_norm, self.mlp_norm, self.after_mlp_norm]
        found += [self.query_norm, self.key_norm, None if self.layer_input is None else self.layer_input.norm]
        return [norm for norm in found if norm is not None]

    def __call__(self, tokens: torch.Tensor, step: Step) -> torch.Tensor:
        """Map (T, C) to (T, C)."""
        tokens, inputs = self._add_and_norm(tokens, self._attend(tokens, step))
        tokens = self._add(tokens, self._feed_forward(tokens, inputs, step), self.after_mlp_norm)
        if self.layer_input is not None:
            assert step.layer_inputs is not None
            own = self.activation(self.layer_input.gate(tokens)).mul_(step.layer_inputs[:, self.index])
            tokens = self.layer_input.norm(self.layer_input.out(own)).add_(tokens)
        return tokens if self.scale is None else tokens.mul_(self.scale)

    def _add_and_norm(self, tokens: torch.Tensor, change: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add what attention gives; return that, and the input of the feed-forward part, which is its norm."""
        norm = self.mlp_norm
        if norm is not None and norm.kernels is not None and self.residual_multiplier == 1.0:
            if self.after_attention_norm is not None:
                change = self.after_attention_norm(change)
            return norm.kernels.add_norm(tokens, change, norm.weight, norm.eps)
        tokens = self._add(tokens, change, self.after_attention_norm)
        return tokens, tokens if norm is None else norm(tokens)

    def _add(self, tokens: torch.Tensor, change: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is not None:
            change = norm(change)
        if self.residual_multiplier != 1.0:
            change = change.mul_(self.residual_multiplier)
        return change.add_(tokens)

    def _attend(self, tokens: torch.Tensor, step: Step) -> torch.Tensor:
        spec, num_tokens = self.spec, len(tokens)
        if self.attention_norm is not None:
            tokens = self.attention_norm(tokens)
        qkv = step.adapted(self.index, QKV, tokens, self.qkv(tokens))
        batch = step.batch.of_group(step.kv.group_of[spec.kv_layer])
        if isinstance(step.kernels, GPUKernels) and self._is_plain:
            query = self._turn_and_store(qkv, step, batch, step.kernels)
            out = attention.attend_stored(self.index, query, self.variant, step.kv, batch, step.kernels)
            return self._project(out.view(num_tokens, -1), step)
        query, key, value = self._heads(qkv, step)
        if key is None or value is None:
            key, value = step.stored[spec.kv_layer]
        elif spec.is_read_later:
            step.stored[self.index] = key, value
        out = attention.attend(
            spec.kv_layer,
            query,
            key,
            value,
            self.variant,
            step.kv,
            batch,
            kernels=step.kernels,
            is_new=spec.kv_layer == self.index,
        )  # (T, Hq, D)
        return self._project(out.reshape(num_tokens, -1), step)

    def _project(self, heads: torch.Tensor, step: Step) -> torch.Tensor:
        return step.adapted(self.index, OUT, heads, self.out(heads))

    @property
    def _is_plain(self) -> bool:
        """Whether its queries, keys and values lie side by side, are its own, and values stay as they are."""
        spec = self.spec
        return not (spec.kv_layer != self.index or spec.is_read_later or spec.values_are_keys or self.value_eps)

    def _turn_and_store(self, qkv: torch.Tensor, step: Step, batch: StepBatch, kernels: GPUKernels) -> torch.Tensor:
        """Store the keys and values of qkv (T, query_dim + 2 kv_dim); return its queries (Hq, T, D)."""
        turn = None if self.spec.rotary is None else step.turns[self.spec.rotary]
        return kernels.turn_and_store(
            self._normed_rows(qkv),
            step.kv.keys[self.index],
            step.kv.values[self.index],
            batch.slot_mapping,
            num_heads=self.spec.num_heads,
            turn=None if turn is None else (turn.cos, turn.sin),
            weights=None if self.head_norm is None else self.head_norm.weights,
            eps=0.0 if self.head_norm is None else self.head_norm.eps,
            query_scale=step.query_scale,
        )

    def _normed_rows(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return qkv with the norms over all query heads, and over all key heads, where the family has them."""
        if self.query_norm is None or self.key_norm is None:
            return qkv
        spec = self.spec
        query, key, rest = qkv.split((spec.query_dim, spec.kv_dim, spec.kv_dim), dim=-1)
        return torch.cat((self.query_norm(query), self.key_norm(key), rest), dim=-1)

    def _heads(self, qkv: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return queries (Hq, T, D), keys and values (Hkv, T, D) of qkv (T, query_dim + 2 kv_dim)."""
        spec = self.spec
        heads = self._normed_rows(qkv).view(len(qkv), -1, spec.head_dim)  # (T, Hq + 2 Hkv, D)
        num_turned = heads.shape[1] if spec.kv_layer != self.index else spec.num_heads + spec.num_kv_heads
        turned = heads[:, :num_turned]
        if self.head_norm is not None:
            turned = self.head_norm(turned)
        if spec.rotary is not None:
            turned = step.turns[spec.rotary](turned)
        query, key = turned[:, : spec.num_heads], turned[:, spec.num_heads :]
        if step.query_scale is not None:
            query = query * step.query_scale
        query = query.transpose(0, 1)
        if spec.kv_layer != self.index:
            return query, None, None
        value = heads[:, spec.num_heads if spec.values_are_keys else num_turned :]
        if self.value_eps is not None:
            value = rms_norm(value, value.shape[-1:], None, self.value_eps)
        return query, key.transpose(0, 1), value.transpose(0, 1)

    def _feed_forward(self, tokens: torch.Tensor, inputs: torch.Tensor, step: Step) -> torch.Tensor:
        """Map `inputs` (T, C), the norm of `tokens`; of both come Gemma 4's experts."""
        if self.gate_up is None or self.down is None:
            assert self.experts is not None
            return self.experts(inputs, step.of_experts(self.index))
        inner = step.gate(step.adapted(self.index, GATE_UP, inputs, self.gate_up(inputs)))
        out = step.adapted(self.index, DOWN, inner, self.down(inner))
        if self.experts is None:
            return out
        assert self.experts.dense_norm is not None
        return self.experts.dense_norm(out).add_(self.experts(tokens))
