"""`NativeStep`: the tokens of a step, of decodes and of prompts, through a whole decoder in one native call.

It computes what `Decoder.forward` and `Decoder.logits` do, with states in float32 and without a return to Python
between operations. The model is described to the library once (its weights' addresses); a step passes token ids,
positions, slots and block tables. `can_compute` says of which decoders. Engine thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch

from streamserve.engine.model.batch import StepBatch
from streamserve.engine.model.decoder.adapters import DOWN, GATE_UP, OUT, QKV, Adapter
from streamserve.engine.model.decoder.layer import DecoderLayer
from streamserve.engine.model.decoder.parts import Norm
from streamserve.engine.model.decoder.spec import DecoderSpec
from streamserve.engine.model.kernels import ACTIVATIONS, DTYPES, Kernels
from streamserve.engine.model.kv_cache import KVCache
from streamserve.engine.model.linear.base import Linear
from streamserve.engine.model.linear.native import LinearRecord, NativeLinear
from streamserve.engine.model.linear.table import PackedTable, Table
from streamserve.engine.plan import Chunk

NO_NORM, NORM_OF_HEADS, NORM_OF_ROWS = 0, 1, 2  # NormKind of native/src/abi.h
MOST_HEAD_DIM = 512
PARTS = QKV, OUT, GATE_UP, DOWN  # by their numbers in StepPart of native/src/abi.h
LANES = 16  # a feed-forward part is shared among threads in so many columns

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Rotation(ctypes.Structure):
    """`StepRotation` of native/src/abi.h."""

    _fields_ = (("frequencies", _pointer), ("num_pairs", _int), ("scaling", _float))


class _Layer(ctypes.Structure):
    """`StepLayer` of native/src/abi.h."""

    _fields_ = (
        *((name, LinearRecord) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _pointer) for name in ("attention_norm", "after_attention_norm", "mlp_norm", "after_mlp_norm")),
        *((name, _pointer) for name in ("query_norm", "key_norm", "keys", "values", "sinks")),
        *(
            (name, _int)
            for name in ("num_heads", "num_kv_heads", "head_dim", "window", "rotation", "norm_kind", "group")
        ),
        ("scaling", _float),
        ("softcap", _float),
    )


class _Model(ctypes.Structure):
    """`StepModel` of native/src/abi.h."""

    _fields_ = (
        *((name, _pointer) for name in ("layers", "rotations", "embedding", "norm")),
        *((name, LinearRecord) for name in ("head", "table")),
        *((name, _int) for name in ("num_layers", "num_rotations", "num_embeddings", "hidden_size", "dtype")),
        *((name, _int) for name in ("block_size", "num_slots", "activation", "is_int8")),
        *((name, _float) for name in ("eps", "embedding_multiplier", "residual_multiplier")),
    )


class _Prompt(ctypes.Structure):
    """`StepPrompt` of native/src/abi.h."""

    _fields_ = (("table", _pointer), *((name, _int) for name in ("first_row", "num_rows", "start", "num_blocks")))


class _Lora(ctypes.Structure):
    """`StepLora` of native/src/abi.h."""

    _fields_ = (("down", LinearRecord), ("up", LinearRecord), ("begin", _int))


class _Adapter(ctypes.Structure):
    """`StepAdapter` of native/src/abi.h."""

    _fields_ = (("loras", _pointer), ("first_of", _pointer))


class _Run(ctypes.Structure):
    """`StepRun` of native/src/abi.h."""

    _fields_ = (("adapter", _pointer), ("first_row", _int), ("num_rows", _int))


class _Group(ctypes.Structure):
    """`StepGroup` of native/src/abi.h."""

    _fields_ = (*((name, _pointer) for name in ("slots", "tables", "prompts")), ("table_stride", _int))


class _Call(ctypes.Structure):
    """`StepCall` of native/src/abi.h."""

    _fields_ = (
        *((name, _pointer) for name in ("token_ids", "positions", "groups", "query_scale")),
        *((name, _pointer) for name in ("runs", "hidden", "logits")),
        *((name, _int) for name in ("num_rows", "num_decodes", "num_prompts", "num_groups", "num_runs")),
    )


class NativeStep:
    """The native step of one decoder. What it has described it holds, so that the addresses stay good."""

    def __init__(
        self,
        kernels: Kernels,
        spec: DecoderSpec,
        layers: Sequence[DecoderLayer],
        *,
        embedding: Table | PackedTable,
        embedding_multiplier: float,
        norm: Norm,
        head: Linear,
    ) -> None:
        """Describe a decoder that `can_compute` says yes of."""
        self._kernels, self._spec, self._decoder_layers = kernels, spec, layers
        self._kept: list[Any] = [embedding, head]
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        self._rotations = (_Rotation * len(spec.rotaries))(
            *(
                _Rotation(self._floats(torch.tensor(rotary.frequencies)), len(rotary.frequencies), rotary.scaling)
                for rotary in spec.rotaries
            )
        )
        self._model = _Model(
            layers=ctypes.addressof(self._layers),
            rotations=ctypes.addressof(self._rotations),
            embedding=None if isinstance(embedding, PackedTable) else embedding.weight.data_ptr(),
            table=self._linear(embedding.layer) if isinstance(embedding, PackedTable) else LinearRecord(),
            norm=self._floats(norm.weight),
            head=self._linear(head),
            num_layers=len(layers),
            num_rotations=len(spec.rotaries),
            num_embeddings=embedding.num_rows,
            hidden_size=spec.hidden_size,
            dtype=DTYPES[embedding.dtype],
            activation=ACTIVATIONS[spec.activation],
            eps=spec.norm_eps,
            embedding_multiplier=embedding_multiplier,
            residual_multiplier=spec.residual_multiplier,
        )
        self._vocab_size = head.out_features
        self._kv: KVCache | None = None
        self._adapters: dict[str, _Adapter] = {}

    def add_adapter(self, adapter: Adapter) -> None:
        """Describe an adapter, whose linear layers are native: steps name it from now on."""
        loras: list[_Lora] = []
        first_of = [0]
        for layer in adapter.layers:
            for part in PARTS:
                for one in layer.get(part, ()):
                    loras.append(_Lora(self._linear(one.down), self._linear(one.up), one.begin))
                first_of.append(len(loras))
        described = (_Lora * len(loras))(*loras), (_int * len(first_of))(*first_of)
        self._kept += [adapter, *described]
        self._adapters[adapter.name] = _Adapter(*[ctypes.addressof(array) for array in described])

    def __call__(
        self, kv: KVCache, batch: StepBatch, query_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a batch: float32 hidden states (T, C), and what the head gives for the decodes (num_decodes, V).

        A token's numbers are bitwise the same in a decode and in a prompt, wherever that is cut into chunks.
        `query_scale`: T numbers. Raises `IndexError` for a token, slot or block that there is not, and `MemoryError`.
        """
        self._use(kv)
        num_rows, num_decodes = batch.num_tokens, batch.num_decodes
        token_ids, positions = batch.input_ids[0], batch.position_ids[0]
        if query_scale is not None:
            query_scale = query_scale.float().contiguous()
        kept = [_group(one) for one in (batch, *batch.others)]
        groups = (_Group * len(kept))(*(group for group, _ in kept))
        runs = self._runs(batch.chunks) if batch.adapters else (_Run * 0)()
        hidden = torch.empty(num_rows, self._spec.hidden_size)
        logits = torch.empty(num_decodes, self._vocab_size)
        call = _Call(
            token_ids=token_ids.data_ptr(),
            positions=positions.data_ptr(),
            groups=ctypes.addressof(groups),
            query_scale=None if query_scale is None else query_scale.data_ptr(),
            runs=ctypes.addressof(runs),
            hidden=hidden.data_ptr(),
            logits=logits.data_ptr() if num_decodes else None,
            num_rows=num_rows,
            num_decodes=num_decodes,
            num_prompts=len(batch.prefills),
            num_groups=len(groups),
            num_runs=len(runs),
        )
        self._kernels.library.step(ctypes.byref(self._model), ctypes.byref(call), torch.get_num_threads())
        return hidden, logits

    def _runs(self, chunks: Sequence[Chunk]) -> ctypes.Array[_Run]:
        """Describe the rows that have adapters: neighbours with the same adapter are a run."""
        runs: list[_Run] = []
        row = 0
        for name, group in groupby(chunks, key=attrgetter("adapter")):
            num_rows = sum(len(chunk.token_ids) for chunk in group)
            if name:
                runs.append(_Run(ctypes.addressof(self._adapters[name]), row, num_rows))
            row += num_rows
        return (_Run * len(runs))(*runs)

    def _use(self, kv: KVCache) -> None:
        """Describe the pools of `kv`, if those of another were described."""
        if self._kv is kv:
            return
        for layer, own in zip(self._layers, self._decoder_layers, strict=True):
            layer.keys, layer.values = kv.keys[own.index].data_ptr(), kv.values[own.index].data_ptr()
            layer.group = kv.group_of[own.index]
        self._model.block_size, self._model.num_slots = kv.block_size, kv.num_blocks * kv.block_size
        self._model.is_int8 = kv.is_int8
        self._kv = kv

    def _layer(self, layer: DecoderLayer) -> _Layer:
        spec = layer.spec
        query_norm, key_norm, kind = self._head_norms(layer)
        return _Layer(
            qkv=self._linear(layer.qkv),
            out=self._linear(layer.out),
            gate_up=self._linear(layer.gate_up),
            down=self._linear(layer.down),
            attention_norm=self._norm(layer.attention_norm),
            after_attention_norm=self._norm(layer.after_attention_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            after_mlp_norm=self._norm(layer.after_mlp_norm),
            query_norm=query_norm,
            key_norm=key_norm,
            sinks=None if layer.variant.sinks is None else self._floats(layer.variant.sinks),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=spec.window or 0,
            rotation=-1 if spec.rotary is None else spec.rotary,
            norm_kind=kind,
            scaling=spec.attention_scaling,
            softcap=spec.softcap or 0.0,
        )

    def _head_norms(self, layer: DecoderLayer) -> tuple[int | None, int | None, int]:
        if layer.head_norm is not None:
            weights, num_heads = layer.head_norm.weights, layer.spec.num_heads
            return self._floats(weights[:num_heads]), self._floats(weights[num_heads:]), NORM_OF_HEADS
        if layer.query_norm is not None:
            return self._norm(layer.query_norm), self._norm(layer.key_norm), NORM_OF_ROWS
        return None, None, NO_NORM

    def _linear(self, linear: Linear | None) -> LinearRecord:
        assert isinstance(linear, NativeLinear)
        return linear.record()

    def _norm(self, norm: Norm | None) -> int | None:
        return None if norm is None else self._floats(norm.weight)

    def _floats(self, tensor: torch.Tensor) -> int:
        """Return the address of a tensor's numbers in float32, which are held from now on."""
        kept = tensor.float().contiguous()
        self._kept.append(kept)
        return int(kept.data_ptr())


def can_compute(spec: DecoderSpec, layers: Sequence[DecoderLayer], head: Linear) -> bool:
    """Return whether `NativeStep` computes a decoder: dense layers, each with keys of its own, all linears native."""
    return (
        isinstance(head, NativeLinear)
        and not spec.per_layer_size
        and not spec.family.has_value_norm
        and all(map(_is_dense, layers))
    )


def _is_dense(layer: DecoderLayer) -> bool:
    spec = layer.spec
    linears = (layer.qkv, layer.out, layer.gate_up, layer.down)
    return (
        all(isinstance(linear, NativeLinear) for linear in linears)
        and spec.experts is None
        and spec.kv_layer == layer.index
        and not (spec.is_read_later or spec.values_are_keys)
        and layer.scale is None
        and spec.head_dim <= MOST_HEAD_DIM
        and spec.intermediate_size % LANES == 0
    )


def _group(batch: StepBatch) -> tuple[_Group, Any]:
    """Return where the keys of a group of layers are, and what holds that memory."""
    tables = _tables(batch)
    prompts = (_Prompt * len(batch.prefills))(
        *(
            _Prompt(span.block_table.data_ptr(), span.first_row, span.num_tokens, span.start, len(span.block_table))
            for span in batch.prefills
        )
    )
    group = _Group(
        slots=batch.slot_mapping.data_ptr(),
        tables=None if tables is None else tables.data_ptr(),
        prompts=ctypes.addressof(prompts),
        table_stride=0 if tables is None else tables.shape[1],
    )
    return group, (tables, prompts)


def _tables(batch: StepBatch) -> torch.Tensor | None:
    """Return the block tables of all groups of decodes as one, (num_decodes, most blocks)."""
    tables = [group.block_tables for group in batch.decodes]
    if len(tables) <= 1:
        return tables[0] if tables else None
    widest = max(table.shape[1] for table in tables)
    return torch.cat([torch.nn.functional.pad(table, (0, widest - table.shape[1])) for table in tables])
