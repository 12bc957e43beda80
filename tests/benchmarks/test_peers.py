"""Laws of `benchmarks.peers`: its sums, its files, what it refuses, and a whole run with a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("tokenizers", reason="needs the engine extra: pip install streamserve[engine]")
pytest.importorskip("websockets", reason="needs websockets: pip install -r tests/requirements.txt")

from benchmarks.peers.__main__ import parse_options
from benchmarks.peers.install import NotInstalled, Peer, install
from benchmarks.peers.quiet import Moment, Noise
from benchmarks.peers.readers import Lengths, Reading
from benchmarks.peers.report import NOISE, as_json, as_markdown, as_svg
from benchmarks.peers.results import BEST, Entry, Results, at_once
from benchmarks.peers.rounds import LOADS
from benchmarks.qoe_http.readers import Prompts
from benchmarks.qoe_http.servers import ROOT
from benchmarks.support.shape import HELPDESK, SHAPES, model_folder

pytestmark = pytest.mark.proof

ONE = at_once(1)


def entry(kind: str, precision: str, variant: str = "") -> Entry:
    """Return a contender whose weights are 1 MB."""
    name = f"{kind} {precision} {variant}".strip()
    return Entry(name=name, kind=kind, precision=precision, variant=variant, weight_bytes=1e6)


def results(**itls: tuple[float, ...]) -> Results:
    """Return rounds of one stream in which each contender had these latencies; `_` stands for a space."""
    about = {"command": "peers", "model": "S", "rounds": 1, "date": "2026-11-26", "machine": "a <fast> machine"}
    made = Results(about=about, bandwidth=1e9)
    for name, values in itls.items():
        made.entries.append(entry(*name.split("_")))
        for value in values:
            made.add(made.entries[-1].name, ONE, {"itl_ms": value, "tokens_per_second": 1e3 / value})
    return made


def test_a_plain_command_line_asks_for_the_lengths_that_are_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """All loads, with prompts of 1,000 and 3,000 tokens."""
    monkeypatch.setattr(sys, "argv", ["peers"])
    options = parse_options()
    assert (options.lengths, options.loads) == (Lengths(), list(LOADS))
    assert (options.lengths.long, options.lengths.mixed) == (1000, 3000)


def test_itl_is_the_time_from_first_to_last_text_by_the_gaps_of_its_tokens() -> None:
    """Coalesced chunks count as the tokens in them; one token has no latency between tokens."""
    reading = Reading(asked_at=1.0, came_at=(1.5, 1.7, 2.5), num_tokens=11)
    assert (round(reading.ttft), round(reading.itl)) == (500, 100)
    assert Reading(0.0, (1.0,), 1).itl == 0.0


def test_gaps_are_those_that_overlap_the_while() -> None:
    """A gap that began before, or ends after, counts whole; gaps that have ended or begin later do not."""
    reading = Reading(0.0, (1.0, 2.0, 4.0, 7.0, 11.0), 5)
    assert [round(gap) for gap in reading.gaps(3.0, 5.0)] == [2000, 3000]


def test_ratios_are_of_medians_and_like_with_like() -> None:
    """A round that is an outlier changes no ratio; fp32 is not compared with a quantised peer."""
    found = results(ours_bf16=(10.0, 12.0, 900.0), llama_f16=(6.0, 6.0, 1.0), llama_q8_0=(3.0,), vllm_bf16=(4.0, 4.0))
    ratios = found.ratios(ONE)
    assert set(ratios) == {"ours bf16 ÷ llama f16", "ours bf16 ÷ vllm bf16", f"ours bf16 ÷ {BEST}"}
    assert ratios["ours bf16 ÷ llama f16"]["itl_ms"] == 2.0
    assert ratios[f"ours bf16 ÷ {BEST}"]["itl_ms"] == 3.0
    assert ratios[f"ours bf16 ÷ {BEST}"]["tokens_per_second"] == pytest.approx(1 / 3)


def test_a_variant_of_ours_is_compared_with_ours() -> None:
    """An environment variable's effect is a ratio to the same precision without it."""
    assert list(results(ours_bf16=(8.0,), **{"ours_bf16_A=B": (4.0,)}).ratios(ONE)) == ["ours bf16 A=B ÷ ours bf16"]


def test_share_of_the_weight_read_floor() -> None:
    """A step that takes twice as long as its weights take to be read has half of the floor."""
    assert results(ours_bf16=(2.0,)).medians(ONE)["ours bf16"]["floor_share"] == 0.5


