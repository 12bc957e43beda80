"""Compile the kernels into a shared library, once per level and compiler, and keep it for the next start.

    prebuilt/<level>-<sources>.so              in a wheel made by `make wheel`
    <cache>/<level>-<sources>-<compiler>.so    compiled here

The names hold hashes of what a library was made from, so a changed source, option or compiler makes a new file and an
old one is never loaded. The cache belongs to this user alone (0700, the owner is checked, no link): what is in it is
run. A lock file keeps two processes from compiling the same library; a rename makes it appear whole.

Called by the engine's process and by `make wheel`; a web process only looks (`find`). Knows no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from streamserve.native.levels import LEVELS, Level, best_level, usable_levels

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"
# No -ffast-math, no contraction: a row's numbers must not depend on where the compiler puts its code. No -march=native:
# see levels.py.
OPTIONS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-tree-reassoc",  # the order of integer sums is chosen for the registers
    "-fno-rtti",
)
COMPILERS = ("g++", "clang++", "c++")
COMPILE_SECONDS, TRIAL_SECONDS = 300.0, 20.0  # of one file; of loading the library once
_LOCK_POLL_SECONDS = 0.2
_MAX_COMPLAINT = 300  # characters of a compiler's message
_NO_COMPILER = "no C++ compiler was found: install g++ (or clang++, or set CXX)"

OnProgress = Callable[[float], None]


class NativeUnavailable(Exception):
    """There is no native library; the message says why and what to do, for operators."""


def find(level: Level, cache: Path | None = None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the library for `level`, from the wheel or from the cache; None if it must be compiled first."""
    prebuilt = PREBUILT / prebuilt_name(level)
    if prebuilt.is_file():
        return prebuilt
    folder = cache or default_cache(environment)
    if not is_private(folder):
        return None
    compiler = find_compiler(environment)
    name = cache_name(level, compiler) if compiler else f"{level.name}-{source_key(level)}-*.so"
    return next((path for path in folder.glob(name) if path.is_file()), None)


