"""A decoder's step asks a device for no value: it runs on tensors that have none."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from streamserve.engine.config import ModelConfig
from streamserve.engine.model.batch import StepBatch, build_batch
from streamserve.engine.model.decoder.build import build
from streamserve.engine.model.decoder.checkpoint import Checkpoint
from streamserve.engine.model.decoder.families import FAMILIES
from streamserve.engine.model.decoder.spec import spec_of
from streamserve.engine.model.kv_cache import KVCache
from streamserve.engine.model.linear.base import PLAIN
from streamserve.engine.model.linear.choose import LinearMaker
from streamserve.engine.model.load.loader import open_source
from streamserve.engine.plan import Chunk, StepPlan

META = torch.device("meta")  # an operation that needs a value of a tensor fails here: on a GPU it would wait
BLOCK_SIZE = 4
DENSE = [name for name, family in FAMILIES.items() if family.experts is None or family.experts.switch]


def batch_of(rng: random.Random) -> StepBatch:
    """Return decodes of any length, a chunk from the beginning, and a later chunk."""
    table = tuple(range(1, 40))
    starts = [rng.randrange(1, 150) for _ in range(rng.randrange(1, 5))]
    chunks = [Chunk(seq_id=index, start=start, token_ids=(5,), block_table=table) for index, start in enumerate(starts)]
    chunks.append(Chunk(seq_id=8, start=0, token_ids=(3,) * rng.randrange(2, 30), block_table=table))
    chunks.append(Chunk(seq_id=9, start=rng.randrange(1, 30), token_ids=(3,) * 7, block_table=table))
    return build_batch(StepPlan(step_id=0, chunks=tuple(chunks)), BLOCK_SIZE, META)


@pytest.mark.parametrize("model_type", DENSE)
def test_no_step_waits(model_type: str, tiny_folder: Callable[[str], Path]) -> None:
    """Body and head, of decodes and chunks; the shapes are those of the batch. (Experts count their tokens.)"""
    source = open_source(ModelConfig(alias="m", path=str(tiny_folder(model_type)), device="cpu"))
    spec = spec_of(source.config)
    assert spec is not None
    decoder = build(spec, Checkpoint(source.folder), LinearMaker(back_end=PLAIN), torch.float32, META)
    kv = KVCache(decoder.layer_shapes, num_blocks=50, block_size=BLOCK_SIZE, dtype=torch.float32, device=META)
    rng = random.Random(3)
    for _ in range(4):
        batch = batch_of(rng)
        with torch.inference_mode():
            hidden = decoder.forward(kv, batch)
            logits = decoder.logits(hidden, torch.tensor([0, 1], device=META))
        assert hidden.shape == (batch.num_tokens, spec.hidden_size)
        assert logits.shape == (2, spec.vocab_size)
        assert (hidden.device, logits.device) == (META, META)
