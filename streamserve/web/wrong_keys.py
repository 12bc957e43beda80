"""`WrongKeys`: refuse API keys from an address that has sent too many wrong ones in the last minute.

A key that was right before is taken from any address, so that one bad client behind a shared address harms no other.
Of one process; on its event loop. Memory is bounded.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

from streamserve.asgi.guard import limited_client
from streamserve.protocol.errors import QuotaExceeded

WINDOW_SECONDS = 60.0
_MAX_ADDRESSES = 10_000
_MAX_RIGHT = 10_000


class WrongKeys:
    """Counts wrong keys by address: at most `limit` a minute. `clock` gives seconds."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._windows: OrderedDict[str, tuple[float, int]] = OrderedDict()  # address → (start, wrong keys since)
        self._right: OrderedDict[bytes, None] = (
            OrderedDict()
        )  # digests of keys that were right, the last used at the end

    def check(self, address: str, key: str) -> None:
        """Raise QuotaExceeded if `address` has sent too many wrong keys in this window and `key` is not known as right.

        A unix socket and a loopback address are not limited: all clients of a proxy may come from there.
        """
        address = limited_client(address)
        started_at, num_wrong = self._windows.get(address, (0.0, 0))
        left = started_at + WINDOW_SECONDS - self._clock()
        if not address or num_wrong < self._limit or left <= 0 or _digest(key) in self._right:
            return
        raise QuotaExceeded(
            f"This address has sent {self._limit} wrong API keys within a minute. Check the key, and try again later.",
            code="too_many_wrong_keys",
            retry_after=max(1, round(left)),
        )

    def note_wrong(self, address: str, key: str) -> None:
        """Count a wrong key."""
        self._right.pop(_digest(key), None)
        address = limited_client(address)
        if not address:
            return
        now = self._clock()
        started_at, num_wrong = self._windows.pop(address, (now, 0))
        if now - started_at >= WINDOW_SECONDS:
            started_at, num_wrong = now, 0
        self._windows[address] = (started_at, num_wrong + 1)
        if len(self._windows) > _MAX_ADDRESSES:
            self._windows.popitem(last=False)

    def note_right(self, key: str) -> None:
        """Remember a key that was right."""
        digest = _digest(key)
        self._right[digest] = None
        self._right.move_to_end(digest)
        if len(self._right) > _MAX_RIGHT:
            self._right.popitem(last=False)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