def obstacle(level: Level, cache: Path | None = None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return why this machine can have no library; None if it has one, or can compile it."""
    folder = cache or default_cache(environment)
    if find(level, cache, environment) is not None:
        return None
    if find_compiler(environment) is None:
        return _NO_COMPILER
    return _not_private(folder) if os.path.lexists(folder) and not is_private(folder) else None


def build(
    level: Level,
    cache: Path | None = None,
    on_progress: OnProgress = lambda _fraction: None,
    environment: Mapping[str, str] = os.environ,
) -> Path:
    """Return the library for `level`, compiled if it is not there yet. Raises `NativeUnavailable`."""
    found = find(level, cache, environment)
    if found is not None:
        return found
    compiler = find_compiler(environment)
    if compiler is None:
        raise NativeUnavailable(_NO_COMPILER)
    folder = cache or default_cache(environment)
    _make_private(folder)
    path = folder / cache_name(level, compiler)
    try:
        with _locked(folder / "lock", lambda: on_progress(0.0)):
            if not path.is_file():  # another process may have made it meanwhile
                logger.info("compiling the native kernels with %s into %s: once, for some seconds", compiler[0], folder)
                compile_library(level, compiler, path, on_progress)
                _try(path)
    except OSError as error:
        raise NativeUnavailable(f"the cache {folder} cannot be written to: {error.strerror or error}") from error
    return path


def find_compiler(environment: Mapping[str, str] = os.environ) -> tuple[str, ...] | None:
    """Return the command of the C++ compiler: CXX, else the first on the path; None if there is none."""
    chosen = tuple(shlex.split(environment.get("CXX", "")))
    if chosen:
        return chosen if shutil.which(chosen[0], path=environment.get("PATH")) else None
    return next(((name,) for name in COMPILERS if shutil.which(name, path=environment.get("PATH"))), None)


def default_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of compiled libraries: in the user's cache, or where there is none in the temporary folder."""
    home = environment.get("XDG_CACHE_HOME") or (f"{environment['HOME']}/.cache" if environment.get("HOME") else "")
    folder = Path(home) / "streamserve" / "native"
    with suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
    if home and os.access(folder.parent, os.W_OK):
        return folder
    return Path(tempfile.gettempdir()) / f"streamserve-native-{os.geteuid()}"


def source_key(level: Level) -> str:
    """Return the hash of the sources and of the options that they are compiled with for `level`."""
    digest = hashlib.sha256(repr((OPTIONS, level.options, platform.machine())).encode())
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def source_files() -> list[Path]:
    """Return the sources and headers, in a fixed order."""
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def prebuilt_name(level: Level) -> str:
    """Return the name of a library in the wheel."""
    return f"{level.name}-{source_key(level)}.so"


def cache_name(level: Level, compiler: Sequence[str]) -> str:
    """Return the name of a library in the cache: a new compiler makes a new library."""
    said = _output([*compiler, "--version"]).encode() + repr(tuple(compiler)).encode()
    return f"{level.name}-{source_key(level)}-{hashlib.sha256(said).hexdigest()[:8]}.so"


def compile_library(level: Level, compiler: Sequence[str], path: Path, on_progress: OnProgress) -> None:
    """Compile all sources for `level`, a few at a time, and put the library at `path`. Raises `NativeUnavailable`."""
    sources = [file for file in source_files() if file.suffix == ".cpp"]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
        objects = [Path(scratch) / f"{file.stem}.o" for file in sources]

        def compile_file(file: Path, output: Path) -> None:
            _run([*compiler, *OPTIONS, *level.options, "-c", str(file), "-o", str(output)])

        with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
            jobs = [pool.submit(compile_file, file, output) for file, output in zip(sources, objects, strict=True)]
            for number, job in enumerate(jobs):
                job.result()
                on_progress((number + 1) / (len(jobs) + 1))
        library = Path(scratch) / path.name
        # No -fopenmp: the pool's symbols are looked up in the process, which has torch's (src/parallel.h).
        _run([*compiler, "-shared", *map(str, objects), "-o", str(library)])
        if not library.is_file():
            raise NativeUnavailable(f"{compiler[0]} ended well and wrote no library")
        os.replace(library, path)
    on_progress(1.0)


def is_private(folder: Path) -> bool:
    """Return whether `folder` is a real folder that only this user can write to and read."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077 == 0


def _make_private(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    except OSError as error:
        raise NativeUnavailable(f"the cache {folder} cannot be made: {error}") from error
    if not is_private(folder):
        raise NativeUnavailable(_not_private(folder))


def _not_private(folder: Path) -> str:
    return f"the cache {folder} is not this user's alone, and what is in it would be run: remove it, or chmod 700 it"


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file while the block runs; `on_wait` is called while another process holds it, and may raise."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                on_wait()
                time.sleep(_LOCK_POLL_SECONDS)
        yield


def _run(command: Sequence[str]) -> None:
    """Run a compiler. Raises `NativeUnavailable` with the beginning of what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} could not compile: {error}") from error
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        raise NativeUnavailable(f"{command[0]} failed with status {done.returncode}: {said[:_MAX_COMPLAINT]}")


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _try(path: Path) -> None:
    """Load a fresh library and run its self-check in a process of its own; remove it if that process fails."""
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).ss_self_check())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, timeout=TRIAL_SECONDS, check=False
        )
        status: int | str = done.returncode
    except subprocess.TimeoutExpired:
        status = "a timeout"
    if status:
        path.unlink(missing_ok=True)
        raise NativeUnavailable(f"the compiled library does not work here (its self-check ended with {status})")


def main(folder: str | None = None) -> None:
    """Compile the library of this machine into the cache; with a `folder`, those of all levels: `make wheel`."""
    try:
        if folder is None:
            print(build(best_level()))
            return
        compiler = find_compiler()
        if compiler is None:
            raise NativeUnavailable(_NO_COMPILER)
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        every_flag = frozenset().union(*(level.flags for level in LEVELS))
        for level in usable_levels(every_flag):
            compile_library(level, compiler, target / prebuilt_name(level), lambda _fraction: None)
            print(target / prebuilt_name(level))
    except NativeUnavailable as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main(*sys.argv[1:2])
