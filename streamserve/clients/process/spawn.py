"""Start an engine process that outlives the worker which starts it. Event loop; nothing is left to reap.

    worker ──Popen──► starter ──fork──► engine     a session of its own: Ctrl-C and autoreload do not reach it
             ◄─exit 0─   ◄── one byte ──            "the socket is there"

The starter ends when the engine listens, and so tells the worker that it may connect, or that it never will.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from streamserve.clients.process.config import LaunchConfig, spec_to_json
from streamserve.clients.process.paths import open_log, place_of

logger = logging.getLogger(__name__)

# The package may lie where only the worker's own sys.path finds it; the current folder is never searched (-P).
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from streamserve.clients.process.server import main; sys.exit(main())"
)
_ROOT = str(Path(__file__).resolve().parents[3])
_POLL_SECONDS = 0.02


class SpawnFailed(Exception):
    """The engine process ended before it listened; its output says why."""


async def spawn(spec: LaunchConfig) -> None:
    """Start the engine of `spec`; returns when it listens, or there is one already. Raises SpawnFailed, OSError."""
    starter = _start(spec)
    try:
        async with asyncio.timeout(spec.failure_seconds):
            while starter.poll() is None:  # noqa: ASYNC110  (asyncio's own way takes a thread for each child)
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError as error:
        raise SpawnFailed(f"the engine of {spec.model.alias} did not begin to listen") from error
    finally:
        if starter.poll() is None:
            _kill_session(starter)
    if starter.returncode != 0:
        raise SpawnFailed(f"the engine of {spec.model.alias} ended at once; see {place_of(spec).log}")


def _start(spec: LaunchConfig) -> subprocess.Popen[bytes]:
    logger.info("starting the engine of model %s", spec.model.alias)
    with open_log(place_of(spec)) as log:
        starter = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, _ROOT, f"engine-{spec.model.alias}"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    assert starter.stdin is not None
    with suppress(BrokenPipeError), starter.stdin as told:  # a starter that is dead already says so by its exit
        told.write(spec_to_json(spec))
    return starter


def _kill_session(starter: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()
