"""Plant one fault at a time in a copy of the engine, and see whether the simulation notices.

`python -m tests.sim.mutants` tries all, `... NAME NAME` some, `--list` shows them. Exits 1 if fewer than 95 % are
caught, if the unchanged engine fails, or if a fault's text is no longer in the code. (Idea: mutation testing, by hand:
plausible faults only, not every operator negated.)
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.sim.planted import (
    Mutant,
    block_pool,
    core,
    drafts,
    overlap,
    park,
    policy,
    recovery,
    scheduler,
    sequence,
    sharing,
    windows,
)

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = (
    *block_pool.MUTANTS,
    *sequence.MUTANTS,
    *scheduler.MUTANTS,
    *core.MUTANTS,
    *park.MUTANTS,
    *policy.MUTANTS,
    *overlap.MUTANTS,
    *recovery.MUTANTS,
    *sharing.MUTANTS,
    *drafts.MUTANTS,
    *windows.MUTANTS,
)
MIN_CAUGHT = 0.95
NUM_SEEDS = 120
# A fault may keep the engine from ending; the unchanged engine takes a quarter of this time. Time on the processor: a
# busy machine catches no fault.
MOST_CPU_SECONDS = 60
_COPIED = (
    "streamserve/__init__.py",
    "streamserve/engine",
    "streamserve/protocol",
    "tests/__init__.py",
    "tests/sim",
)
_NOT_COPIED = shutil.ignore_patterns("model", "__pycache__", "test_*.py")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one fault. `is_caught` is None where it could not be planted; `how` is the last line of output."""

    name: str
    is_caught: bool | None
    how: str


def copy_engine(folder: Path) -> None:
    """Copy what the simulation needs, without torch, Django and tests."""
    for part in (*_COPIED, "tests/support/engines/cores.py", "tests/support/engines/runners.py"):
        source, target = ROOT / part, folder / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=_NOT_COPIED)
        else:
            shutil.copy(source, target)


def plant(mutant: Mutant, folder: Path) -> str | None:
    """Change the copy; return why it cannot be changed, or None."""
    path = folder / "streamserve" / "engine" / mutant.file
    text = path.read_text()
    count = text.count(mutant.old)
    if count != 1:
        return f"the text to change stands {count} times in {mutant.file}"
    path.write_text(text.replace(mutant.old, mutant.new))
    return None


def run_seeds(folder: Path, num_seeds: int) -> tuple[bool, str]:
    """Run the simulation in a copy; return whether it passed, and its last line."""
    limits = ["--seeds", str(num_seeds), "--cpu-seconds", str(MOST_CPU_SECONDS)]
    command = [sys.executable, "-m", "tests.sim.seeds", *limits]
    env = {**os.environ, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode == -signal.SIGXCPU:
        return False, f"no end after {MOST_CPU_SECONDS} s"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else f"exit status {done.returncode}"


def try_one(mutant: Mutant, num_seeds: int) -> Verdict:
    """Plant one fault in a fresh copy and run the simulation on it."""
    with tempfile.TemporaryDirectory(prefix="streamserve-mutant-") as name:
        folder = Path(name)
        copy_engine(folder)
        reason = plant(mutant, folder)
        if reason is not None:
            return Verdict(mutant.name, None, reason)
        has_passed, how = run_seeds(folder, num_seeds)
        return Verdict(mutant.name, not has_passed, how)


def try_all(mutants: tuple[Mutant, ...], num_seeds: int, num_workers: int) -> Iterator[Verdict]:
    """Try the faults side by side, in order."""
    with ThreadPoolExecutor(num_workers) as workers:
        yield from workers.map(lambda mutant: try_one(mutant, num_seeds), mutants)


def check_engine(num_seeds: int) -> tuple[bool, str]:
    """Run the simulation on the unchanged engine: if that fails, every mutant would count as caught."""
    with tempfile.TemporaryDirectory(prefix="streamserve-mutant-") as name:
        copy_engine(Path(name))
        return run_seeds(Path(name), num_seeds)


def show(verdict: Verdict, law: int) -> None:
    """Print one verdict."""
    word = {True: "caught", False: "SURVIVED", None: "NOT FOUND"}[verdict.is_caught]
    print(f"{word:9}  law {law:2}  {verdict.name}: {verdict.how[:150]}", flush=True)


def judge(verdicts: list[Verdict]) -> int:
    """Print the totals and return the exit status."""
    lost = [one.name for one in verdicts if one.is_caught is None]
    survivors = [one.name for one in verdicts if one.is_caught is False]
    num_tried = len(verdicts) - len(lost)
    num_caught = num_tried - len(survivors)
    print(f"\n{num_caught} of {num_tried} planted faults caught; survivors: {', '.join(survivors) or 'none'}")
    if lost:
        print(f"no longer plantable, refit them: {', '.join(lost)}")
    return 1 if lost or num_caught < MIN_CAUGHT * num_tried else 0


def main() -> int:
    """Parse the command line, try the faults, judge."""
    parser = argparse.ArgumentParser(prog="tests.sim.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these, by name or by a part of it")
    parser.add_argument("--list", action="store_true", help="show the faults and leave")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="runs of the simulation for each")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    chosen = tuple(one for one in MUTANTS if not options.names or any(name in one.name for name in options.names))
    if options.list:
        print("\n".join(f"law {one.law:2}  {one.file:14}  {one.name}" for one in chosen))
        return 0
    is_sound, how = check_engine(options.seeds)
    print(f"the engine as it is: {how}")
    if not is_sound:
        return 1
    verdicts = []
    for mutant, verdict in zip(chosen, try_all(chosen, options.seeds, options.workers), strict=True):
        show(verdict, mutant.law)
        verdicts.append(verdict)
    return judge(verdicts)


if __name__ == "__main__":
    sys.exit(main())
