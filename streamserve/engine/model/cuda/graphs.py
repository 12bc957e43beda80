"""A step of decodes as one CUDA graph: a few hundred launches become one, for each of some numbers of rows.

A graph is captured once, over tensors that stay where they are: a step's tokens, positions, slots and block tables are
copied into them, and rows that the step does not have write to the null block and are not read. Steps with prompts run
kernel by kernel. Nothing here waits for the GPU but `capture`. Engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch

from streamserve.engine.model.batch import DecodeMetadata, StepBatch
from streamserve.engine.model.kv_cache import KVCache

logger = logging.getLogger(__name__)

FEW_ROWS = 8  # up to here the numbers of rows are powers of two, then multiples of it
NUM_WARM_UPS = 2  # kernels are compiled and workspaces made in these, which a capture may not do

Forward = Callable[[KVCache, StepBatch], torch.Tensor]


class DecodeGraphs:
    """The graphs of one model over one KV memory."""

    def __init__(self, forward: Forward, kv: KVCache, *, most_rows: int, most_blocks: int) -> None:
        """`forward` is what `capture` captures: of up to `most_rows` decodes, each of `most_blocks` at most."""
        device = next(iter(kv.keys.values())).device
        self.kv = kv
        self._forward = forward
        self._sizes = list(sizes(most_rows))
        self._most_blocks = most_blocks
        self._numbers = torch.zeros(3, self._sizes[-1], dtype=torch.int64, device=device)  # tokens, positions, slots
        self._tables = torch.zeros(self._sizes[-1], most_blocks, dtype=torch.int32, device=device)
        self.num_replays = 0
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}  # by rows: and hidden states (rows, C)

    def capture(self, on_progress: Callable[[float], None] = lambda _fraction: None) -> None:
        """Capture all graphs, the largest first, whose memory the others share."""
        pool = None
        with torch.inference_mode():
            for index, size in enumerate(reversed(self._sizes)):
                on_progress(index / len(self._sizes))
                batch = self._batch(size)
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(NUM_WARM_UPS):
                        self._forward(self.kv, batch)
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    hidden = self._forward(self.kv, batch)
                pool = pool or graph.pool()
                self._graphs[size] = graph, hidden

    def __call__(self, kv: KVCache, batch: StepBatch) -> torch.Tensor | None:
        """Return the hidden states (T, C) of a batch of decodes, good until the next call; None for other batches."""
        num_rows = batch.num_tokens
        if kv is not self.kv or batch.prefills or len(batch.decodes) != 1 or num_rows > self._sizes[-1]:
            return None
        tables = batch.decodes[0].block_tables
        if tables.shape[1] > self._most_blocks:
            return None
        size = next(size for size in self._sizes if size >= num_rows)
        graph, hidden = self._graphs[size]
        self._numbers[:, :num_rows].copy_(batch.numbers)
        if num_rows < size:
            self._numbers[:, num_rows:size].zero_()
        self._tables[:num_rows, : tables.shape[1]].copy_(tables)
        graph.replay()
        self.num_replays += 1
        return hidden[:num_rows]

    def _batch(self, size: int) -> StepBatch:
        """Return a batch of as many decodes over the tensors that stay."""
        numbers = self._numbers[:, :size]
        group = DecodeMetadata(
            first_row=0,
            positions=numbers[1],
            block_tables=self._tables[:size],
            longest=1,
            shortest=1,
            block_size=self.kv.block_size,
        )
        return StepBatch(chunks=(), numbers=numbers, decodes=(group,), prefills=(), last_rows=())


def sizes(most_rows: int) -> Iterator[int]:
    """Yield the numbers of rows that have a graph: 1, 2, 4, 8, 16, 24, … and the first that holds `most_rows`."""
    size = 1
    while True:
        yield size
        if size >= most_rows:
            return
        size = size * 2 if size < FEW_ROWS else size + FEW_ROWS
