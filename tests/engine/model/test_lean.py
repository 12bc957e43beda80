"""Layers that are computed in fewer operations give what Hugging Face's own code gives, or are left to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamserve.engine.model import lean
from streamserve.engine.model.lean import LeanLayer, restore_layers
from streamserve.engine.model.linear import choose_packed_dtype
from streamserve.engine.model.load.probe import probe
from streamserve.engine.model.runner import HFRunner
from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.tiny_models import VOCAB_SIZE, save_model

NUM_LAYERS = 4
SHAPED = {"llama": 4, "mistral": 4, "qwen2": 4, "qwen3": 4, "smollm3": 2}  # two of smollm3's layers do not rotate
# Each has the parts of a Llama's layer, and computes something else with them.
UNLIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "a norm that adds one": ("gemma", {}),
    "scaled residuals": ("granite", {"residual_multiplier": 0.7}),
    "another activation": ("llama", {"hidden_act": "gelu"}),
    "queries scaled by position": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": 200,
            }
        },
    ),
}


@pytest.fixture(autouse=True)
def _packs() -> None:
    if choose_packed_dtype(torch.float32, torch.device("cpu")) is None:
        pytest.skip("layers are replaced where linears are packed: needs oneDNN")


def lean_layers_of(runner: HFRunner) -> list[LeanLayer]:
    return [module for module in runner.loaded.model.modules() if isinstance(module, LeanLayer)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", SHAPED)
def test_layers_of_the_shape_are_replaced(model_type: str, dtype: str, tiny_folder: Callable[[str], Path]) -> None:
    """With biases, windows and norms of heads; the probe finds the model equal to transformers' own code."""
    runner = load_tiny(tiny_folder(model_type), dtype=dtype, parity_probe=False)
    assert len(lean_layers_of(runner)) == SHAPED[model_type]
    assert 0 < probe(runner) < (0.05 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_compute_something_else_are_left(name: str, dtype: str, tmp_path: Path) -> None:
    """Parts alone do not replace a layer: numbers decide."""
    model_type, fields = UNLIKE[name]
    runner = load_tiny(save_model(tmp_path, model_type, **fields), dtype=dtype, parity_probe=False)
    assert sum(lean.has_parts(module) for module in runner.loaded.model.modules()) == NUM_LAYERS
    assert not lean_layers_of(runner)


def test_norms_without_weights_are_left(tmp_path: Path) -> None:
    """What a lean layer would read must be there: olmo's norms have no weight."""
    assert not lean_layers_of(load_tiny(save_model(tmp_path, "olmo")))


def test_unpacked_layers_are_left(tiny_folder: Callable[[str], Path]) -> None:
    """`packed=False` runs Hugging Face's code throughout."""
    assert not lean_layers_of(load_tiny(tiny_folder("llama"), packed=False))


class NoRotation(lean.Rotation):
    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        return heads


MUTATIONS: dict[str, Callable[[LeanLayer], None]] = {
    "epsilon of the first norm": lambda layer: setattr(layer.input_norm, "eps", 0.5),
    "weight of the second norm": lambda layer: setattr(layer.post_norm, "weight", layer.post_norm.weight * 1.1),
    "no norm of the heads": lambda layer: setattr(layer, "head_norm", None),
    "no rotation": lambda layer: setattr(layer, "rotation", NoRotation()),
    "another window": lambda layer: setattr(layer, "variant", replace(layer.variant, window=3)),
    "output of attention": lambda layer: setattr(layer, "out", PartOf(layer.out, 0.9)),
    "output of the MLP": lambda layer: setattr(layer, "down", PartOf(layer.down, 0.9)),
}


class PartOf:
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], share: float) -> None:
        self.function, self.share = function, share

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.function(inputs) * self.share


def plant(monkeypatch: pytest.MonkeyPatch, mutation: str) -> None:
    """Put one fault into every lean layer."""

    class Wrong(LeanLayer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            MUTATIONS[mutation](self)

    monkeypatch.setattr(lean, "LeanLayer", Wrong)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_layer_is_noticed(
    mutation: str, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part of a lean layer is wrong, the load leaves the layer to transformers."""
    plant(monkeypatch, mutation)
    assert not lean_layers_of(load_tiny(tiny_folder("qwen3"), parity_probe=False))


def test_the_probe_puts_the_layers_back(tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that the comparison of layers misses shows in the model's logits: it runs without lean layers then."""
    plant(monkeypatch, "output of the MLP")
    monkeypatch.setattr(lean, "agrees", lambda *_args: True)
    runner = load_tiny(tiny_folder("qwen3"))
    assert not lean_layers_of(runner)
    assert 0 < probe(runner) < 1e-5


def test_weights_are_held_once(tiny_folder: Callable[[str], Path]) -> None:
    """A lean layer's linears are those of the layer it holds, and it adds no parameter."""
    runner = load_tiny(tiny_folder("llama"))
    for layer in lean_layers_of(runner):
        attention = layer.layer.self_attn
        assert layer.qkv.__self__ is attention.q_proj.group.packed
        assert layer.out.__self__ is attention.o_proj
    assert sum(one.numel() for one in runner.loaded.model.parameters()) < runner.num_parameters


def test_same_tokens_as_the_layers_it_replaces(tiny_folder: Callable[[str], Path]) -> None:
    """Chunks, decodes and a mixed batch over shuffled pages give the tokens of transformers' layers."""
    runner = load_tiny(tiny_folder("qwen3"))
    answers = Driver(runner).run(prompts(VOCAB_SIZE), max_tokens=8, chunk=7)
    assert restore_layers(runner.loaded.model) == NUM_LAYERS
    assert Driver(runner).run(prompts(VOCAB_SIZE), max_tokens=8, chunk=7) == answers
