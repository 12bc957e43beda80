"""`Decoder`: a language model of our own layers, over paged memory. Tokens in, hidden states and logits out.

Holds weights; knows plans and sequences no more than a batch shows. Nothing here waits for a device, but experts do on
a GPU for the number of tokens that each takes. Engine thread.

Shapes: T packed tokens, C hidden size, V vocabulary, L layers, P numbers of a layer's own input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn.functional import embedding

from streamserve.engine.model.batch import StepBatch
from streamserve.engine.model.cuda.graphs import DecodeGraphs
from streamserve.engine.model.cuda.kernels import GPUKernels
from streamserve.engine.model.decoder.adapters import Adapter
from streamserve.engine.model.decoder.layer import DecoderLayer, Step
from streamserve.engine.model.decoder.native_experts import native_experts
from streamserve.engine.model.decoder.parts import ACTIVATION, Norm, Rotary, gated
from streamserve.engine.model.decoder.spec import DecoderSpec
from streamserve.engine.model.decoder.step import NativeStep, can_compute
from streamserve.engine.model.kernels import Kernels
from streamserve.engine.model.kv_cache import KVCache, LayerShape
from streamserve.engine.model.linear.base import Linear
from streamserve.engine.model.linear.table import PackedTable, Table


@dataclass(slots=True, kw_only=True)
class LayerInputs:
    """Gemma 4: an embedding that every layer has of its own, and what the token's embedding adds to it."""

    embedding: torch.Tensor  # (V, L * P)
    projection: Linear
    norm: Norm
    embedding_multiplier: float
    projection_multiplier: float

    def __call__(self, input_ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Map input_ids (T,) and their embeddings (T, C) to (T, L, P)."""
        size = len(self.norm.weight)
        own = (embedding(input_ids, self.embedding) * self.embedding_multiplier).view(len(tokens), -1, size)
        projected = self.norm((self.projection(tokens) * self.projection_multiplier).view(len(tokens), -1, size))
        return (projected + own) * 2.0**-0.5


@dataclass(slots=True, kw_only=True)
class Decoder:
    """A decoder in memory: `spec` says what it computes, the rest is what it computes with."""

    spec: DecoderSpec
    embedding: Table | PackedTable  # (T,) -> (T, C)
    embedding_multiplier: float  # in the model's dtype, as transformers rounds it
    rotaries: list[Rotary]
    layers: list[DecoderLayer]
    norm: Norm
    head: Linear
    layer_inputs: LayerInputs | None = None
    num_parameters: int = 0
    kernels: Kernels | GPUKernels | None = None
    native_step: NativeStep | None = None  # where it can be computed whole; see `use`
    graphs: DecodeGraphs | None = None  # on a GPU, once they are captured
    adapters: dict[str, Adapter] = field(default_factory=dict)  # by name
    # Hidden states of the last forward pass, and what the head gives for its decodes: computed with them.
    _decoded: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, the hidden states, and the KV memory."""
        return self.embedding.dtype

    @property
    def vocab_size(self) -> int:
        """Tokens that logits are of."""
        return self.head.out_features

    @property
    def layer_shapes(self) -> dict[int, LayerShape]:
        """What each layer with keys and values of its own stores for a token."""
        return {
            index: LayerShape(
                num_kv_heads=layer.num_kv_heads,
                key_dim=layer.head_dim,
                value_dim=layer.head_dim,
                sliding_window=layer.window,
            )
            for index, layer in enumerate(self.spec.layers)
            if layer.kv_layer == index
        }

    @property
    def linears(self) -> list[Linear]:
        """All linear layers, the head last."""
        found: list[Linear | None] = []
        for layer in self.layers:
            found += [layer.qkv, layer.out, layer.gate_up, layer.down]
            if layer.experts is not None:
                found += [*layer.experts.gate_up, *layer.experts.down]
            if layer.layer_input is not None:
                found += [layer.layer_input.gate, layer.layer_input.out]
        return [linear for linear in (*found, self.head) if linear is not None]

    @property
    def weight_bytes(self) -> int:
        """What linear layers, adapters and the embedding take; a packed embedding that is the head counts once."""
        layers = {id(linear): linear.num_bytes for linear in self.linears}
        if isinstance(self.embedding, PackedTable):
            layers[id(self.embedding.layer)] = self.embedding.layer.num_bytes
        else:
            layers[id(self.embedding)] = self.embedding.weight.nbytes
        return sum(layers.values()) + sum(adapter.num_bytes for adapter in self.adapters.values())

    def use(self, kernels: Kernels | GPUKernels | None) -> None:
        """Compute with kernels from now on: native kernels in one call, if they can do that for this decoder."""
        self.kernels, self.native_step, self.graphs = kernels, None, None
        for norm in (self.norm, *(norm for layer in self.layers for norm in layer.norms)):
            norm.kernels = kernels if isinstance(kernels, GPUKernels) else None
        if isinstance(kernels, GPUKernels):
            return
        for layer in self.layers:
            if layer.experts is not None:
                layer.experts.native = native_experts(kernels, layer.experts)
        if kernels is not None and can_compute(self.spec, self.layers, self.head):
            self.native_step = NativeStep(
                kernels,
                self.spec,
                self.layers,
                embedding=self.embedding,
                embedding_multiplier=self.embedding_multiplier,
                norm=self.norm,
                head=self.head,
            )
            for adapter in self.adapters.values():
                self.native_step.add_adapter(adapter)

    def forward(self, kv: KVCache, batch: StepBatch) -> torch.Tensor:
        """Run the body on a batch, whose keys and values are stored in `kv`; return the hidden states (T, C).

        A sequence with an adapter changes no number of a sequence without.
        """
        self._decoded = None
        if self.native_step is None:
            hidden = None if self.graphs is None or batch.adapters else self.graphs(kv, batch)
            return self._forward(kv, batch) if hidden is None else hidden
        self._decoded = self.native_step(kv, batch, self._query_scale(batch.position_ids[0]))
        return self._decoded[0]

    def _forward(self, kv: KVCache, batch: StepBatch) -> torch.Tensor:
        input_ids, positions = batch.input_ids[0], batch.position_ids[0]
        tokens = self.embedding(input_ids)
        if self.embedding_multiplier != 1.0:
            tokens = tokens * self.embedding_multiplier
        step = Step(
            kv=kv,
            batch=batch,
            kernels=self.kernels,
            gate=self._gate,
            turns=[rotary.at(positions) for rotary in self.rotaries],
            query_scale=self._query_scale(positions),
            layer_inputs=None if self.layer_inputs is None else self.layer_inputs(input_ids, tokens),
            adapters=[(self.adapters[name], rows) for name, rows in batch.adapters.items()],
        )
        for layer in self.layers:
            tokens = layer(tokens, step)
        return self.norm(tokens)

    def capture(self, kv: KVCache, *, most_rows: int, most_blocks: int, on_progress: Callable[[float], None]) -> None:
        """Capture steps of up to `most_rows` decodes over `kv` as CUDA graphs, if there are kernels for it."""
        if isinstance(self.kernels, GPUKernels) and self.kernels.device.type == "cuda":
            graphs = DecodeGraphs(self._forward, kv, most_rows=most_rows, most_blocks=most_blocks)
            graphs.capture(on_progress)
            self.graphs = graphs

    @property
    def _gate(self) -> Callable[[torch.Tensor], torch.Tensor]:
        if isinstance(self.kernels, GPUKernels):
            return partial(self.kernels.gated, activation=self.spec.activation)
        return partial(gated, activation=ACTIVATION[self.spec.activation])

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 logits (n, V) of `rows` (n,) of the hidden states (T, C)."""
        logits = self._products(hidden, rows)
        if self.spec.logit_multiplier != 1.0:
            logits = logits * self.spec.logit_multiplier
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _products(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return what the head gives for `rows`: of decodes of the last pass it is known."""
        if self._decoded is None or hidden is not self._decoded[0]:
            return self.head.floats(hidden.index_select(0, rows))
        known = self._decoded[1]
        if torch.equal(rows, torch.arange(len(known))):
            return known
        is_known = rows < len(known)
        others = hidden.index_select(0, rows[~is_known])
        out = known.new_empty(len(rows), known.shape[1])
        out[is_known] = known.index_select(0, rows[is_known])
        out[~is_known] = self.head.floats(others)
        return out

    def _query_scale(self, positions: torch.Tensor) -> torch.Tensor | None:
        if self.spec.query_scale is None:
            return None
        beta, length = self.spec.query_scale
        scale = 1 + beta * torch.log(1 + torch.floor(positions / length))
        return scale[:, None, None].to(self.dtype)
