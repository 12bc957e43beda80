"""Linears of the native library: any dtype and precision, one copy, and rows that depend on no other."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from streamserve.engine.model.linear import native
from streamserve.engine.model.linear.base import BackEnd
from streamserve.engine.model.linear.choose import choose, is_right
from streamserve.engine.model.linear.native import (
    BYTES_PER_WEIGHT,
    NativeLinear,
    dequantized,
    from_groups,
    group_wise,
    native_back_end,
    pack,
    quantize,
    quantizing_back_end,
)
from streamserve.native.library import Library

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_linear_is_the_plain_one(library: Library, dtype: torch.dtype, has_bias: bool) -> None:
    """Results in the model's dtype and in float32, within the dtype's rounding."""
    weight, inputs = (0.1 * torch.randn(77, 130)).to(dtype), torch.randn(9, 130).to(dtype)
    bias = torch.randn(77).to(dtype) if has_bias else None
    packed = pack(library, weight, bias)
    wanted = linear(inputs.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(packed.floats(inputs), wanted.float(), rtol=1e-5, atol=1e-5)
    assert packed(inputs).dtype is dtype
    assert torch.equal(packed(inputs), packed.floats(inputs).to(dtype))


def back_ends(library: Library) -> list[BackEnd]:
    return [native_back_end(library), *(quantizing_back_end(library, kind) for kind in BYTES_PER_WEIGHT)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", range(3))
def test_a_neighbour_changes_nothing(library: Library, dtype: torch.dtype, number: int) -> None:
    """A row alone gives the bits that it gives among others, whatever the others are."""
    made = back_ends(library)[number].make(torch.randn(50, 96).to(dtype), None)
    inputs = torch.randn(11, 96).to(dtype)
    whole = made(inputs)
    for row in range(len(inputs)):
        assert torch.equal(made(inputs[row : row + 1]), whole[row : row + 1])
    inputs[1:] = 100 * torch.randn(10, 96).to(dtype)
    assert torch.equal(made(inputs)[0], whole[0])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_weight_is_rounded_in_parts(library: Library, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of whole panels, the last of fewer rows, give the bytes of the whole."""
    weight = torch.randn(75, 70)
    whole = from_groups(library, group_wise(library, kind, weight), None, torch.float32)
    monkeypatch.setattr(native, "NUMBERS_AT_ONCE", 2_500)
    assert torch.equal(quantize(library, kind, weight, None).packed, whole.packed)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("shape", [(33, 64), (16, 200), (5, 31)])
def test_a_quantised_linear_computes_its_dequantised_weight(
    library: Library, kind: str, shape: tuple[int, int]
) -> None:
    """What differs from the float32 product of that weight is the rounding of the inputs to int8."""
    weight, inputs = torch.randn(shape), torch.randn(6, shape[1])
    groups = group_wise(library, kind, weight)
    wanted = linear(inputs, dequantized(groups))
    for made in (from_groups(library, groups, None, torch.float32), quantize(library, kind, weight, None)):
        found = made(inputs)
        assert float((found - wanted).norm() / wanted.norm()) < 0.012
        assert isinstance(made, NativeLinear)
        assert made.name == f"native_{kind}"


def test_int8_rounds_to_half_a_step(library: Library) -> None:
    """Each weight is within half a scale of its group, and a little for the scale's own rounding."""
    weight = torch.randn(20, 100)
    groups = group_wise(library, "int8", weight)
    scale = groups[1].float().repeat_interleave(32, dim=1)[:, :100]
    assert bool(((dequantized(groups) - weight).abs() <= 0.57 * scale).all())


def test_int4_is_better_than_the_range_of_a_group(library: Library) -> None:
    """The squared error of no group is above that of equal steps from smallest to largest, and in sum it is lower."""
    weight = torch.randn(64, 256)
    grouped = weight.view(64, -1, 32)
    low, high = grouped.amin(-1, keepdim=True).half().float(), grouped.amax(-1, keepdim=True)
    step = ((high - grouped.amin(-1, keepdim=True)) / 15).half().float()
    plain = ((grouped - low) / step).round().clamp(0, 15) * step + low
    plain_errors = (plain - grouped).square().sum(-1)
    found = dequantized(group_wise(library, "int4", weight)).view_as(grouped)
    errors = (found - grouped).square().sum(-1)
    assert bool((errors <= plain_errors * 1.001).all())
    assert float(errors.sum()) < 0.85 * float(plain_errors.sum())


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_equal_and_zero_weights_stay_what_they_are(library: Library, kind: str) -> None:
    """A group without a range has no scale to divide by."""
    weight = torch.zeros(3, 64)
    weight[1] = 0.5
    weight[2, 7] = -2.0
    torch.testing.assert_close(dequantized(group_wise(library, kind, weight)), weight, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_native_back_end_goes_before_the_others(library: Library, dtype: torch.dtype) -> None:
    """It is right on this machine, and where nothing is measured it is taken."""
    native = native_back_end(library)
    assert is_right(native, dtype, CPU)
    assert choose(dtype, CPU, [], preferred=[native]).back_end is native


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8.5), ("int4", 5.0)])
def test_a_quantised_weight_takes_few_bits(library: Library, kind: str, bits: float) -> None:
    """One packed copy: q, scales and minima, and no more."""
    made = quantize(library, kind, torch.randn(128, 256), None)
    assert made.num_bytes * 8 == bits * 128 * 256
    assert BYTES_PER_WEIGHT[kind] * 8 == bits
