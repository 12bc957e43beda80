"""A LoRA adapter of random numbers, as PEFT writes it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_random_adapter(folder: Path, model: Path, *, rank: int) -> None:
    """Write an adapter of all linear layers of the Llama-like model in `model`."""
    weights = {}
    with safe_open(model / "model.safetensors", "pt") as checkpoint:
        for name in checkpoint.keys():  # noqa: SIM118 - no mapping
            module = name.removesuffix(".weight")
            if module.rsplit(".", 1)[-1] not in _LINEARS:
                continue
            num_outputs, num_inputs = checkpoint.get_slice(name).get_shape()
            weights[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, num_inputs) * 0.02
            weights[f"base_model.model.{module}.lora_B.weight"] = torch.randn(num_outputs, rank) * 0.02
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(_LINEARS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
