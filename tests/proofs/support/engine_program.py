"""An engine process like `streamserve.clients.process.server`, which writes down its plans or has a planted fault.

python -m tests.proofs.support.engine_program [--plans FILE] [--hang-at STEP [--hold-gil]] < spec.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path

from streamserve.clients.process.config import (
    LaunchConfig,
    config_from_json,
    config_to_json,
    engine_paths,
    listening,
    locked,
    open_log,
    prepare_folder,
)
from streamserve.clients.process.server import EngineServer
from streamserve.clients.thread.acceptance import LoadedEngine
from streamserve.clients.thread.engine_thread import Load
from streamserve.engine.plan import Progress, Runner, StepPlan
from tests.support.engines.engine_processes import pid_of
from tests.support.engines.runners import WrappedRunner

_ROOT = Path(__file__).resolve().parents[3]


class HangingRunner(WrappedRunner):
    """One of its steps never returns."""

    def __init__(self, runner: Runner, *, at_step: int, holds_gil: bool) -> None:
        super().__init__(runner)
        self._at_step = at_step
        self._holds_gil = holds_gil

    def launch(self, plan: StepPlan) -> object:
        if plan.step_id >= self._at_step:
            self.never_end()
        return self.inner.launch(plan)

    def never_end(self) -> None:
        """Wait for ever, as for a device; or keep every other thread from running, as C code may."""
        if self._holds_gil:
            sum(repeat(0))
        while True:
            time.sleep(3600)


def _with_fault(load: Load, at_step: int, holds_gil: bool, progress: Progress) -> LoadedEngine:
    loaded = load(progress)
    return replace(loaded, runner=HangingRunner(loaded.runner, at_step=at_step, holds_gil=holds_gil))


async def serve(spec: LaunchConfig, options: argparse.Namespace) -> int:
    """Run the engine server, with the faults of the options."""
    prepare_folder(engine_paths(spec))
    with locked(engine_paths(spec)) as is_ours, listening(engine_paths(spec)) as listener:
        assert is_ours
        host = EngineServer(spec)
        thread = host._client._thread
        if options.hang_at is not None:
            thread._load = partial(_with_fault, thread._load, options.hang_at, options.hold_gil)
        if options.plans is not None:
            plans = open(options.plans, "w", buffering=1)  # noqa: ASYNC230, SIM115  (until the process ends)
            thread._on_plan = lambda plan: print(time.monotonic(), len(plan.chunks), file=plans)
        return await host.serve(listener)


@contextmanager
def running(spec: LaunchConfig, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run this program until it listens, and kill it at the end; its output goes to the engine's own file."""
    command = [sys.executable, "-m", "tests.proofs.support.engine_program", *options]
    with (
        open_log(engine_paths(spec)) as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=_ROOT) as process,
    ):
        try:
            assert process.stdin is not None
            process.stdin.write(config_to_json(spec))
            process.stdin.close()
            while pid_of(spec) != process.pid:
                assert process.poll() is None
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


def plans_of(path: Path) -> list[tuple[float, int]]:
    """Return for each plan when it was made, by `time.monotonic()`, and how many chunks it had."""
    lines = path.read_text().splitlines(keepends=True)
    pairs = (line.split() for line in lines if line.endswith("\n"))
    return [(float(at), int(num_chunks)) for at, num_chunks in pairs]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans")
    parser.add_argument("--hang-at", type=int)
    parser.add_argument("--hold-gil", action="store_true")
    options = parser.parse_args()
    if options.hold_gil:  # on two cores: the timer counts the CPU time of all
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    return asyncio.run(serve(config_from_json(sys.stdin.buffer.read()), options))


if __name__ == "__main__":
    sys.exit(main())
