"""Models whose linear layers are quantised: by QUANTIZE while they are loaded, or as a GGUF file has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.model.decoder.decoder import Decoder
from streamserve.engine.model.linear.native import dequantized
from streamserve.engine.model.linear.packer import matrix_names
from streamserve.engine.model.linear.table import PackedTable, Table
from streamserve.engine.model.load.gguf.file import GGUFFile
from streamserve.engine.model.load.gguf.weights import GGUFWeights
from streamserve.engine.model.load.source import ModelLoadError
from streamserve.engine.model.load.start import load_runner
from streamserve.engine.model.runner import ModelRunner
from tests.support.models.gguf_checkpoints import convert
from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.tiny_models import VOCAB_SIZE, save_model

pytest.importorskip("gguf", reason="needs gguf: pip install gguf")

WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "llama", **WIDE)


def answers(runner: ModelRunner, **options: Any) -> list[list[int]]:
    return Driver(runner).run(prompts(VOCAB_SIZE), max_tokens=6, chunk=16, **options)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_quantised_while_it_is_loaded(kind: str, dtype: str, folder: Path) -> None:
    """All linear layers, the head too, are of the kind; it passes the probe against its rounded weights."""
    runner = load_tiny(folder, quantize=kind, dtype=dtype, parity_probe=True)
    assert runner.linears == f"native_{kind}"
    assert all(len(answer) == 6 for answer in answers(runner))
    runner.close()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_neighbours_change_no_quantised_answer(kind: str, folder: Path) -> None:
    """Answers in a batch, with chunks of any size, are those that each prompt gets alone."""
    runner = load_tiny(folder, quantize=kind, parity_probe=False)
    together = answers(runner, stagger=2)
    alone = [Driver(runner).run([prompt], max_tokens=6, chunk=7)[0] for prompt in prompts(VOCAB_SIZE)]
    assert together == alone
    runner.close()


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("fields", [{"quantize": "int8"}, {"quantize": "int4"}, {"dtype": "bfloat16"}])
def test_a_packed_head_is_the_embedding_too(fields: dict[str, Any], is_tied: bool, tmp_path: Path) -> None:
    """One copy of a weight that is both; a weight that is only the embedding is packed where weights are rounded."""
    folder = save_model(tmp_path / "model", "llama", **WIDE, tie_word_embeddings=is_tied)
    runner = load_tiny(folder, parity_probe=True, **fields)
    decoder = runner.loaded.model
    assert isinstance(decoder, Decoder)
    if is_tied:
        assert isinstance(decoder.embedding, PackedTable)
        assert decoder.embedding.layer is decoder.head
    else:
        assert isinstance(decoder.embedding, PackedTable if "quantize" in fields else Table)
    assert decoder.native_step is not None
    plain = load_tiny(folder, packed=False, native=False, parity_probe=False, dtype=fields.get("dtype", "float32"))
    assert runner.num_parameters == plain.num_parameters
    runner.close()
    plain.close()


def test_a_files_embedding_stays_quantised(folder: Path, tmp_path: Path) -> None:
    """Its rows are the file's numbers, bit for bit, whether the head has the same weight or its own."""
    for tied in (True, False):
        source = save_model(tmp_path / f"{tied}", "llama", **WIDE, tie_word_embeddings=tied)
        path = convert(source, tmp_path / f"{tied}.gguf", "Q4_1")
        runner = load_tiny(path, dtype="float32", parity_probe=True)
        decoder = runner.loaded.model
        assert isinstance(decoder, Decoder)
        assert isinstance(decoder.embedding, PackedTable)
        token_ids = torch.arange(VOCAB_SIZE)
        stored = GGUFWeights(GGUFFile(path)).floats("model.embed_tokens.weight")
        assert torch.equal(decoder.embedding(token_ids), stored)
        runner.close()


def test_other_architectures_are_quantised_too(tiny_folder: Callable[[str], Path]) -> None:
    """Experts, and models that run on transformers' own code."""
    for model_type in ("qwen3_moe", "gpt2"):
        runner = load_tiny(tiny_folder(model_type), quantize="int8", parity_probe=True)
        assert runner.linears == "native_int8", model_type
        runner.close()


