"""Whatever part of a decoder is wrong, the probe notices, and transformers' own code answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamserve.engine.model.decoder.build import Builder
from streamserve.engine.model.decoder.decoder import Decoder
from streamserve.engine.model.decoder.layer import DecoderLayer
from streamserve.engine.model.decoder.parts import Norm
from streamserve.engine.model.decoder.step import NO_NORM, NativeStep
from streamserve.engine.model.hf import HFModel
from streamserve.engine.model.load.source import ModelLoadError
from tests.support.models.model_driver import load_tiny
from tests.support.models.tiny_models import save_model


class PartOf:
    """A linear layer of which only a share is left."""

    def __init__(self, layer: Any, share: float) -> None:
        self.layer, self.share, self.name, self.num_bytes = layer, share, "wrong", layer.num_bytes

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) * self.share


FAULTS: dict[str, tuple[str, Callable[[DecoderLayer], None]]] = {
    "epsilon of the first norm": (
        "qwen3",
        lambda one: setattr(one, "attention_norm", Norm(one.attention_norm.weight, 0.5)),
    ),
    "weight of the second norm": ("qwen3", lambda one: setattr(one, "mlp_norm", Norm(one.mlp_norm.weight * 1.1, 1e-6))),
    "no norm of the heads": ("qwen3", lambda one: setattr(one, "head_norm", None)),
    "no rotation": ("qwen3", lambda one: setattr(one, "spec", replace(one.spec, rotary=None))),
    "another window": ("qwen3", lambda one: setattr(one, "variant", replace(one.variant, window=3))),
    "output of attention": ("qwen3", lambda one: setattr(one, "out", PartOf(one.out, 0.9))),
    "output of the feed-forward part": ("qwen3", lambda one: setattr(one, "down", PartOf(one.down, 0.9))),
    "residuals that are not scaled": ("granite", lambda one: setattr(one, "residual_multiplier", 0.9)),
    "one expert less": ("mixtral", lambda one: one.experts.down.__setitem__(1, PartOf(one.experts.down[1], 0.0))),
    "weights of experts": (
        "gpt_oss",
        lambda one: setattr(one.experts, "spec", replace(one.experts.spec, clamp=(7.0, 1.0))),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_layer_is_noticed(
    fault: str, dtype: str, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a part is wrong and torch computes the parts, the probe fails and transformers' code answers."""
    model_type, plant = FAULTS[fault]
    build = Builder._layer

    def wrong(self: Builder, index: int) -> DecoderLayer:
        layer = build(self, index)
        plant(layer)
        return layer

    assert isinstance(load_tiny(tiny_folder(model_type), dtype=dtype, native=False).loaded.model, Decoder)
    monkeypatch.setattr(Builder, "_layer", wrong)
    assert isinstance(load_tiny(tiny_folder(model_type), dtype=dtype, native=False).loaded.model, HFModel)


# What is wrong in the native step's description of a layer.
RECORD_FAULTS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "another window": ("mistral", "window", lambda window: window + 1),
    "scores that are scaled otherwise": ("llama", "scaling", lambda scaling: scaling * 1.1),
    "no softcap": ("gemma2", "softcap", lambda softcap: 0.0),
    "no rotation": ("qwen3", "rotation", lambda rotation: -1),
    "no norm of the heads": ("qwen3", "norm_kind", lambda kind: NO_NORM),
    "no first norm": ("llama", "attention_norm", lambda norm: None),
    "no norm behind the feed-forward part": ("gemma2", "after_mlp_norm", lambda norm: None),
}


@pytest.mark.parametrize("fault", RECORD_FAULTS)
def test_a_wrong_step_is_noticed(
    fault: str, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the native step is described wrongly, the probe fails and transformers' code answers."""
    model_type, name, mutate = RECORD_FAULTS[fault]
    loaded = load_tiny(tiny_folder(model_type)).loaded.model
    if not isinstance(loaded, Decoder) or loaded.native_step is None:
        pytest.skip("no native step computes this model here")
    describe = NativeStep._layer

    def wrong(self: NativeStep, layer: DecoderLayer) -> Any:
        record = describe(self, layer)
        setattr(record, name, mutate(getattr(record, name)))
        return record

    monkeypatch.setattr(NativeStep, "_layer", wrong)
    assert isinstance(load_tiny(tiny_folder(model_type)).loaded.model, HFModel)


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    """A config.json of another model is an error, not an answer."""
    from safetensors.torch import load_file, save_file

    folder = save_model(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"] = torch.zeros(32, 40)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"layers\.2\.mlp\.down_proj.*\(32, 40\)"):
        load_tiny(folder, parity_probe=False)
