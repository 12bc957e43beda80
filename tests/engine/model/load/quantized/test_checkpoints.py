"""Folders in each quantised format load, and answer as their dequantised weights do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamserve.engine.model.decoder.checkpoint import Checkpoint
from streamserve.engine.model.linear.native import dequantized
from streamserve.engine.model.linear.packer import matrix_names
from streamserve.engine.model.load import loader
from streamserve.engine.model.load.loader import read_config, support_of
from streamserve.engine.model.load.quantized.scheme import scheme_of
from streamserve.engine.model.load.quantized.weights import QuantizedCheckpoint
from streamserve.engine.model.load.source import ModelLoadError, UnsupportedModel
from streamserve.engine.model.runner import ModelRunner
from tests.support.models import quantized_checkpoints as formats
from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.quantized_checkpoints import Quantize, quantize_folder
from tests.support.models.tiny_models import VOCAB_SIZE, save_model

WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def compressed(kind: str, bits: int, of: str = "int") -> dict[str, Any]:
    weights = {"num_bits": bits, "type": of}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


# name -> how weights are quantised, the config, and the layers they become with the kernels.
FORMATS: dict[str, tuple[Quantize, dict[str, Any], str]] = {
    "gptq": (formats.gptq(), GPTQ, "native_int4"),
    "gptq-one-group": (formats.gptq(group_size=-1), {**GPTQ, "group_size": -1}, "native_int4"),
    "gptq-v2": (formats.gptq(zero_offset=0), {**GPTQ, "checkpoint_format": "gptq_v2"}, "native_int4"),
    "gptq-act-order": (formats.gptq(act_order=True), {**GPTQ, "desc_act": True}, "native_int8"),
    "gptq-groups-of-16": (formats.gptq(group_size=16), {**GPTQ, "group_size": 16}, "native_int8"),
    "gptq-2": (formats.gptq(bits=2), {**GPTQ, "bits": 2}, "native_int4"),
    "gptq-8": (formats.gptq(bits=8), {**GPTQ, "bits": 8}, "native_int8"),
    "awq": (formats.awq(), AWQ, "native_int4"),
    "fp8": (formats.fp8(), FP8, "native_int8"),
    "fp8-rows": (formats.fp8(per="row"), compressed("float-quantized", 8, "float"), "native_int8"),
    "fp8-blocks": (
        formats.fp8(block=(40, 24), name="weight_scale_inv"),
        {**FP8, "weight_block_size": [40, 24]},
        "native_int8",
    ),
    "packed": (formats.packed_integers(), compressed("pack-quantized", 4), "native_int4"),
    "packed-zeros": (formats.packed_integers(symmetric=False), compressed("pack-quantized", 4), "native_int4"),
    "packed-8": (formats.packed_integers(bits=8, group_size=-1), compressed("pack-quantized", 8), "native_int8"),
    "int8": (formats.int8(), compressed("int-quantized", 8), "native_int8"),
    "int8-groups": (formats.int8(per="group"), compressed("int-quantized", 8), "native_int8"),
}
EXACT = (
    "gptq",
    "gptq-one-group",
    "gptq-v2",
    "gptq-2",
    "awq",
    "packed",
    "packed-zeros",
    "packed-8",
    "int8",
    "int8-groups",
)
SERVED = ("gptq", "gptq-act-order", "awq", "fp8-blocks", "packed-zeros", "int8")  # a load of each kind of layer
NAMES = ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight")
MINIMUM_ROUNDING = 2**-10  # of scale * zero point, which int4 has as a half


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "llama", **WIDE)


class Folders:
    """Folders of one model in all formats, each made when it is asked for, with its plain twin in plain/."""

    def __init__(self, source: Path, place: Path) -> None:
        self.source, self.place = source, place

    def __getitem__(self, name: str) -> Path:
        path = self.place / name
        return path if path.exists() else quantize_folder(self.source, path, *FORMATS[name][:2])


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Folders:
    return Folders(folder, tmp_path_factory.mktemp("quantized"))


def answers(runner: ModelRunner) -> list[list[int]]:
    return Driver(runner).run(prompts(VOCAB_SIZE), max_tokens=8, chunk=16)


def opened(path: Path, dtype: torch.dtype = torch.float32) -> QuantizedCheckpoint:
    scheme = scheme_of(read_config(path))
    assert scheme is not None
    return QuantizedCheckpoint(Checkpoint(path), scheme, dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_the_plain_reference(name: str, quantized: Folders) -> None:
    """Bit for bit in float32; and the names are those of the model before it was quantised."""
    weights, plain = opened(quantized[name]), load_file(quantized[name] / "plain" / "model.safetensors")
    assert set(weights.names()) == set(plain)
    for weight in plain:
        assert torch.equal(weights.floats(weight), plain[weight]), weight
        assert weights.tensor(weight).dtype is torch.float32


@pytest.mark.parametrize("name", SERVED)
def test_without_kernels_tokens_are_those_of_the_dequantised_model(name: str, quantized: Folders) -> None:
    """Weights are dequantised while they are loaded: in float32 to the same tokens; transformers agrees."""
    runner = load_tiny(quantized[name], native=False, packed=False, parity_probe=True)
    assert runner.linears == "plain"
    wanted = load_tiny(quantized[name] / "plain", native=False, packed=False, parity_probe=False)
    assert answers(runner) == answers(wanted)
    assert runner.num_parameters == wanted.num_parameters
    runner.close()
    wanted.close()


@pytest.mark.parametrize("name", SERVED)
def test_with_kernels_weights_stay_packed(name: str, quantized: Folders) -> None:
    """The layers have the kind that fits; the probe holds them to transformers' model of the dequantised weights."""
    runner = load_tiny(quantized[name], parity_probe=True)
    found = {linear.name for linear in runner.loaded.model.linears[:-1]}
    assert found == {FORMATS[name][2]}
    assert all(len(answer) == 8 for answer in answers(runner))
    runner.close()


