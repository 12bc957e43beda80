"""LoRA adapters as PEFT writes them, of random numbers, and models that have one merged into their weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PHI3 = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def save_adapter(
    folder: Path, model: Path, targets: Iterable[str] = LLAMA, *, rank: int = 4, seed: int = 0, **config: Any
) -> Path:
    """Write an adapter that changes the linear layers named `targets` of each layer of a model; return its folder."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, linear in _linears(_loaded(model), tuple(targets)):
        place = f"base_model.model.{name}"
        weights[f"{place}.lora_A.weight"] = torch.randn(rank, linear.in_features, generator=generator) * 0.3
        weights[f"{place}.lora_B.weight"] = torch.randn(linear.out_features, rank, generator=generator) * 0.3
    assert weights, f"no {targets} in {model}"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    kept = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**kept, **config}))
    return folder


def save_merged(folder: Path, model: Path, adapter: Path) -> Path:
    """Write the model with the adapter's products added to its weights, as transformers reads it; return the folder."""
    import torch
    from safetensors.torch import load_file

    config, weights = (
        json.loads((adapter / "adapter_config.json").read_text()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    scale = config["lora_alpha"] / config["r"] ** (0.5 if config.get("use_rslora") else 1.0)
    loaded = _loaded(model)
    with torch.no_grad():
        for name, linear in _linears(loaded, tuple(config["target_modules"])):
            place = f"base_model.model.{name}"
            linear.weight += scale * weights[f"{place}.lora_B.weight"] @ weights[f"{place}.lora_A.weight"]
    loaded.save_pretrained(folder, safe_serialization=True)
    _merge_experts(folder, weights, scale)
    return folder


def add_experts(adapter: Path, model: Path, *, rank: int = 4, seed: int = 1) -> None:
    """Let an adapter change every matrix of every expert that the model's file has by a name of its own."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    weights = load_file(adapter / "adapter_model.safetensors")
    for name, weight in load_file(model / "model.safetensors").items():
        if ".experts." in name:
            place = f"base_model.model.{name.removesuffix('.weight')}"
            weights[f"{place}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=generator) * 0.3
            weights[f"{place}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=generator) * 0.3
    save_file(weights, adapter / "adapter_model.safetensors")


def _merge_experts(folder: Path, weights: Mapping[str, Any], scale: float) -> None:
    """Add the products of experts to the file: transformers keeps these in one tensor, and its file apart."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    merged = load_file(file)
    for name in weights:
        own = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight") + ".weight"
        if ".experts." in name and own in merged:
            merged[own] += scale * weights[name.replace("lora_A", "lora_B")] @ weights[name]
    save_file(merged, file, metadata={"format": "pt"})


def _loaded(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _linears(model: Any, targets: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if ".layers." in f".{name}" and name.rpartition(".")[2] in targets:
            yield name, module
