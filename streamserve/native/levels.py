"""The instruction sets that the kernels are compiled for, and the choice among them for a processor.

A library is compiled for a named set, never for "this machine", so that a file in a shared cache or in the wheel runs
on every processor that has the set. The flags are Linux's (/proc/cpuinfo); it leaves out what the system cannot save.
"""

from __future__ import annotations

import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

X86 = frozenset({"x86_64", "AMD64"})


@dataclass(frozen=True, slots=True)
class Level:
    """An instruction set: its name, the processor flags that it needs, and the compiler's options for it."""

    name: str
    flags: frozenset[str]
    options: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
_AVX512_FLAGS = frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"})
GENERIC = Level("generic", frozenset(), ())
# The best first. On aarch64 "generic" has NEON, which every such processor has.
LEVELS = (
    Level("avx512_bf16", _AVX512_FLAGS | {"avx512_bf16"}, (*_AVX512, "-mavx512bf16")),
    Level("avx512", _AVX512_FLAGS, _AVX512),
    Level("avx2", frozenset({"avx2", "fma", "f16c"}), _AVX2),
    GENERIC,
)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the flags of this machine's processor; none where the system does not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def usable_levels(flags: Collection[str], machine: str = platform.machine()) -> tuple[Level, ...]:
    """Return the levels that a processor with these flags can run, the best first."""
    return tuple(level for level in LEVELS if level.flags <= set(flags) and (machine in X86 or not level.flags))


def best_level() -> Level:
    """Return the level for this machine."""
    return usable_levels(cpu_flags())[0]
