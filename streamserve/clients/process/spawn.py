"""Start an engine process that outlives the worker. Event loop; no child is left to reap.

    worker ──Popen──► starter ──fork──► engine     a session of its own: Ctrl-C and autoreload do not reach it
             ◄─exit 0─   ◄── one byte ──            "the socket is there"

The starter's exit status is 0 once the engine listens, and 1 if it never does.
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

from streamserve.clients.process.config import LaunchConfig, config_to_json
from streamserve.clients.process.paths import engine_paths, open_log

logger = logging.getLogger(__name__)

# The package may lie where only the worker's own sys.path finds it; the current folder is never searched (-P).
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from streamserve.clients.process.server import main; sys.exit(main())"
)
_ROOT = str(Path(__file__).resolve().parents[3])
_POLL_SECONDS = 0.02


class SpawnFailed(Exception):
    """The engine process ended before it listened; its output has the reason."""


async def spawn(config: LaunchConfig) -> None:
    """Start the config's engine; returns when it or another one listens. Raises SpawnFailed, OSError."""
    starter = _start(config)
    try:
        async with asyncio.timeout(config.failure_seconds):
            while starter.poll() is None:  # noqa: ASYNC110  (asyncio's own way takes a thread for each child)
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError as error:
        raise SpawnFailed(f"the engine of {config.model.alias} did not begin to listen") from error
    finally:
        if starter.poll() is None:
            _kill_session(starter)
    if starter.returncode != 0:
        raise SpawnFailed(f"the engine of {config.model.alias} ended at once; see {engine_paths(config).log}")


def _start(config: LaunchConfig) -> subprocess.Popen[bytes]:
    logger.info("starting the engine of model %s", config.model.alias)
    with open_log(engine_paths(config)) as log:
        starter = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, _ROOT, f"engine-{config.model.alias}"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    assert starter.stdin is not None
    with suppress(BrokenPipeError), starter.stdin as stdin:  # the exit status reports a dead starter
        stdin.write(config_to_json(config))
    return starter


def _kill_session(starter: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()
