"""The config of a LoRA adapter, as PEFT writes it: what of it can be computed here. Without torch: checks read it too.

What cannot be computed is refused by name: nothing is left out in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamserve.engine.model.load.errors import ModelLoadError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Fields by which an adapter is more than two products beside a linear layer, and what they are where it is not.
_MORE = {
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "alpha_pattern": ({},),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The product of an adapter's two weights is multiplied by `alpha`, over a power of their rank."""

    alpha: float
    exponent: float

    def scale(self, rank: int) -> float:
        """Return the factor of weights of that rank."""
        return float(self.alpha / rank**self.exponent)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Return the config in a folder that has weights, too. Raises ModelLoadError where it is no adapter of ours."""
    if not (folder / WEIGHTS).is_file():
        raise ModelLoadError(f"{folder} has no {WEIGHTS}, so it is no adapter. Name the folder that PEFT has written.")
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"{file} cannot be read ({type(error).__name__}), so {folder} is no adapter. Name the folder that PEFT has "
            "written."
        ) from error
    if not isinstance(config, Mapping) or config.get("peft_type") != "LORA":
        raise ModelLoadError(
            f"{file} is not of a LoRA adapter, and no other kind can be computed. Take it out of ADAPTERS."
        )
    for field, plain in _MORE.items():
        if config.get(field) is not None and config[field] not in plain:
            raise ModelLoadError(
                f"The adapter {folder} has {field} {config[field]!r}, which cannot be computed here. Merge it into the "
                "model (PEFT: merge_and_unload), or train it without."
            )
    return AdapterConfig(alpha=_alpha(folder, config), exponent=0.5 if config.get("use_rslora") else 1.0)


def _alpha(folder: Path, config: Mapping[str, Any]) -> float:
    alpha = config.get("lora_alpha", 8)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise ModelLoadError(f"The adapter {folder} has a lora_alpha that is no number: {alpha!r}. Copy it again.")
    return alpha
