"""What a config's quantization_config says, and what is refused by it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from streamserve.engine.model.load.quantized.scheme import scheme_of
from streamserve.engine.model.load.source import UnsupportedModel
from tests.support.models.tiny_models import TINY

COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}


def config_with(given: dict[str, Any] | None) -> Any:
    return AutoConfig.for_model("llama", **TINY, **({} if given is None else {"quantization_config": given}))


@pytest.mark.parametrize(
    ("given", "title", "group_size", "zero_offset"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "GPTQ int4", 128, 1),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"}, "GPTQ int8", None, 0),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}, "AWQ int4", 64, 0),
        ({"quant_method": "fp8"}, "FP8", None, 0),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "FP8", None, 0),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "MXFP4", 32, 0),
        ({**COMPRESSED, "format": "pack-quantized"}, "compressed-tensors int4", None, 0),
    ],
)
def test_what_is_read(given: dict[str, Any], title: str, group_size: int | None, zero_offset: int) -> None:
    """Fields have the names of the tools that write them."""
    scheme = scheme_of(config_with(given))
    assert scheme is not None
    assert (scheme.title, scheme.group_size, scheme.zero_offset) == (title, group_size, zero_offset)


def test_a_plain_model_has_no_scheme() -> None:
    """No quantization_config: nothing is quantised."""
    assert scheme_of(config_with(None)) is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised by bitsandbytes"),
        ({"quant_method": "eetq"}, "quantised by eetq"),
        ({"quant_method": "hqq"}, "quantised by hqq"),
        ({"bits": 4}, "quantised by a method without a name"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ weights have 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "in the format marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "in the format gemv"),
        ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, "in the format nvfp4-pack-quantized"),
        ({**COMPRESSED, "format": "pack-quantized", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        ({**COMPRESSED, "format": "pack-quantized", "transform_config": {"config_groups": {"R1": {}}}}, "rotated"),
    ],
)
def test_what_is_refused(given: dict[str, Any], reason: str) -> None:
    """By name, with what is read and the way out."""
    with pytest.raises(UnsupportedModel, match=rf"{reason}.* What is read: .*QUANTIZE makes int8 or int4 of it"):
        scheme_of(config_with(given))
