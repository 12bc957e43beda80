"""The measured side of `benchmarks.web`: the demo site in a web process, whose event loop can be profiled.

    python child.py daphne|uvicorn PORT FILE

SIGUSR1 starts cProfile on the thread of the event loop; the next SIGUSR1 ends it and writes FILE, and beside it the
thread's CPU seconds between the two (FILE.cpu).
"""

from __future__ import annotations

import cProfile
import os
import signal
import sys
import time
from pathlib import Path


class Switch:
    """See above."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._profile: cProfile.Profile | None = None
        self._cpu = 0.0

    def turn(self, number: int, frame: object) -> None:
        """Take a SIGUSR1."""
        if self._profile is None:
            self._cpu, self._profile = time.thread_time(), cProfile.Profile(time.thread_time_ns, 1e-9)
            self._profile.enable()
            return
        self._profile.disable()
        Path(f"{self._path}.cpu").write_text(str(time.thread_time() - self._cpu))
        self._profile.dump_stats(f"{self._path}.part")
        os.replace(f"{self._path}.part", self._path)
        self._profile = None


def main() -> None:
    """Serve."""
    server, port, path = sys.argv[1:]
    sys.path.insert(0, os.getcwd())
    signal.signal(signal.SIGUSR1, Switch(Path(path)).turn)
    if server == "daphne":
        from daphne.cli import CommandLineInterface

        import project.asgi  # noqa: F401  # before the command line, whose server it replaces

        CommandLineInterface().run(["-b", "127.0.0.1", "-p", port, "--verbosity", "0", "project.asgi:application"])
    else:
        import uvicorn

        uvicorn.run("project.asgi:application", host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