@pytest.mark.parametrize("name", FORMATS)
def test_groups_stand_for_the_weights(name: str, quantized: Folders) -> None:
    """Where int4 or int8 holds a format as it is; others have no groups."""
    weights = opened(quantized[name])
    for weight in NAMES:
        groups = weights.groups(weight)
        assert (groups is not None) == (name in EXACT)
        if groups is None:
            continue
        assert ("int4" if len(groups) == 3 else "int8") == weights.kind(weight)
        wanted = weights.floats(weight)
        bound = MINIMUM_ROUNDING * wanted.abs().max() if len(groups) == 3 else 0.0
        assert (dequantized(groups) - wanted).abs().max() <= bound


def changed(folder: Path, path: Path, change: Callable[[dict[str, torch.Tensor]], Any], **config: Any) -> Path:
    """Write a folder with other tensors, and another quantization_config."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    own = json.loads((folder / "config.json").read_text())
    own["quantization_config"] |= config
    (path / "config.json").write_text(json.dumps(own))
    return path


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "part", "make", "said"),
    [
        ("gptq", "scales", None, "has no q_proj.scales"),
        ("gptq", "qzeros", None, "has no q_proj.qzeros"),
        ("gptq", "qzeros", lambda part: part[:, :4], r"has qzeros of the shape \(2, 4\) instead of \(2, 8\)"),
        ("gptq", "g_idx", lambda part: part[:32], r"has g_idx of the shape \(32,\) instead of \(64,\)"),
        ("gptq", "g_idx", lambda part: part + 5, "has an input of group 6, and 2 groups"),
        ("awq", "scales", lambda part: part[:1], r"has scales of the shape \(1, 64\) instead of \(2, 64\)"),
        ("awq", "qweight", lambda part: part.flatten(), "which is no matrix"),
        ("packed", "weight_shape", None, "has no q_proj.weight_shape"),
        ("packed", "weight_scale", lambda part: part[:, :1].repeat(1, 3), r"has scales of the shape \(64, 3\)"),
        ("fp8", "weight_scale", None, "has no q_proj.weight_scale"),
        ("fp8-blocks", "weight_scale_inv", lambda part: part[:1], r"of the shape \(1, 3\), and blocks of 40"),
        ("int8", "weight_scale", lambda part: part[:60], r"has weight_scale of the shape \(60, 1\)"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    name: str,
    part: str,
    make: Callable[[torch.Tensor], torch.Tensor] | None,
    said: str,
    quantized: Folders,
    tmp_path: Path,
) -> None:
    """Before anything is allocated, by the weight's name, with the way out."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        old = tensors.pop(f"{Q_PROJ}.{part}")
        if make is not None:
            tensors[f"{Q_PROJ}.{part}"] = make(old).contiguous()

    path = changed(quantized[name], tmp_path / "broken", change)
    with pytest.raises(ModelLoadError, match=rf"{Q_PROJ} .*{said}.*Download the checkpoint again"):
        opened(path).groups(f"{Q_PROJ}.weight")


def test_groups_that_do_not_divide_are_refused(quantized: Folders, tmp_path: Path) -> None:
    """Inputs are a whole number of groups; `streamserve_models` says so too."""
    path = changed(quantized["gptq"], tmp_path / "broken", lambda _tensors: None, group_size=40)
    found = support_of(str(path))
    assert found.verdict == "refused"
    assert "inputs, which groups of 40 do not divide" in found.reason


@pytest.mark.parametrize("name", ["gptq", "fp8", "packed"])
def test_quantised_weights_without_a_word_in_the_config_are_refused(
    name: str, quantized: Folders, tmp_path: Path
) -> None:
    """Numbers without their scales would be wrong answers."""
    path = changed(quantized[name], tmp_path / "silent", lambda _tensors: None)
    own = json.loads((path / "config.json").read_text())
    del own["quantization_config"]
    (path / "config.json").write_text(json.dumps(own))
    with pytest.raises(UnsupportedModel, match=r"is quantised, and its config\.json has no quantization_config"):
        load_tiny(path)


