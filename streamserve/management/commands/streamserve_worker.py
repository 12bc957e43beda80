"""`manage.py streamserve_worker`: run jobs, webhooks and batches, for systemd, containers or a second terminal.

SIGTERM and Ctrl-C end it gracefully: it takes nothing new, what runs has GRACE_SECONDS to end, and another worker
continues the rest. A second signal gives everything back at once.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any, TextIO

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from streamserve.conf import get_settings
from streamserve.web import site
from streamserve.work.kinds import MODELS, work_counts
from streamserve.work.worker import Worker

_CLEAR = "\r\x1b[K"  # ECMA-48: to the line's beginning, and erase it
_SHOW_SECONDS = 1.0


class Command(BaseCommand):
    """Runs one worker until a signal."""

    help = "Run jobs, webhooks and batches until SIGTERM or Ctrl-C. Several workers share the work."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--concurrency", type=int, help='how many of each kind run at once; default for jobs: JOBS["CONCURRENCY"]'
        )
        parser.add_argument(
            "--kinds", default="", help=f"what it runs, separated by commas: {', '.join(MODELS)}; default: all"
        )
        parser.add_argument("--drain", action="store_true", help="end when nothing is due any more")

    def handle(self, *args: Any, concurrency: int | None, kinds: str, drain: bool, **options: Any) -> None:
        settings = get_settings()
        if settings.log == "memory":
            raise CommandError('Logs are in the memory of web processes (LOG is "memory"), and they run the jobs.')
        names = [name for name in kinds.split(",") if name]
        unknown = [name for name in names if name not in MODELS]
        if unknown:
            raise CommandError(f"There is no kind of work {unknown[0]!r}. There are: {', '.join(MODELS)}.")
        if concurrency is not None and concurrency < 1:
            raise CommandError("--concurrency is 1 at least.")
        _log_to_stderr()
        asyncio.run(self._run(names, concurrency, settings.jobs.grace_seconds, drain))

    async def _run(self, names: list[str], concurrency: int | None, grace_seconds: float, drain: bool) -> None:
        try:
            here = site.get_site()
        except ImproperlyConfigured as problem:
            raise CommandError(str(problem)) from problem
        site.start_loading()
        worker = here.work.new_worker(names, concurrency=concurrency, grace_seconds=grace_seconds)
        worker.ends_idle = drain
        running = asyncio.create_task(worker.run())
        showing = asyncio.create_task(_show(worker, sys.stderr)) if sys.stderr.isatty() else None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop, worker, running)
        kinds = ", ".join(f"{kind.name} ({kind.concurrency} at once)" for kind in worker.kinds)
        self.stdout.write(f"Working on {kinds}, as {worker.presence.worker_id}. Ctrl-C ends it.")
        self.stdout.flush()
        await asyncio.gather(running, return_exceptions=True)
        if showing is not None:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
        await site.reset()
        self.stdout.write(f"The worker has ended; pieces of work done: {worker.num_done}.")


def _stop(worker: Worker, running: asyncio.Task[None]) -> None:
    """The first signal ends it gracefully, the second at once."""
    if worker.is_stopping:
        running.cancel()
    worker.stop()


async def _show(worker: Worker, out: TextIO) -> None:
    """Keep one line of a terminal up to date: what runs here, what waits, what was done."""
    try:
        while True:
            counts = await work_counts()
            width = shutil.get_terminal_size().columns - 1
            out.write(_CLEAR + progress_line(worker, counts)[:width])
            out.flush()
            await asyncio.sleep(_SHOW_SECONDS)
    finally:
        out.write(_CLEAR)
        out.flush()


def progress_line(worker: Worker, counts: Mapping[str, Mapping[str, int]]) -> str:
    """Return "jobs: 2 running, 7 waiting; batch: 1 running; 41 done"; `counts` cover all workers."""
    parts = []
    for kind in worker.kinds:
        num_running = sum(claim.kind == kind.name for claim in worker.claims)
        num_waiting = counts.get(kind.name, {}).get("queued", 0)
        parts.append(f"{kind.name}: {num_running:,} running" + (f", {num_waiting:,} waiting" if num_waiting else ""))
    return "; ".join([*parts, f"{worker.num_done:,} done"])


def _log_to_stderr() -> None:
    """Log to stderr, unless the site has configured logging."""
    logger = logging.getLogger("streamserve")
    if not logger.hasHandlers():
        begin = _CLEAR if sys.stderr.isatty() else ""  # of the line that `_show` has written
        logging.basicConfig(level=logging.INFO, format=begin + "%(asctime)s %(levelname)s %(name)s: %(message)s")
        logger.setLevel(logging.INFO)
