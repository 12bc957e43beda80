"""Linear layers of ours in a model: in place of transformers' own, and the output layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from streamserve.engine.model.batch import StepBatch
from streamserve.engine.model.linear.base import PLAIN, BackEnd, PlainLinear
from streamserve.engine.model.linear.choose import BACK_ENDS, LinearMaker, choose, is_right
from streamserve.engine.model.linear.head import FloatHead
from streamserve.engine.model.linear.modules import pack_linears
from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.tiny_models import VOCAB_SIZE, save_model

CPU = torch.device("cpu")


def maker_of(dtype: torch.dtype) -> LinearMaker:
    found = choose(dtype, CPU, [])
    if found.back_end is PLAIN:
        pytest.skip(f"this build of torch packs no {dtype}: needs oneDNN or FBGEMM")
    return found


def test_all_layers_are_replaced() -> None:
    """Every linear of a model is packed, GPT-2's transposed ones too; progress ends at 1."""
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Conv1D(4, 8), nn.LayerNorm(4)))
    inputs = torch.randn(3, 8)
    wanted = model(inputs)
    fractions: list[float] = []
    assert len(pack_linears(model, maker_of(torch.float32), fractions.append)) == 2
    assert fractions[-1] == 1.0
    assert not any(isinstance(module, (nn.Linear, Conv1D)) for module in model.modules())
    torch.testing.assert_close(model(inputs), wanted, rtol=1e-4, atol=1e-5)


def test_packed_or_not_the_answer_is_the_same(tiny_folder: Callable[[str], Path]) -> None:
    """A model answers the same with and without packing; tied embeddings stay usable."""
    packed, plain = (load_tiny(tiny_folder("gpt2"), packed=flag, native=False) for flag in (None, False))
    assert packed.linears == maker_of(torch.float32).back_end.name
    assert plain.linears == "plain"
    answers = [Driver(runner).run(prompts(VOCAB_SIZE)[:2], max_tokens=8, chunk=16) for runner in (packed, plain)]
    assert answers[0] == answers[1]


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


HALF = [back_end for back_end in (*BACK_ENDS, PLAIN) if is_right(back_end, torch.bfloat16, CPU)]


@pytest.mark.parametrize("back_end", HALF, ids=[one.name for one in HALF])
@pytest.mark.parametrize("bias", [True, False])
def test_the_largest_logit_is_the_largest_in_float32(back_end: BackEnd, bias: bool) -> None:
    """Rows whose bfloat16 logits tie, by hundreds, choose what float32 chooses; the other logits are the layer's."""
    generator = torch.Generator().manual_seed(3)
    plain = nn.Linear(48, 4_000, bias=bias, dtype=torch.bfloat16)
    plain.weight.data = torch.randn(4_000, 48, generator=generator).bfloat16()
    plain.weight.data[2_000:] = plain.weight.data[:2_000]
    column = torch.arange(2_000) % 48
    nudged = torch.nextafter(plain.weight.data[:2_000], torch.full((2_000, 48), 9.0).bfloat16())
    plain.weight.data[torch.arange(2_000, 4_000), column] = nudged[torch.arange(2_000), column]
    inputs = torch.randn(300, 48, generator=generator).bfloat16()
    with torch.inference_mode():
        layer = back_end.make(plain.weight.detach(), plain.bias)
        head = FloatHead(layer, plain.weight.detach(), plain.bias)
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
    head = FloatHead(PlainLinear(weight, None), weight, None)
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
    weight = load_tiny(folder, packed=False).loaded.model.head.weight
    forward, num_seen = runner.forward, 0

    def checked(batch: StepBatch, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        nonlocal num_seen
        hidden, logits = forward(batch, rows)
        if logits is not None:
            assert logits.dtype == torch.float32
            exact = hidden[rows].float()  # of the native step; its head may take them in the model's dtype
            wanted = {tuple((one @ weight.t()).argmax(-1).tolist()) for one in (exact, exact.bfloat16().float())}
            assert tuple(logits.argmax(-1).tolist()) in wanted
            num_seen += len(rows)
        return hidden, logits

    runner.forward = checked
    Driver(runner).run(prompts(VOCAB_SIZE), max_tokens=24, chunk=16)
    assert num_seen == 4 * 24