def test_without_kernels_it_is_refused(folder: Path) -> None:
    """A model that was planned to fit is not loaded in twice or four times the memory."""
    model = ModelConfig(alias="m", path=str(folder), device="cpu", quantize="int4", native=False)
    with pytest.raises(ModelLoadError, match=r"quantised to int4, .* they are off\. Install g\+\+"):
        load_runner(model, EngineConfig(num_blocks=50))


@pytest.mark.parametrize(
    ("tensor_type", "kind"), [("Q4_0", "int4"), ("Q4_1", "int4"), ("Q8_0", "int8"), ("Q5_0", "int8")]
)
def test_a_files_quantised_weights_stay_so(tensor_type: str, kind: str, folder: Path, tmp_path: Path) -> None:
    """They are packed as they are: bytes as small, and answers as near as inputs of 8 bits allow."""
    path = convert(folder, tmp_path / "model.gguf", tensor_type)
    runner = load_tiny(path, parity_probe=True)
    assert runner.linears == f"native_{kind}"
    wanted = load_tiny(path, native=False, packed=False, parity_probe=False)
    assert wanted.linears == "plain"
    assert runner.num_parameters == wanted.num_parameters
    runner.close()
    wanted.close()


def test_groups_of_a_file_are_its_weights(folder: Path, tmp_path: Path) -> None:
    """Groups stand for what dequantising gives, bit for bit, rows turned back included."""
    weights = GGUFWeights(GGUFFile(convert(folder, tmp_path / "model.gguf", "Q4_1")), torch.float32)
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight", "lm_head.weight"):
        groups = weights.groups(name)
        assert groups is not None
        assert torch.equal(dequantized(groups), weights.floats(name))


@pytest.mark.parametrize("tensor_type", ["Q5_1"])
def test_types_without_groups_are_rounded_to_int8(tensor_type: str, folder: Path, tmp_path: Path) -> None:
    """A type that groups of 32 do not hold is packed as int8; without kernels, or PACKED, it is dequantised."""
    path = convert(folder, tmp_path / "model.gguf", tensor_type)
    for fields, linears in (({}, "native_int8"), ({"native": False, "packed": False}, "plain")):
        runner = load_tiny(path, parity_probe=True, **fields)
        assert runner.linears == linears
        runner.close()


def test_a_layer_of_unlike_types_is_of_the_finer_kind(folder: Path, tmp_path: Path) -> None:
    """Queries of int4 and values of int8 make a layer of int8; the others keep their kind."""
    path = convert(folder, tmp_path / "model.gguf", "Q4_0", finer={"attn_v": "Q8_0"})
    runner = load_tiny(path, parity_probe=True)
    names = [linear.name for linear in runner.loaded.model.linears]
    assert names.count("native_int8") == 4
    assert names.count("native_int4") == len(names) - 4
    runner.close()


@pytest.mark.parametrize("tensor_type", ["Q8_0", "MXFP4"])
def test_experts_in_one_tensor_are_packed_one_by_one(tensor_type: str, tmp_path: Path) -> None:
    """gpt-oss: an expert's gate, up and down are what its part of the tensor stands for; the probe agrees.

    In MXFP4 the rounded inputs send some tokens to another expert, as they may.
    """
    source = save_model(tmp_path / "model", "gpt_oss", **{**WIDE, "intermediate_size": 64})
    path = convert(source, tmp_path / "model.gguf", tensor_type)
    weights = GGUFWeights(GGUFFile(path), torch.float32)
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    both = weights.floats(stack)[2].t()
    for place, name in enumerate(matrix_names(stack, 2, is_interleaved=True)):
        groups = weights.groups(name)
        assert groups is not None
        assert torch.equal(dequantized(groups), both[place::2])
    runner = load_tiny(path, parity_probe=True)
    assert runner.linears == "native_int8"
    runner.close()
