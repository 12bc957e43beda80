"""Groups of 32 made of a file's blocks stand for the same weights."""

from __future__ import annotations

import pytest
import torch

from streamserve.engine.model.linear.native import dequantized
from streamserve.engine.model.load.gguf import packed
from streamserve.engine.model.load.gguf.dequantize import dequantize
from streamserve.engine.model.load.gguf.packed import INT4, INT8, KINDS, groups_of
from streamserve.engine.model.load.gguf.types import TYPES
from tests.engine.model.load.gguf.test_dequantize import blocks_of

BY_NAME = {kind.name: kind for kind in TYPES.values()}


@pytest.mark.parametrize("name", [*INT4, *INT8])
def test_groups_stand_for_the_same_weights(name: str) -> None:
    """Bit for bit, but for Q4_K, whose scales are rounded to halves."""
    kind = BY_NAME[name]
    data, shape = blocks_of(name, 60).flatten(), (12, 5 * kind.block_size)
    if name == "Q8_0":
        data = data.view(-1, 34).clone()
        data[:, 2:][data[:, 2:] == 128] = 0
        data = data.flatten()
    if name == "MXFP4":
        data = data.view(-1, 17).clone()
        data[:, 0] = 110 + data[:, 0] % 30
        data = data.flatten()
    groups = groups_of(data, kind, shape)
    assert groups is not None
    assert (len(groups) == 3) == (name in INT4)
    wanted = dequantize(data, kind, shape, torch.float32)
    error = (dequantized(groups) - wanted).abs().max() / wanted.abs().max()
    assert float(error) <= (1e-3 if name == "Q4_K" else 0.0)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q8_0"])
def test_blocks_by_and_by_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large matrix is taken in parts, so that only its groups are in memory beside it."""
    kind = BY_NAME[name]
    data, shape = blocks_of(name, 60).flatten(), (12, 5 * kind.block_size)
    if name == "Q8_0":
        data = torch.where(data == 128, 0, data)
    whole = groups_of(data, kind, shape)
    monkeypatch.setattr(packed, "NUMBERS_AT_ONCE", 7 * kind.block_size)
    parts = groups_of(data, kind, shape)
    assert whole is not None
    assert parts is not None
    assert all(torch.equal(column, wanted) for column, wanted in zip(parts, whole, strict=True))


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {*INT4, *INT8}))
def test_other_types_have_no_groups(name: str) -> None:
    """A type that groups of 32 do not hold says so."""
    kind = BY_NAME[name]
    assert groups_of(blocks_of(name, 4).flatten(), kind, (4, kind.block_size)) is None


def test_what_a_kernel_cannot_hold_is_not_packed() -> None:
    """int8 numbers are -127..127 there, and scales are finite halves."""
    blocks = blocks_of("Q8_0", 2)
    blocks[0, 2] = 128
    assert groups_of(blocks.flatten(), BY_NAME["Q8_0"], (2, 32)) is None
    blocks[0, 2] = 1
    blocks[1, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)  # infinity
    assert groups_of(blocks.flatten(), BY_NAME["Q8_0"], (2, 32)) is None
    far = blocks_of("MXFP4", 2)
    far[:, 0] = 90  # 2^-37 is no half
    assert groups_of(far.flatten(), BY_NAME["MXFP4"], (2, 32)) is None
