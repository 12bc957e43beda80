"""Whether the machine does only what is measured, and what its memory gives. Linux: reads /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
# Of one core. A quiet machine has its kernel's work and a daemon now and then; 0.1 moves a ratio by a few percent.
MAX_OTHERS, MAX_STOLEN = 0.1, 0.05


@dataclass(frozen=True, slots=True)
class Noise:
    """Cores that other programs, and the machine below this one, have taken over a while."""

    others: float
    stolen: float

    @property
    def is_quiet(self) -> bool:
        """Whether ratios measured meanwhile can be believed."""
        return self.others <= MAX_OTHERS and self.stolen <= MAX_STOLEN

    def __str__(self) -> str:
        return f"other programs {self.others:.2f} cores, stolen {self.stolen:.2f}, load {os.getloadavg()[0]:.1f}"


@dataclass(frozen=True, slots=True)
class Moment:
    """What had been computed on this machine by then, in CPU seconds; `own`: by the sessions measured and this one."""

    at: float
    busy: float
    stolen: float
    own: float

    def noise_since(self, earlier: Moment) -> Noise:
        """Return what others did between two moments."""
        seconds = self.at - earlier.at
        others = self.busy - earlier.busy - (self.own - earlier.own)
        return Noise(max(0.0, others / seconds), (self.stolen - earlier.stolen) / seconds)


def look(sessions: Collection[int]) -> Moment:
    """Read the clocks of the machine; the processes of `sessions` (their leaders' ids), and this process, are ours."""
    user, nice, system, _, _, irq, softirq, stolen = map(int, (_PROC / "stat").read_text().split()[1:9])
    busy = (user + nice + system + irq + softirq) / _TICK
    own = time.process_time() + sum(cpu_seconds(sessions).values())
    return Moment(time.monotonic(), busy, stolen / _TICK, own)


def cpu_seconds(sessions: Collection[int]) -> dict[int, float]:
    """Return the CPU seconds of each session's living processes and of their ended children."""
    seconds = dict.fromkeys(sessions, 0.0)
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        session = int(fields[3])
        if session in seconds:
            seconds[session] += sum(map(int, fields[11:15])) / _TICK
    return seconds


def free_bytes() -> int:
    """Return the memory that new programs may take."""
    lines = (_PROC / "meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def read_bandwidth(num_bytes: int = 1 << 29) -> float:
    """Return the bytes a second that all cores read from memory: the most of several sums over more than any cache."""
    import torch

    values = torch.zeros(num_bytes // 4)
    seconds = []
    for _ in range(6):
        began_at = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - began_at)
    return num_bytes / min(seconds)
