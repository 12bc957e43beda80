"""`Prover`: the parent's side of one worker process (see worker.py). Blocking; one text at a time.

A worker that does not answer in time is killed, and one that ends by itself is gone: the text that it had is refused,
and the next one gets a new worker. A worker is started when the first text comes, and ends with its parent.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from streamserve.engine.grammar.limits import GrammarLimits, refusal, too_complex
from streamserve.engine.grammar.vocabulary import TokenTable
from streamserve.engine.grammar.worker import HEAD, write_frame
from streamserve.protocol.errors import EngineUnavailable

logger = logging.getLogger(__name__)

# The package may lie where only the parent's own sys.path finds it; the current folder is never searched (-P).
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from streamserve.engine.grammar.worker import main; main()"
_ROOT = str(Path(__file__).resolve().parents[3])
# To import llguidance and to build the table of a large vocabulary, on a busy machine.
_START_SECONDS = 60.0
_WARM_UP = '{"grammars":[{"json_schema":{"type":"object"}}]}'


class _NoAnswer(Exception):
    """The worker has ended, or was too slow."""


class Prover:
    """Proves texts in a worker. `prove` may be called from any thread; calls wait for one another."""

    def __init__(self, table: TokenTable, limits: GrammarLimits) -> None:
        self._table = table
        self._limits = limits
        self._lock = threading.Lock()  # guards the process and its pipes
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The worker's process id, while there is one."""
        return None if self._process is None else self._process.pid

    def prove(self, source: str) -> int:
        """Return how many bytes a matcher of the text takes; raise BadRequest unless it compiles within its limits."""
        with self._lock:
            process = self._started()
            try:
                found = self._ask(process, {"source": source}, self._limits.compile_seconds)
            except _NoAnswer:
                self._end()
                raise too_complex(
                    f"it takes more than {self._limits.compile_seconds:g} s or too much memory to compile. Simplify it."
                ) from None
            if found["code"] is not None:
                raise refusal(found["code"], found["error"])
            return int(found["num_bytes"])

    def close(self) -> None:
        """End the worker for good; a text that it has is refused."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()  # without the lock, which a running proof holds
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        if self._is_closed:
            raise _unavailable()
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, _ROOT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        settings = {
            "tokens": [token.decode("latin-1") for token in self._table.tokens],
            "special_ids": self._table.special_ids,
            "limits": asdict(self._limits),
            "warm_up": _WARM_UP,
        }
        try:
            self._ask(process, settings, _START_SECONDS)
        except _NoAnswer:
            self._end()
            raise _unavailable() from None
        return process

    def _ask(self, process: subprocess.Popen[bytes], value: Mapping[str, Any], seconds: float) -> Any:
        """Send a frame and return the worker's answer."""
        assert process.stdin is not None
        deadline = time.monotonic() + seconds
        try:
            write_frame(process.stdin, value)
        except OSError:
            raise _NoAnswer from None
        [size] = HEAD.unpack(self._read(process, HEAD.size, deadline))
        return json.loads(self._read(process, size, deadline))

    def _read(self, process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
        assert process.stdout is not None
        out = b""
        while len(out) < size:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(process.stdout.fileno(), size - len(out)) if ready else b""
            if not data:
                raise _NoAnswer
            out += data
        return out

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was left to write has no reader
                    logger.debug("a worker ended with a text unread")


def _unavailable() -> EngineUnavailable:
    message = "the process that compiles grammars does not run. Try again later."
    return EngineUnavailable(message, code="grammar_unavailable")
