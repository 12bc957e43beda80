"""Rotary variants, tied heads, sharded files and more model types: answers are those of `transformers.generate`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from streamserve.engine.model.load.source import ModelLoadError
from tests.engine.model.parity.test_parity import MAX_TOKENS, generate
from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.tiny_models import VOCAB_SIZE, build_model, save_model

# A context of 64 before scaling: prompts of 41 and 12 more stay within it, where it must not be left.
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.3, 1.7, 2.5],
        "long_factor": [2.0, 4.0, 8.0, 16.0],
        "original_max_position_embeddings": 64,
    },
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
}
# Beside those of test_parity.py; each has a part that those lack.
TYPES = {
    "exaone4": "q/k norms after a window of its own pattern",
    "gemma": "embeddings that are scaled, a norm that adds one",
    "gemma4_text": "full layers with another head size, keys that layers share",
    "glm4": "rotary pairs that are interleaved, half of the head",
    "granite": "multipliers of embeddings, attention, residuals and logits",
    "ministral3": "queries that are scaled by position",
    "mixtral": "experts",
    "opt": "learned positions, a decoder inside the body",
    "olmo3": "windows, and norms after the layers",
    "phi": "attention and MLP side by side, biases, a part of the head rotated",
    "qwen3_moe": "experts, q/k norms",
    "stablelm": "a part of the head rotated",
}


def rope_of(name: str) -> dict[str, Any]:
    """Return the config of a llama with this rotary embedding (phi3 for longrope, whose class has it)."""
    rope = {"rope_theta": 10_000.0, **ROPES[name]}
    out: dict[str, Any] = {"rope_parameters": rope}
    if name == "longrope":
        out["original_max_position_embeddings"] = 64
    return out


def type_of(name: str) -> str:
    return {"longrope": "phi3", "partial": "stablelm"}.get(name, "llama")


def answers_of(folder: Path, chunk: int = 16, **fields: Any) -> list[list[int]]:
    """Return what our engine answers, over shuffled pages, in a mixed batch."""
    runner = load_tiny(folder, **fields)
    try:
        return Driver(runner, seed=chunk).run(prompts(VOCAB_SIZE), max_tokens=MAX_TOKENS, chunk=chunk)
    finally:
        runner.close()


def references(model: Any) -> list[list[int]]:
    return [generate(model, prompt) for prompt in prompts(VOCAB_SIZE)]


@pytest.mark.parametrize("name", ROPES)
def test_rotary_variants(name: str, tmp_path: Path) -> None:
    """Each kind of scaling gives transformers' own tokens; what depends on a batch's length is capped."""
    folder = save_model(tmp_path, type_of(name), **rope_of(name))
    reference = references(build_model(type_of(name), **rope_of(name)))
    assert answers_of(folder) == reference
    runner = load_tiny(folder)
    assert runner.max_model_len == (64 if name in ("dynamic", "longrope") else 256)
    runner.close()


@pytest.mark.parametrize("name", sorted({*ROPES} - {"dynamic"}))  # which is the plain one up to 64
def test_the_scaling_bites(name: str) -> None:
    """Without it the answers differ, so the parity above has tested it."""
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}}
    assert references(build_model(type_of(name), **rope_of(name))) != references(build_model(type_of(name), **plain))


@pytest.mark.parametrize("model_type", TYPES)
def test_more_model_types(model_type: str, tmp_path: Path) -> None:
    """Greedy answers over paged memory equal `generate`."""
    assert answers_of(save_model(tmp_path, model_type)) == references(build_model(model_type))


@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_heads(is_tied: bool, tmp_path: Path) -> None:
    """A head that shares the embeddings' weights is not in the file, and is computed with them."""
    folder = save_model(tmp_path, "llama", tie_word_embeddings=is_tied)
    index = json.loads((folder / "model.safetensors").read_bytes()[8:].split(b"}}", 1)[0] + b"}}")
    assert ("lm_head.weight" in index) != is_tied
    reference = references(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    assert answers_of(folder) == reference


def test_sharded_weights(tmp_path: Path) -> None:
    """Several files with an index are one model."""
    model = build_model("llama")
    whole = references(model)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert answers_of(tmp_path) == whole


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """A download that is not whole is a load error, not a model with random weights."""
    build_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelLoadError, match=gone.name):
        load_tiny(tmp_path)


def test_weights_that_the_file_lacks_are_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers makes up what a file lacks; an answer of random weights would be silently wrong."""
    from safetensors.torch import load_file, save_file

    caplog.set_level(logging.ERROR)
    folder = save_model(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks 1 of its weights.*layers\.1\.mlp\.up_proj"):
        load_tiny(folder)
