"""A linear of every kind gives what the plain product gives, and a row's numbers depend on no other row."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.native.library import Library

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")

FLOAT32, BFLOAT16, FLOAT16, INT8, INT4 = range(5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUP = 32
# Relative to the norm. Grouped kinds round their inputs to int8; bf16 weights may be multiplied with bf16 inputs.
TOLERANCE = {FLOAT32: 2e-6, BFLOAT16: 4e-3, FLOAT16: 2e-6, INT8: 1.2e-2, INT4: 1.2e-2}


class PackedWeight:
    """A packed matrix and `plain`, the float32 matrix (num_outputs, num_inputs) that it stands for."""

    def __init__(self, library: Library, kind: int, weight: Any) -> None:
        self.library, self.kind = library, kind
        self.num_outputs, self.num_inputs = weight.shape
        self.packed = torch.empty(library.linear_bytes(kind, *weight.shape), dtype=torch.uint8)
        parts = [weight.to(DTYPES[kind]).contiguous()] if kind < INT8 else group_wise(weight, kind)
        function = (library.pack_int8 if kind == INT8 else library.pack_int4) if kind >= INT8 else library.pack_dense
        first = () if kind >= INT8 else (kind,)
        function(*first, *(part.data_ptr() for part in parts), *weight.shape, self.packed.data_ptr(), 2)
        self.plain = parts[0].float() if kind < INT8 else dequantized(parts)

    def __call__(self, x: Any, *, y_dtype: Any = torch.float32, bias: Any = None, num_threads: int = 2) -> Any:
        y = torch.full((len(x), self.num_outputs), torch.nan, dtype=y_dtype)
        self.library.linear(
            self.kind,
            self.packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            self.num_outputs,
            self.num_inputs,
            DTYPES.index(x.dtype),
            x.data_ptr(),
            len(x),
            DTYPES.index(y_dtype),
            y.data_ptr(),
            num_threads,
        )
        return y


def group_wise(weight: Any, kind: int) -> list[Any]:
    """Return q (num_outputs, num_inputs) and fp16 scales, for int4 minima too (num_outputs, num_groups)."""
    num_outputs, num_inputs = weight.shape
    padding = -num_inputs % GROUP
    groups = torch.nn.functional.pad(weight, (0, padding)).view(num_outputs, -1, GROUP)
    if kind == INT8:
        scale = (groups.abs().amax(-1) / 127).half()
        q, parts = groups / scale.float().clamp_min(1e-6)[..., None], [scale]
        low, high, dtype = -127, 127, torch.int8
    else:
        minimum = groups.amin(-1).half()
        scale = ((groups.amax(-1) - groups.amin(-1)) / 15).half()
        q, parts = (groups - minimum.float()[..., None]) / scale.float().clamp_min(1e-6)[..., None], [scale, minimum]
        low, high, dtype = 0, 15, torch.uint8
    q = q.round().clamp(low, high).view(num_outputs, -1)[:, :num_inputs].to(dtype)
    return [q.contiguous(), *parts]


def dequantized(parts: list[Any]) -> Any:
    """Return scale * q (+ minimum) in float32."""
    wide = [part.float().repeat_interleave(GROUP, dim=1)[:, : parts[0].shape[1]] for part in parts[1:]]
    return parts[0].float() * wide[0] + (wide[1] if len(wide) > 1 else 0)


def relative_error(found: Any, wanted: Any) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-9))


@settings(max_examples=40)
@given(
    kind=st.integers(0, 4),
    num_outputs=st.integers(1, 150),
    num_inputs=st.integers(1, 200),
    num_rows=st.integers(1, 40),
    x_dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
def test_a_linear_gives_the_plain_product(
    library: Library,
    kind: int,
    num_outputs: int,
    num_inputs: int,
    num_rows: int,
    x_dtype: Any,
    has_bias: bool,
    num_threads: int,
    seed: int,
) -> None:
    """Any shape, number of rows, threads and dtype of the states, within the kind's rounding."""
    generator = torch.Generator().manual_seed(seed)
    linear = PackedWeight(library, kind, torch.randn(num_outputs, num_inputs, generator=generator))
    x = torch.randn(num_rows, num_inputs, generator=generator).to(x_dtype)
    bias = torch.randn(num_outputs, generator=generator) if has_bias else None
    found = linear(x, bias=bias, num_threads=num_threads)
    wanted = torch.nn.functional.linear(x.float(), linear.plain, bias)
    scale = x.float().norm() * linear.plain.norm() / num_inputs**0.5  # a sum may cancel out
    assert float((found - wanted).norm()) <= TOLERANCE[kind] * float(scale + wanted.norm())


@pytest.mark.parametrize("kind", range(5))
def test_a_rows_numbers_depend_on_no_other_row(library: Library, kind: int) -> None:
    """Bitwise: neither on what the others are, nor on how many they are, nor on the number of threads."""
    linear = PackedWeight(library, kind, torch.randn(83, 150))
    x = torch.randn(37, 150)
    whole = linear(x)
    for start in (0, 5):
        for num_rows in (*range(1, 18), 32):
            part = x[start : start + num_rows].contiguous()
            assert torch.equal(linear(part, num_threads=1 + num_rows % 3), whole[start : start + num_rows])
    x[1:] = 1e4 * torch.randn(36, 150)
    assert torch.equal(linear(x)[0], whole[0])


@pytest.mark.parametrize("y_dtype", DTYPES)
def test_results_are_rounded_as_torch_does(library: Library, y_dtype: Any) -> None:
    """The result in a short type is float32's, rounded to nearest even."""
    linear = PackedWeight(library, FLOAT32, torch.randn(50, 70))
    x = torch.randn(9, 70)
    assert torch.equal(linear(x, y_dtype=y_dtype), linear(x).to(y_dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_number_of_a_short_type_is_read_and_written(library: Library, dtype: Any) -> None:
    """All 65,536 patterns, through a weight of one: subnormal numbers and infinities too."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 1)
    one = PackedWeight(library, FLOAT32, torch.ones(1, 1))
    found = one(every, y_dtype=dtype)
    assert torch.equal(found.isnan(), every.isnan())
    assert torch.equal(found[~every.isnan()], every[~every.isnan()])


@pytest.mark.parametrize("kind", [INT8, INT4])
def test_zeros_and_large_rows_stay_exact(library: Library, kind: int) -> None:
    """A group of zeros has no scale; one of the largest numbers does not overflow the integer sums."""
    extremes = torch.tensor([127.0, -127.0]).repeat(8, 32)
    linear = PackedWeight(library, kind, extremes)
    assert torch.equal(linear(torch.zeros(3, 64)), torch.zeros(3, 8))
    found = linear(extremes[:5].contiguous())
    wanted = extremes[:5] @ linear.plain.t()
    assert relative_error(found, wanted) < 1e-3
    assert relative_error(linear(-extremes[:1].contiguous()), -wanted[:1]) < 1e-3


@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_stays_so(library: Library, kind: int, broken: float) -> None:
    """The sampler finds it, and it changes no other row."""
    linear = PackedWeight(library, kind, torch.randn(40, 70))
    x = torch.randn(6, 70)
    wanted = linear(x)
    x[3, 50] = broken
    found = linear(x)
    assert not found[3].isfinite().any()
    others = [0, 1, 2, 4, 5]
    assert torch.equal(found[others], wanted[others])
