"""The parity probe: at every load, the paged path against the same weights in transformers' plain eager attention.

Structure does not show whether an architecture is correct over an external KV memory (several call our attention once
per layer and are still wrong); numbers do. Costs one short forward and a few steps. Runs once, at load.

    prompt  [ chunk | chunk | … | chunk | decode | decode | decode ]   in scattered blocks, beside a second sequence
    compare the logits after each part with the logits of one plain forward over the whole prompt
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from streamserve.engine.capacity import NULL_BLOCKS, blocks_for_tokens
from streamserve.engine.model.attention import implementation
from streamserve.engine.model.batch import build_batch
from streamserve.engine.model.load.source import UnsupportedModel
from streamserve.engine.model.runner import HFRunner
from streamserve.engine.plan import Chunk, StepPlan

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}  # |difference| / |reference|
NUM_DECODES = 5
NUM_LAST_CHUNKS = 3
NUM_NEIGHBOUR_TOKENS = 5
NOISE_FACTOR = 2.0  # a mixture of experts magnifies rounding: the model's own answer to noise is the yardstick
LOOSEST = 0.4  # wrong attention is off by more
LONGEST_ON_CPU = 256
LONGEST_ON_CUDA = 4096


def probe(runner: HFRunner) -> float:
    """Return the relative error of the paged path; raise `UnsupportedModel` if it is above the dtype's tolerance."""
    tokens = probe_tokens(probe_len(runner), runner.vocab_size)
    with torch.inference_mode():
        paged, rows = _paged_logits(runner, tokens)
        plain = _plain_logits(runner, tokens, rows)
        dtype, tolerance = runner.loaded.dtype, TOLERANCE[runner.loaded.dtype]
        error = judged_error(row_errors(paged, plain), dtype)
        if error > tolerance and dtype is not torch.float32:
            with _rounding_noise(runner):
                noise = judged_error(row_errors(_plain_logits(runner, tokens, rows), plain), dtype)
            tolerance = min(max(tolerance, NOISE_FACTOR * noise), LOOSEST)
    if not error <= tolerance:  # NaN must not pass
        raise UnsupportedModel(
            f"Models of type {runner.loaded.model_type} are not supported: over paged memory the logits differ from "
            f"transformers' own by {error:.2g} (tolerance {tolerance:.2g}). Choose another model."
        )
    return error


def probe_len(runner: HFRunner) -> int:
    """Three blocks and a bit; past the sliding window by two blocks where that stays affordable."""
    shortest = 3 * runner.block_size + NUM_DECODES + 2
    windows = [layer.sliding_window for layer in runner.layers.values() if layer.sliding_window]
    wanted = [window + 2 * runner.block_size for window in windows]
    limit = LONGEST_ON_CPU if runner.loaded.device.type == "cpu" else LONGEST_ON_CUDA
    affordable = [length for length in wanted if length <= limit]
    return min(max([shortest, *affordable]), runner.max_model_len)


def probe_tokens(num_tokens: int, vocab_size: int) -> list[int]:
    """Tokens without meaning or repetition, the same on every machine."""
    return [(1 + i * 7919 + i * i * 31) % max(1, min(vocab_size - 1, 20_000)) for i in range(num_tokens)]


def probe_chunks(num_tokens: int, block_size: int) -> list[int]:
    """Lengths of the parts: some that end inside a block, a part that spans several, then single tokens."""
    parts: list[int] = []
    sizes = [1, block_size + 3, 7, 2 * block_size]
    remaining = num_tokens - NUM_DECODES
    while remaining > 0:
        parts.append(min(sizes[len(parts) % len(sizes)], remaining))
        remaining -= parts[-1]
    return parts + [1] * (num_tokens - sum(parts))


def row_errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """|found - wanted| / |wanted| of every row, both (num_rows, vocab_size)."""
    difference = (found.float() - wanted.float()).norm(dim=-1)
    return difference / wanted.float().norm(dim=-1).clamp_min(1e-12)


def judged_error(errors: torch.Tensor, dtype: torch.dtype) -> float:
    """The worst row in float32. In shorter types the worse of two medians: of the decodes, and of the last chunks.

    Rounding alone can send a token to another expert and spoil a row; wrong attention spoils all late rows.
    """
    if dtype is torch.float32 or errors.isnan().any():
        return float(errors.max())
    chunks, decodes = errors[:-NUM_DECODES], errors[-NUM_DECODES:]
    return float(torch.maximum(decodes.median(), chunks[-NUM_LAST_CHUNKS:].median()))


def _plain_logits(runner: HFRunner, tokens: list[int], rows: list[int]) -> torch.Tensor:
    index = torch.tensor(rows, device=runner.loaded.device)
    input_ids = torch.tensor([tokens], device=runner.loaded.device)
    with implementation(runner.loaded.model, "eager"):
        return runner.loaded.model(input_ids=input_ids, use_cache=False, logits_to_keep=index).logits[0]


@contextmanager
def _rounding_noise(runner: HFRunner) -> Iterator[None]:
    """Change every embedding by one unit in the last place, up and down in turns."""

    def nudge(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        signs = torch.ones_like(output)
        signs[..., ::2] = -1
        return output * (1 + signs * torch.finfo(output.dtype).eps)

    hook = runner.loaded.model.get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        hook.remove()


def _paged_logits(runner: HFRunner, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Run the parts one after another in memory of their own; return logits and the positions they belong to."""
    num_blocks = blocks_for_tokens(len(tokens), runner.block_size)
    # Backwards and with gaps, the neighbour's block in the middle: no table is the identity.
    table = tuple(range(NULL_BLOCKS + 2 * num_blocks, NULL_BLOCKS, -2))
    neighbour = NULL_BLOCKS + num_blocks - 1 + num_blocks % 2
    own_kv, runner.kv = runner.kv, runner.new_kv(NULL_BLOCKS + 2 * num_blocks + 1)
    logits, rows, start = [], [], 0
    try:
        for size in probe_chunks(len(tokens), runner.block_size):
            chunk = Chunk(seq_id=0, start=start, token_ids=tuple(tokens[start : start + size]), block_table=table)
            other = _neighbour_chunk(tokens, 1 + start % min(NUM_NEIGHBOUR_TOKENS, runner.block_size), neighbour)
            batch = build_batch(StepPlan(step_id=0, chunks=(other, chunk)), runner.block_size, runner.loaded.device)
            row = batch.last_rows[batch.chunks.index(chunk)]
            logits.append(runner.forward(batch, [row])[1])
            start += size
            rows.append(start - 1)
    finally:
        runner.kv = own_kv
    return torch.cat([part for part in logits if part is not None]), rows


def _neighbour_chunk(tokens: list[int], size: int, block_id: int) -> Chunk:
    """A second sequence in the batch: prefilled again each step, so that it always shares the pass."""
    return Chunk(seq_id=1, start=0, token_ids=tuple(tokens[-size:]), block_table=(block_id,))