def test_what_is_known_of_a_folder_before_a_load(quantized: Folders) -> None:
    """The format, and what the weights take packed and dequantised."""
    found = support_of(str(quantized["awq"]))
    assert found.verdict == "supported"
    assert "AWQ int4" in found.traits
    assert "without the native kernels" in found.traits[-1]


def test_more_than_the_machine_has_is_refused(
    quantized: Folders, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A load says beforehand what weights take; what is too much dequantised is refused, and may fit packed."""
    weights = opened(quantized["gptq"])
    assert weights.packed_bytes() < weights.num_bytes()
    monkeypatch.setattr(loader, "total_memory", lambda: weights.packed_bytes())
    with caplog.at_level("INFO"):
        loader.require_room(weights, is_packed=True)
    assert "weights of type GPTQ int4 take" in caplog.text
    with pytest.raises(ModelLoadError, match=r"in float32, and this machine has .* Packed they take .*install g\+\+"):
        loader.require_room(weights, is_packed=False)


def test_experts_and_other_families(tmp_path: Path) -> None:
    """Experts that are stored one by one are packed one by one; the probe compares with transformers."""
    source = save_model(
        tmp_path / "model", "qwen3_moe", **WIDE, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2
    )
    path = quantize_folder(source, tmp_path / "gptq", formats.gptq(), GPTQ)
    runner = load_tiny(path, parity_probe=True)
    assert runner.linears == "native_int4, native"  # the head has the model's dtype
    runner.close()


def test_a_family_on_transformers_code(tmp_path: Path) -> None:
    """A model that runs on transformers' own code gets its dequantised weights: the same tokens."""
    path = quantize_folder(save_model(tmp_path / "model", "stablelm", **WIDE), tmp_path / "awq", formats.awq(), AWQ)
    found, wanted = (load_tiny(one, native=False, packed=False, parity_probe=True) for one in (path, path / "plain"))
    assert answers(found) == answers(wanted)
    found.close()
    wanted.close()


def test_a_quantised_folder_is_quantised_again(quantized: Folders) -> None:
    """QUANTIZE rounds the dequantised weights: an FP8 checkpoint in int4."""
    runner = load_tiny(quantized["fp8-blocks"], quantize="int4", parity_probe=True)
    assert runner.linears == "native_int4"
    runner.close()


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt-oss with MXFP4 experts, and its plain twin."""
    place = tmp_path_factory.mktemp("gpt_oss")
    kinds = ["sliding_attention", "full_attention"]
    source = save_model(place / "model", "gpt_oss", **{**WIDE, "intermediate_size": 64}, layer_types=kinds)
    return quantize_folder(source, place / "mxfp4", formats.mxfp4(), {"quant_method": "mxfp4"})


def test_experts_in_mxfp4_are_those_of_transformers(gpt_oss: Path) -> None:
    """Bit for bit what transformers makes of blocks and scales, and what the plain reference does."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weights, plain = opened(gpt_oss), load_file(gpt_oss / "plain" / "model.safetensors")
    stored = load_file(gpt_oss / "model.safetensors")
    for name in (f"model.layers.{layer}.mlp.experts.{part}_proj" for layer in (0, 1) for part in ("gate_up", "down")):
        wanted = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
        assert torch.equal(weights.tensor(name), wanted)
        assert torch.equal(wanted, plain[name])


def test_an_expert_in_mxfp4_has_groups(gpt_oss: Path) -> None:
    """int8 holds them as they are; even and odd rows are gate and up."""
    weights = opened(gpt_oss)
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    both = weights.floats(stack)[2].t()
    for place, name in enumerate(matrix_names(stack, 2, is_interleaved=True)):
        groups = weights.groups(name)
        assert groups is not None
        assert weights.kind(name) == "int8"
        assert torch.equal(dequantized(groups), both[place::2])
    assert weights.kind(stack) is None


def test_gpt_oss_answers_as_its_dequantised_model(gpt_oss: Path) -> None:
    """Dequantised in float32: the same tokens; with the kernels: experts in int8, the others as the folder has them."""
    runner = load_tiny(gpt_oss, native=False, packed=False, parity_probe=True)
    wanted = load_tiny(gpt_oss / "plain", native=False, packed=False, parity_probe=False)
    assert answers(runner) == answers(wanted)
    packed = load_tiny(gpt_oss, parity_probe=True)
    assert set(packed.linears.split(", ")) == {"native_int8", "native"}
    assert packed.num_parameters == runner.num_parameters == wanted.num_parameters
    for one in (runner, wanted, packed):
        one.close()


def test_mxfp4_scales_that_are_no_halves_are_rounded(gpt_oss: Path, tmp_path: Path) -> None:
    """A power of two beyond the range of a half has no groups: the layer is rounded instead."""
    name = "model.layers.0.mlp.experts.down_proj"
    path = changed(gpt_oss, tmp_path / "far", lambda tensors: tensors[f"{name}_scales"].fill_(127 + 20))
    assert opened(path).groups(f"{name}.0") is None
    broken = changed(gpt_oss, tmp_path / "broken", lambda tensors: tensors.pop(f"{name}_scales"))
    with pytest.raises(ModelLoadError, match=r"has no down_proj_scales"):
        opened(broken)
