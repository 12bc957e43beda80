"""`LaunchConfig`: everything an engine process needs to start, as one value that both sides can compare; and its files.

The site makes the config from its settings; a spawned engine gets it as JSON. Of its files the first three are:

    <runtime_dir>/<hash of site and alias>.lock     held by the engine for as long as it lives (flock)
    <runtime_dir>/<hash of site and alias>.sock     made and removed under the lock
    <runtime_dir>/<hash of site and alias>.flight   see `FlightRecord` in supervision.py
    <runtime_dir>/<hash of site>.memory             see memory.py: who has how much of MEMORY_BYTES
    <state_dir>/engine-<alias>.log                  the output of an engine that a client has started

The folder and the files belong to our user alone (0700, 0600). A process that does not get the lock is not needed.
Unix; blocking, but never for long.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from streamserve import __version__
from streamserve.engine.config import EmbedderConfig, EngineConfig, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """The settings common to all engine processes of a site."""

    runtime_dir: str = ""
    """Folder of sockets and locks, mode 0700, with a path under 80 characters; `""`: `streamserve-<uid>` among the
    temporary files. Web processes and engines name the same one.
    """
    idle_seconds: float = 60.0
    """An engine that a web process has started ends so long after its last client."""
    drain_seconds: float = 20.0
    """An engine that is stopped or replaced lets its answers run for so long; what is left continues at the next
    engine.
    """
    hang_seconds: float = 10.0
    """An engine without a heartbeat for so long is killed and replaced. While it computes, or waits for a core or the
    disk, it gets six times as long; time in which no process of the machine runs does not count.
    """
    max_failures: int = 5
    """After so many ends within `FAILURE_SECONDS` the model counts as failed: requests get errors, and `/readyz`
    answers 503. An end that one request alone has caused is not counted; it takes three ends to find that request, so
    leave this at 4 or more.
    """
    failure_seconds: float = 60.0
    """Also how long until a failed model is tried again."""
    memory_bytes: int | None = None
    """Memory that the engines of the site on this machine have together (docs/engines.md). Each is then loaded when it
    is first asked, and the least recently used that answers nothing goes to sleep for another. What an engine takes is
    computed before it is loaded; a KV cache without a size of its own takes its share of this instead of all memory.
    `None`: no bound, and every engine is loaded when it starts.
    """
    sleep_after_seconds: float = 0.0
    """An engine that answers nothing for so long goes to sleep: it gives its memory back, and is loaded again when it
    is asked. Each is then loaded when it is first asked. 0: never.
    """

    def __post_init__(self) -> None:
        for name in ("idle_seconds", "drain_seconds", "failure_seconds", "sleep_after_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes 0 or more")
        if self.hang_seconds <= 0:
            raise ValueError(f"hang_seconds is {self.hang_seconds}; it takes more than 0")
        if self.max_failures < 1:
            raise ValueError(f"max_failures is {self.max_failures}; it takes 1 or more")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ValueError(f"memory_bytes is {self.memory_bytes}; it takes more than 0")

    @property
    def is_lazy(self) -> bool:
        """Whether engines are loaded when they are asked, and not before."""
        return self.memory_bytes is not None or self.sleep_after_seconds > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig(ProcessConfig):
    """One engine process: its model, its site, its folders.

    `site` names the site (its BASE_DIR), so that two sites of one user stay apart. `state_dir` holds the engine's
    output file. `autostart`: the first client that needs the engine starts it; otherwise it is started by
    `manage.py streamserve_engine`. `made_at` is `time.monotonic()` when the settings were read (None: when the config
    is first used): where two configs differ, the engine of the more recent config replaces the other. `embedder`: the
    process serves that embedding model, and `model` has its name.
    """

    model: ModelConfig
    engine: EngineConfig = field(default_factory=EngineConfig)
    site: str = ""
    state_dir: str = ""
    autostart: bool = True
    echo_step_seconds: float = 0.0
    made_at: float | None = None
    embedder: EmbedderConfig | None = None


def config_to_json(config: LaunchConfig) -> bytes:
    """Return the config as an engine process reads it."""
    return _to_json(config)


def config_from_json(data: bytes) -> LaunchConfig:
    """Return the config that JSON stands for; raises ValueError."""
    return msgspec.json.decode(data, type=LaunchConfig)


def dated(config: LaunchConfig) -> LaunchConfig:
    """Return the config with `made_at` filled in."""
    return config if config.made_at is not None else replace(config, made_at=time.monotonic())


def config_hash(config: LaunchConfig) -> str:
    """Return what two clients must agree on to share an engine: model, engine config, our version."""
    config = config_from_json(config_to_json(config))  # 12 seconds are 12.0 seconds
    agreed = (__version__, config.model, config.engine, config.echo_step_seconds, config.embedder)
    return hashlib.sha256(_to_json(agreed)).hexdigest()


def _to_json(value: object) -> bytes:
    return msgspec.json.encode(value, order="deterministic", enc_hook=_plain)


def _plain(value: Any) -> Any:
    """Return a mapping as a dict, the only mapping that msgspec encodes (CLASSES is a read-only mapping)."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"no JSON for {type(value).__name__}")


# sockaddr_un.sun_path holds 108 bytes, the closing zero included (unix(7)).
_MAX_PATH_BYTES = 107
# A client that tests the lock holds it for an instant.
_LOCK_TRIES, _LOCK_SECONDS = 10, 0.02
_MAX_LOG_BYTES = 8 * 1024 * 1024
_BACKLOG = 128
_RUNTIME_DIR = 'STREAMSERVE["ENGINE_PROCESS"]["RUNTIME_DIR"]'


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
            f"{paths.socket} is too long for a unix socket ({_MAX_PATH_BYTES} bytes). Name a shorter folder in "
            f"{_RUNTIME_DIR}."
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EnginePathError(
            f"{folder} cannot be made: {error.strerror}. Name another folder in {_RUNTIME_DIR}."
        ) from error
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise EnginePathError(
            f"{folder} must be a folder of user {os.geteuid()} with mode 0700. Change it, or name another folder in "
            f"{_RUNTIME_DIR}."
        )


@contextmanager
def locked(paths: EnginePaths, *, until_exit: bool = False) -> Iterator[bool]:
    """Hold the lock, as the engine; False if another process holds it.

    `until_exit`: the system releases it with the process, after its memory.
    """
    lock = _open_lock(paths)
    is_ours = _try_lock(lock)
    try:
        yield is_ours
    finally:
        if not (is_ours and until_exit):
            os.close(lock)


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
    """Bind the socket, replacing a stale socket file, and remove it in the end. Under the lock only."""
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
    """Open the output file for appending; a long file is renamed first."""
    paths.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if paths.log.stat().st_size > _MAX_LOG_BYTES:
            paths.log.replace(paths.log.with_suffix(".log.1"))
    return os.fdopen(os.open(paths.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


@contextmanager
def _lock_file(paths: EnginePaths) -> Iterator[int]:
    lock = _open_lock(paths)
    try:
        yield lock
    finally:
        os.close(lock)


def _open_lock(paths: EnginePaths) -> int:
    return os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _try_lock(lock: int) -> bool:
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_SECONDS)
        else:
            return True
    return False
