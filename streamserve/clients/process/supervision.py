"""When an engine has failed: `CircuitBreaker` in the client, `Watchdog` in the engine process, `StallClock` in both.

A step that hangs is noticed by the event loop of its process. If the step holds the GIL, so that the loop stands
still, a timer of CPU time ends it, or its clients do, which miss the heartbeat. An engine that hangs between two steps
is noticed by the event loop, an event loop that hangs by the clients. An engine that ends itself prints the stack of
every thread, and a client starts the next engine.

All of them count progress and not wall time: a machine on which no process runs (SIGSTOP, a paused VM) costs the engine
nothing, and an engine that computes gets `BUSY_FACTOR` times the patience. A client sees in /proc that the engine waits
for a core or for the disk; then it has that patience, too.

`FlightRecord` has the engine's steps in flight and outlives its process: whose step was it that ended it?

    <runtime_dir>/<hash of site and alias>.flight     pid, is_trial, length; then stream ids, one on each line

Memory of a file: what is written there is in the kernel at once, whatever ends the process a moment later. Written on
the engine thread, at each call of the runner; read by a client that has lost the engine.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from streamserve.clients.process.config import EnginePathError
from streamserve.engine.plan import Flight
from streamserve.protocol.engine import EngineStats

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5
_STDERR = 2
HUNG = 3  # exit status
# Importing torch, reading weights and long steps hold the GIL for seconds, and a weak CPU takes long for them.
BUSY_FACTOR = 6


class StallClock:
    """Sums the seconds in which a process could have shown progress and did not. Pure.

    Between two looks at most `longest_gap` seconds count: in a longer gap the looking process did not run
    either. A second in which the process was busy counts `1 / BUSY_FACTOR`. Progress sets `seconds` to 0.
    """

    def __init__(self, longest_gap: float) -> None:
        self.seconds = 0.0
        self._longest_gap = longest_gap
        self._looked_at: float | None = None

    def look(self, now: float, busy_seconds: float = 0.0) -> float:
        """Count the time since the last look, and return the sum."""
        if self._looked_at is not None:
            gap = min(now - self._looked_at, self._longest_gap)
            self.seconds += gap - min(gap, busy_seconds) * (1 - 1 / BUSY_FACTOR)
        self._looked_at = now
        return self.seconds


class ProcessActivity:
    """How busy another process is, by its files in /proc (proc(5)). `is_known`: whether the system has them."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._cpu_seconds = self._read()

    @property
    def is_known(self) -> bool:
        """Whether the system shows what the process does."""
        return self._cpu_seconds is not None

    def busy_seconds(self, seconds: float) -> float:
        """Return for how many of the last `seconds` it computed, or waited for a core or for a disk.

        A stopped process is not busy, nor is a process whose threads all sleep.
        """
        before, self._cpu_seconds = self._cpu_seconds, self._read()
        if before is None or self._cpu_seconds is None:
            return 0.0
        if any(state in "RD" for state in self._thread_states()):
            return seconds
        return min(seconds, self._cpu_seconds - before)

    def _read(self) -> float | None:
        with suppress(OSError):
            fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime
        return None

    def _thread_states(self) -> str:
        states = ""
        with suppress(OSError):
            for thread in (self._folder / "task").iterdir():
                states += (thread / "stat").read_text().rpartition(")")[2].split()[0]
        return states


class CircuitBreaker:
    """Counts the failures of an engine and decides when to try again (Nygard's pattern). Pure.

    It opens after `max_failures` within `seconds`, and after as long allows one try (half open). A failure of that try,
    or within `seconds` of it, opens it again at once.
    """

    def __init__(self, max_failures: int, seconds: float) -> None:
        self.is_open = False
        self._max_failures = max_failures
        self._seconds = seconds
        self._recent: list[float] = []

    def note(self, now: float) -> None:
        """Count a failure."""
        window = 2 * self._seconds if self.is_open else self._seconds
        is_relapse = self.is_open and now - self._recent[-1] < window
        self._recent = [at for at in self._recent if now - at < self._seconds] + [now]
        self.is_open = is_relapse or len(self._recent) >= self._max_failures

    def trip(self, now: float) -> None:
        """Count a failure that an early retry cannot mend."""
        self.note(now)
        self.is_open = True

    def pause(self) -> float:
        """Return how many seconds to wait before the next try."""
        if self.is_open:
            return self._seconds
        return min(_FIRST_PAUSE * 2.0 ** len(self._recent), _LONGEST_PAUSE)


def _exit_with_stacks() -> None:
    faulthandler.dump_traceback(file=_STDERR, all_threads=True)
    os._exit(HUNG)


