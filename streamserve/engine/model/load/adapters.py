"""Read LoRA adapters from the files that PEFT writes: `adapter_model.safetensors`, and its config (`adapter_config`).

What a decoder of ours cannot compute of one is refused by name: nothing is left out in silence. Runs once, at load.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight      (r, in)
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight      (out, r)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from streamserve.engine.model.decoder.adapters import DOWN, GATE_UP, OUT, QKV, Adapter, LoraLinear, of_expert
from streamserve.engine.model.decoder.build import qkv_names
from streamserve.engine.model.decoder.spec import DecoderSpec
from streamserve.engine.model.linear.base import Linear
from streamserve.engine.model.load.adapter_config import WEIGHTS, read_adapter_config
from streamserve.engine.model.load.source import ModelLoadError

_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)\.lora_([AB])(?:\.default)?\.weight$")

# The part of a layer, its first output and the one after its last, and its inputs.
_Place = tuple[str, int, int, int]


def read_adapter(
    name: str, folder: Path, spec: DecoderSpec, make: Callable[[torch.Tensor], Linear], dtype: torch.dtype
) -> Adapter:
    """Return an adapter of a decoder of `spec`, its weights (out, in) made into layers by `make`.

    Raises ModelLoadError for files that are no LoRA adapter, or an adapter of another model.
    """
    config = read_adapter_config(folder)
    tables = [dict(_places(spec, index)) for index in range(len(spec.layers))]
    layers: list[dict[str, tuple[LoraLinear, ...]]] = [{} for _ in tables]
    for (index, module), (down, up) in sorted(_pairs(folder).items()):
        place = tables[index].get(module) if index < len(tables) else None
        if place is None:
            raise ModelLoadError(
                f"The adapter {folder} changes layers.{index}.{module}, and this model has no such linear layer that "
                "an adapter may change. Train it on layers of attention and of the feed-forward part alone."
            )
        part, begin, end, num_inputs = place
        rank = len(down)
        if down.shape != (rank, num_inputs) or up.shape != (end - begin, rank):
            raise ModelLoadError(
                f"The adapter {folder} has {tuple(up.shape)} x {tuple(down.shape)} for layers.{index}.{module}, where "
                f"this model has {end - begin} outputs and {num_inputs} inputs: it was trained on another model."
            )
        up = (up.float() * config.scale(rank)).to(dtype)
        change = LoraLinear(begin, end, make(down.to(dtype).contiguous()), make(up.contiguous()))
        layers[index][part] = (*layers[index].get(part, ()), change)
    return Adapter(name, layers)


def _pairs(folder: Path) -> dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]:
    """Return the two weights of each linear layer that is changed, by the layer's index and the linear's name."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{folder / WEIGHTS} cannot be read ({error}). Copy or download it again.") from error
    found: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for name, weight in weights.items():
        match = _NAME.search(name)
        if match is None or weight.dim() != 2 or not weight.numel():
            raise ModelLoadError(
                f"The adapter {folder} has {name}, which is no LoRA weight of a layer. "
                "Merge it into the model (PEFT: merge_and_unload), or train it on linear layers alone."
            )
        found.setdefault((int(match[1]), match[2]), {})[match[3]] = weight
    lacking = [f"layers.{index}.{module}" for (index, module), pair in found.items() if len(pair) != 2]
    if lacking or not found:
        of = ", ".join(lacking[:3]) or "any layer"
        raise ModelLoadError(f"The adapter {folder} lacks weights of {of}. Copy or download it again.")
    return {place: (pair["A"], pair["B"]) for place, pair in found.items()}


def _places(spec: DecoderSpec, index: int) -> Iterator[tuple[str, _Place]]:
    """Yield the linear layers that an adapter may change, by their names in the checkpoint."""
    names, layer = spec.family.names, spec.layers[index]
    of_queries = qkv_names(names, layer, index)
    sizes = [layer.query_dim, layer.kv_dim, layer.kv_dim]
    yield from _side_by_side(QKV, of_queries, sizes if len(names.qkv) > 1 else [sum(sizes)], spec.hidden_size)
    yield names.out, (OUT, 0, spec.hidden_size, layer.query_dim)
    of_experts, experts = spec.family.experts, layer.experts
    if experts is not None and of_experts is not None and "{}" in of_experts.down:
        inner = experts.intermediate_size
        for expert in range(experts.num_experts):
            gate_up = tuple(name.format(expert) for name in of_experts.gate_up)
            yield from _side_by_side(of_expert(GATE_UP, expert), gate_up, [inner, inner], spec.hidden_size)
            yield of_experts.down.format(expert), (of_expert(DOWN, expert), 0, spec.hidden_size, inner)
    if layer.experts is None or layer.experts.is_beside_dense:
        inner = layer.intermediate_size
        sizes = [inner, inner] if len(names.gate_up) > 1 else [2 * inner]
        yield from _side_by_side(GATE_UP, names.gate_up, sizes, spec.hidden_size)
        yield names.down, (DOWN, 0, spec.hidden_size, inner)


def _side_by_side(part: str, names: tuple[str, ...], sizes: list[int], num_inputs: int) -> Iterator[tuple[str, _Place]]:
    begin = 0
    for name, size in zip(names, sizes, strict=False):
        yield name, (part, begin, begin + size, num_inputs)
        begin += size
