"""A `Decoder` of a folder's weights: read by the table of names, fused, packed, one layer after the other.

A layer's plain weights are views of the file, and let go of when they are packed: no more than one layer is in memory
twice. Runs once, at load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from streamserve.engine.model.attention import Variant
from streamserve.engine.model.decoder.checkpoint import UnlikeSpec, Weights
from streamserve.engine.model.decoder.decoder import Decoder, LayerInputs
from streamserve.engine.model.decoder.experts import Experts
from streamserve.engine.model.decoder.families import ExpertNames, HeadNorm, Names
from streamserve.engine.model.decoder.layer import DecoderLayer, LayerInput
from streamserve.engine.model.decoder.parts import ACTIVATION, HeadsNorm, Norm, Rotary
from streamserve.engine.model.decoder.spec import DecoderSpec, ExpertsSpec, LayerSpec
from streamserve.engine.model.linear.base import Linear, PlainLinear
from streamserve.engine.model.linear.choose import LinearMaker
from streamserve.engine.model.linear.head import FloatHead
from streamserve.engine.model.linear.native import NativeLinear
from streamserve.engine.model.linear.packer import matrix_names
from streamserve.engine.model.linear.table import PackedTable, Table
from streamserve.engine.model.load.source import ModelLoadError

# Names that older files have beside the weights: they are computed.
IGNORED = ("rotary_emb.inv_freq",)
EMBEDDING, FINAL_NORM = "embed_tokens.weight", "norm.weight"
LAYER_EMBEDDING, LAYER_PROJECTION = "embed_tokens_per_layer.weight", "per_layer_model_projection"
LAYER_PROJECTION_NORM = "per_layer_projection_norm.weight"


def build(
    spec: DecoderSpec,
    checkpoint: Weights,
    maker: LinearMaker,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[float], None] = lambda _fraction: None,
) -> Decoder:
    """Return the decoder. Raise `UnlikeSpec` for weights without a place in it, `ModelLoadError` for missing ones."""
    check_names(spec, checkpoint)
    return Builder(spec, checkpoint, maker, dtype, device).decoder(on_progress)


def check_names(spec: DecoderSpec, checkpoint: Weights) -> None:
    """Compare the names of all weights with those that the spec needs."""
    prefix = checkpoint.prefix
    needed = {f"{prefix}{name}" for name in body_names(spec)}
    if not spec.is_head_tied:
        needed.add(checkpoint.head_name or "lm_head.weight")
    for index in range(len(spec.layers)):
        needed |= {f"{prefix}layers.{index}.{name}" for name in layer_names(spec, index)}
    shared = {f"{prefix}layers.{index}.self_attn." for index, one in enumerate(spec.layers) if one.kv_layer != index}
    unknown = [
        name
        for name in checkpoint.names(f"{prefix}layers.")
        if name not in needed
        and not name.endswith(IGNORED)
        and not any(name.startswith(layer) and name.split(".")[-2][0] in "kv" for layer in shared)
    ]
    if unknown:
        raise UnlikeSpec(f"{len(unknown)} weights beside those of its family ({', '.join(sorted(unknown)[:3])})")
    checkpoint.require(needed)


def body_names(spec: DecoderSpec) -> Iterator[str]:
    """Yield the names of all weights that no layer has."""
    yield from (EMBEDDING, FINAL_NORM)
    if spec.per_layer_size:
        yield from (LAYER_EMBEDDING, f"{LAYER_PROJECTION}.weight", LAYER_PROJECTION_NORM)


def layer_names(spec: DecoderSpec, index: int) -> Iterator[str]:
    """Yield the names of a layer's weights, after its prefix."""
    names, layer = spec.family.names, spec.layers[index]
    norms = (names.attention_norm, names.after_attention_norm, names.mlp_norm, names.after_mlp_norm, names.query_norm)
    yield from (f"{norm}.weight" for norm in norms if norm)
    if names.key_norm and layer.kv_layer == index:
        yield f"{names.key_norm}.weight"
    yield from (name for name in (names.sinks, names.layer_scale) if name)
    yield from _linear_names(qkv_names(names, layer, index), spec.qkv_bias)
    yield from _linear_names((names.out,), spec.out_bias)
    if layer.experts is None or layer.experts.is_beside_dense:
        yield from _linear_names((*names.gate_up, names.down), spec.mlp_bias)
    if layer.experts is not None:
        assert spec.family.experts is not None
        yield from expert_names(spec.family.experts, layer.experts)
    if spec.per_layer_size:
        yield from _linear_names((names.layer_input_gate, names.layer_input_out, names.layer_input_norm), False)


