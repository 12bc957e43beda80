"""The process in which a grammar is compiled first, and `Prover`, its parent's side. Blocking; one text at a time.

    parent ── frames on stdin ──► worker      settings (tokens, limits), then one text after the other
           ◄── frames on stdout ──            "ready", then for each text what was found

What takes too long or too much memory ends there, and nothing else. A worker that does not answer in time is killed,
and a worker that ends by itself is gone: the text that it had is refused, and the next text gets a new worker. A worker
is started when the first text comes, and ends with its parent.

A frame is its length in four bytes, and JSON. Each text is compiled on a thread with a small stack, so that a text
which overflows it does so there, and not on the engine's larger stack; an alarm of the kernel ends a worker whose
parent is gone in the middle. A worker (`main`) imports nothing but llguidance and our own pure modules.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from streamserve.engine.grammar.limits import GrammarLimits, refusal, shown, too_complex
from streamserve.engine.grammar.matcher import TokenTable, Vocabulary
from streamserve.protocol.errors import EngineUnavailable

logger = logging.getLogger(__name__)

# The package may lie where only the parent's own sys.path finds it; the current folder is never searched (-P).
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from streamserve.engine.grammar.prover import main; main()"
_ROOT = str(Path(__file__).resolve().parents[3])
# To import llguidance and to build the table of a large vocabulary, on a busy machine.
_START_SECONDS = 60.0
_WARM_UP = '{"grammars":[{"json_schema":{"type":"object"}}]}'


class _NoAnswer(Exception):
    """The worker has ended, or was too slow."""


class Prover:
    """Proves texts in a worker. `prove` may be called from any thread; calls wait for each other."""

    def __init__(self, table: TokenTable, limits: GrammarLimits) -> None:
        self._table = table
        self._limits = limits
        self._lock = threading.Lock()  # guards the process and its pipes
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The worker's process id, while there is a worker."""
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


HEAD = struct.Struct(">I")
_NO_MATCH = "no text matches it."
_STACK_BYTES = 2 * 1024 * 1024


def main() -> None:
    """Serve until stdin ends."""
    settings = read_frame(sys.stdin.buffer)
    if settings is None:
        return
    limits = GrammarLimits(**settings["limits"])
    tokens = tuple(token.encode("latin-1") for token in settings["tokens"])
    vocabulary = Vocabulary(TokenTable(tokens=tokens, special_ids=tuple(settings["special_ids"])), limits)
    vocabulary.new_matcher(settings["warm_up"]).compute_bitmask()
    _limit_memory(limits.worker_bytes)
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(vocabulary, limits))
    thread.start()
    thread.join()


def read_frame(stream: IO[bytes]) -> Any:
    """Return the next frame's value; None at the end."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    body = stream.read(HEAD.unpack(head)[0])
    return json.loads(body)


def write_frame(stream: IO[bytes], value: object) -> None:
    """Write a value as a frame."""
    body = json.dumps(value).encode()
    stream.write(HEAD.pack(len(body)) + body)
    stream.flush()


def _serve(vocabulary: Vocabulary, limits: GrammarLimits) -> None:
    write_frame(sys.stdout.buffer, "ready")
    while (request := read_frame(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_REAL, 2 * limits.compile_seconds)  # its default action ends the process
        out = prove(vocabulary, request["source"], limits)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(sys.stdout.buffer, out)


def prove(vocabulary: Vocabulary, source: str, limits: GrammarLimits) -> Mapping[str, Any]:
    """Compile a text and make its first mask. Returns what is wrong with it, or what a matcher takes."""
    before = _used_bytes()
    matcher = vocabulary.new_matcher(source)
    if matcher.is_error():
        return {"code": "invalid_grammar", "error": shown(matcher.get_error())}
    [(mask, may_end)] = vocabulary.masks([matcher])
    if matcher.is_error():
        return {"code": "invalid_grammar", "error": _why_dead(matcher.get_error())}
    if not any(mask):
        return {"code": "invalid_grammar", "error": "only the empty text matches it." if may_end else _NO_MATCH}
    num_bytes = _used_bytes() - before
    if num_bytes > limits.max_bytes:
        message = f"it takes {num_bytes:,} bytes when it is compiled; the limit is {limits.max_bytes:,}. Simplify it."
        return {"code": "grammar_too_complex", "error": message}
    return {"code": None, "error": None, "num_bytes": max(0, num_bytes)}


def _why_dead(error: str) -> str:
    """Return why there is no first token. A grammar that allows none is the usual case."""
    if not error or error.startswith("NoExtension"):
        return _NO_MATCH
    return "the compiler failed on it." if error.startswith("panic") else shown(error)


class _MallInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns: ten counts, of which field4 is `hblkhd` and field7 `uordblks`."""

    _fields_ = tuple((f"field{place}", ctypes.c_size_t) for place in range(10))


def _used_bytes() -> int:
    """Return the allocated bytes of this process, llguidance's too; 0 where libc does not count them."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):  # glibc before 2.33, musl, macOS
        return 0
    mallinfo.restype = _MallInfo
    found = mallinfo()
    return int(found.field7 + found.field4)


def _limit_memory(num_bytes: int) -> None:
    """Let the process grow by so much from here; an allocation beyond that ends it."""
    with suppress(OSError, ValueError):  # not Linux
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + num_bytes, size + num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
