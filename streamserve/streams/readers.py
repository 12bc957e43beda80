"""`Reader` and `Readers`: who is attached to a stream. Only the owner's readers hold it; watchers never do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from streamserve.protocol.events import Event, LoggedEvent


@dataclass(slots=True, eq=False, kw_only=True)
class Reader:
    """Someone attached to a stream. `seq` is the last event it has: that its transport accepted, or, of one that
    `is_acking`, that it said it has.

    `is_paced`: the engine keeps to its pace. One that wants nothing before it can have all is not.
    `take` is given what has just been committed, before the log wakes anybody. It must not raise, and may do nothing.
    """

    is_watcher: bool = False
    is_paced: bool = True
    is_acking: bool = False
    transport: str = "sse"
    seq: int = 0
    take: Callable[[list[LoggedEvent]], None] | None = None


class Readers:
    """The readers of one stream, changed on the event loop only."""

    def __init__(self) -> None:
        self._attached: set[Reader] = set()
        self.last_transport = ""

    def add(self, reader: Reader) -> None:
        """Count `reader` in."""
        self._attached.add(reader)
        if not reader.is_watcher:
            self.last_transport = reader.transport

    def discard(self, reader: Reader) -> bool:
        """Count `reader` out and tell whether it was in."""
        was_in = reader in self._attached
        self._attached.discard(reader)
        return was_in

    def give(self, events: Sequence[Event], first_seq: int) -> None:
        """Give what has just been committed to those who take it."""
        logged: list[LoggedEvent] = []
        for reader in self._attached:
            if reader.take is not None:
                if not logged:
                    logged = list(map(LoggedEvent, count(first_seq), events))
                reader.take(logged)

    @property
    def num_attached(self) -> int:
        """The owner's readers and watchers."""
        return len(self._attached)

    @property
    def num_watchers(self) -> int:
        """Those that do not count."""
        return sum(reader.is_watcher for reader in self._attached)

    @property
    def num_holding(self) -> int:
        """The owner's readers."""
        return self.num_attached - self.num_watchers

    @property
    def are_paced(self) -> bool:
        """Whether the engine keeps to the pace of the furthest of the owner's readers."""
        return all(reader.is_paced for reader in self._attached if not reader.is_watcher)

    @property
    def furthest_seq(self) -> int:
        """The last event that one of the owner's readers has; 0 without any."""
        return max((reader.seq for reader in self._attached if not reader.is_watcher), default=0)
