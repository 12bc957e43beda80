"""The weights of a GGUF file under the names of the safetensors checkpoint, dequantised when they are asked for.

llama.cpp's converters rename tensors and change some. Here that is undone, so that the checkpoint comes out:

    q and k of Llama's kin    a head's rows are in pairs (i, i + dim / 2) there; here the first half, then the second
    norms of Gemma            stored with 1 added
    experts                   stacked in one tensor a layer; gpt-oss' gate and up are two tensors there, and one here

Tensors are mapped when they are asked for, and let go of. (Changes: convert_hf_to_gguf.py of llama.cpp.)
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from streamserve.engine.model.decoder.checkpoint import LazyWeight
from streamserve.engine.model.linear.native import BYTES_PER_WEIGHT
from streamserve.engine.model.linear.packer import matrix_names
from streamserve.engine.model.load.errors import ModelLoadError, UnsupportedModel
from streamserve.engine.model.load.gguf.config import config_of
from streamserve.engine.model.load.gguf.dequantize import dequantize
from streamserve.engine.model.load.gguf.file import GGUFFile, TensorPlace
from streamserve.engine.model.load.gguf.packed import KINDS, Groups, groups_of

PREFIX = "model."
EMBEDDING, NORM, HEAD = f"{PREFIX}embed_tokens.weight", f"{PREFIX}norm.weight", "lm_head.weight"
# The dtype that weights are dequantised to where none is asked for, by the type of most: else bfloat16, whose 8 bits of
# mantissa are as many as the best quantised type has.
DTYPES = {"F32": torch.float32, "F16": torch.float16}
# Tensors that hold no weights: the config says the same.
COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# A checkpoint's name in a layer -> llama.cpp's in a block, both without .weight and .bias.
LLAMA = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
NORMED_TWICE = {
    **LLAMA,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
PHI_3 = {
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OLMO_2 = {name: tensor for name, tensor in {**LLAMA, **HEAD_NORMS}.items() if name not in ("input_layernorm",)} | {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
LAYER_NAMES = {
    "llama": LLAMA,
    "mixtral": LLAMA,
    "smollm3": LLAMA,
    "granite": LLAMA,
    "qwen2": LLAMA,
    "gemma": LLAMA,
    "qwen3": {**LLAMA, **HEAD_NORMS},
    "qwen3_moe": {**LLAMA, **HEAD_NORMS},
    "gemma2": NORMED_TWICE,
    "gemma3_text": {**NORMED_TWICE, **HEAD_NORMS},
    "phi3": PHI_3,
    "olmo2": OLMO_2,
    "gpt_oss": {**LLAMA, "post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
}
TURNED = {"llama", "mixtral", "smollm3", "granite"}
NORMS_PLUS_ONE = {"gemma", "gemma2", "gemma3_text"}
# A layer's router and experts: the checkpoint's names of the router and of each expert, and the blocks' of all.
MIXTRAL = ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.{}", {"w1": "gate", "w3": "up", "w2": "down"})
QWEN = ("mlp.gate", "mlp.experts.{}.{}", {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"})
EXPERTS = {"mixtral": MIXTRAL, "qwen3_moe": QWEN}


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the checkpoint: its tensors in the file, `expert` of them, and what is made of their numbers.

    `rows`, of a matrix, are the tensor's rows in the checkpoint's order; None: as they are.
    """

    tensors: tuple[str, ...]
    expert: int | None = None
    rows: torch.Tensor | None = None
    change: Callable[..., torch.Tensor] | None = None


