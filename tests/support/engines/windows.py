"""`WindowedEcho`: an echo engine of several groups of layers, some of which look back only so far."""

from __future__ import annotations

from array import array
from typing import Any

from streamserve.engine.echo import _MAX_SLOT, _MIX, EchoRunner
from streamserve.engine.kv.groups import Windows
from streamserve.engine.plan import Chunk

_NUMBER = 1 << 40  # of a group, in what its layers store


class WindowedEcho(EchoRunner):
    """Each group stores numbers of its own, and a token is drawn by all that its groups see: more than a token each.

    A block that is lost, of another group, or read outside its window changes the text.
    """

    def __init__(self, windows: Windows, **fields: Any) -> None:
        super().__init__(**fields)
        self.windows = windows

    def _write(self, chunk: Chunk) -> None:
        super()._write(chunk)
        for group, table in enumerate(chunk.other_tables, 1):
            before = self._slots[self._slot(table, chunk.start - 1)] if chunk.start else group * _NUMBER
            for position, token_id in enumerate(chunk.token_ids, chunk.start):
                before = (before * _MIX + (position << 32 | token_id)) & _MAX_SLOT
                self._slots[self._slot(table, position)] = before

    def _read(self, chunk: Chunk) -> bytes:
        end, out = chunk.start + len(chunk.token_ids), bytearray()
        for table, window in zip(chunk.tables, self.windows, strict=True):
            first = 0 if window is None else max(0, end - window)
            out += array("q", (self._slots[self._slot(table, position)] for position in range(first, end))).tobytes()
        return bytes(out)

    def _slot(self, table: tuple[int, ...], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size
