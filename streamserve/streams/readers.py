"""`Attachment`, `Readers` and `ReaderLag`: what reads a stream, and how far behind it is.

Only the owner's readers hold a stream and count for its lag; watchers never do. Event loop only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from streamserve.clients.engine_run import ReaderTokens
from streamserve.protocol.errors import BadRequest, Gone, QuotaExceeded
from streamserve.protocol.events import Status
from streamserve.protocol.glass import ReaderTimes
from streamserve.protocol.measures import ReaderCounts
from streamserve.streams.transcript import Transcript
from streamserve.tracing.spans import Span

# An acknowledgement beside the connection that comes sooner after the last is refused.
_MIN_ACK_SECONDS = 0.05


@dataclass(eq=False, kw_only=True)
class Attachment:
    """Something that reads a stream. `received_seq` is the last event it has, as far as is known here.

    `is_paced`: the engine keeps to its pace. A whole answer, which shows nothing before the end, is not paced.
    `is_away`: its client has sent that its user does not look at the answer now. `id` names it in its acknowledgements
    by HTTP, the last of which came at `acked_at`.
    """

    is_watcher: bool = False
    is_paced: bool = True
    transport: str = "sse"
    received_seq: int = 0
    id: str = ""
    is_away: bool = False
    acked_at: float = -math.inf
    span: Span | None = None  # of what it is delivered

    def advance(self) -> None:
        """Take what is committed, or notice the end. Must not raise."""

    def notify(self, status: Status) -> None:
        """Show a status that is not in the log. Must not raise."""

    def go_away(self) -> None:
        """End the connection; the stream continues, and its reader may return. Must not raise."""

    def ack(self, seq: int, *, is_away: bool = False) -> None:
        """Note that the reader has every event up to `seq`, and whether it looks away; a lower seq moves nothing.

        Raises BadRequest for an event that it was not sent.
        """


@dataclass(slots=True, eq=False)
class Readers:
    """The attachments of one stream: `num_holding` are the owner's, `num_watchers` those that do not hold it.

    `seen_seq`: the last event that the system of an owner's reader is known to have, where that had all of them.
    `counts`, of the model, learns of the owner's readers that leave early, of any transport, and of those that come
    back: after an event that they have, or to a stream that was left early here. `reported`: the times that a reader
    has measured at its own side.
    """

    attached: tuple[Attachment, ...] = ()
    num_attached: int = 0
    num_watchers: int = 0
    num_holding: int = 0
    last_transport: str = ""
    seen_seq: int = 0
    counts: ReaderCounts = field(default_factory=ReaderCounts)
    reported: ReaderTimes | None = None
    _was_left: bool = False

    def add(self, reader: Attachment) -> None:
        """Count `reader` in."""
        self.attached += (reader,)
        self.num_attached += 1
        if reader.is_watcher:
            self.num_watchers += 1
            return
        if reader.received_seq > 0 or (self._was_left and not self.num_holding):
            self.counts.num_resumes += 1
        self.num_holding += 1
        self.last_transport = reader.transport

    def discard(self, reader: Attachment, *, is_dismissed: bool = False) -> bool:
        """Count `reader` out; return whether it was in.

        `is_dismissed`: it was sent its answer's end, or this server has let it go; a connection that ends without
        either has ended early.
        """
        if reader not in self.attached:
            return False
        self.attached = tuple(one for one in self.attached if one is not reader)
        self.num_attached -= 1
        self.num_watchers -= reader.is_watcher
        self.num_holding -= not reader.is_watcher
        if not (reader.is_watcher or is_dismissed):
            self.counts.num_disconnects += 1
            self._was_left = True
        return True

    @property
    def are_paced(self) -> bool:
        """Whether the engine keeps to the pace of the furthest of the owner's readers."""
        return all(reader.is_paced for reader in self.attached if not reader.is_watcher)

    @property
    def are_away(self) -> bool:
        """Whether all of the owner's readers look away; False without any."""
        return self.num_holding > 0 and all(reader.is_away for reader in self.attached if not reader.is_watcher)

    @property
    def furthest_seq(self) -> int:
        """The last event that one of the owner's readers has, of those that look if one looks; 0 without readers.

        The furthest reader is the first to run out of tokens, so the engine keeps to it.
        """
        held = [(not reader.is_away, reader.received_seq) for reader in self.attached if not reader.is_watcher]
        return max(held, default=(True, 0))[1]

    def check_place(self, after: int, last_seq: int, max_readers: int, *, is_watcher: bool) -> None:
        """Raise unless there is a place for another reader, after event `after` of `last_seq` events.

        BadRequest or Gone where there is no such event, QuotaExceeded where another reader is too many. Watchers are
        counted apart: they keep no owner out.
        """
        if after < 0:
            raise BadRequest("A stream is read after event 0 or a later event.", code="unknown_event_id", param="after")
        if after > last_seq:  # lost with a part of the log, or never sent
            message = f"The stream has {last_seq} events; event {after} is not kept. Ask the question again."
            raise Gone(message, param="after")
        num_readers = self.num_watchers if is_watcher else self.num_holding
        if num_readers >= max_readers:
            message = f"The stream is being read {num_readers} times. Close one of its readers."
            raise QuotaExceeded(message, code="too_many_readers", retry_after=5)

    def ack(self, reader_id: str, seq: int, *, is_away: bool, now: float) -> bool:
        """Pass on what one of the owner's readers has acknowledged beside its connection.

        Returns False where it is not connected here. Raises QuotaExceeded for more than twenty a second, BadRequest.
        """
        reader = next((one for one in self.attached if one.id == reader_id and not one.is_watcher), None)
        if reader is None:
            return False
        if now - reader.acked_at < _MIN_ACK_SECONDS:
            message = "Acknowledgements come too fast. Send the next a moment later."
            raise QuotaExceeded(message, code="too_many_acks", retry_after=1)
        reader.acked_at = now
        reader.ack(seq, is_away=is_away)
        return True


@dataclass(slots=True, eq=False)
class ReaderLag:
    """How far a stream's log is ahead of its owner's readers: `Lag` of its `EngineRun`.

    `is_bounded` False: the answer is made whether it is read or not. While `is_log_down` what is committed counts as
    read: then the engine parks every stream that runs ahead of the log.
    """

    transcript: Transcript
    readers: Readers
    is_bounded: bool
    is_log_down: bool = False

    @property
    def num_tokens(self) -> int:
        """Committed tokens of all choices."""
        return self.transcript.num_tokens

    @property
    def reader_tokens(self) -> ReaderTokens:
        """Tokens of each choice that the furthest owner's reader has; None: the engine waits for no reader."""
        if self.is_bounded and self.readers.are_paced:
            return self.transcript.delivered(self.readers.furthest_seq)
        return self.transcript.num_output_tokens if self.is_log_down else None

    @property
    def num_unread(self) -> int:
        """Committed tokens that this reader has not received; 0 where the engine waits for none."""
        read = self.reader_tokens
        return 0 if read is None else self.transcript.num_unread(read)

    @property
    def is_away(self) -> bool:
        """Whether all of the owner's readers look away."""
        return self.readers.are_away
