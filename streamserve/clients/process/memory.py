"""`HostMemory`: how the engines of a site share the memory of one machine, under one budget (MEMORY_BYTES).

There is no broker process. Every engine process has an entry in a table, and follows the same rules:

    <runtime_dir>/<hash of site>.memory        the table: JSON, replaced as a whole
    <runtime_dir>/<hash of site>.memory-lock   held (flock) for the milliseconds of a look or a change

    waiting   before its weights are loaded: in the queue, with the bytes that were computed from its files
    held      it loads or is loaded; `free_from` is when it may sleep for another engine, None while it answers
    leaving   it goes to sleep for the first in the queue: its process ends

An entry counts while the engine's own lock is held: the system releases that lock with the process, after its memory.
So a process that is killed leaves no reservation. Blocking, but never for long; knows no requests.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from streamserve.clients.process.config import LaunchConfig, engine_paths, prepare_folder
from streamserve.engine.capacity import GIB, MIB
from streamserve.engine.model.load.source import memory_for
from streamserve.engine.plan import Progress
from streamserve.protocol.engine import AWAITS_MEMORY, TOO_LARGE
from streamserve.protocol.errors import EngineUnavailable

# An engine with nothing to do for so long may sleep for another: longer than the pauses within one request.
QUIET_SECONDS = 1.0
# And so long after it was loaded, if nothing was asked of it yet: the requests that wait for it ask again within that.
FIRST_USE_SECONDS = 10.0
_LOOK_SECONDS = 0.1
# What an engine holds beyond its estimate is counted in such steps, so that the table is seldom written.
_STEP_BYTES = 64 * MIB
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's line in the table. Times are of the machine's monotonic clock."""

    state: str
    num_bytes: int
    since: float
    free_from: float | None = None

    def may_sleep(self, now: float) -> bool:
        """Return whether it has memory, and nothing to do."""
        return self.state == "held" and self.free_from is not None and self.free_from <= now


Table = Mapping[str, Entry]


def queue(table: Table) -> list[str]:
    """Return the engines that wait for memory, the first to get it first."""
    waiting = [(entry.since, name) for name, entry in table.items() if entry.state == "waiting"]
    return [name for _, name in sorted(waiting)]


def may_load(table: Table, name: str, budget: int, now: float) -> bool:
    """Return whether a waiting engine may load now: the first in the queue where it fits.

    An engine behind the first may load where the first cannot: if all that may sleep slept, it would not fit.
    """
    need, first = table[name].num_bytes, queue(table)[0]
    if need > budget - _sum(table, "held", "leaving"):
        return False
    return first == name or table[first].num_bytes > budget - _sum(table, "held") + _idle_bytes(table, now)


def must_sleep(table: Table, name: str, budget: int, now: float) -> bool:
    """Return whether an engine sleeps for the first in the queue: the least recently used of those that may.

    None does where enough leave already, or where that would not make enough room.
    """
    waiting = queue(table)
    if not waiting or not table[name].may_sleep(now):
        return False
    need, free = table[waiting[0]].num_bytes, budget - _sum(table, "held")
    if need <= free or need > free + _idle_bytes(table, now):
        return False
    idle = ((entry.free_from, other) for other, entry in table.items() if entry.may_sleep(now))
    return min(idle)[1] == name


def _sum(table: Table, *states: str) -> int:
    return sum(entry.num_bytes for entry in table.values() if entry.state in states)


def _idle_bytes(table: Table, now: float) -> int:
    return sum(entry.num_bytes for entry in table.values() if entry.may_sleep(now))


