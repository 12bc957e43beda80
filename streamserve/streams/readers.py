"""`Attachment`, `Readers` and `ReaderLag`: what reads a stream, and how far behind it is.

Only the owner's readers hold a stream and count for its lag; watchers never do. Event loop only.
"""

from __future__ import annotations

from streamserve.clients.base import Generation
from streamserve.protocol.events import Status
from streamserve.streams.transcript import Transcript

# The engine learns a reader's position in steps of an eighth of the usual lead, or of fewer tokens when all is read.
_STEP = 32
_STEP_WHEN_READ = 8

ReaderTokens = tuple[int, ...] | None


class Attachment:
    """Something that reads a stream. `received_seq` is the last event it has, as far as is known here.

    `is_paced`: the engine keeps to its pace. A whole answer, which shows nothing before the end, is not paced.
    """

    def __init__(
        self, *, is_watcher: bool = False, is_paced: bool = True, transport: str = "sse", seq: int = 0
    ) -> None:
        self.is_watcher, self.is_paced, self.transport = is_watcher, is_paced, transport
        self.received_seq = seq

    def advance(self) -> None:
        """Take what is committed, or notice the end. Must not raise."""

    def notify(self, status: Status) -> None:
        """Show a status that is not in the log. Must not raise."""

    def go_away(self) -> None:
        """End the connection; the stream continues, and its reader may return. Must not raise."""


class Readers:
    """The attachments of one stream: `num_holding` are the owner's, `num_watchers` those that do not hold it."""

    def __init__(self) -> None:
        self.attached: tuple[Attachment, ...] = ()
        self.num_attached = self.num_watchers = self.num_holding = 0
        self.last_transport = ""

    def add(self, reader: Attachment) -> None:
        """Count `reader` in."""
        self.attached += (reader,)
        self.num_attached += 1
        if reader.is_watcher:
            self.num_watchers += 1
        else:
            self.num_holding += 1
            self.last_transport = reader.transport

    def discard(self, reader: Attachment) -> bool:
        """Count `reader` out; return whether it was in."""
        if reader not in self.attached:
            return False
        self.attached = tuple(one for one in self.attached if one is not reader)
        self.num_attached -= 1
        self.num_watchers -= reader.is_watcher
        self.num_holding -= not reader.is_watcher
        return True

    @property
    def are_paced(self) -> bool:
        """Whether the engine keeps to the pace of the furthest of the owner's readers."""
        return all(reader.is_paced for reader in self.attached if not reader.is_watcher)

    @property
    def furthest_seq(self) -> int:
        """The last event that one of the owner's readers has; 0 without any."""
        return max((reader.received_seq for reader in self.attached if not reader.is_watcher), default=0)


class ReaderLag:
    """How far a stream's log is ahead of its owner's readers, and what the engine knows of that.

    The engine parks a sequence that is too far ahead, so it must learn of reading; a message a token would be too many.
    `is_bounded` False: the answer is made whether it is read or not. While `is_log_down` what is committed counts as
    read: then the engine parks every stream that runs ahead of the log.
    """

    def __init__(self, transcript: Transcript, readers: Readers, *, is_bounded: bool, known: ReaderTokens) -> None:
        self._transcript, self._readers = transcript, readers
        self._is_bounded = is_bounded
        self._known = known  # to the engine
        self.is_log_down = False

    @property
    def reader_tokens(self) -> ReaderTokens:
        """Tokens of each choice that the furthest owner's reader has; None: the engine waits for no reader."""
        if self._is_bounded and self._readers.are_paced:
            return self._transcript.delivered(self._readers.furthest_seq)
        return self._transcript.num_output_tokens if self.is_log_down else None

    @property
    def num_unread(self) -> int:
        """Committed tokens that this reader has not received; 0 where the engine waits for none."""
        read = self.reader_tokens
        return 0 if read is None else self._transcript.num_unread(read)

    def begin(self, known: ReaderTokens) -> None:
        """Note what a new generation was asked for with."""
        self._known = known

    def report(self, generation: Generation) -> None:
        """Send the reader's position to `generation` if that is worth a message."""
        read = self.reader_tokens
        if read is None or self._known is None:
            is_news = read is not self._known
        else:
            moved = max(abs(now - before) for now, before in zip(read, self._known, strict=True))
            is_news = moved >= _STEP or (moved >= _STEP_WHEN_READ and self._transcript.num_unread(read) == 0)
        if is_news:
            self._known = read
            generation.reader_at(read)
