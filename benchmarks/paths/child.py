"""The measured side of `benchmarks.paths`: a web worker or an engine of a site, run under a profiler.

    python -P child.py TREE RECORD web PORT            daphne on project.asgi, as its command line runs it
    python -P child.py TREE RECORD manage ARGUMENT...  manage.py

SIGUSR1 writes everything recorded so far to the file RECORD, as JSON: functions, names of threads, and events in the
order in which they happened, each [time, thread, function, note]. The time is CLOCK_MONOTONIC in nanoseconds, which all
processes of a machine share. An event is the entry of a function under TREE/streamserve (note: whether a generator or
coroutine was resumed), or, without a function, a mark (the note):

    app METHOD PATH        the ASGI app is entered            recv PEER, eof PEER   a socket was read
    disconnect             `receive` gives http.disconnect    send PEER             a socket is about to be written
    sql KIND TABLE         Django executes a statement        wait                  an event loop is about to block
    launch                 the runner's `launch` returned
    dropped                the scheduler holds a sequence less, and the function that took it out returned

PEER is "engine" for a unix socket with a name, the peer's port for TCP. Of TREE only manage.py and project.asgi are
imported by name. The runner is the object with `launch`, `collect`, `num_blocks` and `vocab_size`; the scheduler is
the one with `schedule` and the lists `running` and `waiting`.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import itertools
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_NEVER_RESUMED = -1


class Recorder:
    """Records entries of the functions under TREE/streamserve, and marks. One for a process, all threads."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._package = f"{tree / 'streamserve'}{os.sep}"
        self._events: list[tuple[int, int, int | None, Any]] = []
        self._functions: list[tuple[str, int, str]] = []
        self._threads: dict[int, str] = {}
        # id(code) -> code, its index in `_functions`, the offset of its first entry. By id, as a code object's hash is
        # slow; the object is kept, so that its id is not given to another.
        self._known: dict[int, tuple[CodeType, int | None, int]] = {}
        self._scheduler: Any = None
        self._num_sequences = 0
        self._remover: FrameType | None = None

    def install(self) -> None:
        """Record this thread and every thread started from now on."""
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)

    def mark(self, text: str) -> None:
        """Record that something happens now."""
        self._events.append((time.monotonic_ns(), threading.get_ident(), None, text))

    def write(self, path: Path) -> None:
        """Write everything to `path`, which appears when it is whole."""
        record = {"functions": self._functions, "threads": self._threads, "events": self._events[:]}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(record))
        part.replace(path)

    def profile(self, frame: FrameType, event: str, arg: object) -> None:
        """Take an event of `sys.setprofile`."""
        if event != "call" and event != "return":
            return
        code = frame.f_code
        _, index, first_entry = self._known.get(id(code)) or self._learn(code)
        if index is None:
            return
        if self._scheduler is not None:
            self._watch_scheduler(frame, event)
        if event == "return":
            if code.co_name == "launch" and _is_runner(frame.f_locals.get("self")):
                self.mark("launch")
            return
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread().name
        is_resumed = first_entry != _NEVER_RESUMED and frame.f_lasti != first_entry
        self._events.append((time.monotonic_ns(), thread, index, is_resumed))
        if self._scheduler is None and code.co_name == "schedule":
            self._find_scheduler(frame.f_locals.get("self"))

    def _learn(self, code: CodeType) -> tuple[CodeType, int | None, int]:
        """Decide once whether a code object counts. Module and class bodies are not CO_OPTIMIZED."""
        index = None
        is_function = bool(code.co_flags & inspect.CO_OPTIMIZED) and not code.co_name.startswith("<")
        if is_function and code.co_filename.startswith(self._package):
            index = len(self._functions)
            file = str(Path(code.co_filename).relative_to(self._tree))
            self._functions.append((file, code.co_firstlineno, code.co_qualname))
        known = self._known[id(code)] = code, index, _first_entry_of(code)
        return known

    def _find_scheduler(self, owner: object) -> None:
        if all(hasattr(getattr(owner, name, None), "__len__") for name in ("running", "waiting")):
            self._scheduler = owner

    def _watch_scheduler(self, frame: FrameType, event: str) -> None:
        """Mark the return of the function in which the scheduler's lists became shorter.

        The loss shows at the next event: a call made by that function, or its return.
        """
        num_sequences = len(self._scheduler.running) + len(self._scheduler.waiting)
        if num_sequences < self._num_sequences:
            self._remover = frame if event == "return" else frame.f_back
        self._num_sequences = num_sequences
        if event == "return" and frame is self._remover:
            self._remover = None
            self.mark("dropped")


