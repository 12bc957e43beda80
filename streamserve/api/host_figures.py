"""`HostFigures`: what all processes of this host have counted, for one scrape of `/metrics` and for the live page.

    <folder>/<process id>.figures    what a process has counted; written anew a second after it changed
    <folder>/past.figures            what processes counted that have ended, and marks of the last minutes

Web processes and workers share the folder. A file is replaced at once, so a reader never waits for its writer, and a
process that hangs or was killed delays nothing. What was shown is in a file before: a process shows of itself what it
has just written, so that no counter falls when it is killed; at most the last second of its counts is lost. The first
process that sees a dead process's file adds its counters to the past, under a lock that none waits for. Without a
folder there is this process only.

Files are read and written in threads, one call at a time; all else is on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamserve.api.logs import get_logger
from streamserve.protocol.figures import MINUTE_SECONDS, Figures, Past, pack, pack_past, unpack, unpack_past
from streamserve.protocol.metrics import Sample
from streamserve.streams.lease.liveness import Liveness

log = get_logger(__name__)

EVERY_SECONDS = 1.0
_KEEP_SECONDS = 10.0  # how often a process looks for the files of dead processes; at the turn of a minute, too
# A disk that takes longer delays no scrape: of other processes the figures of before are shown.
_MAX_SECONDS = 2.0
_ENDING, _PAST = ".figures", "past"
_MAX_TRIES = 10  # of a reading during which files vanished, because their processes were added to the past


@dataclass(frozen=True, slots=True)
class Shared:
    """What is known of this host at one moment: all figures, and the past, whose marks are subtracted from them."""

    figures: Figures
    past: Past

    def of_last(self, minutes: int, now: float) -> Figures:
        """Return what was counted in so many minutes, and in the minute that runs."""
        return self.figures.since(self.past.at(int(now // MINUTE_SECONDS) - minutes))

    def by_minute(self, minutes: int, now: float) -> list[tuple[int, Figures, Figures]]:
        """Return of each of the last minutes when it began (Unix seconds), what was counted then, and at its end."""
        last = int(now // MINUTE_SECONDS)
        bounds = [self.past.at(minute) for minute in range(last - minutes + 1, last + 1)]
        begins = [MINUTE_SECONDS * (last - minutes + 1 + index) for index in range(minutes)]
        return list(zip(begins, bounds, [*bounds[1:], self.figures], strict=True))


class HostFigures:
    """`collect` returns what this process has counted. `start` it; `read` at any time; `aclose` writes the last."""

    def __init__(
        self,
        collect: Callable[[], Iterable[Sample]],
        liveness: Liveness | None,
        folder: Path | None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._collect, self._liveness, self._folder = collect, liveness, folder
        self._written = b""
        self._past, self._past_of = Past(), (0, 0)
        self._peers: dict[str, Figures] = {}
        self._others = Figures()  # by the last reading
        self._reading: asyncio.Task[Shared] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="host figures", context=Context())

    async def aclose(self) -> None:
        """Write what was counted last, and stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.read()

    async def read(self) -> Shared:
        """Return what all processes of the host have counted: of this process now, of the others a second ago."""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(_MAX_SECONDS):
                return await self._fresh()
        log.warning("host_figures_unread", folder=str(self._folder))
        figures = Figures(self._collect())
        figures.add(self._others)
        return Shared(figures, self._past)

    async def _run(self) -> None:
        is_written, kept_at, minute = True, -_KEEP_SECONDS, 0
        while True:
            try:
                if time.monotonic() - kept_at >= _KEEP_SECONDS or self._minute() != minute:
                    kept_at, minute = time.monotonic(), self._minute()
                    await self._fresh()
                elif self._folder is not None and self._liveness is not None:
                    await self._once(self._written_only(self._folder, self._liveness))
                is_written = True
            except Exception:  # the edge of the task: a disk that is full or away
                if is_written:
                    log.exception("host_figures_failed")
                is_written = False
            await asyncio.sleep(EVERY_SECONDS)

    async def _fresh(self) -> Shared:
        """Write and read, after the call that is under way."""
        return await self._once(self._sync())

    async def _once(self, work: Coroutine[Any, Any, Shared]) -> Shared:
        try:
            while self._reading is not None and not self._reading.done():
                await asyncio.wait({self._reading})
        except asyncio.CancelledError:
            work.close()
            raise
        self._reading = asyncio.get_running_loop().create_task(work, context=Context())
        return await asyncio.shield(self._reading)

    async def _sync(self) -> Shared:
        own = Figures(self._collect())
        if self._folder is None or self._liveness is None:
            self._past.mark(self._minute(), own)
            return Shared(own, self._past)
        return await asyncio.to_thread(self._exchange, self._folder, self._liveness, own)

    async def _written_only(self, folder: Path, liveness: Liveness) -> Shared:
        own = Figures(self._collect())
        await asyncio.to_thread(self._write, folder, liveness, own)
        return Shared(own, self._past)

    def _minute(self) -> int:
        return int(self._clock() // MINUTE_SECONDS)

    # In a thread

    def _write(self, folder: Path, liveness: Liveness, own: Figures) -> None:
        """Write what this process has counted, if that is news."""
        packed = pack(own)
        if packed != self._written:
            folder.mkdir(mode=0o700, exist_ok=True)
            _replace(folder / f"{liveness.own_id}{_ENDING}", packed)
            self._written = packed

    def _exchange(self, folder: Path, liveness: Liveness, own: Figures) -> Shared:
        """Write what this process has counted, and read what the others have."""
        self._write(folder, liveness, own)
        past, peers = self._read(folder, liveness.own_id)
        dead = {name for name in peers if not liveness.lives_here(name)}
        figures = Figures(own)
        others = Figures(past.ended)
        for name, one in peers.items():
            others.add(one.counted() if name in dead else one)
        figures.add(others)
        self._others = others
        if dead or past.ids or past.mark(self._minute(), figures):
            self._keep(folder, liveness, figures)
        return Shared(figures, past)

    def _read(self, folder: Path, own_id: str) -> tuple[Past, dict[str, Figures]]:
        """Return the past, and the figures of each other process that it does not have."""
        for _ in range(_MAX_TRIES):
            # The names first: a process that is added to the past in between is in it, or its file is missed.
            names = [path.stem for path in folder.glob(f"*{_ENDING}")]
            past = self._read_past(folder)
            peers: dict[str, Figures] = {}
            try:
                for name in names:
                    if name not in (_PAST, own_id) and name not in past.ids:
                        peers[name] = unpack((folder / f"{name}{_ENDING}").read_bytes())
            except FileNotFoundError:
                continue
            self._peers = peers
            break
        return past, self._peers

    def _read_past(self, folder: Path) -> Past:
        try:
            with (folder / f"{_PAST}{_ENDING}").open("rb") as file:
                state = os.fstat(file.fileno())
                if (state.st_ino, state.st_mtime_ns) != self._past_of:
                    self._past = unpack_past(file.read())
                    self._past_of = state.st_ino, state.st_mtime_ns
        except FileNotFoundError:
            self._past, self._past_of = Past(), (0, 0)
        return self._past

    def _keep(self, folder: Path, liveness: Liveness, figures: Figures) -> None:
        """Add the dead to the past, and mark the minute, unless another process does that now."""
        with _locked(folder / "lock") as is_held:
            if not is_held:
                return
            self._past_of = 0, 0
            past, peers = self._read(folder, liveness.own_id)
            dead = [name for name in peers if not liveness.lives_here(name)]
            for name in dead:
                past.ended.add(peers[name].counted())
            gone = past.ids | set(dead)
            # A file that is still there after a crash right here is known, and not counted twice.
            past.ids = {name for name in gone if (folder / f"{name}{_ENDING}").exists()}
            past.mark(self._minute(), figures)
            _replace(folder / f"{_PAST}{_ENDING}", pack_past(past))
            self._past_of = 0, 0
            for name in past.ids:
                (folder / f"{name}{_ENDING}").unlink(missing_ok=True)


def _replace(path: Path, data: bytes) -> None:
    new = path.with_suffix(f".{os.getpid()}.new")
    new.write_bytes(data)
    new.replace(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock while the block runs, if no other process has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)
