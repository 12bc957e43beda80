"""Loading: what is refused, and with which messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.model.load import loader
from streamserve.engine.model.load.loader import (
    READ_BYTES,
    choose_device,
    choose_dtype,
    load_hf,
    open_source,
    read_ahead,
    read_weights,
)
from streamserve.engine.model.load.source import (
    HubUnreachable,
    ModelLoadError,
    ModelNotFound,
    NoSafetensors,
    UnsupportedModel,
    revision,
)
from streamserve.engine.model.load.start import load_runner
from streamserve.engine.model.load.support import max_model_len, require_supported
from tests.support.models.model_driver import load_tiny
from tests.support.models.tiny_models import TINY, save_model

WRONG_TYPES = {
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 32, "attention_chunk_size": 8},
    "qwen3_next": {"num_experts": 2, "num_experts_per_tok": 1},
    "jamba": {"num_experts": 2, "mamba_d_state": 4},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 4},
    "nemotron_h": {},
    "recurrent_gemma": {},
    "diffllama": {},
    "bloom": {},
    "mpt": {},
    "falcon": {},
    "gpt_neo": {},
    "xglm": {},
    "minimax": {},
    "bert": {},
}


def load(path: Path | str, **fields: Any) -> Any:
    return load_runner(ModelConfig(alias="m", path=str(path), device="cpu"), EngineConfig(num_blocks=50, **fields))


@pytest.mark.parametrize("model_type", sorted(WRONG_TYPES))
def test_silently_wrong_types_are_refused(model_type: str, tmp_path: Path) -> None:
    """A type known to come out wrong is refused by name before any weight is read."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UnsupportedModel, match=f"type {model_type} are not supported: .*[Cc]hoose another"):
        load(tmp_path)


def test_layer_types_beyond_attention_are_refused() -> None:
    """Layers that are neither full nor sliding attention are refused whatever the type is called."""
    config = AutoConfig.for_model("llama", **TINY)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModel, match="linear_attention"):
        require_supported(config)


