"""`Reader`: one reader of a stream: takes what is committed, joins tokens, and writes at its channel's pace.

Three cursors: read (taken from the stream), sent (written to the channel), received (acknowledged, or taken by the
reader's system). Only `advance` writes. It is called by a commit, by the one timer, by the channel when it is writable
again, by an acknowledgement, and by a page that was read.

    the stream's last batch ──► held ──► joined, encoded ──► channel
    older events: a task reads pages of the log, one at a time, so a slow reader costs a page of memory, not an answer

    Feed         what it takes: recent events, pages of the log, a snapshot where it is far behind    (feed.py)
    Held         when held events leave, and how tokens are joined                                    (held.py)
    FrameWriter  events as frames on the channel                                                      (frame_writer.py)
    Received     what its system has taken, or what it has acknowledged                               (channel.py)
    Alarm        when it writes without being called                                                  (alarm.py)

Event loop only.
"""

from __future__ import annotations

import math
import random
import time

from streamserve.dialects.encoder import Encoder
from streamserve.dialects.pace import SITES_OWN, Pace
from streamserve.protocol.errors import Gone
from streamserve.protocol.events import TERMINALS, GoingAway, LoggedEvent, Status
from streamserve.streams.log.base import LogUnavailable
from streamserve.streams.reader.alarm import Alarm
from streamserve.streams.reader.channel import Channel, Received, check_sent
from streamserve.streams.reader.feed import Feed
from streamserve.streams.reader.frame_writer import FrameWriter
from streamserve.streams.reader.held import Held
from streamserve.streams.reader.pages import PAGE
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from streamserve.streams.stream import LOG_AWAY, LOST, Stream

# A reader whose connection ends returns after that long, not all at once.
_RETRY_MS = (500, 1500)


class BrokenStream(Exception):
    """The stream is over without a terminal event in its log. The connection breaks: a clean end would mislead."""


