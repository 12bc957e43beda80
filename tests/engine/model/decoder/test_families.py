"""Every family's decoder computes what transformers' own modelling code does, in each of the family's shapes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from streamserve.engine.capacity import layer_windows, numbers_per_token
from streamserve.engine.model.decoder.decoder import Decoder
from streamserve.engine.model.decoder.families import FAMILIES, Windows
from streamserve.engine.model.decoder.spec import spec_of
from streamserve.engine.model.hf import HFModel
from streamserve.engine.model.load.probe import probe
from tests.engine.model.parity.test_parity import MAX_TOKENS, generate
from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.tiny_models import MIXED_LAYERS, TINY, VOCAB_SIZE, build_model, config_of, save_model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA_4 = {
    "global_head_dim": 16,
    "sliding_window": 8,
    "num_hidden_layers": 8,
    "layer_types": [*MIXED_LAYERS, *MIXED_LAYERS],
}
# What the families' own tests do not set (parity/test_parity.py, test_variants.py).
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, heads wider than its size": ("llama", {"head_dim": 16}),
    "llama, tied head": ("llama", {"tie_word_embeddings": True}),
    "llama, another activation": ("llama", {"hidden_act": "gelu"}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "ministral": ("ministral", {"sliding_window": 8, "layer_types": MIXED_LAYERS}),
    "ministral3, queries scaled within the prompt": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen3_moe, weights that do not add up to 1": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": False}),
    "qwen3_moe, dense layers between": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 2}),
    "mixtral, a window": ("mixtral", {"sliding_window": 8}),
    "gemma, tied head": ("gemma", {"tie_word_embeddings": True}),
    "gemma3_text, scaled rotation of full layers": (
        "gemma3_text",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
            }
        },
    ),
    "gemma4_text, no inputs of layers": ("gemma4_text", {**GEMMA_4, "hidden_size_per_layer_input": 0}),
    "gemma4_text, shared keys, wide layers": (
        "gemma4_text",
        {**GEMMA_4, "num_kv_shared_layers": 4, "use_double_wide_mlp": True},
    ),
    "gemma4_text, values that are keys": (
        "gemma4_text",
        {**GEMMA_4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4_text, experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "phi3, a part of the head turned": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
    ),
    "olmo3": ("olmo3", {"sliding_window": 8, "layer_types": MIXED_LAYERS}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "logits_scaling": 4.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3, biases": ("smollm3", {"attention_bias": True, "mlp_bias": True}),
}


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_family_is_computed_here(model_type: str, dtype: str, tiny_folder: Callable[[str], Path]) -> None:
    """By our layers, packed and plain, and the probe finds them equal to transformers' code."""
    for packed in (None, False):
        runner = load_tiny(tiny_folder(model_type), dtype=dtype, packed=packed, parity_probe=False)
        assert isinstance(runner.loaded.model, Decoder)
        assert 0 < probe(runner) < (0.1 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_answers_alike(name: str, tmp_path: Path) -> None:
    """In mixed batches over shuffled pages, in chunks of any size, the tokens are those of `generate`."""
    model_type, fields = SHAPES[name]
    model = build_model(model_type, **fields)
    wanted = [generate(model, prompt) for prompt in prompts(VOCAB_SIZE)]
    runner = load_tiny(save_model(tmp_path, model_type, **fields))
    assert isinstance(runner.loaded.model, Decoder)
    for chunk in (7, 1000):
        assert Driver(runner, seed=chunk).run(prompts(VOCAB_SIZE), max_tokens=MAX_TOKENS, chunk=chunk) == wanted


@pytest.mark.parametrize("model_type", ["gpt2", "cohere2", "glm4"])
def test_any_other_architecture_runs_on_its_own_code(model_type: str, tiny_folder: Callable[[str], Path]) -> None:
    """What is no family has no spec."""
    assert spec_of(config_of(model_type)) is None
    assert isinstance(load_tiny(tiny_folder(model_type), parity_probe=False).loaded.model, HFModel)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [("llama", {"hidden_act": "quick_gelu"}), ("gemma3_text", {"use_bidirectional_attention": True})],
)
def test_what_no_layer_here_computes_has_no_spec(model_type: str, fields: dict[str, Any]) -> None:
    """An activation without a row in the table, attention to what comes after."""
    assert spec_of(config_of(model_type, **fields)) is None


WINDOWED = (
    "mistral",
    "ministral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt_oss",
    "olmo3",
)


@pytest.mark.parametrize("model_type", WINDOWED)
@pytest.mark.parametrize(
    "left_out", [(), ("layer_types",), ("layer_types", "sliding_window"), ("use_sliding_window",)], ids=str
)
def test_windows_by_config_json(model_type: str, left_out: tuple[str, ...]) -> None:
    """The file alone says how far each layer looks back, also where it leaves that to the config class."""
    given = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2, "layer_types": MIXED_LAYERS * 2}
    fields = {name: one for name, one in given.items() if name not in left_out}
    if FAMILIES[model_type].windows is Windows.ALL:
        fields.pop("layer_types", None)
    own = {**TINY, "num_hidden_layers": 8, "no_rope_layers": [1] * 8}
    spec = spec_of(AutoConfig.for_model(model_type, **own, **fields))
    assert layer_windows({"model_type": model_type, **own, **fields}) == [layer.window for layer in spec.layers]


def test_layers_alike_share_a_rotation() -> None:
    """A rotation is made ready once a step for all layers that turn alike."""
    assert len(spec_of(config_of("llama")).rotaries) == 1
    assert len(spec_of(config_of("gemma3_text")).rotaries) == 2
    assert [layer.rotary for layer in spec_of(config_of("smollm3")).layers] == [0, None, 0, None]


def test_shared_keys_are_stored_once(tmp_path: Path) -> None:
    """Layers that read an earlier layer's keys have no memory of their own."""
    fields = SHAPES["gemma4_text, shared keys, wide layers"][1]
    runner = load_tiny(save_model(tmp_path, "gemma4_text", **fields))
    assert sorted(runner.layers) == [0, 1, 2, 3]
    stored = sum(layer.bytes_per_token(runner.loaded.dtype) for layer in runner.layers.values())
    assert stored == 4 * numbers_per_token(config_of("gemma4_text", **fields).to_dict())


def test_a_layer_in_disguise_runs_on_its_own_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights without a place in the family's layers are no reason to leave them out."""
    from safetensors.torch import load_file, save_file

    folder = save_model(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.q_norm.weight"] = weights["model.norm.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="streamserve"):
        assert isinstance(load_tiny(folder).loaded.model, HFModel)
    assert "layers.1.self_attn.q_norm" in caplog.text
