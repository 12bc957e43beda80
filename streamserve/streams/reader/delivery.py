"""`Delivery`: one reader of a stream over HTTP: log → coalesce → encoder → transport, at the transport's pace.

The reader's position is what the transport has accepted less what the reader's system has not taken, where the server
can tell that: a lower bound on how far behind the reader is, and blind behind a proxy that buffers.

asyncio; framework-free. `run(send)` is for servers that take bytes, `async for` for frameworks that pull; events that
are not bytes yet come from follow.py. Whoever makes one of these must run or `close` it: `close` is synchronous, and
when it returns the engine knows that the reader has gone.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple, Protocol

from streamserve.dialects.base import Encoder
from streamserve.protocol.events import GoingAway, LoggedEvent
from streamserve.streams.reader.received import Looks, Position, nothing
from streamserve.streams.reader.tail import Outlet, Tail, read_page
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Reader, Stream

# Who is let go comes again after that long, not all at once.
_RETRY_MS = (500, 1500)
_TRANSPORTS = {"text/event-stream": "sse", "text/plain": "text"}


class Pen(Protocol):
    """A transport that writes at once, while it is ready: what was written before is on its way, and none waits."""

    def is_ready(self) -> bool: ...

    def write(self, data: bytes) -> None: ...


class Flow(NamedTuple):
    """What a server offers besides `send`: how many bytes of what was sent the reader's system has not taken; a pen."""

    num_untaken: Callable[[], int] = nothing
    pen: Pen | None = None


NO_FLOW = Flow()


class Delivery:
    """What one reader is sent: `first_bytes`, then the frames of every event after `after`, to the terminal one.

    `after` is the last seq the reader has: 0 is from the start; past the stream's last event raises BadRequest
    ("unknown_event_id"), one reader too many QuotaExceeded ("too_many_readers"). A reader that already has the terminal
    event: see `is_over` (answer 204).
    """

    def __init__(
        self, streams: Streams, stream: Stream, encoder: Encoder, *, after: int = 0, watcher: bool = False
    ) -> None:
        content_type = encoder.content_type.partition(";")[0]
        self.reader = Reader(is_watcher=watcher, transport=_TRANSPORTS.get(content_type, content_type), seq=after)
        self.stream = stream
        self._encoder = encoder
        self._after = after
        silence_seconds = streams.settings.keepalive_seconds if encoder.keepalive else math.inf
        self._tail = Tail(
            streams, stream, after, self.reader, snapshots=encoder.takes_snapshots, silence_seconds=silence_seconds
        )
        self._watch(nothing)
        self._log = streams.log
        self._sent_seq = after
        self._outlet: Outlet | None = None
        self._write: Callable[[bytes], None]
        self._rewound_to = after if encoder.takes_snapshots else 0
        self._has_begun = self._has_taken_leave = False

    @property
    def is_over(self) -> bool:
        """Whether the reader has everything, the terminal event included."""
        return self._tail.is_over or (self.stream.terminal is not None and self._after >= self.stream.last_seq)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the response must say, in ASGI form. Identity keeps GZipMiddleware away; there is no length."""
        return [
            (b"content-type", self._encoder.content_type.encode()),
            (b"cache-control", b"no-cache, no-transform"),
            (b"x-accel-buffering", b"no"),
            (b"content-encoding", b"identity"),
            (b"x-stream-id", self.stream.id.encode()),
            (b"streamserve-from", str(self._after + 1).encode()),
        ]

    async def run(self, send: Callable[[bytes], Awaitable[None]], flow: Flow = NO_FLOW) -> None:
        """Send everything, waiting for `send` each time; returns after the terminal event. Cancel it to disconnect."""
        self._watch(flow.num_untaken)
        if flow.pen is not None:
            self._outlet, self._write = Outlet(flow.pen.is_ready, self._put), flow.pen.write
        try:
            frame: bytes | None = self._begin()
            while frame is not None:
                await send(frame)
                self._has_sent(frame)
                frame = await self._next()
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield what `run` sends. Whoever iterates closes it (`contextlib.aclosing`) or calls `close`."""
        try:
            frame: bytes | None = self._begin()
            while frame is not None:
                yield frame
                self._has_sent(frame)
                frame = await self._next()
        finally:
            self.close()

    def cut_off(self) -> bytes | None:
        """Close, because the server waits no longer, and return the last word; None if nobody can go on with it."""
        can_leave = self._has_begun and self.stream.can_leave
        self.close()
        return self._farewell() if can_leave else None

    def close(self) -> None:
        """Detach the reader, or give up one that never came. Idempotent and synchronous."""
        self._looks.close()
        self._tail.close()

    def _watch(self, num_untaken: Callable[[], int]) -> None:
        self._position = Position(self._after, num_untaken)
        self._looks = Looks(self._position, lambda seq: self.stream.moved(self.reader, seq))

    def _begin(self) -> bytes:
        if self._has_begun:
            raise RuntimeError("a Delivery runs once")
        self._has_begun = True
        self._tail.begin(self._outlet)
        return self._encoder.first_bytes

    async def _next(self) -> bytes | None:
        """Return the next whole frames, or a keepalive after silence; None when the terminal event has been sent."""
        await self._rewind()
        while not self._tail.is_over:
            events = await self._tail.next()
            data = b"".join(map(self._encoder.encode, events))
            if not events and not self._tail.is_over:
                data = self._encoder.keepalive
            if data:
                return data
            self._has_sent(data)
        return self._leave()

    def _put(self, events: list[LoggedEvent]) -> None:
        """Write what was committed now."""
        data = b"".join(map(self._encoder.encode, events))
        if data:
            self._write(data)
        self._has_sent(data)

    async def _rewind(self) -> None:
        """Feed the encoder, once, what the reader already has; its output is dropped."""
        while self._rewound_to < self._after:
            page = await read_page(self._log, self.stream, self._rewound_to, self._after - self._rewound_to)
            for logged in page:
                self._encoder.encode(logged)
            self._rewound_to = page[-1].seq
            await asyncio.sleep(0)

    def _has_sent(self, data: bytes) -> None:
        """Note what the transport has accepted."""
        self._sent_seq = seq = self._tail.given_seq
        if self._position.send(len(data), seq):
            self._looks.look()
        else:
            self._looks.soon()

    def _leave(self) -> bytes | None:
        """Return the last word to a reader whose stream was let go, once."""
        if not self._tail.is_let_go or self._has_taken_leave:
            return None
        self._has_taken_leave = True
        return self._farewell() or None

    def _farewell(self) -> bytes:
        farewell = GoingAway(stream_id=self.stream.id, seq=self._sent_seq, retry_ms=random.randint(*_RETRY_MS))
        return self._encoder.going_away(farewell)