class HostMemory:
    """One engine's side of the table. `reserve` is called on its engine thread, `look` on its event loop."""

    def __init__(
        self,
        config: LaunchConfig,
        budget: int,
        clock: Callable[[], float] = time.monotonic,
        limit: int | None = None,
    ) -> None:
        """`limit`: the memory that this process may use at all; None: by the machine and its control groups.

        Engines that web processes start are in the same control groups, so that it bounds them together.
        """
        self._limit = memory_for(config.model.device) if limit is None else limit
        self.budget = min(budget, self._limit)
        self._together = self.budget if config.autostart else budget
        paths = engine_paths(config)
        site = hashlib.sha256(config.site.encode()).hexdigest()[:24]
        self._alias, self._name, self._folder = config.model.alias, paths.lock.stem, paths.lock.parent
        self._file, self._lock = self._folder / f"{site}.memory", self._folder / f"{site}.memory-lock"
        self._clock = clock
        self._num_bytes = 0
        self._has_entry = False
        prepare_folder(paths)

    def reserve(self, num_bytes: int, progress: Progress) -> None:
        """Return once the memory is this engine's. Raises EngineUnavailable where it is more than the budget.

        `progress` gets the place in the queue, and may raise to end the wait.
        """
        if num_bytes > self.budget:
            progress(TOO_LARGE, 0.0)
            raise EngineUnavailable(too_large(self._alias, num_bytes, self.budget, self._limit), code=TOO_LARGE)
        self._num_bytes = num_bytes
        since = self._clock()
        while (place := self._try(since)) != 0:
            progress(f"{AWAITS_MEMORY}, {_ordinal(place)} in the queue", 0.0)
            time.sleep(_LOOK_SECONDS)

    def look(self, free_from: float | None) -> bool:
        """Note from when this engine may sleep for others; return whether it has to now, and leaves."""
        with self._locked() as is_ours:
            if not is_ours:
                return False  # the next look is soon
            table = self._read()
            mine = table.get(self._name)
            if not self._has_entry:
                if mine is not None:  # of an engine that was killed
                    self._write({name: entry for name, entry in table.items() if name != self._name})
                return False
            if mine is None or mine.state != "held":
                return mine is not None and mine.state == "leaving"
            over = max(0, resident_bytes() - self._num_bytes)
            num_bytes = self._num_bytes + -(-over // _STEP_BYTES) * _STEP_BYTES
            now = msgspec.structs.replace(mine, free_from=free_from, num_bytes=num_bytes)
            table = {**table, self._name: now}
            is_leaving = must_sleep(table, self._name, self._together, self._clock())
            if is_leaving:
                table = {**table, self._name: msgspec.structs.replace(now, state="leaving")}
            if table[self._name] != mine:
                self._write(table)
            return is_leaving

    def _try(self, since: float) -> int:
        """Take the memory, and return 0; or the place in the queue."""
        with self._locked() as is_ours:
            if not is_ours:
                return 1
            table = self._read()
            if not self._has_entry or self._name not in table:
                self._has_entry = True
                waiting = Entry(state="waiting", num_bytes=self._num_bytes, since=since)
                table = {**table, self._name: waiting}
                self._write(table)
            if may_load(table, self._name, self._together, self._clock()):
                held = msgspec.structs.replace(table[self._name], state="held")
                self._write({**table, self._name: held})
                return 0
            return queue(table).index(self._name) + 1

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the table's lock; False where another process has it now."""
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(lock)

    def _read(self) -> dict[str, Entry]:
        """Return the entries of engines that live."""
        try:
            table = msgspec.json.decode(self._file.read_bytes(), type=dict[str, Entry])
        except FileNotFoundError:
            return {}
        return {name: entry for name, entry in table.items() if name == self._name or self._lives(name)}

    def _write(self, table: Table) -> None:
        new = self._file.with_suffix(".memory-new")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(msgspec.json.encode(table))
        new.replace(self._file)

    def _lives(self, name: str) -> bool:
        """Return whether an engine holds the lock of that name."""
        try:
            lock = os.open(self._folder / f"{name}.lock", os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False


def too_large(alias: str, num_bytes: int, budget: int, limit: int) -> str:
    """Return the message for a model that never fits, with both sizes. `limit` is what there is at all."""
    bound, way_out = f"the engines of this machine have {budget / GIB:,.2f} GiB (MEMORY_BYTES)", "Raise it"
    if budget >= limit:
        bound, way_out = f"this machine, or its container, has {limit / GIB:,.2f} GiB", "Give it more memory"
    takes = f"the model {alias} takes {num_bytes / GIB:,.2f} GiB"
    return f"{takes}, and {bound}. {way_out}, lower KV_CACHE_BYTES, or QUANTIZE the model."


def resident_bytes() -> int:
    """Return the memory that this process holds; 0 where the system does not show it."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    return 0


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
