"""The record of an engine's steps in flight, which outlives the engine process: whose step was it that ended it?

    <runtime_dir>/<hash of site and alias>.flight     pid, is_trial, length; then stream ids, one a line

Memory of a file: what is written there is in the kernel at once, whatever ends the process a moment later. Written on
the engine thread, at each call of the runner; read by a worker that has lost the engine.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streamserve.engine.plan import Flight

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
    """Make an empty record. The caller holds the engine's lock, and removes the file after an orderly end."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(descriptor, _NUM_BYTES)
        memory = mmap.mmap(descriptor, _NUM_BYTES)
    finally:
        os.close(descriptor)
    yield FlightRecord(memory)


def last_flight(path: Path, pid: int) -> LastFlight:
    """Return what was in flight when the engine of that process id ended; nothing if the record is of another one."""
    try:
        with path.open("rb") as file:
            writer, is_trial, length = _HEADER.unpack(file.read(_HEADER.size))
            lines = file.read(length).decode().split("\n") if writer == pid and length > 0 else []
    except (OSError, struct.error, UnicodeDecodeError):
        return LastFlight()
    return LastFlight(stream_ids=frozenset(lines), is_trial=bool(is_trial and lines))
