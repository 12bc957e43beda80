"""Dequantisation against the reference that llama.cpp's `gguf` package brings."""

from __future__ import annotations

import pytest
import torch

from streamserve.engine.model.load.gguf.dequantize import FLOATS, FORMULAS, NUMBERS_AT_ONCE, dequantize
from streamserve.engine.model.load.gguf.types import TYPES

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install gguf")


def blocks_of(name: str, num_blocks: int, seed: int = 0) -> torch.Tensor:
    """Return bytes that could be blocks: random ones, with halves that are finite."""
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (num_blocks, kind.block_bytes), dtype=torch.uint8, generator=generator)
    halves = {"Q6_K": (208,), "MXFP4": ()}.get(name, (0, 2) if name.endswith(("1", "_K")) else (0,))
    for begin in halves:
        values = torch.randn(num_blocks, 1, generator=generator).half()
        blocks[:, begin : begin + 2] = values.view(torch.uint8)
    if name == "MXFP4":
        blocks[:, 0] %= 240  # greater powers of two are no float32 numbers
    return blocks


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_each_quantised_type_gives_the_references_bits(name: str) -> None:
    """Random blocks of each type stand for the same float32 numbers, bit for bit."""
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    blocks = blocks_of(name, 300)
    found = dequantize(blocks.flatten(), kind, (20, 15 * kind.block_size), torch.float32)
    wanted = gguf.dequantize(blocks.view(20, -1).numpy(), gguf.GGMLQuantizationType[name])
    assert torch.equal(found, torch.from_numpy(wanted))


@pytest.mark.parametrize("name", sorted(FLOATS))
def test_floats_are_read_as_they_are(name: str) -> None:
    """F32, F16 and BF16 are views of the file's bytes."""
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    wanted = torch.randn(6, 8).to(FLOATS[name])
    found = dequantize(wanted.view(torch.uint8).flatten(), kind, (6, 8), FLOATS[name])
    assert torch.equal(found, wanted)


def test_a_tensor_larger_than_a_part_is_whole() -> None:
    """A tensor is dequantised in parts of bounded memory; where a part ends does not show."""
    kind = TYPES[8]
    num_blocks = NUMBERS_AT_ONCE // 32 + 7
    blocks = blocks_of("Q8_0", num_blocks)
    found = dequantize(blocks.flatten(), kind, (num_blocks, 32), torch.float32)
    wanted = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(found, torch.from_numpy(wanted))


def test_sizes_are_those_of_the_reference() -> None:
    """Blocks of each type have the size that the reference says."""
    for number, kind in TYPES.items():
        assert (kind.block_size, kind.block_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
        assert gguf.GGMLQuantizationType(number).name == kind.name