class GGUFWeights:
    """All weights by the checkpoint's names, in `dtype` (None: what suits the file)."""

    prefix = PREFIX

    def __init__(self, file: GGUFFile, dtype: torch.dtype | None = None) -> None:
        """Raise `UnsupportedModel` for tensors that no weight of the architecture is made of."""
        self.file, self.path, self.main_type = file, file.path, file.main_type()
        self._dtype = dtype or DTYPES.get(self.main_type, torch.bfloat16)
        config = config_of(file)
        self._weights = dict(weights_of(file, config))
        self._matrices = dict(_gpt_oss_matrices(file, config)) if config["model_type"] == "gpt_oss" else {}
        self.head_name = HEAD if HEAD in self._weights else None
        used = {tensor for weight in self._weights.values() for tensor in weight.tensors}
        unknown = [name for name in file.tensors if name not in used and name not in COMPUTED]
        if unknown:
            raise UnsupportedModel(
                f"{file.path} has {len(unknown)} tensors that are not known of {file.architecture} "
                f"({', '.join(unknown[:3])}{', …' if len(unknown) > 3 else ''}). Serve it with llama-server and point "
                "streamserve's remote client at it."
            )

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names that begin with `prefix`."""
        return (name for name in self._weights if name.startswith(prefix))

    def require(self, names: Iterable[str]) -> None:
        """Raise `ModelLoadError` for names that the file has no tensor for."""
        missing = sorted(name for name in names if name not in self)
        if missing:
            raise ModelLoadError(
                f"{self.file.path} lacks {len(missing)} of the model's weights ({', '.join(missing[:3])}"
                f"{', …' if len(missing) > 3 else ''}). Download it again, or another file of the model."
            )

    def dtype(self) -> torch.dtype:
        """Return the dtype of all weights."""
        return self._dtype

    def tensor(self, name: str) -> torch.Tensor:
        """Return a weight; floats of the file's own type are a map of the file."""
        return self._tensor(name, self._dtype)

    def _tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        weight = self._matrices.get(name) or self._weights[name]
        parts = [self._read(self.file.tensors[tensor], weight.expert, dtype) for tensor in weight.tensors]
        if weight.rows is not None:
            parts = [part[weight.rows] for part in parts]
        if weight.change is not None:
            return weight.change(*parts)
        (found,) = parts
        return found

    def kind(self, name: str) -> str | None:
        """Return what a weight's layer is packed to; None for a weight that is not quantised, or is made of several."""
        weight = self._matrices.get(name) or self._weights.get(name)
        if weight is None or len(weight.tensors) != 1 or weight.change is not None:
            return None
        return KINDS.get(self.file.tensors[weight.tensors[0]].type.name)

    def groups(self, name: str) -> Groups | None:
        """Return a weight as groups of 32; None where they do not hold it as it is (packed.py)."""
        weight = self._matrices.get(name) or self._weights[name]
        data, shape = self._blocks(self.file.tensors[weight.tensors[0]], weight.expert)
        found = groups_of(data, self.file.tensors[weight.tensors[0]].type, (shape[0], shape[1]))
        if found is None or weight.rows is None:
            return found
        return tuple(part[weight.rows] for part in found)

    def floats(self, name: str) -> torch.Tensor:
        """Return a weight in float32."""
        return self._tensor(name, torch.float32)

    @property
    def is_quantized(self) -> bool:
        """Whether most of the weights are."""
        return self.main_type in KINDS

    def lazily(self) -> dict[str, LazyWeight]:
        """Return all weights, each read when it is indexed: what transformers takes as a state dict."""
        return {name: LazyWeight(self, name) for name in self._weights}

    def num_bytes(self) -> int:
        """Return what all weights take when they are dequantised."""
        return sum(prod(place.shape) for place in self.file.tensors.values()) * int(self._dtype.itemsize)

    def packed_bytes(self) -> int:
        """Return what all weights take when the quantised ones stay so."""
        total = 0.0
        for place in self.file.tensors.values():
            kind = KINDS.get(place.type.name)
            per_weight = self._dtype.itemsize if kind is None else BYTES_PER_WEIGHT[kind]
            total += prod(place.shape) * per_weight
        return int(total)

    def _read(self, place: TensorPlace, expert: int | None, dtype: torch.dtype) -> torch.Tensor:
        data, shape = self._blocks(place, expert)
        return dequantize(data, place.type, shape, dtype)

    def _blocks(self, place: TensorPlace, expert: int | None) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Return the bytes of a tensor, or of one expert's part of it, and its shape."""
        data, shape = mapped(self.file, place), place.shape
        if expert is not None:
            shape = shape[1:]
            num_bytes = place.num_bytes // place.shape[0]
            data = data[expert * num_bytes : (expert + 1) * num_bytes]
        return data, shape


def mapped(file: GGUFFile, place: TensorPlace) -> torch.Tensor:
    """Return the bytes of a tensor (num_bytes,), uint8: pages of the file, read when they are used."""
    skipped = place.begin % mmap.ALLOCATIONGRANULARITY
    with file.path.open("rb") as stream:
        # Private: torch asks for memory that could be written to. Nothing is.
        pages = mmap.mmap(
            stream.fileno(), skipped + place.num_bytes, access=mmap.ACCESS_COPY, offset=place.begin - skipped
        )
    return torch.frombuffer(pages, dtype=torch.uint8, count=place.num_bytes, offset=skipped)


