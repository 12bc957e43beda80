"""One connection under FlowServer: `FlowTransport` counts what is unsent; `FlowControl` is what `send` waits for.

    app ── await send() ──► Twisted's buffer ──► kernel: unsent ≤ 16 KiB, then in flight ──► peer's buffer ──► reader
              ▲                   │ above a quarter of connection_bytes: pauseProducing
              └──── FlowControl ◄────────┘ empty: resumeProducing

Imports neither Twisted nor daphne: their transports come in, and Twisted takes a producer by its methods
(IPushProducer). Event loop only. Idea: asyncio's and uvicorn's flow control; daphne#170 for taking a WebSocket's
transport over; Cloudflare's "HTTP/2 prioritization" for TCP_NOTSENT_LOWAT. Relies on, in Twisted 26.10:
`internet/abstract.py` FileDescriptor (`bufferSize`, `writeSomeData`, `dataBuffer`, `offset`, `_tempDataLen`,
`disconnecting`, `_writeDisconnecting`), and on TLS wrapping a transport as `.transport` of an object with
`.wrappedProtocol`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

from streamserve.asgi.flow.config import FlowConfig
from streamserve.asgi.types import Message

# What the kernel may hold unsent. Its default hides megabytes: a whole answer, and every sign that nobody reads it.
_KERNEL_UNSENT_BYTES = 16 * 1024
# A refused client may send on for so long before it is cut off: else its reset overtakes our answer (RFC 9112, 9.6).
LINGER_SECONDS = 2.0
# linux: asm-generic/socket.h, and a program of classic BPF, "ret #0", as linux/filter.h lays it out.
_SO_ATTACH_FILTER = 26
_TAKE_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)
_ACCEPTS = 1000  # at once; Twisted notes how many there were
# S29: a body slower than this is a slow-loris.
_BODY_BYTES_PER_SECOND = 1024
# More unread WebSocket messages, or bytes of them, than this stop the reading.
_INBOX_MESSAGES = 64
_INBOX_BYTES = 1024 * 1024


class FlowTransport:
    """One connection, from accept to close, whatever speaks over it. `channel` is the HTTP parser it began with."""

    __slots__ = ("_buffer", "_closed", "_write", "body_since", "channel", "head_since", "linger_since", "moved_at",
                 "num_body", "options", "tcp", "transport")  # fmt: skip

    def __init__(self, transport: Any, channel: Any, options: FlowConfig) -> None:
        self.transport, self.channel, self.options = transport, channel, options
        self.tcp = _innermost(transport)
        self.moved_at = time.monotonic()  # when it last had nothing unsent, or took some
        self.head_since: float | None = None  # a request's first byte came then, and its last has not
        self.body_since: float | None = None
        self.linger_since: float | None = None
        self.num_body = 0
        self._closed = False
        self._write, self._buffer = self.tcp.writeSomeData, self.tcp.write
        self.tcp.writeSomeData = self._write_some
        self.tcp.write, self.tcp.writeSequence = self._write_now, self._write_sequence_now
        # Twisted holds what is written twice while it joins it: a quarter here is at most the whole in memory.
        self.tcp.bufferSize = piece_bytes(options)
        tune(self.tcp, options)

    def _write_some(self, data: bytes) -> Any:
        """Pass on to the socket, and note that it took some."""
        taken = self._write(data)
        if isinstance(taken, int) and taken > 0:
            self.moved_at = time.monotonic()
        return taken

    def _write_now(self, data: bytes) -> None:
        """Hand `data` to the kernel, if nothing waits before it; Twisted would first ask the system whether it may."""
        tcp = self.tcp
        is_behind = tcp._tempDataLen or len(tcp.dataBuffer) > tcp.offset  # as num_unsent has it
        if data and not (is_behind or tcp.disconnecting or tcp._writeDisconnecting) and tcp.connected:
            try:
                num = tcp.socket.send(data)
            except OSError:  # full; or broken, which Twisted finds out and acts on
                num = 0
            if num:
                self.moved_at = time.monotonic()
                data = data[num:]
        if data:
            self._buffer(data)

    def _write_sequence_now(self, pieces: Iterable[bytes]) -> None:
        self._write_now(b"".join(pieces))

    @property
    def is_open(self) -> bool:
        return bool(self.tcp.connected)

    @property
    def num_unsent(self) -> int:
        """Bytes Twisted holds for the socket."""
        return int(len(self.tcp.dataBuffer) - self.tcp.offset + self.tcp._tempDataLen)

    @property
    def num_untaken(self) -> int:
        """Bytes the peer's system has not acknowledged: a lower bound on the reader's lag."""
        return self.num_unsent + (_kernel_bytes(self.tcp) if self.is_open else 0)

    def check(self, now: float) -> str | None:
        """Enforce the limits; return why the connection is ended now, or None."""
        if self.linger_since is not None:
            return self._cut("it was refused") if now - self.linger_since > LINGER_SECONDS else None
        if self._is_late(now):
            self.channel.refuse(408, "Request Timeout", "The request did not come in time.")
            return "its request came too slowly"
        if not self.num_unsent:
            self.moved_at = now
        elif self.options.stall_seconds and now - self.moved_at > self.options.stall_seconds:
            return self._cut(f"it took nothing for {self.options.stall_seconds:g} s")
        return None

    def _is_late(self, now: float) -> bool:
        if self.head_since is None or not self.options.head_seconds:
            return False
        if self.body_since is None:
            return now - self.head_since > self.options.head_seconds
        return now - self.body_since > self.options.head_seconds + self.num_body / _BODY_BYTES_PER_SECOND

    def _cut(self, why: str) -> str:
        self.transport.abortConnection()
        return why

    def close(self) -> None:
        """Send what is left, then end the connection."""
        self.transport.loseConnection()

    def forget(self) -> None:
        """Untie the knot of the transport and us, so that no collector is needed."""
        for name in ("write", "writeSequence", "writeSomeData"):
            self.tcp.__dict__.pop(name, None)


class FlowControl:
    """One response's or WebSocket's leave to write. `turn` keeps the pieces of one message together."""

    __slots__ = ("_opened", "is_gone", "is_open", "on_open", "turn", "wire")

    def __init__(self, wire: FlowTransport | None) -> None:
        self.wire = wire
        self.turn = asyncio.Lock()
        self.is_open = True
        self.is_gone = False
        self.on_open: Callable[[], None] | None = None
        self._opened: asyncio.Event | None = None  # made by the first who waits

    def pauseProducing(self) -> None:
        self.is_open = self.is_gone

    def resumeProducing(self) -> None:
        self._open()
        # FileDescriptor.doWrite asks its producer before it closes, and does not come back by itself.
        if self.wire is not None and self.wire.tcp.disconnecting:
            self.wire.transport.unregisterProducer()

    def stopProducing(self) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Nobody is at the other end: nothing waits any more, and nothing is written."""
        self.is_gone = True
        self._open()

    def _open(self) -> None:
        self.is_open = True
        if self._opened is not None:
            self._opened.set()
            self._opened = None
        if self.on_open is not None and not self.is_gone:
            self.on_open()

    async def wait(self) -> None:
        """Wait until the reader has taken what was written, or has gone."""
        while not self.is_open:
            if self._opened is None:
                self._opened = asyncio.Event()
            await self._opened.wait()


