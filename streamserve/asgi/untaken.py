"""How many bytes of a response its reader's system has not taken: what a transport holds, and what the kernel holds.

FlowServer offers the count in the scope (`streamserve.flow`). uvicorn does not; its `send` is a method of the request,
whose transport has the same numbers. Of any other server, and behind a middleware that wraps `send`, nothing is known:
what was accepted counts as taken.

Relies on, in uvicorn 0.54: `protocols/http/*_impl.py` RequestResponseCycle (`send`, `transport`). HTTP/1.1 only, so a
transport carries one response at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from streamserve.asgi.types import Scope, Send
from streamserve.streams.reader.channel import nothing


def untaken_of(scope: Scope, send: Send) -> Callable[[], int]:
    """Return what counts the bytes that the reader's system has not taken; `nothing` where that is not known."""
    offered: Callable[[], int] | None = scope.get("extensions", {}).get("streamserve.flow", {}).get("num_untaken")
    if offered is not None:
        return offered
    cycle = getattr(send, "__self__", None)
    transport = getattr(cycle, "transport", None)
    if not type(cycle).__module__.startswith("uvicorn.") or not hasattr(transport, "get_write_buffer_size"):
        return nothing
    return lambda: _untaken_by(transport)


def _untaken_by(transport: Any) -> int:
    tcp = transport.get_extra_info("socket")
    return int(transport.get_write_buffer_size()) + (0 if tcp is None else kernel_bytes(tcp))


def kernel_bytes(tcp: Any) -> int:
    """Return the bytes in a socket that are unsent or not acknowledged (SIOCOUTQ, which is TIOCOUTQ); 0 if unknown."""
    try:
        import fcntl
        import termios

        return int(struct.unpack("i", fcntl.ioctl(tcp.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0])
    except (ImportError, OSError, ValueError):
        return 0
