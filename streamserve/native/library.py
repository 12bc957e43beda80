"""The loaded library: its functions through ctypes, which releases the GIL while they run.

Every argument is a plain number: addresses (`data_ptr()`), sizes and strides as int64, factors as float. The caller
keeps the memory alive, contiguous where the header says so, and passes the number of threads: the functions use
OpenMP's pool of the process, which is torch's (src/parallel.h). Lives on the engine thread. Knows no torch.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

from streamserve.native.arena import Arena
from streamserve.native.build import NativeUnavailable, OnProgress, build, find, source_key
from streamserve.native.levels import Level, best_level

ABI_VERSION = 3  # src/abi.h has the same number
ADDRESS, INT, FLOAT = c_void_p, c_int64, c_float
DONE, OUT_OF_MEMORY, OUT_OF_RANGE = 0, 1, 2  # Status of src/status.h

# The functions of src/abi.h, with their arguments' types. All return None but those of RETURNS and CHECKED.
FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "ss_abi_version": (),
    "ss_self_check": (),
    "ss_team_size": (INT,),
    "ss_linear_bytes": (INT, INT, INT),
    "ss_pack_dense": (INT, ADDRESS, INT, INT, ADDRESS, INT),
    "ss_pack_int8": (ADDRESS, ADDRESS, INT, INT, ADDRESS, INT),
    "ss_pack_int4": (ADDRESS, ADDRESS, ADDRESS, INT, INT, ADDRESS, INT),
    "ss_quantize_int8": (INT, ADDRESS, INT, INT, ADDRESS, ADDRESS, INT),
    "ss_quantize_int4": (INT, ADDRESS, INT, INT, ADDRESS, ADDRESS, ADDRESS, INT),
    "ss_linear": (INT, ADDRESS, ADDRESS, INT, INT, INT, ADDRESS, INT, INT, ADDRESS, INT),
    "ss_experts": (ADDRESS, INT, ADDRESS, INT, ADDRESS, INT),
    "ss_linear_rows": (INT, ADDRESS, INT, INT, ADDRESS, INT, INT, ADDRESS, INT),
    "ss_attend_decodes": (ADDRESS, INT, INT),
    "ss_attend_prompt": (ADDRESS, INT, INT),
    "ss_write_slots": (ADDRESS, INT, INT, ADDRESS, INT, ADDRESS, INT, INT, INT),
    "ss_draw": (ADDRESS, INT),
    "ss_step": (ADDRESS, ADDRESS, INT),
}
RETURNS: Mapping[str, Any] = {
    "ss_abi_version": INT,
    "ss_self_check": ctypes.c_int,
    "ss_team_size": INT,
    "ss_linear_bytes": INT,
}
# What returns a Status, and raises MemoryError or IndexError for it: outputs hold anything then.
CHECKED = frozenset(
    {
        "ss_linear",
        "ss_linear_rows",
        "ss_experts",
        "ss_attend_decodes",
        "ss_attend_prompt",
        "ss_write_slots",
        "ss_draw",
        "ss_step",
    }
)


class Library:
    """The functions of one compiled library as attributes without their prefix: `library.team_size(2)`."""

    def __init__(self, path: Path, level: Level) -> None:
        """Load the library at `path`. Raises `NativeUnavailable` if it is not of this version."""
        self.path, self.level, self.arena = path, level, Arena()
        self.source = f"{level.name}-{source_key(level)}"  # what it was made from, by whatever compiler
        _share_openmp()
        try:
            handle = ctypes.CDLL(str(path))
            version = handle.ss_abi_version()
            self._functions = {name.removeprefix("ss_"): getattr(handle, name) for name in FUNCTIONS}
        except (OSError, AttributeError) as error:
            raise NativeUnavailable(f"the library {path} cannot be loaded: {error}") from error
        if version != ABI_VERSION:
            raise NativeUnavailable(f"the library {path} has version {version}, and {ABI_VERSION} is needed")
        for name, types in FUNCTIONS.items():
            function = self._functions[name.removeprefix("ss_")]
            function.argtypes, function.restype = types, INT if name in CHECKED else RETURNS.get(name)
            if name in CHECKED:
                function.errcheck = _raise_status

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_functions"][name]
        except KeyError:
            raise AttributeError(name) from None


def _raise_status(status: int, function: Any, _arguments: Any) -> None:
    """Raise what a function's status says."""
    if status == OUT_OF_MEMORY:
        raise MemoryError(f"{function.__name__}: not enough memory")
    if status == OUT_OF_RANGE:
        raise IndexError(f"{function.__name__}: a token, slot or block is beyond its table")


def open_library(
    *,
    compiles: bool,
    level: Level | None = None,
    cache: Path | None = None,
    on_progress: OnProgress = lambda _fraction: None,
) -> Library:
    """Return the library for this processor. `compiles`: make it if it is not there, which takes seconds.

    Raises `NativeUnavailable`.
    """
    level = level or best_level()
    if os.name != "posix":
        raise NativeUnavailable("native kernels need Linux or another Unix")
    path = build(level, cache, on_progress) if compiles else find(level, cache)
    if path is None:
        raise NativeUnavailable("the native library is not compiled yet, and only an engine's own process compiles it")
    return Library(path, level)


def _share_openmp() -> None:
    """Make the symbols of the OpenMP runtime that torch has loaded visible to libraries that are loaded later."""
    for path in mapped_openmp():
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def mapped_openmp(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Return the paths of the OpenMP runtimes in this process: none before torch is imported, else one."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count(" ") > 4 and "/" in line}
    return sorted(path for path in paths if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")))
