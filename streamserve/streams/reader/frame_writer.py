"""`FrameWriter`: what one reader is sent, as frames of its encoder on its channel, and how far that is.

Knows no stream: its reader decides what is written, and when. Event loop only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from streamserve.dialects.encoder import Encoder
from streamserve.dialects.pace import Pace
from streamserve.protocol.events import Error, LoggedEvent, Status
from streamserve.streams.reader.channel import Channel


class FrameWriter:
    """`encoder` None writes lists of events, in place of bytes. `channel` is there once the reader has started.

    `sent_seq` is the last event written, `accepted_seq` the last event that the transport has accepted: a frame of
    `num_bytes` may still be on its way to it. `written_at`: when a frame was last written, or the reader was attached;
    after `silence_seconds` more a keepalive is due.
    """

    __slots__ = (
        "_encode_all", "_pace", "accepted_seq", "channel", "encoder", "num_bytes", "sent_seq", "silence_seconds",
        "written_at",
    )  # fmt: skip

    def __init__(self, encoder: Encoder | None, pace: Pace, keepalive_seconds: float, after: int) -> None:
        self.encoder = encoder
        self.channel: Channel | None = None
        self.sent_seq = self.accepted_seq = after
        self.num_bytes = 0
        self.written_at = -math.inf
        self.silence_seconds = math.inf
        if encoder is not None and encoder.keepalive:
            self.silence_seconds = pace.keepalive_seconds or keepalive_seconds
        self._pace = pace
        self._encode_all: Callable[[Sequence[LoggedEvent]], bytes] | None = getattr(encoder, "encode_all", None)

    @property
    def must_be_fed(self) -> bool:
        """Whether the encoder needs the log from its beginning, whatever its reader has."""
        return self.encoder is not None and not self.encoder.takes_snapshots and self._encode_all is None

    def write(self, channel: Channel, events: list[LoggedEvent], now: float) -> None:
        """Write these events as one frame."""
        frame: Any = events
        if self._encode_all is not None:
            frame = self._encode_all(events)
        elif self.encoder is not None:
            encode = self.encoder.encode
            frame = encode(events[0]) if len(events) == 1 else b"".join(map(encode, events))
        self.sent_seq, self.written_at, self.num_bytes = events[-1].seq, now, len(frame)
        if frame:
            channel.write(frame)

    def write_notice(self, channel: Channel, event: Status | Error, now: float) -> None:
        """Write something that is not in the log: seq 0, which no dialect shows."""
        notice = LoggedEvent(0, event)
        frame: Any = [notice] if self.encoder is None else self.encoder.encode(notice)
        if frame:
            self.written_at = now
            channel.write(frame)

    def write_keepalive(self, channel: Channel, now: float) -> None:
        """Write the bytes that end a silence."""
        assert self.encoder is not None
        self.written_at = now
        channel.write(self._pace.keepalive_of(self.encoder))