class Watchdog:
    """Ends the process of an engine that hangs.

    `seconds`: the longest time, while sequences run, without a report of a step or of a look around. `tick_seconds`:
    how often `check` is called where nothing delays it.
    """

    def __init__(self, seconds: float, tick_seconds: float, give_up: Callable[[], None] = _exit_with_stacks) -> None:
        self._seconds = seconds
        self._give_up = give_up
        self._num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._stall = StallClock(2 * tick_seconds)
        # How many reports there were, and how long the reported call may take; None: the engine is between two calls.
        # An engine whose sequences all wait for their readers still reports: it looks around, and lives.
        self._report: tuple[int, float | None] = (0, None)
        self._seen: tuple[int, tuple[int, float | None]] = (-1, self._report)  # the number of steps, the last report
        self._cpu_seconds = time.process_time()
        # In C, without the GIL: the stacks, and then the end that SIGPROF has by default.
        faulthandler.register(signal.SIGPROF, file=_STDERR, all_threads=True, chain=True)

    def on_step(self, flight: Flight) -> None:
        """A call of the runner begins, and may take so long; None: no call is under way. Engine thread.

        CPU time beyond what all cores give in the time of a busy step ends the process, even while the step holds the
        GIL.
        """
        seconds = flight.seconds_allowed
        self._report = self._report[0] + 1, seconds
        signal.setitimer(signal.ITIMER_PROF, (seconds or 0.0) * BUSY_FACTOR * self._num_cores)

    def check(self, stats: EngineStats, now: float, busy_seconds: float | None = None) -> None:
        """Give up if there is work and no progress for too long. Event loop, every `tick_seconds`.

        `busy_seconds`: of the time since the last check; None: by this process's own clock.
        """
        if busy_seconds is None:
            before, self._cpu_seconds = self._cpu_seconds, time.process_time()
            busy_seconds = self._cpu_seconds - before
        report = self._report
        allowed = report[1]
        if (stats.steps, report) != self._seen or (allowed is None and stats.running == 0):
            self._stall.look(now)
            self._stall.seconds = 0.0
            self._seen = (stats.steps, report)
            return
        what = "between two steps" if allowed is None else f"in step {stats.steps}"
        seconds = self._seconds if allowed is None else allowed
        if self._stall.look(now, busy_seconds) > seconds:
            logger.critical("no progress for %.1f s %s, with %d running sequences", seconds, what, stats.running)
            self._give_up()


_HEADER = struct.Struct("IIi")
# Thousands of stream ids; a step that holds more is not recorded.
_NUM_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LastFlight:
    """The streams in whose steps an engine ended; none where it ended between two steps, or without a record."""

    stream_ids: frozenset[str] = frozenset()
    is_trial: bool = False


class FlightRecord:
    """The engine's side. One thread."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._written: tuple[frozenset[str], bool] = (frozenset(), False)

    def write(self, flight: Flight) -> None:
        """Record what is in flight; costs nothing where that is what it was."""
        if (flight.stream_ids, flight.is_trial) != self._written:
            self._written = flight.stream_ids, flight.is_trial
            text = "\n".join(flight.stream_ids).encode()
            text = text if len(text) <= _NUM_BYTES - _HEADER.size else b""
            self._memory[: _HEADER.size] = _HEADER.pack(os.getpid(), 0, 0)
            self._memory[_HEADER.size : _HEADER.size + len(text)] = text
            self._memory[: _HEADER.size] = _HEADER.pack(os.getpid(), flight.is_trial, len(text))


@contextmanager
def flight_record(path: Path) -> Iterator[FlightRecord]:
    """Make an empty record. The caller holds the engine's lock, and removes the file after an orderly end.

    Raises EnginePathError where its disk is full. It takes all of its room now: a write into mapped memory without any
    would end the process (SIGBUS).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        try:
            for _ in range(_NUM_BYTES // mmap.PAGESIZE):
                file.write(bytes(mmap.PAGESIZE))
        except OSError as error:
            raise EnginePathError(
                f"{path} cannot be written to: {error.strerror}. Make room, or set RUNTIME_DIR."
            ) from error
        memory = mmap.mmap(descriptor, _NUM_BYTES)
    yield FlightRecord(memory)


def last_flight(path: Path, pid: int) -> LastFlight:
    """Return what was in flight when the engine of that process id ended; nothing if another engine wrote it."""
    try:
        with path.open("rb") as file:
            writer, is_trial, length = _HEADER.unpack(file.read(_HEADER.size))
            lines = file.read(length).decode().split("\n") if writer == pid and length > 0 else []
    except (OSError, struct.error, UnicodeDecodeError):
        return LastFlight()
    return LastFlight(stream_ids=frozenset(lines), is_trial=bool(is_trial and lines))