def test_a_busy_machine_gets_no_ratios() -> None:
    """What noise made is printed as noise, in each of the files."""
    busy = results(ours_bf16=(8.0,), llama_f16=(4.0,))
    assert "÷" in as_markdown(busy)
    busy.is_quiet = False
    assert "÷" not in as_markdown(busy)
    assert NOISE in as_markdown(busy)
    assert NOISE in as_svg(busy)
    assert "ratios" not in as_json(busy)


def test_what_is_missing_is_named_and_the_chart_is_xml() -> None:
    """A peer that did not start is in the report with its reason; names are escaped in the chart."""
    found = results(ours_bf16=(8.0,))
    found.missing["vllm bf16"] = "no wheel"
    assert "- vllm bf16: no wheel" in as_markdown(found)
    assert ElementTree.fromstring(as_svg(found)).tag.endswith("svg")


def test_own_processor_time_is_no_noise() -> None:
    """Noise is what the machine computed, less what the measured servers and this process did."""
    earlier = Moment(at=10.0, busy=100.0, stolen=1.0, own=50.0)
    noise = Moment(at=20.0, busy=118.0, stolen=1.0, own=67.5).noise_since(earlier)
    assert noise == Noise(others=0.05, stolen=0.0)
    assert noise.is_quiet
    assert not Noise(others=0.5, stolen=0.0).is_quiet
    assert not Noise(others=0.0, stolen=0.5).is_quiet


def test_a_peer_that_cannot_live_here_is_refused_with_the_reason(tmp_path: Path) -> None:
    """A package that must be absent is named before anything is installed."""
    with pytest.raises(NotInstalled, match="does not work beside json"):
        install(Peer(name="vllm", imports="vllm", absent=("json",)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_prompts_are_drawn_anew_for_each_stream() -> None:
    """The same seed gives the same prompt, so that contenders are alike; another one shares no cached block with it."""
    prompts = Prompts(HELPDESK)
    one, same, other = prompts.draw(40, "0 ours 0"), prompts.draw(40, "0 ours 0"), prompts.draw(40, "0 ours 1")
    assert one == same
    assert one.split()[:8] != other.split()[:8]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the tiny model of `--quick` in a folder that a run can use as its cache."""
    missing = [name for name in ("torch", "xllamacpp", "gguf") if find_spec(name) is None]
    if missing and os.environ.get("STREAMSERVE_REQUIRE") != "all":
        pytest.skip(f"needs {', '.join(missing)}: pip install -r tests/requirements.txt")
    assert not missing, f"STREAMSERVE_REQUIRE=all, and there is no {', '.join(missing)}"
    return model_folder("tiny", tmp_path_factory.mktemp("peers"))[0]


def test_a_converted_model_has_the_values_of_the_checkpoint(tiny: Path, tmp_path: Path) -> None:
    """llama.cpp's file holds the same matrices within its format's error, and the head in more bits."""
    import gguf
    from safetensors.torch import load_file

    from benchmarks.peers.convert import convert

    convert(tiny, "q4_K_M", tmp_path / "tiny.gguf")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    assert found["token_embd.weight"].tensor_type == gguf.GGMLQuantizationType.Q6_K
    assert found["blk.1.ffn_gate.weight"].tensor_type == gguf.GGMLQuantizationType.Q4_K
    values = load_file(tiny / "model.safetensors")
    expected = values["model.layers.1.mlp.gate_proj.weight"].float().numpy()
    tensor = found["blk.1.ffn_gate.weight"]
    error = gguf.quants.dequantize(tensor.data, tensor.tensor_type) - expected
    assert (error**2).mean() < 0.02 * (expected**2).mean()


def test_a_whole_run_with_a_tiny_model(tiny: Path, tmp_path: Path) -> None:
    """`--quick` installs llama.cpp's server, serves the model there and on our site, and writes what it measured."""
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--ours", "fp32", "--llama", "f16"]
    command += ["--cache", str(tiny.parent), "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "peers.json").read_text())
    assert found["missing"] == {}
    names = {"ours fp32", "llama f16"}
    assert {name for name, loads in found["rounds"].items() if len(loads) == 6} == names
    assert all(
        value > 0
        for medians in found["medians"].values()
        for figures in medians.values()
        for figure, value in figures.items()
        if "cpu" not in figure
    )
    assert (tmp_path / "peers.md").read_text() in done.stdout
    assert (tmp_path / "peers.svg").exists()


def test_shapes_are_those_of_their_names() -> None:
    """The 1.7B shape has that many weights, with its tied head."""
    shape = SHAPES["qwen3-1.7b"]
    width, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    attention = 2 * width * head * (shape["num_attention_heads"] + shape["num_key_value_heads"])
    total = shape["vocab_size"] * width + shape["num_hidden_layers"] * (attention + 3 * width * inner)
    assert round(total / 1e9, 1) == 1.7
