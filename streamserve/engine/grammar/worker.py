"""The process in which a grammar is compiled first: what takes too long or too much memory ends here, and nothing else.

    parent ── frames on stdin ──► worker      settings (tokens, limits), then one text after the other
           ◄── frames on stdout ──            "ready", then for each text what was found

A frame is its length in four bytes, and JSON. Each text is compiled on a thread with a small stack, so that one which
overflows it does so here, and not on the engine's larger one; an alarm of the kernel ends a worker whose parent is gone
in the middle. Imports nothing but llguidance and our own pure modules.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from streamserve.engine.grammar.limits import GrammarLimits, shown
from streamserve.engine.grammar.vocabulary import TokenTable, Vocabulary

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


if __name__ == "__main__":
    main()
    os._exit(0)
