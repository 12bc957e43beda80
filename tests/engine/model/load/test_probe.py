"""The parity probe: numbers catch what names and structure miss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamserve.engine.model import attention, batch
from streamserve.engine.model.load import support
from streamserve.engine.model.load.probe import ProbeTokens, probe
from streamserve.engine.model.load.source import UnsupportedModel
from tests.support.models.model_driver import load_tiny
from tests.support.models.tiny_models import CONFIGS, save_model

SMALL = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
# Types that the name list refuses, buildable in a few lines: the numbers (or the structure) must catch them alone.
BUILDABLE: dict[str, dict[str, Any]] = {
    "llama4_text": {
        "num_local_experts": 2,
        "intermediate_size_mlp": 32,
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention"] * 4,
        "no_rope_layers": [1, 1, 1, 1],
    },
    "diffllama": {},
    "bloom": SMALL,
    "falcon": SMALL,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mpt": {"vocab_size": 128, "d_model": 32, "n_heads": 4, "n_layers": 2},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "minimax": {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 8},
}


@pytest.mark.parametrize("model_type", sorted(BUILDABLE))
def test_wrong_types_are_caught_without_their_names(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the list of names, each silently wrong type is still refused."""
    monkeypatch.setattr(support, "REFUSED", {})
    monkeypatch.setattr(support, "WINDOWED", {*support.WINDOWED, "chunked_attention", "linear_attention", "mamba"})
    save_model(tmp_path, model_type, **BUILDABLE[model_type])
    with pytest.raises(UnsupportedModel, match=f"type {model_type} are not supported"):
        load_tiny(tmp_path)


MUTATIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "window forgotten": ("gemma3_text", lambda variant: replace(variant, window=None)),
    "window one too long": ("mistral", lambda variant: replace(variant, window=variant.window + 1)),
    "softcap forgotten": ("gemma2", lambda variant: replace(variant, softcap=None)),
    "sinks forgotten": ("gpt_oss", lambda variant: replace(variant, sinks=None)),
    "scaling off": ("llama", lambda variant: replace(variant, scaling=variant.scaling * 1.1)),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_wrong_attention_is_caught(
    mutation: tuple[str, Callable[[Any], Any]], tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention that computes something other than the model's is refused by the model's name."""
    model_type, mutate = mutation
    attend = attention.attend

    def wrong(layer: int, query: Any, key: Any, value: Any, variant: Any, *step: Any, **how: Any) -> Any:
        return attend(layer, query, key, value, mutate(variant), *step, **how)

    monkeypatch.setattr(attention, "attend", wrong)
    with pytest.raises(UnsupportedModel, match=model_type):
        load_tiny(tiny_folder(model_type), native=False)


@pytest.mark.parametrize("native", [True, False])
def test_wrong_slots_are_caught(
    native: bool, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys written one slot off are caught."""
    numbers_of = batch._numbers_of

    def wrong(*chunks: Any) -> Any:
        numbers = numbers_of(*chunks)  # tokens, positions, slots
        size = len(numbers) // 3
        for row in range(size):
            numbers[2 * size + row] ^= numbers[size + row] == 5
        return numbers

    monkeypatch.setattr(batch, "_numbers_of", wrong)
    with pytest.raises(UnsupportedModel):
        load_tiny(tiny_folder("llama"), native=native)


def test_wrong_attention_is_caught_in_bfloat16(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forgotten window is larger than bfloat16's rounding."""
    attend = attention.attend

    def wrong(layer: int, query: Any, key: Any, value: Any, variant: Any, *step: Any, **how: Any) -> Any:
        return attend(layer, query, key, value, replace(variant, window=None), *step, **how)

    monkeypatch.setattr(attention, "attend", wrong)
    with pytest.raises(UnsupportedModel):
        load_tiny(tiny_folder("mistral"), dtype="bfloat16", native=False)


@pytest.mark.parametrize("model_type", ["gpt_oss", "phi3"])
def test_the_prompt_passes_the_window(model_type: str, tiny_folder: Callable[[str], Path]) -> None:
    """The probe's prompt is longer than the window by two blocks, and its parts add up to it."""
    runner = load_tiny(tiny_folder(model_type), parity_probe=False)
    found = ProbeTokens.for_runner(runner)
    length = len(found.tokens)
    assert length >= CONFIGS[model_type]["sliding_window"] + 2 * runner.block_size
    assert sum(found.parts) == length
    assert len(set(found.tokens)) > length // 3
    assert probe(runner) < 1e-4