class Inbox(asyncio.Queue[Message]):
    """The messages an app has not received. A WebSocket's stops the reading when the app does not keep up."""

    def __init__(self, transport: Any = None) -> None:
        super().__init__()
        self._transport = transport
        self._num_bytes = 0
        self._is_paused = False

    def _put(self, item: Message) -> None:
        super()._put(item)
        self._num_bytes += _length(item)
        is_full = self._num_bytes > _INBOX_BYTES or self.qsize() > _INBOX_MESSAGES
        if is_full and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pauseProducing()

    def _get(self) -> Message:
        item = super()._get()
        self._num_bytes -= _length(item)
        if self._is_paused and self._num_bytes <= _INBOX_BYTES // 2 and self.qsize() <= _INBOX_MESSAGES // 2:
            self._is_paused = False
            self._transport.resumeProducing()
        return item


def _length(message: Message) -> int:
    return len(message.get("bytes") or message.get("text") or b"")


def piece_bytes(options: FlowConfig) -> int:
    """Return the high-water mark, and how much of one message is written at once."""
    return options.connection_bytes // 4


def tune(tcp: Any, options: FlowConfig) -> None:
    """Have the kernel hold little, and notice a peer that has vanished. Best effort: a unix socket knows neither."""
    seconds = options.vanish_seconds
    probe = max(1, int(seconds / 6))
    wanted = [(socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", _KERNEL_UNSENT_BYTES)]
    if seconds:
        # With data under way the first one counts, without any the probes; each alone saw nothing for 60 s.
        wanted += [
            (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", int(seconds * 1000)),
            (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
            (socket.IPPROTO_TCP, "TCP_KEEPIDLE", max(1, int(seconds / 2))),
            (socket.IPPROTO_TCP, "TCP_KEEPINTVL", probe),
        ]
    for level, name, value in wanted:
        with contextlib.suppress(AttributeError, OSError):
            tcp.getHandle().setsockopt(level, getattr(socket, name), value)


def _kernel_bytes(tcp: Any) -> int:
    """Return what the socket holds: unsent and not yet acknowledged (SIOCOUTQ, which is TIOCOUTQ)."""
    try:
        import fcntl
        import termios

        return int(struct.unpack("i", fcntl.ioctl(tcp.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0])
    except (ImportError, OSError):
        return 0


def _innermost(transport: Any) -> Any:
    """Return the transport that has the socket, under any TLS."""
    while hasattr(transport, "wrappedProtocol"):
        transport = transport.transport
    return transport


def accept_last(port: Any) -> None:
    """Have a Twisted port accept whom the system has let in; who comes from now on waits until it is closed.

    Closing it resets whoever is in its queue, with a request that it may have sent already: a proxy cannot tell whether
    that was begun. On Linux the port is made deaf first; who finds it closed a second later was never connected.
    """
    with contextlib.suppress(OSError, AttributeError):
        program = ctypes.create_string_buffer(_TAKE_NOTHING)
        port.socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
    if hasattr(port, "numberAccepts"):
        port.numberAccepts = _ACCEPTS
        while port.numberAccepts >= _ACCEPTS:  # fewer, and the queue is empty
            port.numberAccepts = _ACCEPTS
            port.doRead()
