"""`Lead`: how far a stream's log is ahead of its owner's readers, and what the engine has been told of that.

The engine parks who is too far ahead, so it must hear of reading; a message a token would be too many. Event loop only.
"""

from __future__ import annotations

from streamserve.clients.base import Generation
from streamserve.streams.readers import Readers
from streamserve.streams.transcript import Transcript

# Positions are told in steps of an eighth of the usual lead, or of fewer tokens when all is read.
_STEP = 32
_STEP_WHEN_READ = 8

ReaderTokens = tuple[int, ...] | None


class Lead:
    """Of one stream. `is_bounded` False: the answer is made whether it is read or not."""

    def __init__(self, tally: Transcript, readers: Readers, *, is_bounded: bool, told: ReaderTokens) -> None:
        self._tally, self._readers = tally, readers
        self._is_bounded = is_bounded
        self._told = told

    @property
    def reader_tokens(self) -> ReaderTokens:
        """How many tokens of each choice the furthest owner's reader has; None: nobody's reading is waited for."""
        if not self._is_bounded or not self._readers.are_paced:
            return None
        return self._tally.delivered(self._readers.furthest_seq)

    @property
    def num_unread(self) -> int:
        """How many committed tokens wait for that reader; 0 when nobody's reading is waited for."""
        read = self.reader_tokens
        return 0 if read is None else self._tally.num_unread(read)

    def begin(self, told: ReaderTokens) -> None:
        """Note what a new generation was `told` when it was asked for."""
        self._told = told

    def tell(self, generation: Generation) -> None:
        """Tell `generation` of the reader's position if that is worth a message."""
        read = self.reader_tokens
        if self._is_news(read):
            self._told = read
            generation.reader_at(read)

    def _is_news(self, read: ReaderTokens) -> bool:
        if read is None or self._told is None:
            return read is not self._told
        moved = max(abs(now - before) for now, before in zip(read, self._told, strict=True))
        return moved >= _STEP or (moved >= _STEP_WHEN_READ and self._tally.num_unread(read) == 0)
