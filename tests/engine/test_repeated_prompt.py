"""A prompt that comes again is computed from its last full block on: less than a block and a token."""

from __future__ import annotations

import pytest

from tests.support.engines.cores import Drive, request

BLOCK_SIZE = 32


@pytest.mark.parametrize(("prompt_len", "rest"), [(1000, 8), (993, 1), (992, 32), (33, 1), (32, 32), (20, 20)])
def test_only_the_rest_is_computed(prompt_len: int, rest: int) -> None:
    """In one chunk of one step, which samples: the blocks before it are found, and count as cached."""
    drive = Drive(num_blocks=100, block_size=BLOCK_SIZE, max_num_batched_tokens=2048, prefill_chunk=2048)
    drive.run(request(1, range(prompt_len)))
    num_steps = len(drive.plans)
    drive.add(request(2, range(prompt_len)))
    (update, *_) = drive.step()
    (chunk,) = drive.plans[num_steps].chunks
    assert (chunk.start, len(chunk.token_ids), len(chunk.samples)) == (prompt_len - rest, rest, 1)
    assert update.num_cached_tokens == prompt_len - rest
    assert update.token_ids
