"""One connection under FlowServer: `FlowTransport` counts its unsent bytes; `send` waits on `FlowControl`.

Its limits and times are in `FlowConfig`, a value that the site's settings make.

    app ── await send() ──► Twisted's buffer ──► kernel: unsent ≤ 16 KiB, then in flight ──► peer's buffer ──► reader
              ▲                   │ above an eighth of connection_bytes: pauseProducing
              └──── FlowControl ◄────────┘ empty: resumeProducing

Imports neither Twisted nor daphne: it gets their transports, and Twisted calls a producer by its methods
(IPushProducer). Event loop only. Idea: asyncio's and uvicorn's flow control; daphne#170 for registering on a
WebSocket's transport; Cloudflare's "HTTP/2 prioritization" for TCP_NOTSENT_LOWAT. Relies on, in Twisted 26.10:
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
from dataclasses import dataclass
from typing import Any

from streamserve.asgi.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowConfig:
    """Bytes and seconds, for every connection."""

    connection_bytes: int = 256 * 1024
    """Unsent bytes held for one reader before the sender waits."""
    stall_seconds: float = 30.0
    """A reader that takes nothing for so long, while there is something, is cut off; it can resume."""
    vanish_seconds: float = 30.0
    """A peer that answers no packet for so long, or takes nothing, is gone (Linux counts both); 0: the system's own
    limit. To be patient with slow readers raise `STALL_SECONDS` and this.
    """
    body_bytes: int = 32 * 1024 * 1024
    """The largest request body under FlowServer, but for uploads of files (`MAX_FILE_BYTES`); beyond it 413, before
    anything is stored.
    """
    head_seconds: float = 10.0
    """A request's head must be whole by then; its body may take as long, and a second more for each KiB; 0: no limit.
    """
    drain_seconds: float = 20.0
    """On SIGTERM, answers in flight may finish for so long, while new requests get 503; a second signal ends at once.
    Under other servers (docs/deploy.md#other-servers) too, within their own time-outs. Give systemd's `TimeoutStopSec`
    20 more.
    """

    def __post_init__(self) -> None:
        if self.connection_bytes < 4096:
            raise ValueError(f"connection_bytes is {self.connection_bytes}; a connection needs at least 4096")
        for name in ("stall_seconds", "vanish_seconds", "body_bytes", "head_seconds", "drain_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes 0 or more")

    @property
    def check_seconds(self) -> float:
        """The interval between checks of all connections: a quarter of the shortest limit, at most one second."""
        limits = [seconds for seconds in (self.stall_seconds, self.head_seconds) if seconds]
        return min(1.0, *(seconds / 4 for seconds in limits)) if limits else 1.0


# What the kernel may hold unsent. Its default is megabytes: a whole answer, which hides that the reader has stalled.
_KERNEL_UNSENT_BYTES = 16 * 1024
# How long a refused client may send on before its connection is closed: a reset would overtake the answer (RFC 9112,
# 9.6).
LINGER_SECONDS = 2.0
# Linux: asm-generic/socket.h, and a program of classic BPF, "ret #0", in the layout of linux/filter.h.
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
_ACCEPTS = 1000  # in one call; Twisted sets `numberAccepts` to how many there were
# Reading pauses at more unread WebSocket messages, or bytes of them, than this.
_INBOX_MESSAGES = 64
_INBOX_BYTES = 1024 * 1024


class FlowTransport:
    """One connection, from accept to close, over any protocol. `channel` is the HTTP parser it began with."""

    __slots__ = ("_buffer", "_write", "channel", "head_since", "linger_since", "moved_at", "options", "tcp",
                 "transport")  # fmt: skip

    def __init__(self, transport: Any, channel: Any, options: FlowConfig) -> None:
        self.transport, self.channel, self.options = transport, channel, options
        self.tcp = _innermost(transport)
        self.moved_at = time.monotonic()  # when the socket last took bytes, or nothing was unsent
        self.head_since: float | None = None  # when the first byte of an unfinished head arrived
        self.linger_since: float | None = None
        self._write, self._buffer = self.tcp.writeSomeData, self.tcp.write
        self.tcp.writeSomeData = self._write_some
        self.tcp.write, self.tcp.writeSequence = self._write_now, self._write_sequence_now
        # One more piece may follow, and Twisted holds written bytes twice while it joins them: at most half in memory.
        self.tcp.bufferSize = piece_bytes(options)
        tune(self.tcp, options)

    def _write_some(self, data: bytes) -> Any:
        """Pass `data` to the socket, and note when it takes some."""
        taken = self._write(data)
        if isinstance(taken, int) and taken > 0:
            self.moved_at = time.monotonic()
        return taken

    def _write_now(self, data: bytes) -> None:
        """Send `data` to the kernel at once if nothing is unsent before it; Twisted would first poll the socket."""
        tcp = self.tcp
        is_behind = tcp._tempDataLen or len(tcp.dataBuffer) > tcp.offset  # as num_unsent has it
        if data and not (is_behind or tcp.disconnecting or tcp._writeDisconnecting) and tcp.connected:
            try:
                num = tcp.socket.send(data)
            except OSError:  # full, or broken: Twisted notices and handles that
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
        """Bytes that Twisted holds for the socket."""
        return int(len(self.tcp.dataBuffer) - self.tcp.offset + self.tcp._tempDataLen)

    @property
    def num_untaken(self) -> int:
        """Bytes that the peer's system has not acknowledged: a lower bound on the reader's lag."""
        return self.num_unsent + (kernel_bytes(self.tcp) if self.is_open else 0)

    def check(self, now: float) -> str | None:
        """Enforce the limits; return the reason if the connection is ended now, else None."""
        if self.linger_since is not None:
            return self._abort("it was refused") if now - self.linger_since > LINGER_SECONDS else None
        if self.head_since is not None and 0 < self.options.head_seconds < now - self.head_since:
            self.channel.refuse_late_head()
            return "its request arrived too slowly"
        if not self.num_unsent:
            self.moved_at = now
        elif self.options.stall_seconds and now - self.moved_at > self.options.stall_seconds:
            return self._abort(f"it took nothing for {self.options.stall_seconds:g} s")
        return None

    def _abort(self, reason: str) -> str:
        self.transport.abortConnection()
        return reason

    def close(self) -> None:
        """Send what is unsent, then close the connection."""
        self.transport.loseConnection()

    def forget(self) -> None:
        """Break the reference cycle with the transport, so that no garbage collection is needed."""
        for name in ("write", "writeSequence", "writeSomeData"):
            self.tcp.__dict__.pop(name, None)


class FlowControl:
    """Whether one response or WebSocket may write. `write_lock` keeps the pieces of one message together."""

    __slots__ = ("_opened", "is_gone", "is_open", "transport", "write_lock")

    def __init__(self, transport: FlowTransport | None) -> None:
        self.transport = transport
        self.write_lock = asyncio.Lock()
        self.is_open = True
        self.is_gone = False
        self._opened: asyncio.Event | None = None  # made by the first wait

    def pauseProducing(self) -> None:
        self.is_open = self.is_gone

    def resumeProducing(self) -> None:
        self.is_open = True
        self._end_waits()
        # FileDescriptor.doWrite resumes its producer instead of closing; only unregistering it lets the close proceed.
        if self.transport is not None and self.transport.tcp.disconnecting:
            self.transport.transport.unregisterProducer()

    def release(self) -> None:
        """End every wait for good, because the client has left; nothing is written any more."""
        self.is_gone = self.is_open = True
        if self._opened is not None:
            self._end_waits()

    stopProducing = release

    def _end_waits(self) -> None:
        if self._opened is not None:
            self._opened.set()
            self._opened = None

    async def wait(self) -> None:
        """Wait until the reader has taken what was written, or has left."""
        while not self.is_open:
            if self._opened is None:
                self._opened = asyncio.Event()
            await self._opened.wait()


class Inbox(asyncio.Queue[Message]):
    """The messages that an app has not received. Reading pauses when the app falls behind: `is_paused`."""

    def __init__(self, transport: Any) -> None:
        super().__init__()
        self._transport = transport
        self._num_bytes = 0
        self.is_paused = False

    def _put(self, item: Message) -> None:
        super()._put(item)
        self._num_bytes += _length(item)
        is_full = self._num_bytes > _INBOX_BYTES or self.qsize() > _INBOX_MESSAGES
        if is_full and not self.is_paused:
            self.is_paused = True
            self._transport.pauseProducing()

    def _get(self) -> Message:
        item = super()._get()
        self._num_bytes -= _length(item)
        if self.is_paused and self._num_bytes <= _INBOX_BYTES // 2 and self.qsize() <= _INBOX_MESSAGES // 2:
            self.is_paused = False
            self._transport.resumeProducing()
        return item


class RequestInbox(Inbox):
    """The messages that the app of a request has not received: the pieces of its body as they arrive, then its end.

    A client that waits for a 100 is answered by `invite`, which the app's first `receive` calls.
    """

    def __init__(self, transport: Any) -> None:
        super().__init__(transport)
        self.invite: Callable[[], None] | None = None
        self._last: Message | None = None  # piece of the body

    def put_nowait(self, item: Message) -> None:
        """Take a message of daphne's. The body's message is left out: daphne sees an empty body."""
        if item["type"] != "http.request":
            super().put_nowait(item)

    def feed(self, data: bytes) -> None:
        """Take a piece of the body."""
        self._last = {"type": "http.request", "body": data, "more_body": True}
        super().put_nowait(self._last)

    def end(self) -> None:
        """The body is whole: its last piece is marked so, unless the app has taken it already."""
        if self._last is not None and not self.empty():
            self._last["more_body"] = False
        else:
            super().put_nowait({"type": "http.request", "body": b"", "more_body": False})

    async def get(self) -> Message:
        """Return the next message."""
        if self.invite is not None:
            self.invite()
            self.invite = None
        return await super().get()


def _length(message: Message) -> int:
    return len(message.get("bytes") or message.get("text") or message.get("body") or b"")


def piece_bytes(options: FlowConfig) -> int:
    """Return the high-water mark, which is also the largest piece written at once."""
    return options.connection_bytes // 8


def tune(tcp: Any, options: FlowConfig) -> None:
    """Set socket options: little unsent data, and detection of a vanished peer. A unix socket ignores both."""
    seconds = options.vanish_seconds
    probe = max(1, int(seconds / 6))
    wanted = [(socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", _KERNEL_UNSENT_BYTES)]
    if seconds:
        # With data in flight the first option counts, without any the probes; each alone noticed nothing for 60 s.
        wanted += [
            (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", int(seconds * 1000)),
            (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
            (socket.IPPROTO_TCP, "TCP_KEEPIDLE", max(1, int(seconds / 2))),
            (socket.IPPROTO_TCP, "TCP_KEEPINTVL", probe),
        ]
    for level, name, value in wanted:
        with contextlib.suppress(AttributeError, OSError):
            tcp.getHandle().setsockopt(level, getattr(socket, name), value)


def _innermost(transport: Any) -> Any:
    """Return the transport that has the socket, below any TLS."""
    while hasattr(transport, "wrappedProtocol"):
        transport = transport.transport
    return transport


def accept_last(port: Any) -> None:
    """Accept every connection that is queued on a Twisted port. On Linux no connection is completed after that.

    Closing a port resets the connections in its queue, with requests that they may have sent already: a proxy cannot
    know whether those were processed. A client that connects later finds the port closed when it sends its SYN again, a
    second after the first.
    """
    with contextlib.suppress(OSError, AttributeError):
        program = ctypes.create_string_buffer(_DROP_ALL)
        port.socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
    if hasattr(port, "numberAccepts"):
        port.numberAccepts = _ACCEPTS
        while port.numberAccepts >= _ACCEPTS:  # fewer: the queue is empty
            port.numberAccepts = _ACCEPTS
            port.doRead()


def kernel_bytes(tcp: Any) -> int:
    """Return the bytes in a socket that are unsent or not acknowledged (SIOCOUTQ, which is TIOCOUTQ); 0 if unknown."""
    try:
        import fcntl
        import termios

        return int(struct.unpack("i", fcntl.ioctl(tcp.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0])
    except (ImportError, OSError, ValueError):
        return 0
