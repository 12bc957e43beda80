"""`manage.py streamserve_capacity`: it prints the numbers of a load, and loads no weights for that."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.test.utils import override_settings

from streamserve.management.commands.streamserve_capacity import format_bytes, parse_bytes
from tests.support.models.large import large_model

ROOT = Path(__file__).resolve().parents[2]
HELPDESK = ROOT / "project" / "demo_model" / "helpdesk"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "max_position_embeddings": 131_072,
}


def run(*args: str, **options: Any) -> str:
    out = io.StringIO()
    call_command("streamserve_capacity", *args, stdout=out, stderr=io.StringIO(), **options)
    return out.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder without weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_a_table_for_people(folder: Path) -> None:
    """The table has bytes of a token, pool and streams in both dtypes, and a notice that the weights are unknown."""
    text = run(str(folder), "--memory", "16GiB", "--device", "cuda")
    rows = {line[:26].strip(): line[26:].split() for line in text.splitlines()[2:11]}
    assert rows["KV of one token"] == ["64", "KiB", "32", "KiB"]
    assert rows["KV pool"] == ["14.4", "GiB", "14.4", "GiB"]
    assert rows["streams of 8,192 tokens"] == ["28", "57"]
    assert rows["longest sequence"] == ["131,072", "131,072"]
    assert "if all were kept" not in text
    assert "weights are not here" in text


def test_json_for_programs(folder: Path) -> None:
    """The JSON has the same numbers, unrounded."""
    report = json.loads(run(str(folder), "--memory", "16GiB", "--json"))
    assert (report["model_type"], report["device"], report["memory_bytes"]) == ("llama", "cpu", 16 << 30)
    assert [one["dtype"] for one in report["capacities"]] == ["float32", "bfloat16"]
    assert [one["bytes_per_token"] for one in report["capacities"]] == [65_536, 32_768]
    assert report["capacities"][0]["streams"] == {"1024": 63, "4096": 15, "8192": 7}


def test_a_hub_id_without_the_hub_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is no folder may be a hub id; the package that reads it is part of the engine's."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # its import fails, as where it is not installed
    with pytest.raises(CommandError, match=r"There is no folder nosuch, .* pip install huggingface_hub"):
        run("nosuch")


def test_the_numbers_are_those_of_a_load() -> None:
    """For the shipped model blocks, bytes and parameters are the runner's."""
    pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")
    from streamserve.engine.config import EngineConfig, ModelConfig
    from streamserve.engine.model.kv_cache import bytes_per_block
    from streamserve.engine.model.load.start import load_runner

    said = json.loads(run(str(HELPDESK), "--json"))
    runner = load_runner(ModelConfig(alias="m", path=str(HELPDESK), dtype="float32", device="cpu"), EngineConfig())
    of_float32 = said["capacities"][0]
    assert said["num_parameters"] == runner.num_parameters
    assert said["max_model_len"] == runner.max_model_len
    assert of_float32["num_blocks"] == runner.num_blocks
    block_bytes = bytes_per_block(runner.layers, runner.block_size, runner.loaded.dtype)
    assert of_float32["bytes_per_token"] * runner.block_size == block_bytes
    runner.close()


def test_an_alias_brings_its_engine(folder: Path) -> None:
    """A name in MODELS stands for its folder and its settings."""
    models = {"small": {"PATH": str(folder), "ENGINE": {"NUM_BLOCKS": 100}}}
    with override_settings(STREAMSERVE=settings.STREAMSERVE | {"MODELS": models, "TESTING": False, "CLIENT": "thread"}):
        report = json.loads(run("small", "--json"))
    assert report["model"] == "small"
    assert {one["num_blocks"] for one in report["capacities"]} == {100}


def test_an_embedding_model_holds_no_streams() -> None:
    """It keeps no keys; the message says so."""
    conf = {"MODELS": {"echo": {"PATH": "echo"}}, "EMBEDDING_MODELS": {"search": {"PATH": "org/name"}}}
    with override_settings(STREAMSERVE=conf), pytest.raises(CommandError, match="makes embeddings"):
        run("search")


