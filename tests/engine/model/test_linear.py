"""Packed linears compute what plain ones do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from streamserve.engine.model.linear import PackedLinear, agrees, choose_packed_dtype, pack_linears
from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.tiny_models import VOCAB_SIZE

CPU = torch.device("cpu")


def packed_dtype_of(dtype: torch.dtype) -> torch.dtype:
    found = choose_packed_dtype(dtype, CPU)
    if found is None:
        pytest.skip(f"this build of torch packs no {dtype}: needs oneDNN")
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 7, 33, 200])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_equals_plain(dtype: torch.dtype, num_rows: int, bias: bool) -> None:
    """Any number of rows, with and without bias: equal within rounding, and of the input's shape and dtype."""
    plain = nn.Linear(72, 40, bias=bias, dtype=dtype)
    packed = PackedLinear(plain.weight, plain.bias, packed_dtype_of(dtype))
    inputs = torch.randn(1, num_rows, 72).to(dtype)
    with torch.inference_mode():
        found, wanted = packed(inputs), plain(inputs)
    assert found.shape == wanted.shape
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=2e-2)


def test_a_wrong_packing_is_noticed() -> None:
    """The self-test distinguishes a layer from another one."""
    plain, other = nn.Linear(16, 8), nn.Linear(16, 8)
    packed = PackedLinear(plain.weight, plain.bias, packed_dtype_of(torch.float32))
    assert agrees(packed, plain.weight, plain.bias)
    assert not agrees(packed, other.weight, plain.bias)


def test_nothing_to_pack_for() -> None:
    """Packing is for CPUs, and for the dtypes it was tested in."""
    assert choose_packed_dtype(torch.float32, torch.device("meta")) is None
    assert choose_packed_dtype(torch.float64, CPU) is None


def test_all_layers_are_replaced() -> None:
    """Every linear of a model is packed, GPT-2's transposed ones too; progress ends at 1."""
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Conv1D(4, 8), nn.LayerNorm(4)))
    inputs = torch.randn(3, 8)
    wanted = model(inputs)
    fractions: list[float] = []
    assert pack_linears(model, packed_dtype_of(torch.float32), fractions.append) == 2
    assert fractions[-1] == 1.0
    assert not any(isinstance(module, (nn.Linear, Conv1D)) for module in model.modules())
    torch.testing.assert_close(model(inputs), wanted, rtol=1e-4, atol=1e-5)


def test_packed_or_not_the_answer_is_the_same(tiny_folder: Callable[[str], Path]) -> None:
    """A model answers the same with and without packing; tied embeddings stay usable."""
    packed, plain = (load_tiny(tiny_folder("gpt2"), packed=flag) for flag in (None, False))
    assert packed.loaded.num_packed > 0
    assert plain.loaded.num_packed == 0
    answers = [Driver(runner).run(prompts(VOCAB_SIZE)[:2], max_tokens=8, chunk=16) for runner in (packed, plain)]
    assert answers[0] == answers[1]


def test_fused_layers_in_any_order() -> None:
    """Layers fused into one matrix give what each gives alone, in any order, again and again, for any input."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 2)

    block = Block()
    plain = dict(block.named_children())
    assert pack_linears(block, packed_dtype_of(torch.float32)) == 3
    first, second = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    for name in ("q_proj", "k_proj", "v_proj", "v_proj", "q_proj"):
        for inputs in (first, second, first):
            torch.testing.assert_close(getattr(block, name)(inputs), plain[name](inputs), rtol=1e-4, atol=1e-5)
