"""Where an engine process lies: its socket, its lock, its output. Unix files; blocking, but never for long.

    <runtime_dir>/<hash of site and alias>.lock     held by the engine for as long as it lives (flock)
    <runtime_dir>/<hash of site and alias>.sock     made and removed under the lock
    <state_dir>/engine-<alias>.log                  what an engine that a worker has started prints

The folder is ours alone (0700), the files too (0600). Who loses the race for the lock is not needed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from streamserve.clients.process.config import LaunchConfig

# sockaddr_un.sun_path holds 108 bytes, the closing zero included (unix(7)).
_MAX_PATH_BYTES = 107
# A worker that looks whether the lock is held holds it itself for an instant.
_CLAIM_TRIES, _CLAIM_SECONDS = 10, 0.02
_MAX_LOG_BYTES = 8 * 1024 * 1024
_BACKLOG = 128


class PlaceError(Exception):
    """The engine cannot lie there: not our folder, or a path too long. For the log, not for clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePaths:
    """The files of one engine."""

    socket: Path
    lock: Path
    log: Path


def place_of(spec: LaunchConfig) -> EnginePaths:
    """Return where the engine of a spec lies; touches nothing. Site and alias alone decide: the config may change."""
    folder = Path(spec.runtime_dir or Path(tempfile.gettempdir()) / f"streamserve-{os.geteuid()}")
    name = hashlib.sha256(f"{spec.site}\0{spec.model.alias}".encode()).hexdigest()[:24]
    log = f"engine-{re.sub('[^A-Za-z0-9._-]', '-', spec.model.alias)}.log"
    return EnginePaths(
        socket=folder / f"{name}.sock", lock=folder / f"{name}.lock", log=Path(spec.state_dir or folder) / log
    )


def prepare_folder(place: EnginePaths) -> None:
    """Make the folder, or make sure that nobody else can have put anything into it; raises PlaceError."""
    folder = place.socket.parent
    if len(os.fsencode(place.socket)) > _MAX_PATH_BYTES:
        raise PlaceError(
            f"{place.socket} is too long for a unix socket ({_MAX_PATH_BYTES} bytes). Use a shorter folder."
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PlaceError(f"{folder} must be a folder of user {os.geteuid()} with mode 0700. Remove it, or mend that.")


@contextmanager
def claimed(place: EnginePaths) -> Iterator[bool]:
    """Hold the lock, as the engine that this is; False if there is one already."""
    with _lock_file(place) as lock:
        yield _try_lock(lock)


def is_claimed(place: EnginePaths) -> bool:
    """Tell whether an engine holds the lock, answering or not."""
    with _lock_file(place) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@contextmanager
def listening(place: EnginePaths) -> Iterator[socket.socket]:
    """Bind the socket, over that of an engine that died, and remove it in the end. Under the lock only."""
    place.socket.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        mask = os.umask(0o177)
        try:
            listener.bind(str(place.socket))
        finally:
            os.umask(mask)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        try:
            yield listener
        finally:
            place.socket.unlink(missing_ok=True)


def open_log(place: EnginePaths) -> BinaryIO:
    """Open the output file for more; a long one is put aside first."""
    place.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if place.log.stat().st_size > _MAX_LOG_BYTES:
            place.log.replace(place.log.with_suffix(".log.1"))
    return os.fdopen(os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


@contextmanager
def _lock_file(place: EnginePaths) -> Iterator[int]:
    lock = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        yield lock
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    for _ in range(_CLAIM_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_CLAIM_SECONDS)
        else:
            return True
    return False
