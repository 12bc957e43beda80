"""What an engine takes, computed before it is loaded: the bytes that its load then gives to weights and keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from streamserve.engine.capacity import GIB, MIB
from streamserve.engine.config import EmbedderConfig, EngineConfig, ModelConfig
from streamserve.engine.model.load.size import PROCESS_BYTES, embedder_bytes, oversize, sized
from streamserve.engine.model.load.source import ModelLoadError
from tests.support.models.large import large_model

pytest.importorskip("torch", reason="needs the engine extra: pip install 'streamserve[engine]'")

HELPDESK = Path(__file__).resolve().parents[4] / "project" / "demo_model" / "helpdesk"


def loaded(model: ModelConfig, engine: EngineConfig) -> Any:
    from streamserve.engine.model.load.start import load_runner

    return load_runner(model, engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_load_takes_what_was_computed(dtype: str) -> None:
    """Weights by their number and dtype, and the blocks that the pool then has."""
    model = ModelConfig(alias="desk", path=str(HELPDESK), dtype=dtype, parity_probe=False, num_threads=1)
    num_bytes, engine = sized(model, EngineConfig(block_size=16, max_num_seqs=4), HELPDESK, 2 * GIB)
    runner = loaded(model, engine)
    try:
        width = {"float32": 4, "bfloat16": 2}[dtype]
        assert engine.kv_cache_bytes is not None
        assert num_bytes == PROCESS_BYTES + runner.num_parameters * width + engine.kv_cache_bytes
        assert runner.kv.num_blocks * runner.kv.block_size == 4 * runner.max_model_len + 16
    finally:
        runner.close()


def test_keys_without_a_size_take_their_share_of_the_budget() -> None:
    """A quarter, or MEMORY_SHARE; a size that is given is kept."""
    model = ModelConfig(alias="desk", path=str(HELPDESK))
    many = EngineConfig(max_num_seqs=100_000)

    def pool(engine: EngineConfig, budget: int) -> int:
        return sized(model, engine, HELPDESK, budget)[1].kv_cache_bytes or 0

    assert GIB // 4 - MIB < pool(many, GIB) <= GIB // 4
    assert GIB // 2 - MIB < pool(EngineConfig(max_num_seqs=100_000, memory_share=0.5), GIB) <= GIB // 2
    assert 9 * MIB < pool(EngineConfig(max_num_seqs=100_000, kv_cache_bytes=10 * MIB), GIB) <= 10 * MIB
    num_bytes, engine = sized(model, EngineConfig(num_blocks=7), HELPDESK, GIB)
    assert engine.kv_cache_bytes is None
    assert num_bytes > PROCESS_BYTES


def test_rounded_weights_take_less() -> None:
    """By kind."""
    sizes = [
        sized(ModelConfig(alias="desk", path=str(HELPDESK), quantize=kind), EngineConfig(), HELPDESK, GIB)[0]
        for kind in ("", "int8", "int4")
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_an_embedding_model_takes_its_weights() -> None:
    """It keeps no keys."""
    half, full = (
        embedder_bytes(EmbedderConfig(alias="e", path=str(HELPDESK), dtype=dtype), HELPDESK) - PROCESS_BYTES
        for dtype in ("bfloat16", "float32")
    )
    assert full == 2 * half > 0


@pytest.mark.parametrize(
    ("options", "limit", "said"),
    [
        ({}, 20 * GIB, None),
        (
            {},
            15 * GIB,
            ["16.0 GiB in bfloat16", "has 15.0 GiB", 'set "QUANTIZE": "int8" (9.6 GiB)', '"int4" (7.2 GiB)'],
        ),
        ({"dtype": "float32"}, 20 * GIB, ["32.0 GiB in float32", 'set "DTYPE": "bfloat16" (16.0 GiB)', '"int8"']),
        ({}, 8 * GIB, ['set "QUANTIZE": "int4" (7.2 GiB)']),
        ({"quantize": "int8"}, 8 * GIB, ["9.6 GiB as int8", 'set "QUANTIZE": "int4" (7.2 GiB)']),
        ({"quantize": "int4"}, 10 * GIB, None),
        ({}, GIB, ["To serve it, take a smaller model, or serve it elsewhere"]),
    ],
)
def test_weights_that_do_not_fit_are_named_with_what_helps(
    tmp_path: Path, options: dict[str, str], limit: int, said: list[str] | None
) -> None:
    """Both sizes, and the settings with which they would fit; nothing for weights that fit."""
    folder = large_model(tmp_path / "large", 16 * GIB)
    model = ModelConfig(alias="chat", path=str(folder), **options)  # type: ignore[arg-type]
    message = oversize(model, EngineConfig(), folder, limit)
    assert bool(message) is (said is not None)
    assert all(words in message for words in said or [])


def test_a_draft_model_counts(tmp_path: Path) -> None:
    """Unless it proposes nothing."""
    folder, draft = large_model(tmp_path / "large", 16 * GIB), large_model(tmp_path / "draft", 6 * GIB)
    model = ModelConfig(alias="chat", path=str(folder), draft=str(draft))
    assert "and 6.0 GiB for its draft model" in oversize(model, EngineConfig(), folder, 20 * GIB)
    assert oversize(model, EngineConfig(speculation="off"), folder, 20 * GIB) == ""


def test_quantised_weights_count_as_in_their_files(tmp_path: Path) -> None:
    """Of a GGUF file nothing else is read."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    os.truncate(file, 9 * GIB)
    model = ModelConfig(alias="chat", path=str(file))
    assert "9.0 GiB in its files" in oversize(model, EngineConfig(), file, 8 * GIB)
    assert oversize(model, EngineConfig(), file, 9 * GIB) == ""


def test_a_header_without_shapes_is_refused(tmp_path: Path) -> None:
    """By its name, as other damage is."""
    folder = large_model(tmp_path / "large", GIB)
    header = b'{"a": {"dtype": "BF16"}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelLoadError, match="a has no shape"):
        oversize(ModelConfig(alias="chat", path=str(folder)), EngineConfig(), folder, GIB)