def test_windows_are_counted(folder: Path) -> None:
    """Of layers with a window what is held counts, and beside it what would be if all were kept; on a GPU all is."""
    (folder / "config.json").write_text(json.dumps(LLAMA | {"model_type": "mistral", "sliding_window": 4096}))
    text = run(str(folder), "--memory", "16GiB")
    rows = {line[:44].strip(): line[44:].split() for line in text.splitlines()[2:15]}
    assert rows["longest sequence"] == ["131,072", "131,072"]
    assert rows["if all were kept, longest sequence"] == ["65,504", "131,040"]
    assert rows["streams of 8,192 tokens"] == ["15", "31"]
    assert rows["if all were kept, streams of 8,192 tokens"] == ["7", "15"]
    assert "what lies before it is freed" in text
    assert "too small for the model's longest" not in text
    assert "if all were kept" not in run(str(folder), "--memory", "16GiB", "--device", "cuda")
    assert "if all were kept" not in run(str(HELPDESK))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("/no/such/folder", {}, "no folder at"),
        ("echo", {}, "no weights"),
        (str(HELPDESK), {"device": "cuda"}, "--memory 24GiB"),
        (str(ROOT), {}, "no config.json"),
    ],
)
def test_refusals_are_sentences(model: str, options: dict[str, Any], words: str) -> None:
    """Each refusal is an error message without a traceback."""
    with pytest.raises(CommandError, match=words):
        run(model, **options)


def test_amounts_of_memory() -> None:
    """Amounts of memory are read in their usual notations."""
    texts = ["8GiB", "8 gb", "1.5g", "512MiB", "1024"]
    assert [parse_bytes(text) for text in texts] == [8 << 30, 8 * 10**9, 3 << 29, 512 << 20, 1024]
    numbers = (None, 512, 1536, 3 << 30, 2000 << 30)
    assert [format_bytes(number) for number in numbers] == ["unknown", "512 B", "2 KiB", "3.0 GiB", "2,000.0 GiB"]
    with pytest.raises(CommandError, match="try 8GiB"):
        run(str(HELPDESK), "--memory", "lots")


def test_torch_stays_out(folder: Path) -> None:
    """Neither the command nor what a web process imports of the clients loads torch or transformers."""
    script = f"""
import sys
import django
django.setup()
import streamserve.clients.factory, streamserve.clients.thread.client
import streamserve.clients.process.config, streamserve.web.site
from django.core.management import call_command
call_command("streamserve_capacity", {str(folder)!r})
found = sorted({{"torch", "transformers", "tokenizers"}} & set(sys.modules))
assert not found, found
"""
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "project.settings"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_draft_model_counts(folder: Path) -> None:
    """Its keys and values lie in the same blocks."""
    models = {"large": {"PATH": str(folder), "DRAFT": str(folder)}}
    with override_settings(STREAMSERVE=settings.STREAMSERVE | {"MODELS": models, "TESTING": False, "CLIENT": "thread"}):
        report = json.loads(run("large", "--memory", "16GiB", "--json"))
    assert [one["bytes_per_token"] for one in report["capacities"]] == [131_072, 65_536]


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """By dtype, with what helps; no count is negative, and nothing is advised about a pool that cannot be."""
    folder = str(large_model(tmp_path / "large", 16 << 30))
    both = run(folder, "--memory", "8GiB")
    assert "In float32 and bfloat16, the weights alone are more than there is" in both
    assert "QUANTIZE takes about 0.6" in both
    assert "-" not in "".join(both.splitlines()[2:12])
    assert "the pool is too small" not in both
    assert "Lower memory_share" not in both
    assert "In float32, the weights alone" in run(folder, "--memory", "24GiB")
    assert "QUANTIZE" not in run(folder, "--memory", "8GiB", "--device", "cuda")
