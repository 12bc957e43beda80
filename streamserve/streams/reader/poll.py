"""`Poll`: a reader that asks for events again and again, and has no connection in between (long-poll).

It is attached from its first request, so the answer is made for it, at its pace: it has what the offset of its newest
request names. Between two requests it stays attached for as long as a first reader may take; then it has left. A
request that its client ends before the response leaves at once. The next request at the same place is taken for the
same reader, in this process. asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import Context

from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream


class Poll(Attachment):
    """Made by `begin`; each request ends in `pause` or `close`."""

    def __init__(self, stream: Stream, after: int, pause_seconds: float) -> None:
        super().__init__(transport="long-poll", received_seq=after)
        self.sent_seq = after
        self._stream, self._pause_seconds = stream, pause_seconds
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None  # while no request waits
        self._is_let_go = False

    @classmethod
    def begin(cls, streams: Streams, stream: Stream, after: int) -> Poll:
        """Return the reader of a request that waits for events after `after`. Raises as `Readers.check_place`."""
        poll = cls.paused_at(stream, after)
        if poll is None:
            settings = streams.settings
            stream.readers.check_place(after, stream.last_seq, settings.max_readers, is_watcher=False)
            poll = cls(stream, after, settings.first_reader_seconds)
            stream.attach(poll)
        poll.resume(after)
        return poll

    @classmethod
    def paused_at(cls, stream: Stream, after: int) -> Poll | None:
        """Return a reader between two requests which has the events up to `after`, or was sent them last."""
        return next((one for one in stream.readers.attached if isinstance(one, cls) and one.is_paused_at(after)), None)

    def is_paused_at(self, after: int) -> bool:
        return self._timer is not None and after in (self.received_seq, self.sent_seq)

    def resume(self, after: int) -> None:
        """Another request has come, whose reader has the events up to `after`."""
        self._stop_timer()
        self._stream.moved(self, after)

    async def wait(self, seconds: float) -> None:
        """Wait until there are events that it lacks, for the end, or `seconds`."""
        stream = self._stream
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while stream.last_seq <= self.received_seq and not stream.ended.is_set() and not self._is_let_go:
                    self._news.clear()
                    await self._news.wait()

    def pause(self, sent_seq: int) -> None:
        """The request is answered, with the events up to `sent_seq`."""
        self.sent_seq = sent_seq
        if self._is_let_go or self._stream.ended.is_set():
            self.close()
        else:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._pause_seconds, self.close, context=Context())

    def close(self) -> None:
        """Detach. Idempotent; when it returns, the engine knows."""
        self._stop_timer()
        self._stream.detach(self, is_dismissed=self._is_let_go or self._stream.ended.is_set())

    def advance(self) -> None:
        self._news.set()
        if self._timer is not None and self._stream.ended.is_set():
            self.close()

    def go_away(self) -> None:
        self._is_let_go = True
        self._news.set()
        if self._timer is not None:
            self.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
