"""Every back end computes what the plain layer does, and each row by itself."""

from __future__ import annotations

import random

import pytest
import torch

from streamserve.engine.model.linear.base import PLAIN, BackEnd, DoesNotFit
from streamserve.engine.model.linear.choose import BACK_ENDS, TOLERANCE, is_right
from streamserve.engine.model.linear.fbgemm import FBGEMM_FP16

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What this machine has; the plain one is the reference, and keeps the laws too.
HERE = [(one, dtype) for one in (*BACK_ENDS, PLAIN) for dtype in DTYPES if is_right(one, dtype, CPU)]


def for_each(pairs: list[tuple[BackEnd, torch.dtype]]) -> pytest.MarkDecorator:
    """Run a test with each back end and dtype."""
    ids = [f"{one.name} {str(dtype).removeprefix('torch.')}" for one, dtype in pairs]
    return pytest.mark.parametrize(("back_end", "dtype"), pairs, ids=ids)


def random_weight(dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a weight of a random shape, and a bias or none."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_out, num_in = rng.randrange(1, 200), rng.randrange(1, 300)
    bias = torch.randn(num_out, generator=generator).to(dtype) if rng.random() < 0.5 else None
    return (torch.randn(num_out, num_in, generator=generator) / num_in**0.5).to(dtype), bias


@for_each(HERE)
def test_equals_the_plain_layer(back_end: BackEnd, dtype: torch.dtype) -> None:
    """Any shape, any number of rows, with and without bias: equal within rounding, and of the model's dtype."""
    for seed in range(12):
        weight, bias = random_weight(dtype, seed)
        layer = back_end.make(weight, bias)
        assert (layer.out_features, layer.in_features) == weight.shape
        assert layer.name == back_end.name
        assert layer.num_bytes >= weight.numel() * back_end.bytes_per_weight(dtype)
        for num_rows in (1, 2, 7, 33, 130):
            inputs = torch.randn(num_rows, weight.shape[1]).to(dtype)
            wanted = inputs.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
            found = layer(inputs)
            assert (found.dtype, found.shape) == (dtype, wanted.shape)
            limit = TOLERANCE[dtype] * float(wanted.abs().max().clamp_min(1e-3))
            assert float((found.double() - wanted).abs().max()) <= limit, f"seed {seed}, {num_rows} rows"
            floats = layer.floats(inputs)
            assert floats.dtype is torch.float32
            assert (floats.to(dtype) == found).all()


@for_each(HERE)
def test_a_row_depends_on_no_other(back_end: BackEnd, dtype: torch.dtype) -> None:
    """Whatever else a batch of as many rows holds, huge numbers and NaN too, a row's result has the same bits."""
    for seed in range(6):
        weight, bias = random_weight(dtype, seed)
        layer = back_end.make(weight, bias)
        for num_rows in (2, 8, 33):
            inputs = torch.randn(num_rows, weight.shape[1]).to(dtype)
            row, wanted = seed % num_rows, layer(inputs)
            for other in (0.0, 1e4, float("nan")):
                beside = torch.full_like(inputs, other)
                beside[row] = inputs[row]
                assert torch.equal(layer(beside)[row], wanted[row]), f"seed {seed}, {num_rows} rows of {other}"


@for_each([pair for pair in HERE if pair[0].is_batch_invariant])
def test_a_row_does_not_depend_on_their_number(back_end: BackEnd, dtype: torch.dtype) -> None:
    """Where a back end says so: a row alone, and among 2 to 130 others, gives the same bits."""
    for seed in range(6):
        weight, bias = random_weight(dtype, seed)
        layer = back_end.make(weight, bias)
        inputs = torch.randn(130, weight.shape[1]).to(dtype)
        alone = torch.cat([layer(row[None]) for row in inputs])
        for num_rows in (2, 3, 8, 15, 33, 130):
            assert torch.equal(layer(inputs[:num_rows]), alone[:num_rows]), f"seed {seed}, {num_rows} rows"


@pytest.mark.skipif(not is_right(FBGEMM_FP16, torch.bfloat16, CPU), reason="needs torch with FBGEMM")
@pytest.mark.parametrize("number", [1e5, -7e4, float("inf"), float("nan")])
def test_a_weight_beyond_half_precision_does_not_fit(number: float) -> None:
    """float16 ends at 65,504."""
    weight = torch.ones(4, 8).bfloat16()
    weight[2, 3] = number
    with pytest.raises(DoesNotFit):
        FBGEMM_FP16.make(weight, None)


@pytest.mark.skipif(not is_right(FBGEMM_FP16, torch.bfloat16, CPU), reason="needs torch with FBGEMM")
def test_small_weights_fit_beside_larger_ones() -> None:
    """A number that float16 rounds does not matter beside those of its row, and does in a row of its like."""
    weight = torch.full((2, 8), 0.01).bfloat16()
    weight[0, :4] = 1e-9
    FBGEMM_FP16.make(weight, None)
    weight[1] = 1e-9
    with pytest.raises(DoesNotFit):
        FBGEMM_FP16.make(weight, None)
