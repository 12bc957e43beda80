"""Capacity: arithmetic on config.json."""

from __future__ import annotations

from typing import Any

import pytest

from streamserve.engine.capacity import Capacity, UnknownShape, capacity, model_len, num_parameters, numbers_per_token
from streamserve.engine.config import EngineConfig

# SmolLM2-135M, as its config.json has it.
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "max_position_embeddings": 8192,
}
GIB = 1 << 30


def capacity_of(model: dict[str, Any] = SMOLLM2, *, on_gpu: bool = False, **engine: Any) -> Capacity:
    return capacity(
        model,
        EngineConfig(**engine),
        dtype="bfloat16",
        memory_bytes=8 * GIB,
        on_gpu=on_gpu,
        parameters=134_515_008,
    )


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, 30 * 2 * 3 * 64),
        ({"num_key_value_heads": None}, 30 * 2 * 9 * 64),
        ({"multi_query": True}, 30 * 2 * 64),
        ({"head_dim": 128}, 30 * 2 * 3 * 128),
        ({"per_layer_config": {"07": {"head_dim": 128}}}, 29 * 2 * 3 * 64 + 2 * 3 * 128),
        (
            {
                "global_head_dim": 128,
                "layer_types": ["sliding_attention"] * 29 + ["full_attention"],
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
            },
            29 * 2 * 3 * 64 + 2 * 128,
        ),
        ({"num_kv_shared_layers": 10}, 20 * 2 * 3 * 64),
        (
            {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 100},
            30 * 9 * (128 + 64 + 100),
        ),
    ],
)
def test_what_a_token_takes(changes: dict[str, Any], wanted: int) -> None:
    """Keys and values of every layer, in the shape that layer has; a nested text model counts as the model."""
    model = SMOLLM2 | changes
    assert numbers_per_token(model) == wanted
    assert numbers_per_token({"vision_config": {}, "text_config": model}) == wanted


@pytest.mark.parametrize("missing", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_what_is_missing_is_named(missing: str) -> None:
    """Without a number that the answer depends on there is no answer, and the number is named."""
    model = {key: value for key, value in SMOLLM2.items() if key != missing}
    with pytest.raises(UnknownShape, match=missing):
        numbers_per_token(model)


def test_a_pool_on_the_cpu() -> None:
    """A quarter of RAM; streams are whole blocks of it, without the null block, and never more than may be admitted."""
    found = capacity_of(max_num_seqs=10, max_admitted=30)
    block_bytes = 32 * found.bytes_per_token
    assert found.bytes_per_token == 2 * 30 * 2 * 3 * 64
    assert found.weight_bytes == 2 * 134_515_008
    assert found.num_blocks == 2 * GIB // block_bytes
    assert found.pool_bytes == found.num_blocks * block_bytes
    fitting = {n: (found.num_blocks - 1) // blocks for n, blocks in {1024: 32, 4096: 128, 8192: 256}.items()}
    assert found.streams == {n: min(30, number) for n, number in fitting.items()}
    assert capacity_of(max_num_seqs=30).streams == fitting
    assert fitting[1024] > 30


def test_a_pool_on_the_gpu() -> None:
    """0.9 of what the weights leave, or the share that is set."""
    free, block_bytes = 8 * GIB - 2 * 134_515_008, 32 * 2 * 30 * 2 * 3 * 64
    assert capacity_of(on_gpu=True).num_blocks == int(free * 0.9) // block_bytes
    assert capacity_of(on_gpu=True, memory_share=0.5).num_blocks == int(free * 0.5) // block_bytes


def test_what_is_set_counts() -> None:
    """Stated blocks, stated bytes and a stated length win; nothing is given out that no batch could use."""
    assert capacity_of(num_blocks=77).num_blocks == 77
    assert capacity_of(kv_cache_bytes=GIB).num_blocks == GIB // (32 * 2 * 30 * 2 * 3 * 64)
    short = capacity_of(max_model_len=2000, max_num_seqs=2)
    assert short.num_blocks == 1 + 2 * 63
    assert short.streams == {1024: 3, 4096: None, 8192: None}
    assert capacity_of(max_model_len=2000, max_num_seqs=2, max_admitted=5).num_blocks == 1 + 5 * 63


def test_nothing_fits() -> None:
    """Weights larger than the GPU leave no block and no stream."""
    found = capacity(
        SMOLLM2, EngineConfig(), dtype="float32", memory_bytes=GIB // 4, on_gpu=True, parameters=134_515_008
    )
    assert (found.pool_bytes, found.num_blocks, set(found.streams.values())) == (0, 0, {0})


def test_parameters_by_a_safetensors_header() -> None:
    """Every tensor's numbers; what is no tensor is left out."""
    header = {"__metadata__": {"format": "pt"}, "a": {"shape": [3, 4]}, "b": {"shape": [5]}, "c": {"shape": []}}
    assert num_parameters(header) == 12 + 5 + 1


def test_quantised_weights_count_as_what_they_stand_for() -> None:
    """Words hold several numbers, scales none, and a byte of MXFP4 two."""
    gptq = {"a.qweight": {"shape": [8, 64]}, "a.qzeros": {"shape": [2, 8]}, "a.scales": {"shape": [2, 64]}}
    assert num_parameters(gptq, 4) == 64 * 64
    fp8 = {"a.weight": {"shape": [64, 64]}, "a.weight_scale_inv": {"shape": [1, 1]}, "a.input_scale": {"shape": []}}
    assert num_parameters(fp8, 8) == 64 * 64
    mxfp4 = {"e_blocks": {"shape": [4, 64, 2, 16]}, "e_scales": {"shape": [4, 64, 2]}, "e_bias": {"shape": [4, 64]}}
    assert num_parameters(mxfp4, 4) == 4 * 64 * 64 + 4 * 64


def test_the_models_own_length() -> None:
    """By either name; a model without one gets the default of a load."""
    assert [model_len(model) for model in (SMOLLM2, {"n_positions": 1024}, {})] == [8192, 1024, 4096]
