"""`Connection`: one end of a unix socket, in whole frames; the same for worker and engine. Event loop.

The socket is always read: nothing in here waits for whoever takes the frames. A peer that does not read is dropped.
Only processes of our own user are spoken to (SO_PEERCRED, unix(7)), on top of what the file's rights say.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from streamserve.protocol.frames import FrameCutter, FrameError, frame

logger = logging.getLogger(__name__)

# Unread bytes after which a peer counts as gone: minutes of everything an engine can say.
MAX_UNSENT_BYTES = 64 * 1024 * 1024
_WATCH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel says; pid 0 where it does not."""

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """Ask the kernel; where it has no SO_PEERCRED (macOS) the 0700 folder alone keeps others out."""
    if not hasattr(socket, "SO_PEERCRED"):
        return Peer(0, os.geteuid())
    pid, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")))
    return Peer(pid, uid)


class Connection(asyncio.Protocol):
    """`on_made` hears of a connection that may be spoken to."""

    def __init__(self, on_made: Callable[[Connection], None] | None = None) -> None:
        self.peer = Peer(0, -1)
        self.heard_at = time.monotonic()
        self._on_made = on_made
        self._cutter = FrameCutter()
        self._frames: deque[bytes] = deque()
        self._has_news = asyncio.Event()
        self._is_lost = False
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None

    async def receive(self) -> bytes | None:
        """Return the next payload; None when the connection is lost and everything is read."""
        while not self._frames:
            if self._is_lost:
                return None
            self._has_news.clear()
            await self._has_news.wait()
        return self._frames.popleft()

    def send(self, payload: bytes) -> None:
        """Send, at once or when the peer reads; raises FrameError for a payload over the limit."""
        data = frame(payload)
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            logger.warning("process %d does not read: connection dropped", self.peer.pid)
            self.abort()

    def watch(self, silence: Callable[[], float], on_silence: Callable[[], None]) -> None:
        """Call `on_silence` once when nothing has come for `silence()` seconds.

        After the loop itself stood still, data that waits is read before this timer runs: it blames nobody wrongly.
        """
        if self.heard_at + silence() < time.monotonic():
            on_silence()
        elif not self._is_lost:
            self._watch = asyncio.get_running_loop().call_later(_WATCH_SECONDS, self.watch, silence, on_silence)

    def close(self) -> None:
        """Close when what was sent is on its way."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close now; what is unsent is dropped."""
        if self._transport is not None:
            self._transport.abort()

    async def lost(self) -> None:
        """Wait until the connection is gone; frames that still come are dropped."""
        while await self.receive() is not None:
            pass

    # Called by the loop (asyncio.Protocol).

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.peer = peer_of(transport.get_extra_info("socket"))
        if self.peer.uid != os.geteuid():
            logger.warning("a process of user %d was at the engine's socket: turned away", self.peer.uid)
            self.abort()
        elif self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:
        self.heard_at = time.monotonic()
        try:
            self._frames.extend(self._cutter.feed(data))
        except FrameError as error:
            logger.warning("process %d: %s: connection dropped", self.peer.pid, error)
            self.abort()
        self._has_news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._watch is not None:
            self._watch.cancel()
        self._has_news.set()
