"""The quality gate: what SmolLM2-135M loses by each precision is within the bounds of docs/quantised.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")

from benchmarks import quality  # noqa: E402  (after the skip)
from benchmarks.quality import BOUNDS, Bounds, Quality, Reading, compare  # noqa: E402
from tests.support.models.quantized_checkpoints import from_gguf, rounded_fp8  # noqa: E402
from tests.support.models.smollm2 import smollm2  # noqa: E402

pytestmark = pytest.mark.proof

PAGE = Path(__file__).parents[2] / "docs" / "quantised.md"
NUM_TOKENS = 128


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@cache
def reference() -> tuple[Reading, tuple[int, ...]]:
    """Return what the file's weights in float32 make of the text."""
    token_ids = quality.tokens_of(str(smollm2()), NUM_TOKENS)
    return quality.read(quality.plain(str(smollm2())), token_ids), token_ids


@pytest.mark.parametrize(
    ("quantize", "linears"), [("", "native_int4"), ("int8", "native_int8"), ("int4", "native_int4")]
)
def test_a_small_model_stays_within_the_bounds(quantize: str, linears: str) -> None:
    """KL, perplexity and likeliest tokens, against the file's weights in float32."""
    wanted, token_ids = reference()
    found = compare(wanted, quality.read(quality.served(str(smollm2()), "float32", quantize), token_ids), token_ids)
    assert found.linears.startswith(linears)
    assert not found.complaints(BOUNDS[quantize]), found


def test_keys_and_values_in_eight_bits_stay_within_the_bounds() -> None:
    """Beside the weights as the file has them: the bounds are those of the weights alone."""
    wanted, token_ids = reference()
    served = quality.served(str(smollm2()), "float32", "")
    found = compare(wanted, quality.read(served, token_ids, "int8"), token_ids)
    assert not found.complaints(BOUNDS[""]), found


def test_fp8_becomes_int8_within_the_bounds(tmp_path: Path) -> None:
    """The same model in FP8 with blocks of 128 x 128: int8 stands for it within the bounds of int8."""
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    path = str(from_gguf(smollm2(), tmp_path / "fp8", rounded_fp8, config))
    token_ids = quality.tokens_of(str(smollm2()), NUM_TOKENS)
    wanted = quality.read(quality.plain(path), token_ids)
    found = compare(wanted, quality.read(quality.served(path, "float32", ""), token_ids), token_ids)
    assert found.linears.startswith("native_int8")
    assert not found.complaints(BOUNDS["int8"]), found


def test_worse_figures_are_beyond_the_bounds() -> None:
    """The gate closes: each figure that is worse than its bound is named."""
    bounds = Bounds(kl=0.01, perplexity_ratio=1.02, agreement=0.95)
    bad = Quality(
        num_tokens=10,
        kl=0.02,
        worst_kl=1.0,
        perplexity=11.0,
        reference_perplexity=10.0,
        agreement=0.9,
        greedy=0.5,
        linears="plain",
    )
    assert [text.split()[0] for text in bad.complaints(bounds)] == ["KL", "perplexity", "agreement"]


def test_a_model_is_like_itself() -> None:
    """Equal logits have no distance, and other logits have the distance that is worked out by hand."""
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    same = Reading(logits=logits, greedy=[[1, 2]], linears="plain")
    found = compare(same, same, [0, 1])
    assert (found.kl, found.agreement, found.perplexity_ratio) == (0.0, 1.0, 1.0)
    assert found.perplexity == pytest.approx(2.0)
    other = Reading(logits=logits + torch.tensor([0.0, 1.0]), greedy=[[1, 2]], linears="plain")
    p = torch.tensor([0.0, 1.0]).softmax(0)
    assert compare(same, other, [0, 1]).kl == pytest.approx(float((0.5 * (0.5 / p).log()).sum()), abs=1e-6)


def test_the_page_has_the_bounds() -> None:
    """docs/quantised.md states them."""
    rows = re.findall(
        r"^\| (?:`\"(int\d)\"`|as the file has them) \|.*\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$",
        PAGE.read_text(),
        re.M,
    )
    stated = {
        name: Bounds(**dict(zip([one.name for one in fields(Bounds)], map(float, row), strict=True)))
        for name, *row in rows
    }
    assert stated == BOUNDS
