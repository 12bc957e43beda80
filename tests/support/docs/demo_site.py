"""The demo site as a user starts it: `manage.py demo` and other commands, with a state folder for each test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.processes import variables_of

ROOT = Path(__file__).resolve().parents[3]


def environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    """Return the variables of the demo site on a state folder of its own, with the echo engine."""
    environ = {name: value for name, value in os.environ.items() if name not in {"DJANGO_SETTINGS_MODULE", "KEY"}}
    return environ | {"STREAMSERVE_STATE_DIR": str(tmp_path), "MODEL": "echo", "PYTHONUNBUFFERED": "1", **variables}


def processes_of(tmp_path: Path) -> set[int]:
    """Return the processes that were started for the demo site on that folder, whatever their parent is now."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return {pid for pid in pids if f"STREAMSERVE_STATE_DIR={tmp_path}" in variables_of(pid)}


def end_engines(tmp_path: Path) -> None:
    """End the engines that a site on that folder has left, as `streamserve_engine --stop` does, which starts Django."""
    told: set[int] = set()
    until = time.monotonic() + 60.0
    while left := processes_of(tmp_path):
        for pid in left - told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        told |= left
        assert time.monotonic() < until, f"these processes do not end: {left}"
        time.sleep(0.05)


def manage(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the demo site to its end."""
    command = [sys.executable, "manage.py", *arguments]
    environ = environment(tmp_path, **variables)
    return subprocess.run(command, cwd=ROOT, env=environ, text=True, capture_output=True, timeout=120)


def serve(tmp_path: Path, **variables: str) -> subprocess.Popen[str]:
    """Start what `make run` starts, on a state folder of its own."""
    return subprocess.Popen(
        [sys.executable, "manage.py", "demo"],
        cwd=ROOT,
        env=environment(tmp_path, **variables),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