class Reader(Attachment):
    """Used once: `attach`, `start`, then `advance` until `is_over`; `close` at any time.

    `encoder` None writes lists of events to the channel, in place of bytes. With `credit` no more events than that are
    written beyond the last event acknowledged (`ack`). A reader that acknowledges is at its last `ack` (`Received`).
    """

    def __init__(
        self,
        streams: Streams,
        stream: Stream,
        encoder: Encoder | None,
        *,
        after: int,
        transport: str,
        is_watcher: bool = False,
        takes_snapshots: bool = False,
        credit: int | None = None,
        pace: Pace = SITES_OWN,
    ) -> None:
        config = streams.settings
        stream.readers.check_place(after, stream.last_seq, config.max_readers, is_watcher=is_watcher)
        super().__init__(is_watcher=is_watcher, transport=transport, received_seq=after)
        self.id = f"{random.getrandbits(64):016x}"  # no secret: acknowledgements are checked by their tenant
        self.stream = stream
        self.is_over = False  # nothing more is written
        self.is_let_go = False  # and the stream continues elsewhere, or later
        self._writer = FrameWriter(encoder, pace, config.keepalive_seconds, after)
        self._feed = Feed(
            streams.log,
            stream,
            after,
            snapshot_events=config.snapshot_events if takes_snapshots else 0,
            unfed=encoder if after and self._writer.must_be_fed else None,
        )
        self._held = Held(*(pace.frames or (config.coalesce_seconds, config.coalesce_tokens)), credit)
        self._received: Received | None = None  # from `start` on, of a reader without credit
        self._notice: Status | None = None  # to be shown
        self._alarm = Alarm()  # of polls and of silences: it rings rarely
        self._hold_alarm = Alarm()  # of what is held

    @property
    def has_begun(self) -> bool:
        """Whether it was attached."""
        return self._writer.written_at > -math.inf

    @property
    def sent_seq(self) -> int:
        """The last event written to its channel."""
        return self._writer.sent_seq

    def attach(self) -> None:
        """Count as a reader of the stream from now on, unless closed already."""
        if self.has_begun:
            raise RuntimeError("a reader is attached once")
        self._writer.written_at = time.monotonic()
        if not self.is_over:
            self.stream.attach(self)

    def start(self, channel: Channel) -> None:
        """Write to `channel` from now on."""
        self._writer.channel = channel
        channel.on_writable = self._on_writable
        if not self._held.has_credit:
            self._received = Received(self.received_seq, channel.num_untaken)
        if self.is_over:  # let go before there was a channel: an empty answer must not look whole
            is_cut = self.is_let_go and self._writer.encoder is not None
            channel.end(BrokenStream(self.stream.id) if is_cut else None)
            return
        if self.stream.lag.is_log_down:
            self._notice = LOG_AWAY
        self.advance()

    def ack(self, seq: int, *, is_away: bool = False) -> None:
        check_sent(seq, self.sent_seq)
        if self.is_over:
            return
        if self._received is not None:
            now = time.monotonic()
            self._received.ack(seq, now)
            self._poll(self._received, now, is_away=is_away)
        else:
            self._held.ack(seq)
            self.stream.moved(self, max(seq, self.received_seq), is_away=is_away)
        self.advance()

    def close(self) -> None:
        """Detach, or give up a reader that never came. Idempotent; when it returns, the engine knows."""
        self._leave(is_dismissed=False)

    def dismiss(self) -> None:
        """Close for a reason of this server's, or of the stream's; the connection has not ended early."""
        self._leave(is_dismissed=True)

    def advance(self) -> None:
        """Write what is due, as far as the channel and the credit allow. An exception ends this reader only."""
        writer, stream = self._writer, self.stream
        channel = writer.channel
        if channel is None or self.is_over:
            return
        feed, held, last_seq, now, due_at = self._feed, self._held, stream.last_seq, time.monotonic(), math.inf
        try:
            is_ended = stream.terminal is not None or stream.ended.is_set()
            while channel.is_writable:
                if self._notice is not None:
                    notice, self._notice = self._notice, None
                    writer.write_notice(channel, notice, now)
                    continue
                if feed.read_seq < last_seq and len(held.events) < PAGE and not feed.is_reading:
                    self._take(now)
                if held.events:
                    due_at = self._held_until(is_ended=is_ended)
                    if due_at > now:
                        self._hold_alarm.set(due_at, self.advance)
                        due_at = math.inf
                        break
                    if events := held.take(now):
                        self._write(channel, events, now)
                    else:  # the stream has left before they were acknowledged
                        self._end_with_stream(channel)
                elif is_ended and feed.read_seq >= last_seq and not feed.is_reading:
                    self._end_with_stream(channel)
                else:
                    due_at = writer.written_at + writer.silence_seconds
                    if due_at > now:
                        break
                    writer.write_keepalive(channel, now)
                if self.is_over:
                    return
            else:
                due_at = math.inf
            self._set_alarm(due_at)
        except Exception as error:
            self._end(error)

    def notify(self, status: Status) -> None:
        """Show a status that is not in the log, once there is room: it has no id. A newer one replaces it."""
        if self._writer.channel is not None:
            self._notice = status if self._notice is None else None
            self.advance()

    def go_away(self) -> None:
        """End the connection with the place to resume from; without room for that it breaks. The stream continues."""
        if self.is_over:
            return
        self.is_let_go = True
        channel, encoder = self._writer.channel, self._writer.encoder
        if channel is None or encoder is None:
            self._end(None)
        elif channel.is_writable:
            frame = encoder.going_away(self.going_away())
            if frame:
                channel.write(frame)
            self._end(None)
        else:
            self._end(BrokenStream(self.stream.id))

    def going_away(self) -> GoingAway:
        """Return where and when to resume."""
        seq = self._writer.accepted_seq
        return GoingAway(stream_id=self.stream.id, seq=seq, retry_ms=random.randint(*_RETRY_MS))

    # Inside

    def _take(self, now: float) -> None:
        """Hold what follows of the stream's recent events; have a task read the log if they are older."""
        if self._feed.take(self._held, self._writer.sent_seq, now):
            return
        if self._held.events:
            self._held.hurry()  # the log is read when these are written
        else:
            self._feed.begin(self._read_log())

    def _held_until(self, *, is_ended: bool) -> float:
        """When the held events must leave. -inf is now, also for the end; inf is not before an acknowledgement."""
        due_at = self._held.due_at
        if due_at == math.inf:
            has_left = self.stream.has_left and self.stream.ended.is_set()  # then it waits for no acknowledgement
            return -math.inf if has_left else math.inf
        return -math.inf if is_ended else due_at

    def _write(self, channel: Channel, events: list[LoggedEvent], now: float) -> None:
        """Write these events as one frame."""
        self._hold_alarm.cancel()
        self._writer.write(channel, events, now)
        if channel.is_writable:  # it was sent at once, or there is nothing to send
            self._confirm(now)
        if isinstance(events[-1].event, TERMINALS):
            self._end(None)

    def _on_writable(self) -> None:
        """The channel has sent the last frame. Mostly nothing follows yet, and a commit or the alarm is waited for."""
        writer, stream = self._writer, self.stream
        if writer.accepted_seq != writer.sent_seq:
            self._confirm(time.monotonic())
        has_more = self._held.events or self._notice is not None or self._feed.read_seq < stream.last_seq
        if has_more or self._alarm.at == math.inf or stream.terminal is not None or stream.ended.is_set():
            self.advance()
        else:
            self._set_alarm()

    def _confirm(self, now: float) -> None:
        """The transport has accepted the last frame."""
        writer, received = self._writer, self._received
        writer.accepted_seq = writer.sent_seq
        if received is not None and not self.is_over and received.send(writer.num_bytes, writer.sent_seq, now):
            self._poll(received, now)

    def _poll(self, received: Received, now: float, *, is_away: bool | None = None) -> None:
        """Look what the reader's system has taken."""
        self.stream.moved(self, received.poll(now), is_away=is_away)

    def _set_alarm(self, at: float = math.inf) -> None:
        """Have `advance` called at `at`, and before it a poll when that is due."""
        if self._received is not None and self._received.poll_at < at:
            at = self._received.poll_at
        if at < self._alarm.at:
            self._alarm.set(at, self._ring)

    def _ring(self) -> None:
        now = time.monotonic()
        received, channel = self._received, self._writer.channel
        if received is not None and received.poll_at <= now:
            self._poll(received, now)
        self.advance()
        if not self.is_over and channel is not None and not channel.is_writable:
            self._set_alarm()

    def _end_with_stream(self, channel: Channel) -> None:
        """Everything is written, and the stream is over: here, or for good."""
        stream = self.stream
        if stream.is_lost:
            self._writer.write_notice(channel, LOST, time.monotonic())
            self._end(None)
        elif stream.terminal is not None:
            self._end(None)
        elif stream.has_left:
            self.go_away()
        else:
            self._end(BrokenStream(stream.id))

    def _end(self, error: Exception | None) -> None:
        self.dismiss()
        if self._writer.channel is not None:
            self._writer.channel.end(error)

    def _leave(self, *, is_dismissed: bool) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._alarm.cancel()
        self._hold_alarm.cancel()
        self._feed.cancel()
        self._held.events.clear()
        self.stream.detach(self, is_dismissed=is_dismissed)
        if not self.is_watcher:
            self.stream.release()

    async def _read_log(self) -> None:
        """Take what the stream's recent events do not have, while there is room for it."""
        try:
            await self._feed.read(self._held, self._writer.sent_seq, self.advance)
        except Exception as error:
            self._feed.end()
            if isinstance(error, LogUnavailable):
                self.go_away()
            elif isinstance(error, Gone) and self.stream.on_loss():
                self._feed.skip_all()
                self.advance()
            else:
                self._end(error)
        else:
            self._feed.end()
            self.advance()
