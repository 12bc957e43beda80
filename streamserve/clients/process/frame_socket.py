"""`Connection`: one end of a unix socket, in whole frames; the same class for client and engine. Event loop.

The socket is always read: what arrives is handled at once, and a peer that does not read is dropped. Only processes of
our own user are accepted (SO_PEERCRED, unix(7)), in addition to the permissions of the socket file.
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

from streamserve.clients.process.supervision import StallClock
from streamserve.protocol.frames import FrameCutter, frame

logger = logging.getLogger(__name__)

# Unread bytes after which a peer counts as gone: minutes of everything an engine can send.
MAX_UNSENT_BYTES = 64 * 1024 * 1024
_WATCH_SECONDS = 0.5
# Of an engine that sends its state each second.
_USUAL_SECONDS = 1.75


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, by the kernel; pid 0 where the kernel does not name it."""

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """Ask the kernel for the peer. Without SO_PEERCRED (macOS) only the 0700 folder protects the socket."""
    if not hasattr(socket, "SO_PEERCRED"):
        return Peer(0, os.geteuid())
    pid, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")))
    return Peer(pid, uid)


class Connection(asyncio.Protocol):
    """A connection of frames. `on_made(connection)` is called once the peer is known to be our own user.

    Frames queue up for `receive` until `run` gives them a handler.
    """

    def __init__(self, on_made: Callable[[Connection], None] | None = None) -> None:
        self.peer = Peer(0, -1)
        self._silence = StallClock(2 * _WATCH_SECONDS)
        self._watched_at = time.monotonic()
        self._on_made = on_made
        self._cutter = FrameCutter()
        self._frames: deque[bytes] = deque()
        self._handle: Callable[[bytes], None] = self._queue
        self._has_frames = asyncio.Event()
        self._is_lost = asyncio.Event()
        self._error: Exception | None = None
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None

    async def receive(self) -> bytes | None:
        """Return the next payload; None when the connection is lost and everything is read. Before `run` only."""
        while not self._frames:
            if self._is_lost.is_set():
                if self._error is not None:
                    logger.warning("process %d: %s: connection dropped", self.peer.pid, self._error)
                return None
            self._has_frames.clear()
            await self._has_frames.wait()
        return self._frames.popleft()

    async def run(self, handle: Callable[[bytes], None]) -> None:
        """Pass each payload to `handle` as it arrives, until the connection is lost.

        An exception of `handle`, or a FrameError, closes the connection and is raised here.
        """
        try:
            while self._frames:
                handle(self._frames.popleft())
            self._handle = handle
            await self._is_lost.wait()
        finally:
            self._handle = _drop
        if self._error is not None:
            raise self._error

    async def lost(self) -> None:
        """Wait until the connection is gone; frames that still arrive are dropped."""
        self._handle = _drop
        await self._is_lost.wait()

    def send(self, payload: bytes) -> None:
        """Send, at once or when the peer reads; raises FrameError for a payload over the limit."""
        data = frame(payload)
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            logger.warning("process %d does not read: connection dropped", self.peer.pid)
            self.abort()

    def watch(self, seconds: float, busy_seconds: Callable[[float], float], on_silence: Callable[[], None]) -> None:
        """Call `on_silence` once when the peer has sent nothing for `seconds`, by `StallClock`.

        `busy_seconds` returns for how many of so many last seconds the peer was busy. After the loop itself was
        blocked, waiting data is read before this timer runs, so a live peer is not blamed; nor is a peer that was
        blocked as well. While the silence is shorter than between two heartbeats, `busy_seconds` is not asked, which
        reads a file of each of the peer's threads.
        """
        now = time.monotonic()
        gap, self._watched_at = now - self._watched_at, now
        is_usual = self._silence.seconds + gap < min(_USUAL_SECONDS, seconds / 4)
        if self._silence.look(now, 0.0 if is_usual else busy_seconds(gap)) > seconds:
            on_silence()
        elif not self._is_lost.is_set():
            loop = asyncio.get_running_loop()
            self._watch = loop.call_later(_WATCH_SECONDS, self.watch, seconds, busy_seconds, on_silence)

    def close(self) -> None:
        """Close after what was sent has been written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close now; what is unsent is dropped."""
        if self._transport is not None:
            self._transport.abort()

    # Called by the loop (asyncio.Protocol).

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.peer = peer_of(transport.get_extra_info("socket"))
        if self.peer.uid != os.geteuid():
            logger.warning("a process of user %d connected to the engine's socket: dropped", self.peer.uid)
            self.abort()
        elif self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:
        self._silence.seconds = 0.0
        try:
            for payload in self._cutter.feed(data):
                self._handle(payload)
        except Exception as error:  # raised by `run`, in the task that owns the connection
            self._error = error
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost.set()
        self._has_frames.set()
        if self._watch is not None:
            self._watch.cancel()

    def _queue(self, payload: bytes) -> None:
        self._frames.append(payload)
        self._has_frames.set()


def _drop(payload: bytes) -> None:
    """Ignore a frame that arrives after its handler has gone."""
