"""A `StepPlan` as tensors: packed tokens, the slot mapping, and the attention metadata that all layers share.

Built once per step; knows positions and slots, not what is stored there. Lives on the engine thread.

    rows of the packed batch, (1, num_tokens):
    [ decodes, short contexts | decodes, longer … | prefill chunk | prefill chunk | … ]
      one row each, grouped by context length       one span of rows each

Padding repeats the sequence's own newest slot, so no sequence ever reads a slot that is not its own: a NaN in a freed
block, or in another sequence's, cannot reach it.

`on_device` and `HostCopy` are the ways between host and device: plain numbers in, results out. On a GPU nothing here
waits but `HostCopy.wait`, and that for its own step only: later launches continue. On a CPU all of it is plain
assignment.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from streamserve.engine.model.kv_cache import Slots
from streamserve.engine.plan import PENDING, Chunk, StepPlan

SHORTEST_GROUP_BITS = 8  # contexts up to 256 tokens share one attention call; above that, each power of two has its own


@dataclass(frozen=True, slots=True)
class DecodeIndex:
    """What decodes read under one window: `width` slots a row, and an additive mask (num_rows, width)."""

    slots: Slots
    width: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class DecodeMetadata:
    """Attention metadata of decodes: rows [first_row, first_row + num_rows), contexts of similar length."""

    first_row: int
    positions: torch.Tensor  # (num_rows,) position of the row's token
    block_tables: torch.Tensor  # (num_rows, most blocks), padded with the null block
    longest: int
    shortest: int
    block_size: int
    indexes: dict[int | None, DecodeIndex] = field(default_factory=dict)

    @property
    def rows(self) -> slice:
        """The group's rows in the packed batch."""
        return slice(self.first_row, self.first_row + len(self.positions))

    def index(self, window: int | None, dtype: torch.dtype) -> DecodeIndex:
        """Return the slots to read; computed once per window and step."""
        if window is not None and window >= self.longest:
            window = None
        if window not in self.indexes:
            self.indexes[window] = self._build_index(window, dtype)
        return self.indexes[window]

    def _build_index(self, window: int | None, dtype: torch.dtype) -> DecodeIndex:
        width = self.longest if window is None else window
        last = self.positions[:, None]  # (num_rows, 1)
        first = (last + 1 - width).clamp_min(0) if window is not None else torch.zeros_like(last)
        keys = first + torch.arange(width, device=last.device)  # (num_rows, width) positions
        inside = torch.minimum(keys, last)
        blocks = self.block_tables.gather(1, inside // self.block_size)
        slots = Slots((blocks * self.block_size + inside % self.block_size).view(-1))
        if self.shortest >= width:
            return DecodeIndex(slots, width, None)
        mask = torch.zeros(keys.shape, dtype=dtype, device=last.device)
        return DecodeIndex(slots, width, mask.masked_fill_(keys > last, float("-inf")))


@dataclass(slots=True)
class PrefillMetadata:
    """Attention metadata of a prefill chunk: rows [first_row, first_row + num_tokens), from position `start` on."""

    first_row: int
    num_tokens: int
    start: int
    block_table: torch.Tensor  # (num_blocks,)
    block_size: int
    masks: dict[tuple[int, int, int | None], torch.Tensor] = field(default_factory=dict)
    triangles: dict[int, torch.Tensor] = field(default_factory=dict)
    read_slots: Slots | None = None

    @property
    def rows(self) -> slice:
        """The span's rows in the packed batch."""
        return slice(self.first_row, self.first_row + self.num_tokens)

    @property
    def context(self) -> Slots:
        """Slots (start + num_tokens,) of positions 0, 1, …, to be read; the same for all layers."""
        if self.read_slots is None:
            positions = torch.arange(self.start + self.num_tokens, device=self.block_table.device)
            blocks = self.block_table.index_select(0, positions // self.block_size)
            self.read_slots = Slots(blocks * self.block_size + positions % self.block_size)
        return self.read_slots

    def first_key(self, position: int, window: int | None) -> int:
        """The first position that the query at `position` may see."""
        return 0 if window is None else max(0, position + 1 - window)

    def triangle(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive causal mask (size, size) of the newest `size` keys for as many queries."""
        if size not in self.triangles:
            full = torch.full((size, size), float("-inf"), dtype=dtype, device=self.block_table.device)
            self.triangles[size] = full.triu_(1)
        return self.triangles[size]

    def mask(self, begin: int, end: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask (end - begin, keys) for query positions [begin, end) over keys [first_key(begin), end)."""
        found = self.masks.get((begin, end, window))
        if found is None:
            found = self.masks[(begin, end, window)] = self._build_mask(begin, end, window, dtype)
        return found

    def _build_mask(self, begin: int, end: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        device = self.block_table.device
        query = torch.arange(begin, end, device=device)[:, None]
        keys = torch.arange(self.first_key(begin, window), end, device=device)[None, :]
        hidden = keys > query
        if window is not None:
            hidden |= keys <= query - window
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass in tensors. `chunks` are in row order; `last_rows[i]` is the row of chunk i's last token.

    Where `input_ids` holds PENDING, the caller fills in the token before the pass. `adapters`: the rows (n,) of each
    adapter, by its name. `others`: the same rows with the slots and tables of the other groups of layers.
    """

    chunks: tuple[Chunk, ...]
    numbers: torch.Tensor  # (3, num_tokens) int64: tokens, positions, and the slots that this step writes
    decodes: tuple[DecodeMetadata, ...]
    prefills: tuple[PrefillMetadata, ...]
    last_rows: tuple[int, ...]
    adapters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    others: tuple[StepBatch, ...] = ()

    def of_group(self, group: int) -> StepBatch:
        """Return the rows with the slots and tables of a group of layers."""
        return self.others[group - 1] if group else self

    @property
    def input_ids(self) -> torch.Tensor:
        """Tokens (1, num_tokens)."""
        return self.numbers[:1]

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions (1, num_tokens)."""
        return self.numbers[1:2]

    @property
    def slot_mapping(self) -> torch.Tensor:
        """Slots (num_tokens,) where this step writes."""
        return self.numbers[2]

    @property
    def num_tokens(self) -> int:
        """Rows of the packed batch."""
        return int(self.numbers.shape[1])

    @property
    def num_decodes(self) -> int:
        """Rows of decodes: the first, and as many chunks."""
        return len(self.chunks) - len(self.prefills)

    @property
    def pending(self) -> dict[int, int]:
        """Rows whose token is not known on the host yet: row -> the sequence it belongs to."""
        chunks = enumerate(self.chunks[: self.num_decodes])  # chunk i is row i
        return {row: chunk.seq_id for row, chunk in chunks if chunk.token_ids[0] == PENDING}


def build_batch(plan: StepPlan, block_size: int, device: torch.device, *, groups_decodes: bool = True) -> StepBatch:
    """Turn a plan into a batch: single-token chunks first, grouped by context length, then the rest; of each adapter
    side by side.

    Not `groups_decodes`: all decodes are one group, for an attention that reads their blocks where they are.
    """
    group_of = _length_of if groups_decodes else _kind_of
    chunks = tuple(sorted(plan.chunks, key=lambda chunk: (group_of(chunk), chunk.adapter)))
    num_groups = len(chunks[0].tables)
    first, *others = (_build_for(group, chunks, block_size, device, group_of) for group in range(num_groups))
    return replace(
        first,
        adapters=_rows_of_adapters(chunks, device) if any(chunk.adapter for chunk in chunks) else {},
        others=tuple(others),
    )


def _build_for(
    group: int, chunks: tuple[Chunk, ...], block_size: int, device: torch.device, group_of: Callable[[Chunk], int]
) -> StepBatch:
    """Return a batch of the chunks, which are in order, by the block tables of one group of layers."""
    num_decodes = sum(len(chunk.token_ids) == 1 for chunk in chunks)
    numbers = to_device(_int_tensor(_numbers_of(chunks, group, block_size)).view(3, -1), device)
    prefills = _build_prefills(chunks[num_decodes:], group, num_decodes, block_size, device)
    return StepBatch(
        chunks=chunks,
        numbers=numbers,
        decodes=_build_decodes(chunks[:num_decodes], group, numbers[1], block_size, group_of),
        prefills=prefills,
        last_rows=(*range(num_decodes), *(span.first_row + span.num_tokens - 1 for span in prefills)),
    )


def _rows_of_adapters(chunks: tuple[Chunk, ...], device: torch.device) -> dict[str, torch.Tensor]:
    found: dict[str, list[int]] = {}
    for chunk, row in _chunks_and_rows(chunks):
        if chunk.adapter:
            found.setdefault(chunk.adapter, []).append(row)
    return {name: on_device(rows, torch.int64, device) for name, rows in found.items()}


def _chunks_and_rows(chunks: tuple[Chunk, ...]) -> Iterator[tuple[Chunk, int]]:
    """Yield each row of the packed batch with its chunk."""
    return ((chunk, row) for row, chunk in enumerate(chunk for chunk in chunks for _ in chunk.token_ids))


def _kind_of(chunk: Chunk) -> int:
    return int(len(chunk.token_ids) > 1)  # decodes first, each in the plan's order


def _length_of(chunk: Chunk) -> int:
    if len(chunk.token_ids) > 1:
        return 1 << 30  # after every decode
    return max(SHORTEST_GROUP_BITS, chunk.start.bit_length())


def _int_tensor(numbers: array[int]) -> torch.Tensor:
    """Return a tensor (n,) over the numbers."""
    return torch.frombuffer(numbers, dtype=torch.int64)


def _numbers_of(chunks: tuple[Chunk, ...], group: int, block_size: int) -> array[int]:
    """Return the tokens of all rows, then their positions, then their slots."""
    token_ids, positions, slots = array("q"), array("q"), array("q")
    for chunk in chunks:
        begin, end, table = chunk.start, chunk.start + len(chunk.token_ids), chunk.tables[group]
        token_ids.extend(chunk.token_ids)
        positions.extend(range(begin, end))
        while begin < end:  # what is left of a block, or of the chunk
            block, offset = divmod(begin, block_size)
            first, count = table[block] * block_size + offset, min(block_size - offset, end - begin)
            slots.extend(range(first, first + count))
            begin += count
    return token_ids + positions + slots


def _build_decodes(
    chunks: tuple[Chunk, ...], group: int, positions: torch.Tensor, block_size: int, group_of: Callable[[Chunk], int]
) -> tuple[DecodeMetadata, ...]:
    """Group the decodes, which are the first rows of those at `positions` (num_tokens,)."""
    groups: list[DecodeMetadata] = []
    row = 0
    for _, found in groupby(chunks, key=group_of):
        members = list(found)
        groups.append(_build_group(row, members, group, positions[row : row + len(members)], block_size))
        row += len(members)
    return tuple(groups)


def _build_group(
    first_row: int, chunks: list[Chunk], group: int, positions: torch.Tensor, block_size: int
) -> DecodeMetadata:
    starts = [chunk.start for chunk in chunks]
    num_blocks = max(starts) // block_size + 1
    tables = array("q")  # many times sooner a tensor than lists are
    for chunk in chunks:
        own = chunk.tables[group][:num_blocks]
        tables.extend(own)
        tables.extend((0,) * (num_blocks - len(own)))
    return DecodeMetadata(
        first_row=first_row,
        positions=positions,
        block_tables=to_device(_int_tensor(tables).view(len(chunks), num_blocks), positions.device),
        longest=max(starts) + 1,
        shortest=min(starts) + 1,
        block_size=block_size,
    )


def _build_prefills(
    chunks: tuple[Chunk, ...], group: int, first_row: int, block_size: int, device: torch.device
) -> tuple[PrefillMetadata, ...]:
    spans = []
    for chunk in chunks:
        spans.append(
            PrefillMetadata(
                first_row=first_row,
                num_tokens=len(chunk.token_ids),
                start=chunk.start,
                block_table=to_device(_int_tensor(array("q", chunk.tables[group])), device),
                block_size=block_size,
            )
        )
        first_row += len(chunk.token_ids)
    return tuple(spans)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CPU tensor on `device`. Through pinned memory, as a copy from any other waits for the GPU."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def on_device(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of plain numbers on `device`."""
    return to_device(torch.tensor(numbers, dtype=dtype), device)


class HostCopy:
    """Tensors on their way to the host. Make it right after the work that gives them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        is_cuda = any(tensor.is_cuda for tensor in tensors.values())
        self._copies = {name: _begin_copy(tensor) if is_cuda else tensor for name, tensor in tensors.items()}
        self._arrived = torch.cuda.Event() if is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> dict[str, torch.Tensor]:
        """Return the tensors on the host, by name."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies


def _begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
