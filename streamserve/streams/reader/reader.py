"""`Reader`: one reader of a stream: takes what is committed, joins tokens, and writes at its channel's pace.

Three cursors: read (taken from the stream), sent (written to the channel), received (acknowledged, or taken by the
reader's system). Only `advance` writes. It is called by a commit, by the one timer, by the channel when it is writable
again, by an acknowledgement, and by a page that was read.

    the stream's last batch ──► held ──► joined, encoded ──► channel
    older events: a task reads pages of the log, one at a time, so a slow reader costs a page of memory, not an answer

When held events leave, and how tokens are joined, is `Held` (held.py). A reader that takes snapshots is sent a snapshot
when it is more than `snapshot_events` behind. Event loop only.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any

from streamserve.dialects.encoder import Encoder
from streamserve.dialects.pace import SITES_OWN, Pace
from streamserve.protocol.errors import Gone
from streamserve.protocol.events import Error, GoingAway, LoggedEvent, Status, is_terminal
from streamserve.streams.log.base import LogUnavailable
from streamserve.streams.reader.channel import Channel, Received, check_sent
from streamserve.streams.reader.held import Held
from streamserve.streams.reader.pages import PAGE, Pages
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

    has_begun = False  # to read

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
        stream.readers.check_place(after, stream.last_seq, streams.settings.max_readers, is_watcher=is_watcher)
        super().__init__(is_watcher=is_watcher, transport=transport, received_seq=after)
        config, self.stream, self.sent_seq = streams.settings, stream, after
        frames = pace.frames or (config.coalesce_seconds, config.coalesce_tokens)
        self._held, self._has_credit = Held(*frames, credit), credit is not None
        self.id = f"{random.getrandbits(64):016x}"  # no secret: acknowledgements are checked by their tenant
        self._accepted_seq = after  # by the transport: a frame may still be on its way to it
        self.is_over = False  # nothing more is written
        self.is_let_go = False  # and the stream continues elsewhere, or later
        self._config, self._encoder, self._read_seq = config, encoder, after
        self._takes_snapshots = takes_snapshots and config.snapshot_events > 0
        self._encode_all: Callable[[Sequence[LoggedEvent]], bytes] | None = getattr(encoder, "encode_all", None)
        can_begin_anywhere = encoder is None or encoder.takes_snapshots or self._encode_all is not None
        self._must_fold = after > 0 and not can_begin_anywhere
        self._pace, self._silence_seconds = pace, math.inf
        if encoder is not None and encoder.keepalive:
            self._silence_seconds = pace.keepalive_seconds or config.keepalive_seconds
        self._channel: Channel | None = None
        self._notice: Status | None = None  # to be shown
        self._written_at = -math.inf
        self._unconfirmed: tuple[int, int] | None = None  # bytes and last seq of a frame the channel still has
        self._received: Received | None = None
        self._timer: asyncio.TimerHandle | None = None  # of polls and of silences: it rings rarely
        self._hold_timer: asyncio.TimerHandle | None = None  # of what is held
        self._paging: asyncio.Task[None] | None = None
        self._pages = Pages(streams.log, stream)

    def attach(self) -> None:
        """Count as a reader of the stream from now on, unless closed already."""
        if self.has_begun:
            raise RuntimeError("a reader is attached once")
        self.has_begun = True
        self._written_at = time.monotonic()
        if not self.is_over:
            self.stream.attach(self)

    def start(self, channel: Channel) -> None:
        """Write to `channel` from now on."""
        self._channel = channel
        channel.on_writable = self._on_writable
        if not self._has_credit:
            self._received = Received(self.received_seq, channel.num_untaken)
        if self.is_over:  # let go before there was a channel: an empty answer must not look whole
            is_cut = self.is_let_go and self._encoder is not None
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
            self._received.ack(seq, time.monotonic())
            self._poll(time.monotonic(), is_away=is_away)
        else:
            self._held.ack(seq)
            self.stream.moved(self, max(seq, self.received_seq), is_away=is_away)
        self.advance()

    def close(self) -> None:
        """Detach, or give up a reader that never came. Idempotent; when it returns, the engine knows."""
        if self.is_over:
            return
        self.is_over = True
        for timer in (self._timer, self._hold_timer):
            if timer is not None:
                timer.cancel()
        if self._paging is not None:
            self._paging.cancel()
        self._held.events.clear()
        self.stream.detach(self)
        if not self.is_watcher:
            self.stream.release()

    def dismiss(self) -> None:
        """Close for a reason of this server's, or of the stream's; the connection has not ended early."""
        self.is_dismissed = True
        self.close()

    def advance(self) -> None:
        """Write what is due, as far as the channel and the credit allow. An exception ends this reader only."""
        channel = self._channel
        if channel is None or self.is_over:
            return
        now, due_at = time.monotonic(), math.inf
        try:
            while channel.is_writable and not self.is_over:
                if self._notice is not None:
                    notice, self._notice = self._notice, None
                    self._write_notice(channel, notice)
                    continue
                if self._paging is None and self._read_seq < self.stream.last_seq and len(self._held.events) < PAGE:
                    self._take_recent()
                due_at = self._due_at()
                if due_at > now:
                    break
                if events := self._held.take(now):
                    self._write(channel, events, now)
                elif due_at == -math.inf:
                    self._end_with_stream(channel)
                else:
                    assert self._encoder is not None
                    self._written_at = now
                    channel.write(self._pace.keepalive_of(self._encoder))
            else:
                due_at = math.inf
            if self.is_over:
                return
            if self._held.events:
                self._arm_hold(due_at)
                due_at = math.inf
            self._arm(min(due_at, self._poll_at))
        except Exception as error:
            self._end(error)

    def notify(self, status: Status) -> None:
        """Show a status that is not in the log, once there is room: it has no id. A newer one replaces it."""
        if self._channel is not None:
            self._notice = status if self._notice is None else None
            self.advance()

    def go_away(self) -> None:
        """End the connection with the place to resume from; without room for that it breaks. The stream continues."""
        if self.is_over:
            return
        self.is_let_go = True
        channel = self._channel
        if channel is None or self._encoder is None:
            self._end(None)
        elif channel.is_writable:
            frame = self._encoder.going_away(self.going_away())
            if frame:
                channel.write(frame)
            self._end(None)
        else:
            self._end(BrokenStream(self.stream.id))

    def going_away(self) -> GoingAway:
        """Return where and when to resume."""
        return GoingAway(stream_id=self.stream.id, seq=self._accepted_seq, retry_ms=random.randint(*_RETRY_MS))

    # Inside

    def _take_recent(self) -> None:
        """Hold what follows of the stream's recent events; have a task read the log if they are older."""
        is_far = self._takes_snapshots and self.stream.last_seq - self.sent_seq > self._config.snapshot_events
        if not self._must_fold and (self._held.events or not is_far):
            events = self.stream.recent.since(self._read_seq, self._pages.size)
            if events:
                self._hold(events, events[-1].seq)
                if self._held.is_large:
                    self._pages.note(events)
                return
        if self._held.events:
            self._held.hurry()  # the log is read when these are written
            return
        self._paging = asyncio.get_running_loop().create_task(self._read_log(), name="reader", context=Context())

    def _hold(self, events: list[LoggedEvent], until: int) -> None:
        self._held.add(events, time.monotonic())
        self._read_seq = until

    def _due_at(self) -> float:
        """When the held events must leave; without any, the end of the silence. -inf is now, also for the end."""
        stream = self.stream
        is_over = stream.terminal is not None or stream.ended.is_set()
        if not self._held.events:
            is_all = is_over and self._paging is None and self._read_seq >= stream.last_seq
            return -math.inf if is_all else self._written_at + self._silence_seconds
        due_at = self._held.due_at
        if due_at == math.inf:
            has_left = stream.has_left and stream.ended.is_set()  # then it waits for no acknowledgement
            return -math.inf if has_left else math.inf
        return -math.inf if is_over else due_at

    def _write(self, channel: Channel, events: list[LoggedEvent], now: float) -> None:
        """Write these events as one frame."""
        frame: Any = events
        if self._encode_all is not None:
            frame = self._encode_all(events)
        elif self._encoder is not None:
            frame = b"".join(map(self._encoder.encode, events))
        last = events[-1]
        self.sent_seq, self._written_at = last.seq, now
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None
        if frame:
            channel.write(frame)
        self._unconfirmed = len(frame) if self._encoder is not None else 1, last.seq
        if channel.is_writable:  # it was sent at once, or there is nothing to send
            self._confirm(now)
        if is_terminal(last.event):
            self._end(None)

    def _write_notice(self, channel: Channel, event: Status | Error) -> None:
        """Write something that is not in the log: seq 0, which no dialect shows."""
        notice = LoggedEvent(0, event)
        frame: Any = [notice] if self._encoder is None else self._encoder.encode(notice)
        if frame:
            self._written_at = time.monotonic()
            channel.write(frame)

    def _on_writable(self) -> None:
        """The channel has sent the last frame. Mostly nothing follows yet, and a commit or the timer is waited for."""
        if self._unconfirmed is not None:
            self._confirm(time.monotonic())
        stream = self.stream
        has_more = self._held.events or self._notice is not None or self._read_seq < stream.last_seq
        if self._timer is None or has_more or stream.terminal is not None or stream.ended.is_set():
            self.advance()
        else:
            self._arm(self._poll_at)

    def _confirm(self, now: float) -> None:
        """The transport has accepted the last frame."""
        assert self._unconfirmed is not None
        (num_bytes, seq), self._unconfirmed = self._unconfirmed, None
        self._accepted_seq = seq
        if self._received is None or self.is_over:
            return
        if self._received.send(num_bytes, seq, now):
            self._poll(now)

    def _poll(self, now: float, *, is_away: bool | None = None) -> None:
        """Look what the reader's system has taken."""
        assert self._received is not None
        self.stream.moved(self, self._received.poll(now), is_away=is_away)

    @property
    def _poll_at(self) -> float:
        return math.inf if self._received is None else self._received.poll_at

    def _arm_hold(self, at: float) -> None:
        """Have `advance` called at `at`, unless what is held leaves before."""
        if at < math.inf and self._hold_timer is None:
            self._hold_timer = asyncio.get_running_loop().call_at(at, self._ring_hold, context=Context())

    def _ring_hold(self) -> None:
        self._hold_timer = None
        self.advance()

    def _arm(self, at: float) -> None:
        """Have `advance` called at `at`; a timer that is set for earlier stays, and is set anew then."""
        if at == math.inf or (self._timer is not None and self._timer.when() <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._ring, context=Context())

    def _ring(self) -> None:
        self._timer = None
        now = time.monotonic()
        if self._poll_at <= now:
            self._poll(now)
        self.advance()
        channel = self._channel
        if not self.is_over and channel is not None and not channel.is_writable:
            self._arm(self._poll_at)

    def _end_with_stream(self, channel: Channel) -> None:
        """Everything is written, and the stream is over: here, or for good."""
        stream = self.stream
        if stream.is_lost:
            self._write_notice(channel, LOST)
            self._end(None)
        elif stream.terminal is not None:
            self._end(None)
        elif stream.has_left:
            self.go_away()
        else:
            self._end(BrokenStream(stream.id))

    def _end(self, error: Exception | None) -> None:
        channel = self._channel
        self.dismiss()
        if channel is not None:
            channel.end(error)

    # Reading the log

    async def _read_log(self) -> None:
        """Read what the stream's recent events do not have, a page at a time while there is room for it."""
        stream, pages = self.stream, self._pages
        try:
            if self._must_fold and self._encoder is not None:
                await pages.fold(self._encoder, self._read_seq)
                self._must_fold = False
            await self._leap()
            while not self._held.events and self._read_seq < stream.last_seq:
                if stream.recent.since(self._read_seq, 1):
                    break
                page = await pages.read(self._read_seq, pages.size)
                pages.note(page)
                self._hold(page, page[-1].seq)
                self.advance()
                await asyncio.sleep(0)
        except Exception as error:
            self._paging = None
            if isinstance(error, LogUnavailable):
                self.go_away()
            elif isinstance(error, Gone) and stream.on_loss():
                self._must_fold, self._read_seq = False, stream.last_seq  # nothing is left to read
                self.advance()
            else:
                self._end(error)
        else:
            self._paging = None
            self.advance()

    async def _leap(self) -> None:
        """Hold a snapshot in place of all that the reader lacks, if that is too much."""
        until = self._pages.last_seq_to_show()
        if not self._takes_snapshots or self._held.events or until - self.sent_seq <= self._config.snapshot_events:
            return
        leap = await self._pages.snapshot(self.sent_seq, until)
        if leap:
            self._hold(leap, until)
        else:
            self._takes_snapshots = False
