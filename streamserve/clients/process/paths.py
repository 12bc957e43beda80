"""The files of an engine process: its socket, its lock, its record, its output. Unix; blocking, but never for long.

    <runtime_dir>/<hash of site and alias>.lock     held by the engine for as long as it lives (flock)
    <runtime_dir>/<hash of site and alias>.sock     made and removed under the lock
    <runtime_dir>/<hash of site and alias>.flight   see flight_record.py
    <state_dir>/engine-<alias>.log                  the output of an engine that a worker has started

The folder and the files belong to our user alone (0700, 0600). A process that does not get the lock is not needed.
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
# A worker that tests the lock holds it for an instant.
_LOCK_TRIES, _LOCK_SECONDS = 10, 0.02
_MAX_LOG_BYTES = 8 * 1024 * 1024
_BACKLOG = 128


class EnginePathError(Exception):
    """The engine's folder cannot be used: not ours alone, or a path too long. For the log, not for clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePaths:
    """The files of one engine."""

    socket: Path
    lock: Path
    flight: Path
    log: Path


def engine_paths(config: LaunchConfig) -> EnginePaths:
    """Return the files of a config's engine; no I/O. Site and alias alone decide: the rest of the config may change."""
    folder = Path(config.runtime_dir or Path(tempfile.gettempdir()) / f"streamserve-{os.geteuid()}")
    name = hashlib.sha256(f"{config.site}\0{config.model.alias}".encode()).hexdigest()[:24]
    log = f"engine-{re.sub('[^A-Za-z0-9._-]', '-', config.model.alias)}.log"
    return EnginePaths(
        socket=folder / f"{name}.sock",
        lock=folder / f"{name}.lock",
        flight=folder / f"{name}.flight",
        log=Path(config.state_dir or folder) / log,
    )


def prepare_folder(paths: EnginePaths) -> None:
    """Make the folder, or check that only our user can write to it; raises EnginePathError."""
    folder = paths.socket.parent
    if len(os.fsencode(paths.socket)) > _MAX_PATH_BYTES:
        raise EnginePathError(
            f"{paths.socket} is too long for a unix socket ({_MAX_PATH_BYTES} bytes). Use a shorter folder."
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise EnginePathError(f"{folder} must be a folder of user {os.geteuid()} with mode 0700. Remove or change it.")


@contextmanager
def locked(paths: EnginePaths) -> Iterator[bool]:
    """Hold the lock, as the engine; False if another process holds it."""
    with _lock_file(paths) as lock:
        yield _try_lock(lock)


def is_locked(paths: EnginePaths) -> bool:
    """Return whether an engine holds the lock, responsive or not."""
    with _lock_file(paths) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@contextmanager
def listening(paths: EnginePaths) -> Iterator[socket.socket]:
    """Bind the socket, replacing a stale one, and remove it in the end. Under the lock only."""
    paths.socket.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        mask = os.umask(0o177)
        try:
            listener.bind(str(paths.socket))
        finally:
            os.umask(mask)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        try:
            yield listener
        finally:
            paths.socket.unlink(missing_ok=True)


def open_log(paths: EnginePaths) -> BinaryIO:
    """Open the output file for appending; a long one is renamed first."""
    paths.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if paths.log.stat().st_size > _MAX_LOG_BYTES:
            paths.log.replace(paths.log.with_suffix(".log.1"))
    return os.fdopen(os.open(paths.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


@contextmanager
def _lock_file(paths: EnginePaths) -> Iterator[int]:
    lock = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        yield lock
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_SECONDS)
        else:
            return True
    return False