def weights_of(file: GGUFFile, config: dict[str, Any]) -> Iterator[tuple[str, Weight]]:
    """Yield the checkpoint's weights that the file has tensors for."""
    model_type = config["model_type"]
    minus_one = minus_one_of if model_type in NORMS_PLUS_ONE else None
    yield EMBEDDING, Weight(("token_embd.weight",))
    yield NORM, Weight(("output_norm.weight",), change=minus_one)
    if "output.weight" in file:
        yield HEAD, Weight(("output.weight",))
    for index in range(config["num_hidden_layers"]):
        layer, block = f"{PREFIX}layers.{index}", f"blk.{index}"
        for name, tensor in LAYER_NAMES[model_type].items():
            rows = _turned_rows(config, name) if model_type in TURNED else None
            change = minus_one if name.endswith("norm") else None
            for part in ("weight", "bias"):
                if f"{block}.{tensor}.{part}" in file:
                    yield f"{layer}.{name}.{part}", Weight((f"{block}.{tensor}.{part}",), rows=rows, change=change)
        if model_type in EXPERTS and f"{block}.ffn_gate_inp.weight" in file:
            yield from _expert_weights(file, config, layer, block)
        if model_type == "gpt_oss":
            yield from _gpt_oss_weights(layer, block)


def _turned_rows(config: dict[str, Any], name: str) -> torch.Tensor | None:
    """Return where each row of q or k is in the file: of a head, row 2i there is row i, and 2i + 1 is i + dim / 2.

    (Turning pairs of neighbours is llama.cpp's way of rotary positions for these.)
    """
    heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(name)
    if heads is None:
        return None
    num_heads = config.get(heads) or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return torch.arange(num_heads * head_dim).view(num_heads, head_dim // 2, 2).transpose(1, 2).flatten()


def _expert_weights(file: GGUFFile, config: dict[str, Any], layer: str, block: str) -> Iterator[tuple[str, Weight]]:
    router, expert_name, parts = EXPERTS[config["model_type"]]
    yield f"{layer}.{router}.weight", Weight((f"{block}.ffn_gate_inp.weight",))
    for part, tensor in parts.items():
        stacked = f"{block}.ffn_{tensor}_exps.weight"
        if stacked not in file:
            raise ModelLoadError(
                f"{file.path} has no {stacked}: it was converted by an old llama.cpp, which wrote each expert by "
                "itself. Download a newer file of the model."
            )
        for expert in range(file.tensors[stacked].shape[0]):
            yield f"{layer}.{expert_name.format(expert, part)}.weight", Weight((stacked,), expert=expert)


def _gpt_oss_weights(layer: str, block: str) -> Iterator[tuple[str, Weight]]:
    yield f"{layer}.self_attn.sinks", Weight((f"{block}.attn_sinks.weight",))
    experts = f"{layer}.mlp.experts"
    gate_up = tuple(f"{block}.ffn_{part}_exps" for part in ("gate", "up"))
    transposed, bias = partial(interleaved, is_matrix=True), partial(interleaved, is_matrix=False)
    yield f"{experts}.gate_up_proj", Weight(tuple(f"{name}.weight" for name in gate_up), change=transposed)
    yield f"{experts}.gate_up_proj_bias", Weight(tuple(f"{name}.bias" for name in gate_up), change=bias)
    yield f"{experts}.down_proj", Weight((f"{block}.ffn_down_exps.weight",), change=transposed_of)
    yield f"{experts}.down_proj_bias", Weight((f"{block}.ffn_down_exps.bias",))


def _gpt_oss_matrices(file: GGUFFile, config: dict[str, Any]) -> Iterator[tuple[str, Weight]]:
    """Yield each expert's matrices, for what packs them one by one: gate and up are tensors of their own here."""
    for index in range(config["num_hidden_layers"]):
        experts, block = f"{PREFIX}layers.{index}.mlp.experts", f"blk.{index}"
        for expert in range(config["num_local_experts"]):
            both = matrix_names(f"{experts}.gate_up_proj", expert, is_interleaved=True)
            (down,) = matrix_names(f"{experts}.down_proj", expert, is_interleaved=False)
            for name, part in zip((*both, down), ("gate", "up", "down"), strict=True):
                yield name, Weight((f"{block}.ffn_{part}_exps.weight",), expert=expert)


def minus_one_of(norm: torch.Tensor) -> torch.Tensor:
    """Return Gemma's norm as it is in the checkpoint."""
    return norm - 1


def transposed_of(weights: torch.Tensor) -> torch.Tensor:
    """Return (num_experts, out, in) as (num_experts, in, out)."""
    return weights.transpose(1, 2).contiguous()


def interleaved(gate: torch.Tensor, up: torch.Tensor, *, is_matrix: bool) -> torch.Tensor:
    """Return gate and up (num_experts, out[, in]) in turns along out: (num_experts, [in,] 2 * out)."""
    both = torch.stack((gate, up), dim=2).flatten(1, 2)
    return transposed_of(both) if is_matrix else both
