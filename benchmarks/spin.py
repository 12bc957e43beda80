"""How long OpenMP's threads spin before they sleep: our engine under several policies, alone and beside busy cores.

    python -m benchmarks.engine --spin [--rounds 5] [--steps 24] [--dtype bf16]

libgomp reads its policy when it is loaded, so each policy has a process of its own. The processes take turns, one
measurement at a time, and the ratios are those of one round: a busy machine slows all of them alike. "Busy" means one
endless loop for each core beside the engine, of the same priority.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks.support.machine import progress
from streamserve.engine.model.openmp import NAMES, bound_spin

POLICIES: Mapping[str, Mapping[str, str]] = {
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spin 300": {"GOMP_SPINCOUNT": "300"},
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "spin 3,000": {"GOMP_SPINCOUNT": "3000"},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "spin 30,000": {"GOMP_SPINCOUNT": "30000"},
    "spin 100,000": {"GOMP_SPINCOUNT": "100000"},
    "libgomp's own": {},
    "ours": bound_spin({}),
}
MEASUREMENTS = {
    "decode step, 1 stream": "decode 1",
    "decode step, 8 streams": "decode 8",
    "first token, 1k prompt": "first",
}
PROMPT_LEN = 128
LONG_PROMPT_LEN = 1024


def run(folder: str, dtype: str, options: argparse.Namespace) -> None:
    """Measure every policy, alone and beside busy cores; print a table for each."""
    names = [name for name in POLICIES if not options.policies or name in options.policies.split(";")]
    with ExitStack() as stack:
        engines = {name: stack.enter_context(_engine(folder, dtype, POLICIES[name])) for name in names}
        for num_busy in map(int, options.busy.split(",")):
            print(f"\n{dtype}, beside {num_busy} endless loops; ms, and the ratio to {names[0]}", flush=True)
            print(f"{'':24}" + "".join(f"{name:>20}" for name in names))
            with _busy(num_busy):
                for title, question in MEASUREMENTS.items():
                    _print_line(title, _take_turns(list(engines.values()), f"{question} {options.steps}", options))


def _take_turns(
    engines: Sequence[subprocess.Popen[str]], question: str, options: argparse.Namespace
) -> list[list[float]]:
    """Ask every engine once unmeasured, then `rounds` times in turns; return seconds by engine."""
    times: list[list[float]] = [[] for _ in engines]
    for number in range(options.rounds + 1):
        progress(f"{question}, round {number}")
        for engine, seen in zip(engines, times, strict=True):
            assert engine.stdin is not None
            assert engine.stdout is not None
            print(question, file=engine.stdin, flush=True)
            seconds = float(engine.stdout.readline())
            if number > 0:
                seen.append(seconds)
    return times


def _print_line(title: str, times: list[list[float]]) -> None:
    cells = []
    for seen in times:
        ratio = statistics.median(one / first for one, first in zip(seen, times[0], strict=True))
        cells.append(f"{statistics.median(seen) * 1000:12.1f} ({ratio:.2f})")
    print(f"{title:24}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


@contextmanager
def _engine(folder: str, dtype: str, policy: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | dict(policy)
    command = [sys.executable, "-m", "benchmarks.spin", folder, dtype]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        with engine.stdin:
            progress(f"{dict(policy)}: loaded in {float(engine.stdout.readline()):.1f} s")
            yield engine


@contextmanager
def _busy(num_loops: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_loops)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def serve(folder: str, dtype: str) -> None:
    """Answer each line of stdin with a measurement in seconds, in a process of its own."""
    from benchmarks.support.contenders import Ours

    started_at = time.perf_counter()
    engine = Ours(folder, dtype)
    print(time.perf_counter() - started_at, flush=True)
    for line in sys.stdin:
        kind, *numbers = line.split()
        *streams, steps = map(int, numbers)
        seconds = (
            engine.decode(streams[0], PROMPT_LEN, steps) if kind == "decode" else engine.first_token(LONG_PROMPT_LEN)
        )
        print(seconds, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
