"""Packed linears compute what plain ones do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from streamserve.engine.model.batch import StepBatch
from streamserve.engine.model.linear import FloatHead, PackedLinear, agrees, choose_packed_dtype, pack_linears
from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.tiny_models import VOCAB_SIZE, save_model

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


def nearly_equal_rows(model: nn.Module) -> None:
    """Make the second half of the output layer the first one, but for a unit in the last place of one number."""
    weight = model.lm_head.weight.data
    half = len(weight) // 2
    rounded = weight[:half].bfloat16()
    weight[:half] = rounded.float()
    weight[half:] = rounded.float()
    column = torch.arange(half) % weight.shape[1]
    rows = torch.arange(half)
    weight[half + rows, column] = torch.nextafter(rounded, torch.full_like(rounded, 9.0)).float()[rows, column]


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_largest_logit_is_the_largest_in_float32(is_packed: bool, bias: bool) -> None:
    """Rows whose bfloat16 logits tie, by hundreds, choose what float32 chooses; the other logits are the layer's."""
    generator = torch.Generator().manual_seed(3)
    plain = nn.Linear(48, 4_000, bias=bias, dtype=torch.bfloat16)
    plain.weight.data = torch.randn(4_000, 48, generator=generator).bfloat16()
    plain.weight.data[2_000:] = plain.weight.data[:2_000]
    column = torch.arange(2_000) % 48
    nudged = torch.nextafter(plain.weight.data[:2_000], torch.full((2_000, 48), 9.0).bfloat16())
    plain.weight.data[torch.arange(2_000, 4_000), column] = nudged[torch.arange(2_000), column]
    layer = PackedLinear(plain.weight, plain.bias, packed_dtype_of(torch.bfloat16)) if is_packed else plain
    head = FloatHead(layer, plain.weight.detach(), plain.bias)
    inputs = torch.randn(1, 300, 48, generator=generator).bfloat16()
    with torch.inference_mode():
        found, rounded = head(inputs), layer(inputs)
        wanted = inputs.float() @ plain.weight.float().t() + (plain.bias.float() if bias else 0.0)
    assert (found.dtype, found.shape) == (torch.float32, wanted.shape)
    assert (found.argmax(-1) == wanted.argmax(-1)).all()
    torch.testing.assert_close(found.amax(-1), wanted.amax(-1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found, rounded.float(), rtol=2e-2, atol=2e-2)
    assert (rounded.argmax(-1) != wanted.argmax(-1)).sum() > 30  # what the rounded ones would have chosen


def test_numbers_that_are_not_finite_stay_so() -> None:
    """A row that is broken is found by the sampler, and changes no other row."""
    weight = torch.randn(50, 8).bfloat16()
    head = FloatHead(nn.Linear(8, 50, bias=False, dtype=torch.bfloat16), weight, None)
    head.layer.weight.data = weight
    inputs = torch.randn(3, 8).bfloat16()
    wanted = head(inputs)
    inputs[1] = float("nan")
    found = head(inputs)
    assert found[1].isnan().all()
    assert (found[[0, 2]] == wanted[[0, 2]]).all()


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("packed", [None, False])
def test_a_model_in_bfloat16_chooses_by_float32_logits(tmp_path: Path, packed: bool | None, is_tied: bool) -> None:
    """Each token of an answer is the likeliest by its last hidden state in float32, as transformers has it there."""
    folder = save_model(tmp_path, "llama", tie_word_embeddings=is_tied, edit=nearly_equal_rows)
    runner = load_tiny(folder, packed=packed, dtype="bfloat16")
    weight = load_tiny(folder, packed=False).loaded.model.get_output_embeddings().weight
    forward, num_seen = runner.forward, 0

    def checked(batch: StepBatch, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        nonlocal num_seen
        hidden, logits = forward(batch, rows)
        if logits is not None:
            assert logits.dtype == torch.float32
            wanted = (hidden[rows].float() @ weight.t()).argmax(-1)
            assert logits.argmax(-1).tolist() == wanted.tolist()
            num_seen += len(rows)
        return hidden, logits

    runner.forward = checked
    Driver(runner).run(prompts(VOCAB_SIZE), max_tokens=24, chunk=16)
    assert num_seen == 4 * 24