def test_other_quantised_checkpoints_are_refused() -> None:
    """A way of quantising that is not read is refused by name, and the message says what is read."""
    config = AutoConfig.for_model("llama", **TINY, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(UnsupportedModel, match=r"quantised by bitsandbytes\. What is read: GPTQ .*as a GGUF file"):
        require_supported(config)


def test_unknown_architecture(tmp_path: Path) -> None:
    """A type transformers does not know is refused by its name; code in the folder is not run."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "novel_thing", "auto_map": {"AutoConfig": "evil.Config"}})
    )
    (tmp_path / "evil.py").write_text("raise SystemExit('remote code was run')")
    with pytest.raises(UnsupportedModel, match="update transformers or choose another"):
        load(tmp_path)


def test_a_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    """A config.json that is cut short is named with its place, and not as an architecture that is not known."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(ModelLoadError, match=r"config\.json is no valid JSON \(.*column 23.*Copy or download it again"):
        loader.read_config(tmp_path)


def test_a_body_that_the_head_does_not_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine looks at the decoder's output; where the model does not call that module, a load says so."""

    def read(source: Any) -> Any:
        model = read_weights(source)
        model.get_decoder = torch.nn.Identity
        return model

    monkeypatch.setattr(loader, "read_weights", read)
    model_config = ModelConfig(alias="m", path=str(save_model(tmp_path, "gpt2")), device="cpu")
    with pytest.raises(UnsupportedModel, match="type gpt2 are not supported: their head does not read"):
        load_hf(open_source(model_config), model_config)


def test_no_such_folder(tmp_path: Path) -> None:
    """The error for a path without a folder names the path; it is not taken for a hub id."""
    with pytest.raises(ModelNotFound, match="no folder at"):
        load(tmp_path / "nothing")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ModelNotFound, match="is a file"):
        load(file)


def test_hub_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub id with the hub switched off names the switch."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(HubUnreachable, match="HF_HUB_OFFLINE"):
        load("some-org/some-model-of-nobody")


def test_pickles_are_refused(tmp_path: Path) -> None:
    """A folder with only pickled weights is refused by the file's name, with the way out."""
    AutoConfig.for_model("llama", **TINY).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(NoSafetensors, match=r"pytorch_model\.bin.*save_pretrained"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(NoSafetensors, match="Finish the download"):
        load(tmp_path)


def test_broken_weights(tmp_path: Path) -> None:
    """A file that is cut short is a load error that names its folder, not an exception of a library."""
    save_model(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        load(tmp_path)


def test_missing_config(tmp_path: Path) -> None:
    """A folder without config.json is no model folder."""
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load(tmp_path)


def test_max_model_len() -> None:
    """The model's own length, or a shorter one; a longer one is refused with both numbers."""
    config = AutoConfig.for_model("llama", **TINY)
    assert max_model_len(config, None) == 256
    assert max_model_len(config, 100) == 100
    with pytest.raises(ModelLoadError, match=r"1,000.*256"):
        max_model_len(config, 1000)


def test_rope_that_depends_on_the_batch_is_capped() -> None:
    """Rotary tables that change with the longest position in the batch are kept to the length where they do not."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    assert max_model_len(AutoConfig.for_model("llama", **{**TINY, "rope_parameters": rope}), None) == 64


def test_choices() -> None:
    """Unknown dtypes and absent devices are refused with the available ones."""
    assert choose_dtype("auto") == "auto"
    with pytest.raises(ModelLoadError, match="float32, bfloat16"):
        choose_dtype("int3")
    if not torch.cuda.is_available():
        assert choose_device("auto") == torch.device("cpu")
        with pytest.raises(ModelLoadError, match="no CUDA"):
            choose_device("cuda")


def test_what_a_runner_reports(tiny_folder: Callable[[str], Path]) -> None:
    """A loaded runner knows its limits, its end tokens, its size and its revision; load progress reaches the end."""
    reports: list[tuple[str, float, int, int]] = []

    def progress(stage: str, fraction: float, loaded_bytes: int = 0, total_bytes: int = 0) -> None:
        reports.append((stage, fraction, loaded_bytes, total_bytes))

    runner = load_runner(
        ModelConfig(alias="m", path=str(tiny_folder("llama")), device="cpu"),
        EngineConfig(block_size=8, kv_cache_bytes=1 << 20, max_num_seqs=2),
        progress,
    )
    assert runner.max_model_len == 256
    assert runner.eos_token_ids == (1,)
    assert runner.vocab_size == 128
    assert runner.num_parameters > 10_000
    assert (runner.dtype, runner.device) == ("float32", "cpu")
    assert runner.num_blocks == 1 + 2 * 256 // 8
    assert runner.revision == revision(tiny_folder("llama"))
    assert list(dict.fromkeys(stage for stage, *_ in reports)) == ["config", "kernels", "weights", "packing", "probe"]
    assert reports[-1] == ("probe", 1.0, 0, 0)


def test_the_weights_are_reported_in_bytes(tmp_path: Path) -> None:
    """While weights are read, progress reports the bytes so far and in all, over several files, up to the end."""
    files = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    for file in files:
        file.write_bytes(bytes(READ_BYTES + 1))
    reports: list[tuple[str, float, int, int]] = []
    read_ahead(files, lambda *report: reports.append(report))  # type: ignore[misc]
    loaded = [report[2] for report in reports]
    assert {(report[0], report[3]) for report in reports} == {("weights", 2 * READ_BYTES + 2)}
    assert loaded == [0, READ_BYTES, READ_BYTES + 1, 2 * READ_BYTES + 1, 2 * READ_BYTES + 2, 2 * READ_BYTES + 2]
    assert [report[1] for report in reports] == [number / loaded[-1] for number in loaded]


def test_too_little_kv_memory(tiny_folder: Callable[[str], Path]) -> None:
    """A budget below two blocks is refused with the bytes it would take."""
    with pytest.raises(ModelLoadError, match="Raise kv_cache_bytes"):
        load_runner(
            ModelConfig(alias="m", path=str(tiny_folder("llama")), device="cpu"), EngineConfig(kv_cache_bytes=100)
        )


def test_the_revision_follows_the_files(tmp_path: Path) -> None:
    """Other weights or another config give another revision."""
    save_model(tmp_path, "llama")
    first = revision(tmp_path)
    assert revision(tmp_path) == first
    config = tmp_path / "config.json"
    config.write_text(config.read_text() + "\n")
    second = revision(tmp_path)
    save_model(tmp_path, "llama", num_hidden_layers=3)
    assert len({first, second, revision(tmp_path)}) == 3


def test_dtype_override(tiny_folder: Callable[[str], Path]) -> None:
    """The checkpoint's dtype, unless another is named."""
    assert load_tiny(tiny_folder("llama"), dtype="auto").dtype == "float32"
    assert load_tiny(tiny_folder("llama"), dtype="bfloat16").dtype == "bfloat16"
