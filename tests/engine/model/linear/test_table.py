"""Rows of a packed weight are the rows that were packed."""

from __future__ import annotations

import pytest
import torch

from streamserve.engine.model.linear.native import dequantized, from_groups, group_wise, pack
from streamserve.engine.model.linear.table import PackedTable
from streamserve.native.library import Library
from tests.native.conftest import library  # noqa: F401  (a fixture)

SHAPES = ((50, 64), (130, 96), (33, 71), (1, 32), (17, 5))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_floats_come_back(shape: tuple[int, int], dtype: torch.dtype, library: Library) -> None:  # noqa: F811
    """Bit for bit, in any order, an odd number of inputs and outputs included."""
    weight = torch.randn(*shape).to(dtype)
    token_ids = torch.randint(0, shape[0], (150,))
    assert torch.equal(PackedTable(pack(library, weight, None))(token_ids), weight[token_ids])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_groups_are_what_they_stand_for(
    shape: tuple[int, int],
    kind: str,
    dtype: torch.dtype,
    library: Library,  # noqa: F811
) -> None:
    """The numbers of `dequantized`, bit for bit, rounded to the model's dtype."""
    groups = group_wise(library, kind, torch.randn(*shape))
    token_ids = torch.randint(0, shape[0], (150,))
    rows = PackedTable(from_groups(library, groups, None, dtype))(token_ids)
    assert torch.equal(rows, dequantized(groups).to(dtype)[token_ids])


def test_a_token_beyond_the_table_is_an_error(library: Library) -> None:  # noqa: F811
    """As with a plain embedding."""
    table = PackedTable(pack(library, torch.randn(20, 32), None))
    for token_id in (-1, 20):
        with pytest.raises(IndexError):
            table(torch.tensor([3, token_id]))
