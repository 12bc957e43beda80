"""Jobs, and the results of those that have run: kept in a file if one is given, so that a long run can be continued.

A result counts for the code that made it: the key holds a digest of the engine's and the simulation's sources.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.qoe.bounds import Bounds, bounds
from benchmarks.qoe.contenders import contenders
from benchmarks.qoe.machines import Machine
from benchmarks.qoe.score import Score, score
from benchmarks.qoe.simulation import Simulation
from benchmarks.qoe.usage import Shares
from benchmarks.qoe.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
BOUNDS = "bounds"
_SOURCES = ("engine/*.py", "engine/kv/*.py", "engine/policy/*.py", "clients/engine_run.py")
_SOURCES += ("loadtest/reading.py", "loadtest/visits.py")
_OWN_SOURCES = ("workload", "machines", "usage", "simulation", "score", "contenders", "bounds")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of a contender, or BOUNDS of the same requests."""

    machine: Machine
    workload: Workload
    seconds: float
    seed: int
    contender: str

    def run(self) -> Score | Bounds:
        """Simulate, or compute the bounds."""
        machine = self.machine
        visits = self.workload.draw(self.seed, machine.capacity, self.seconds)
        if self.contender == BOUNDS:
            return bounds(machine, visits)
        chosen = contenders()[self.contender]
        simulation = Simulation(machine, chosen.config, visits, acks=chosen.acks)
        simulation.run()
        return score(simulation, machine)

    @property
    def key(self) -> str:
        """Return what names it in the file."""
        return f"{self!r} {digest()}"


@lru_cache
def digest() -> str:
    """Return a digest of all that a result depends on, this job aside."""
    paths = [path for pattern in _SOURCES for path in sorted((ROOT / "streamserve").glob(pattern))]
    paths += [Path(__file__).with_name(f"{name}.py") for name in _OWN_SOURCES]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


class Results:
    """Results by job. `path` None: in memory only."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self._known[entry["key"]] = entry["result"]

    def __contains__(self, job: Job) -> bool:
        return job.key in self._known

    def get(self, job: Job) -> Score | Bounds:
        """Return the result of a job that has run."""
        known = self._known[job.key]
        if job.contender == BOUNDS:
            return Bounds(**known)
        return Score(**{**known, "by_class": tuple(known["by_class"]), "time": Shares(**known["time"])})

    def run(self, jobs: Sequence[Job], num_processes: int) -> Iterator[Job]:
        """Run those that have no result yet; yield each when it has one."""
        missing = [job for job in jobs if job not in self]
        if num_processes == 1:
            for job in missing:
                self._note(job, job.run())
                yield job
            return
        with ProcessPoolExecutor(num_processes) as pool:
            for job, result in zip(missing, pool.map(Job.run, missing), strict=True):
                self._note(job, result)
                yield job

    def _note(self, job: Job, result: Score | Bounds) -> None:
        self._known[job.key] = asdict(result)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"key": job.key, "result": asdict(result)}) + "\n")
