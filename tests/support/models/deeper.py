"""The demo model with layers that change next to nothing: slow enough for the demo model to be its draft model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def save_deeper(folder: Path, model: Path, *, num_more: int = 28, noise: float = 0.06) -> Path:
    """Write a Llama with `num_more` layers after its own; return the folder.

    What they add is a share `noise` of what the last layer's matrices would: the model below agrees nearly always.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    num_layers = config["num_hidden_layers"]
    last, generator = f"model.layers.{num_layers - 1}.", torch.Generator().manual_seed(1)
    for name in [name for name in weights if name.startswith(last)]:
        for index in range(num_layers, num_layers + num_more):
            own = weights[name].float()
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                own = noise * own.std() * torch.randn(own.shape, generator=generator)
            weights[name.replace(last, f"model.layers.{index}.")] = own.to(weights[name].dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers + num_more}))
    for name in TOKENIZER:
        shutil.copy(model / name, folder / name)
    return folder
