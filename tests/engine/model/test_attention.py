"""The fast paged attention equals the plain one, and never reads a slot that is not the sequence's own."""

from __future__ import annotations

import random

import pytest
import torch

from streamserve.engine.model.attention import PagedAttention, Variant
from streamserve.engine.model.batch import build_batch
from streamserve.engine.model.kv_cache import KVCache, LayerShape
from streamserve.engine.plan import Chunk, StepPlan
from tests.support.models import plain_attention as reference

NUM_BLOCKS = 160
BLOCK_SIZE = 4
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
VARIANTS = {
    "plain": Variant(scaling=0.3),
    "window": Variant(scaling=0.3, window=6),
    "softcap": Variant(scaling=2.0, softcap=1.0),
    "sinks": Variant(scaling=0.3, sinks=torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "all": Variant(scaling=1.0, window=9, softcap=2.0, sinks=torch.tensor([1.0, 2.0, 3.0, 4.0])),
}
# (start, tokens computed now): decodes short and long, whole prompts, later chunks
LENGTHS = [(0, 1), (3, 1), (30, 1), (260, 1), (0, 5), (0, 21), (13, 7), (40, 130)]


def make_plan(seed: int) -> StepPlan:
    deck = list(range(1, NUM_BLOCKS))
    random.Random(seed).shuffle(deck)
    chunks = []
    for seq_id, (start, size) in enumerate(LENGTHS):
        num_blocks = -(-(start + size) // BLOCK_SIZE)
        table, deck = tuple(deck[:num_blocks]), deck[num_blocks:]
        chunks.append(Chunk(seq_id=seq_id, start=start, token_ids=(0,) * size, block_table=table))
    random.Random(seed + 1).shuffle(chunks)
    return StepPlan(step_id=0, chunks=tuple(chunks))


def make_kv(shape: LayerShape, dtype: torch.dtype, fill: float | None = None) -> KVCache:
    kv = KVCache({0: shape}, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype, device=CPU)
    for pool in (kv.keys[0], kv.values[0]):
        if fill is None:
            pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(3)))
        else:
            pool.fill_(fill)
    return kv


def largest_error(kv: KVCache, plan: StepPlan, shape: LayerShape, variant: Variant, dtype: torch.dtype) -> float:
    batch = build_batch(plan, BLOCK_SIZE, CPU)
    generator = torch.Generator().manual_seed(5)
    num_tokens = batch.num_tokens
    query = torch.randn(4, num_tokens, shape.key_dim, generator=generator).to(dtype)
    key = torch.randn(shape.num_kv_heads, num_tokens, shape.key_dim, generator=generator).to(dtype)
    value = torch.randn(shape.num_kv_heads, num_tokens, shape.value_dim, generator=generator).to(dtype)
    paged = PagedAttention()
    with paged.step(kv, batch):
        found = paged(0, query, key, value, variant)
    wanted, row = [], 0
    for chunk in batch.chunks:
        rows = slice(row, row + len(chunk.token_ids))
        wanted.append(reference.attend(query[:, rows], kv, 0, chunk.block_table, chunk.start, variant))
        row = rows.stop
    return float((found.float() - torch.cat(wanted)).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_equals_the_plain_one(dtype: torch.dtype, variant: Variant, num_kv_heads: int) -> None:
    """Decodes, whole prompts and later chunks in one batch give what one query at a time gives."""
    shape = LayerShape(num_kv_heads=num_kv_heads, key_dim=16, value_dim=16)
    error = largest_error(make_kv(shape, dtype), make_plan(num_kv_heads), shape, variant, dtype)
    assert error < TOLERANCE[dtype]


def test_narrow_values() -> None:
    """Values may be narrower than keys, as in MLA."""
    shape = LayerShape(num_kv_heads=2, key_dim=16, value_dim=8)
    error = largest_error(make_kv(shape, torch.float32), make_plan(0), shape, VARIANTS["window"], torch.float32)
    assert error < TOLERANCE[torch.float32]


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_poison_elsewhere_is_never_read(variant: Variant) -> None:
    """NaN in every slot that does not belong to a sequence's known positions changes nothing."""
    shape = LayerShape(num_kv_heads=2, key_dim=16, value_dim=16)
    plan = make_plan(2)
    kv = make_kv(shape, torch.float32, fill=float("nan"))
    healthy = make_kv(shape, torch.float32)
    for chunk in plan.chunks:
        slots = [chunk.block_table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(chunk.start)]
        kv.keys[0][:, slots], kv.values[0][:, slots] = healthy.keys[0][:, slots], healthy.values[0][:, slots]
    assert largest_error(kv, plan, shape, variant, torch.float32) < TOLERANCE[torch.float32]