def _first_entry_of(code: CodeType) -> int:
    """Return the offset at which a generator or coroutine is entered first; all its other entries resume it."""
    if not code.co_flags & _SUSPENDS:
        return _NEVER_RESUMED
    entries = (one.offset for one in dis.get_instructions(code) if one.opname == "RESUME" and one.arg == 0)
    return next(entries, _NEVER_RESUMED)


def _is_runner(owner: object) -> bool:
    return all(hasattr(owner, name) for name in ("collect", "num_blocks", "vocab_size"))


def watch_sockets(recorder: Recorder) -> None:
    """Mark what every socket of this process reads and writes."""
    peers: WeakKeyDictionary[socket.socket, str] = WeakKeyDictionary()

    def peer_of(sock: socket.socket) -> str:
        if sock not in peers:
            peers[sock] = _peer_of(sock)
        return peers[sock]

    def reading(read: Callable[..., Any]) -> Callable[..., Any]:
        def marked(sock: socket.socket, *args: Any) -> Any:
            peer, got = peer_of(sock), None
            try:
                got = read(sock, *args)
            except BlockingIOError:
                peer = ""
                raise
            finally:
                if peer:
                    recorder.mark(f"recv {peer}" if got else f"eof {peer}")
            return got

        return marked

    def writing(write: Callable[..., Any]) -> Callable[..., Any]:
        def marked(sock: socket.socket, *args: Any) -> Any:
            if peer := peer_of(sock):
                recorder.mark(f"send {peer}")
            return write(sock, *args)

        return marked

    for name in ("recv", "recv_into"):
        setattr(socket.socket, name, reading(getattr(socket.socket, name)))
    for name in ("send", "sendall", "sendmsg"):
        setattr(socket.socket, name, writing(getattr(socket.socket, name)))


def _peer_of(sock: socket.socket) -> str:
    """Return what marks call the peer; "" for a listener and for the pair with which an event loop wakes itself."""
    try:
        if sock.family == socket.AF_UNIX:
            return "engine" if sock.getpeername() or sock.getsockname() else ""
        return str(sock.getpeername()[1])
    except OSError:
        return ""


def watch_loops(recorder: Recorder) -> None:
    """Mark when an event loop is about to block."""
    selector: Any = selectors.DefaultSelector
    select = selector.select

    def marked(self: object, timeout: float | None = None) -> Any:
        if timeout is None or timeout > 0:
            recorder.mark("wait")
        return select(self, timeout)

    selector.select = marked


def watch_database(recorder: Recorder) -> None:
    """Mark every statement that Django executes, by its kind and the first table that it names."""
    from django.db.backends.signals import connection_created

    def marked(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        words = sql.replace('"', " ").split()
        tables = (table for word, table in itertools.pairwise(words) if word in ("FROM", "INTO", "UPDATE"))
        recorder.mark(f"sql {words[0]} {next(tables, '')}".rstrip())
        return execute(sql, params, many, context)

    def wrap(connection: Any, **kwargs: Any) -> None:
        if marked not in connection.execute_wrappers:  # a connection object opens again and again
            connection.execute_wrappers.append(marked)

    connection_created.connect(wrap, weak=False)


def serve(recorder: Recorder, port: str) -> None:
    """Run a web worker. `send` is passed on as it is: FlowServer looks whether it is its own."""
    inner: Any = importlib.import_module("project.asgi").application

    async def application(scope: Any, receive: Any, send: Any) -> None:
        async def marked() -> Any:
            message = await receive()
            if message["type"] == "http.disconnect":
                recorder.mark("disconnect")
            return message

        if scope["type"] == "http":
            recorder.mark(f"app {scope['method']} {scope['path']}")
        await inner(scope, marked, send)

    module = ModuleType("paths_app")
    module.application = application  # type: ignore[attr-defined]
    sys.modules["paths_app"] = module
    from daphne.cli import CommandLineInterface

    CommandLineInterface().run(["-b", "127.0.0.1", "-p", port, "paths_app:application"])


def main() -> None:
    """Run the program named on the command line."""
    tree, record, program, *arguments = sys.argv[1:]
    recorder = Recorder(Path(tree))
    signal.signal(signal.SIGUSR1, lambda number, frame: recorder.write(Path(record)))
    watch_sockets(recorder)
    watch_loops(recorder)
    watch_database(recorder)
    recorder.install()
    if program == "web":
        serve(recorder, *arguments)
    else:
        sys.argv = ["manage.py", *arguments]
        runpy.run_path(str(Path(tree) / "manage.py"), run_name="__main__")


if __name__ == "__main__":
    main()