def qkv_names(names: Names, layer: LayerSpec, index: int) -> tuple[str, ...]:
    """Return the linear layers that queries, keys and values come from."""
    if layer.kv_layer != index:
        return names.qkv[:1]
    return names.qkv[:2] if layer.values_are_keys else names.qkv


def expert_names(names: ExpertNames, spec: ExpertsSpec) -> Iterator[str]:
    """Yield the names of a layer's router and experts."""
    yield from _linear_names((names.router,), spec.has_bias)
    yield from (name for name in (names.router_scale, names.expert_scale) if name)
    yield from (f"{norm}.weight" for norm in names.norms)
    parts = (*names.gate_up, names.down)
    for part in parts:
        if "{}" in part:
            yield from (f"{part.format(expert)}.weight" for expert in range(spec.num_experts))
        else:
            yield from (part, f"{part}_bias") if spec.has_bias else (part,)


def _linear_names(names: Sequence[str], has_bias: bool) -> Iterator[str]:
    for name in names:
        yield f"{name}.weight"
        if has_bias:
            yield f"{name}.bias"


def sample_weights(spec: DecoderSpec, checkpoint: Weights, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield weights of linear layers, for a measurement: those of the layers in order."""
    names = spec.family.names
    for index, layer in enumerate(spec.layers):
        parts = [*qkv_names(names, layer, index), names.out]
        if layer.experts is None:
            parts += [*names.gate_up, names.down]
        for part in parts:
            name = f"{checkpoint.prefix}layers.{index}.{part}.weight"
            if name in checkpoint:
                yield checkpoint.tensor(name).to(dtype)


class Builder:
    """Builds one decoder."""

    def __init__(
        self, spec: DecoderSpec, checkpoint: Weights, maker: LinearMaker, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec, self.checkpoint, self.maker = spec, checkpoint, maker
        self.dtype, self.device = dtype, device
        self.names = spec.family.names
        self.num_parameters = 0

    def decoder(self, on_progress: Callable[[float], None]) -> Decoder:
        """Return the decoder."""
        spec, prefix = self.spec, self.checkpoint.prefix
        layers = []
        for index in range(len(spec.layers)):
            layers.append(self._layer(index))
            on_progress((index + 1) / (len(spec.layers) + 1))
        table, head = self._table_and_head()
        on_progress(1.0)
        multiplier = torch.tensor(spec.embedding_multiplier)
        return Decoder(
            spec=spec,
            embedding=table,
            embedding_multiplier=float(multiplier.to(self.dtype) if spec.family.scales_embeddings else multiplier),
            rotaries=[Rotary(rotary, self.dtype, self.device) for rotary in spec.rotaries],
            layers=layers,
            norm=self._norm(f"{prefix}{FINAL_NORM}"),
            head=head,
            layer_inputs=self._layer_inputs() if spec.per_layer_size else None,
            num_parameters=self.num_parameters,
        )

    def _table_and_head(self) -> tuple[Table | PackedTable, Linear]:
        """Return the embedding and the head: of a packed weight that is both, one copy."""
        name = self.checkpoint.head_name
        if self.spec.is_head_tied or name is None:
            table = self._table(is_head=True)
            if isinstance(table, PackedTable):
                return table, table.layer
            return table, self._float_head(table.weight, is_kept=True)
        table = self._table(is_head=False)
        head: Linear | None = self._kept(name)
        if head is None:
            head = self._as_stored([name])
            if head is None:
                head = self._float_head(self._tensor(name), is_kept=self.dtype is not torch.float32)
            self._keep(name, head)
        return table, head

    def _table(self, *, is_head: bool) -> Table | PackedTable:
        """Return the embedding: packed where it is the head too, and where weights are rounded anyhow."""
        name, back_end = f"{self.checkpoint.prefix}{EMBEDDING}", self.maker.back_end
        table: Table | PackedTable
        layer: Linear | None = self._kept(name)
        if layer is None:
            layer = self._as_stored([name])
            if layer is None:
                weight = self._tensor(name)
                packs = back_end.has_rows and (is_head or back_end.rounding > 0)
                layer = self.maker.make(weight) if packs else PlainLinear(weight, None)
            self._keep(name, layer)
        table = PackedTable(layer) if isinstance(layer, NativeLinear) else Table(weight)
        if table.num_rows < self.spec.vocab_size or table.row_len != self.spec.hidden_size:
            raise self._wrong_shape(EMBEDDING, (table.num_rows, table.row_len))
        return table

    def _float_head(self, weight: torch.Tensor, *, is_kept: bool) -> Linear:
        layer = self.maker.make(weight, is_kept=is_kept)
        return layer if layer.is_float else FloatHead(layer, weight, None)

    def _layer(self, index: int) -> DecoderLayer:
        spec, names, layer = self.spec, self.names, self.spec.layers[index]
        prefix = f"{self.checkpoint.prefix}layers.{index}."
        has_dense = layer.experts is None or layer.experts.is_beside_dense
        has_keys = layer.kv_layer == index
        width = layer.query_dim + (has_keys * layer.kv_dim * (1 if layer.values_are_keys else 2))
        return DecoderLayer(
            spec=layer,
            index=index,
            variant=Variant(
                scaling=layer.attention_scaling,
                window=layer.window,
                softcap=layer.softcap,
                sinks=self._tensor(prefix + names.sinks) if names.sinks else None,
            ),
            activation=ACTIVATION[spec.activation],
            attention_norm=self._named_norm(prefix, names.attention_norm),
            qkv=self._linear(prefix, qkv_names(names, layer, index), spec.qkv_bias, (width, spec.hidden_size)),
            head_norm=self._head_norm(prefix, layer, has_keys),
            query_norm=self._row_norm(prefix, names.query_norm),
            key_norm=self._row_norm(prefix, names.key_norm),
            value_eps=spec.norm_eps if spec.family.has_value_norm else None,
            out=self._linear(prefix, (names.out,), spec.out_bias, (spec.hidden_size, layer.query_dim)),
            after_attention_norm=self._named_norm(prefix, names.after_attention_norm),
            mlp_norm=self._named_norm(prefix, names.mlp_norm),
            gate_up=self._linear(prefix, names.gate_up, spec.mlp_bias, (2 * layer.intermediate_size, spec.hidden_size))
            if has_dense
            else None,
            down=self._linear(prefix, (names.down,), spec.mlp_bias, (spec.hidden_size, layer.intermediate_size))
            if has_dense
            else None,
            experts=self._experts(prefix, layer.experts) if layer.experts is not None else None,
            after_mlp_norm=self._named_norm(prefix, names.after_mlp_norm),
            residual_multiplier=spec.residual_multiplier,
            layer_input=self._layer_input(prefix) if spec.per_layer_size else None,
            scale=self._tensor(prefix + names.layer_scale) if names.layer_scale else None,
        )

    def _experts(self, prefix: str, spec: ExpertsSpec) -> Experts:
        names = self.spec.family.experts
        assert names is not None
        norms: list[Norm | None] = [self._norm(f"{prefix}{name}.weight") for name in names.norms]
        dense_norm, norm, after_norm = norms or (None, None, None)
        stacks = self._stacks(prefix, names, spec)
        made = [self._expert(prefix, names, spec, expert, stacks) for expert in range(spec.num_experts)]
        scale = self._tensor(prefix + names.router_scale) * self.spec.hidden_size**-0.5 if names.router_scale else None
        return Experts(
            spec=spec,
            router=self._tensor(f"{prefix}{names.router}.weight"),
            router_bias=self._tensor(f"{prefix}{names.router}.bias") if spec.has_bias else None,
            gate_up=[gate_up for gate_up, _ in made],
            down=[down for _, down in made],
            activation=self.spec.activation,
            router_scale=scale,
            expert_scale=self._tensor(prefix + names.expert_scale) if names.expert_scale else None,
            eps=self.spec.norm_eps,
            dense_norm=dense_norm,
            norm=norm,
            after_norm=after_norm,
        )

    def _stacks(self, prefix: str, names: ExpertNames, spec: ExpertsSpec) -> dict[str, torch.Tensor]:
        """Return the weights and biases that are stored for all experts together, by name.

        Weights that the checkpoint has quantised are left out: `_as_stored` makes layers of them.
        """
        parts = [name for name in (*names.gate_up, names.down) if "{}" not in name]
        biases = [f"{name}_bias" for name in parts] if spec.has_bias else []
        packer = self.maker.packer
        if packer is not None:
            parts = [name for name in parts if not packer.takes(self._matrix_names(prefix, names, name, 0))]
        return {name: self._tensor(prefix + name) for name in (*parts, *biases)}

    def _matrix_names(self, prefix: str, names: ExpertNames, name: str, expert: int) -> tuple[str, ...]:
        is_both = names.is_interleaved and name == names.gate_up[0]
        return matrix_names(prefix + name, expert, is_interleaved=is_both)

    def _expert(
        self, prefix: str, names: ExpertNames, spec: ExpertsSpec, expert: int, stacks: dict[str, torch.Tensor]
    ) -> tuple[Linear, Linear]:
        """Return an expert's [gate | up] and its down."""
        inner, hidden = spec.intermediate_size, self.spec.hidden_size
        if "{}" in names.down:
            gate_up = [name.format(expert) for name in names.gate_up]
            return (
                self._linear(prefix, gate_up, False, (2 * inner, hidden)),
                self._linear(prefix, (names.down.format(expert),), False, (hidden, inner)),
            )
        made = []
        for name, shape in ((names.gate_up[0], (2 * inner, hidden)), (names.down, (hidden, inner))):
            is_both = names.is_interleaved and name == names.gate_up[0]  # gate and up in turns
            bias = stacks[f"{name}_bias"][expert] if spec.has_bias else None
            if is_both and bias is not None:
                bias = torch.cat((bias[::2], bias[1::2]))
            if name not in stacks:
                kept_as = f"{prefix}{name} {expert}"
                layer: Linear | None = self._kept(kept_as, bias)
                if layer is None:
                    layer = self._as_stored(self._matrix_names(prefix, names, name, expert), bias)
                    assert layer is not None
                    self._keep(kept_as, layer)
                if (layer.out_features, layer.in_features) != shape:
                    raise self._wrong_shape(prefix + name, (layer.out_features, layer.in_features))
                made.append(layer)
                continue
            weight = stacks[name][expert].t() if names.is_interleaved else stacks[name][expert]
            if is_both:
                weight = torch.cat((weight[::2], weight[1::2]))
            if weight.shape != shape:
                raise self._wrong_shape(prefix + name, weight.shape)
            made.append(self.maker.make(weight.contiguous(), bias))
        return made[0], made[1]

    def _layer_input(self, prefix: str) -> LayerInput:
        names, size, hidden = self.names, self.spec.per_layer_size, self.spec.hidden_size
        return LayerInput(
            gate=self._linear(prefix, (names.layer_input_gate,), False, (size, hidden)),
            out=self._linear(prefix, (names.layer_input_out,), False, (hidden, size)),
            norm=self._norm(f"{prefix}{names.layer_input_norm}.weight"),
        )

    def _layer_inputs(self) -> LayerInputs:
        prefix, spec = self.checkpoint.prefix, self.spec
        shape = (len(spec.layers) * spec.per_layer_size, spec.hidden_size)
        return LayerInputs(
            embedding=self._tensor(prefix + LAYER_EMBEDDING),
            projection=self._linear(prefix, (LAYER_PROJECTION,), False, shape),
            norm=self._norm(prefix + LAYER_PROJECTION_NORM),
            embedding_multiplier=float(torch.tensor(spec.per_layer_size**0.5).to(self.dtype)),
            projection_multiplier=spec.hidden_size**-0.5,
        )

    def _linear(self, prefix: str, names: Sequence[str], has_bias: bool, shape: tuple[int, int]) -> Linear:
        """Return the layers of these names as one, their outputs side by side."""
        biases = [self._tensor(f"{prefix}{name}.bias") for name in names] if has_bias else []
        bias, kept_as = torch.cat(biases) if biases else None, f"{prefix}{' '.join(names)}"
        layer: Linear | None = self._kept(kept_as, bias)
        if layer is None:
            layer = self._as_stored([f"{prefix}{name}.weight" for name in names], bias)
            if layer is None:
                weights = [self._tensor(f"{prefix}{name}.weight") for name in names]
                weight = weights[0] if len(weights) == 1 else torch.cat(weights)
                del weights
                if weight.shape != shape:
                    raise self._wrong_shape(prefix + names[0], weight.shape)
                layer = self.maker.make(weight, bias)
            self._keep(kept_as, layer)
        if (layer.out_features, layer.in_features) != shape:
            raise self._wrong_shape(prefix + names[0], (layer.out_features, layer.in_features))
        return layer

    def _kept(self, name: str, bias: torch.Tensor | None = None) -> NativeLinear | None:
        """Return a layer that an earlier load has packed."""
        layer = None if self.maker.packs is None else self.maker.packs.layer(name, bias)
        if layer is not None:
            self.num_parameters += layer.out_features * layer.in_features
        return layer

    def _keep(self, name: str, layer: Linear) -> None:
        if self.maker.packs is not None:
            self.maker.packs.add(name, layer)

    def _as_stored(self, names: Sequence[str], bias: torch.Tensor | None = None) -> Linear | None:
        """Return the layer of weights that the checkpoint has quantised, side by side; None where they are not."""
        layer = None if self.maker.packer is None else self.maker.packer.pack(names, bias)
        if layer is not None:
            self.num_parameters += layer.out_features * layer.in_features
        return layer

    def _named_norm(self, prefix: str, name: str) -> Norm | None:
        return self._norm(f"{prefix}{name}.weight") if name else None

    def _norm(self, name: str) -> Norm:
        return Norm(self._norm_weight(name), self.spec.norm_eps)

    def _norm_weight(self, name: str) -> torch.Tensor:
        weight = self._tensor(name)
        offset = self.spec.family.norm_offset
        return weight.float() + offset if offset else weight

    def _row_norm(self, prefix: str, name: str) -> Norm | None:
        return self._named_norm(prefix, name) if self.spec.family.head_norm is HeadNorm.ROW else None

    def _head_norm(self, prefix: str, layer: LayerSpec, has_keys: bool) -> HeadsNorm | None:
        if self.spec.family.head_norm is not HeadNorm.HEAD:
            return None
        weights = self._norm_weight(f"{prefix}{self.names.query_norm}.weight").expand(layer.num_heads, -1)
        if has_keys:
            keys = self._norm_weight(f"{prefix}{self.names.key_norm}.weight").expand(layer.num_kv_heads, -1)
            weights = torch.cat((weights, keys))
        return HeadsNorm(weights.contiguous(), self.spec.norm_eps)

    def _tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in the decoder's dtype and on its device."""
        tensor = self.checkpoint.tensor(name)
        self.num_parameters += tensor.numel()
        return tensor.to(device=self.device, dtype=self.dtype)

    def _wrong_shape(self, name: str, shape: Sequence[int]) -> ModelLoadError:
        return ModelLoadError(
            f"{name} has the shape {tuple(shape)}, and by the model's config another. Copy or download both again."
        )
