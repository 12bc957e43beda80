"""How a step that ran out of memory is tried again: in two halves. Pure functions on chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from streamserve.engine.plan import Chunk
from streamserve.engine.sequence import Sequence


def halves(chunks: tuple[Chunk, ...], block_size: int) -> tuple[tuple[Chunk, ...], ...]:
    """Split a plan's chunks into two with half the tokens each; the chunk in the middle is cut.

    plan:   [ a ][ b ][ ...... c ...... ][ d ]
    halves: [ a ][ b ][ .. c .. ] and [ .. c .. ][ d ]

    One token cannot be split: it is tried once more as it is.
    """
    num_left = sum(len(chunk.token_ids) for chunk in chunks) // 2
    first: list[Chunk] = []
    for index, chunk in enumerate(chunks):
        if num_left < len(chunk.token_ids):
            head, tail = _cut(chunk, num_left, block_size)
            return tuple(half for half in ((*first, *head), (*tail, *chunks[index + 1 :])) if half)
        first.append(chunk)
        num_left -= len(chunk.token_ids)
    return (chunks,)


def still_ready(chunks: tuple[Chunk, ...], sequences: Mapping[int, Sequence]) -> tuple[Chunk, ...]:
    """Return those chunks that can be computed as they were planned, with the tokens that were pending then."""
    return tuple(
        replace(chunk, token_ids=tuple(sequences[chunk.seq_id].token_ids[chunk.start : _end(chunk)]))
        for chunk in chunks
        if _stands_at(chunk, sequences.get(chunk.seq_id))
    )


def _cut(chunk: Chunk, num_tokens: int, block_size: int) -> tuple[list[Chunk], list[Chunk]]:
    """Cut a chunk after `num_tokens`; only the rest samples."""
    if num_tokens == 0:
        return [], [chunk]
    middle = chunk.start + num_tokens
    table = chunk.block_table[: -(-middle // block_size)]
    head = replace(chunk, token_ids=chunk.token_ids[:num_tokens], block_table=table, sample=None)
    return [head], [replace(chunk, start=middle, token_ids=chunk.token_ids[num_tokens:])]


def _stands_at(chunk: Chunk, sequence: Sequence | None) -> bool:
    """Whether the sequence still is where the chunk begins, in the same blocks, and its tokens are known."""
    return (
        sequence is not None
        and sequence.num_launched_tokens == chunk.start
        and sequence.num_tokens >= _end(chunk)
        and tuple(sequence.block_table[: len(chunk.block_table)]) == chunk.block_table
    )


def _end(chunk: Chunk) -> int:
    return chunk.start + len(chunk.token_ids)
