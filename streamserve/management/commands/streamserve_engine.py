"""`manage.py streamserve_engine [ALIAS]`: run the engine of a model in the foreground, for systemd and containers.

With --status, --pause, --resume, --drain, --sleep, --wake or --stop it controls the running engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import select
import signal
import sys
from argparse import ArgumentParser
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from streamserve.clients.base import until_loaded
from streamserve.clients.process import server
from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import EnginePathError, LaunchConfig, engine_paths, is_locked, prepare_folder
from streamserve.conf import get_settings
from streamserve.protocol.engine import EngineStats, ModelDescription
from streamserve.protocol.errors import EngineUnavailable, StreamserveError
from streamserve.web.cli.loading_bar import LoadingBar, progress_line

_ACTIONS = {
    "status": "show its state; the exit status is 1 while it is not ready",
    "pause": "park every answer and take nothing new; readers see that they wait",
    "resume": "take back --pause or --drain",
    "drain": "take nothing new, and let what runs come to its end",
    "sleep": "give its memory back; it is loaded again when it is asked. Refused while it answers",
    "wake": "load a sleeping engine, and return when it is loaded",
    "stop": "drain, then end the process",
}
_ANSWER_SECONDS = 15.0
_POLL_SECONDS = 0.1


class Command(BaseCommand):
    """Runs one engine, or controls it."""

    help = "Run the engine process of a model, or control the running engine."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("alias", nargs="?", help="a model of MODELS or EMBEDDING_MODELS; needed where several")
        group = parser.add_mutually_exclusive_group()
        for name, text in _ACTIONS.items():
            group.add_argument(f"--{name}", dest="action", action="store_const", const=name, help=text)
        parser.add_argument("--when-idle", action="store_true", help="with --sleep: wait until it answers nothing")
        parser.add_argument("--asleep", action="store_true", help="load the model when it is first asked")

    def handle(self, *args: Any, alias: str | None, action: str | None, **options: Any) -> None:
        config = _config_of(alias)
        try:
            prepare_folder(engine_paths(config))
            if action is None:
                sys.exit(self._run(config, begins_asleep=options["asleep"] or config.is_lazy))
            may_start = action == "wake" and get_settings().engine_autostart
            if not may_start and not is_locked(engine_paths(config)):
                raise CommandError(f"No engine runs for the model {config.model.alias!r}.")
            config = dataclasses.replace(config, autostart=may_start, made_at=0.0)
            answer = asyncio.run(_ask(config, action, waits=options["when_idle"]))
        except EnginePathError as error:
            raise CommandError(str(error)) from None
        except TimeoutError:
            raise CommandError(f"The engine of {config.model.alias!r} does not answer in time.") from None
        except StreamserveError as error:
            raise CommandError(error.message) from None
        self._show(action, answer)

    def _run(self, config: LaunchConfig, *, begins_asleep: bool) -> int:
        """Run the engine until SIGTERM or Ctrl-C; returns the exit status.

        When it goes to sleep, this process begins anew, asleep: so all of its memory is given back.
        """
        if is_locked(engine_paths(config)):
            self.stderr.write(f"An engine runs for the model {config.model.alias!r} already; see --status.")
            return 0
        _log_to_stderr()
        bar = LoadingBar(sys.stderr)
        try:
            status = server.run(config, partial(_show_loading, bar), begins_asleep=begins_asleep)
        finally:
            bar.close()
        if status == server.ASLEEP:
            again = sys.orig_argv if "--asleep" in sys.orig_argv else [*sys.orig_argv, "--asleep"]
            signal.setitimer(signal.ITIMER_PROF, 0.0)  # the watchdog's would outlive this program
            os.execv(sys.executable, [sys.executable, *again[1:]])
        return status

    def _show(self, action: str, answer: _Answer) -> None:
        if action in ("stop", "sleep"):
            what = "has ended" if action == "stop" else "has gone to sleep"
            self.stdout.write(f"{answer.model.alias}: process {answer.pid} {what}")
            return
        self.stdout.write(_status_line(answer))
        if action == "status" and answer.model.state != "ready":
            sys.exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The engine's process, description and counts."""

    pid: int
    model: ModelDescription
    stats: EngineStats


def _config_of(alias: str | None) -> LaunchConfig:
    """Return the config of a model's engine. The engine ends on a signal or --stop, not when it is idle."""
    settings = get_settings()
    if settings.client != "process":
        raise CommandError(f'CLIENT is "{settings.client}": engines run inside the web process.')
    names = (*settings.engines, *settings.embedding_models)
    if alias is None and len(names) > 1:
        raise CommandError(f"Name a model. The settings have: {', '.join(names)}.")
    alias = alias or settings.default_model
    if alias in settings.models and alias not in names:
        of = settings.models[alias].adapter_of
        raise CommandError(f"{alias!r} is an adapter of the model {of!r}, whose engine serves it: name {of!r}.")
    if alias not in names:
        raise CommandError(f"There is no model {alias!r}. The settings have: {', '.join(names)}.")
    remote = settings.engines[alias].remote if alias in settings.engines else None
    if remote is not None:
        raise CommandError(f"The model {alias!r} runs elsewhere, at {remote.address}: there is no engine here.")
    return dataclasses.replace(settings.engine_spec(alias), autostart=False)


async def _ask(config: LaunchConfig, action: str, *, waits: bool = False) -> _Answer:
    """Carry out `action` in the running engine; return its state afterwards. Raises TimeoutError.

    `waits`: "sleep" waits until the engine answers nothing.
    """
    client = ProcessClient(config)
    if action == "wake":
        client.wake()
    else:
        client.start()
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            pid = await _reached(client)
        if action == "stop":
            await _stop(client, pid, config)
        elif action == "sleep":
            await _sleep(client, pid, waits=waits)
        elif action == "wake":
            await until_loaded(client, math.inf)
        elif action != "status":
            async with asyncio.timeout(_ANSWER_SECONDS):
                await client.control(action)
        return _Answer(pid=pid, model=client.describe(), stats=client.stats())
    finally:
        await client.aclose()


async def _reached(client: ProcessClient) -> int:
    """Wait until the engine has sent its state; return its process id."""
    while client.engine_pid is None:  # noqa: ASYNC110  (it has no event)
        await asyncio.sleep(_POLL_SECONDS)
    return client.engine_pid


async def _sleep(client: ProcessClient, pid: int, *, waits: bool) -> None:
    """Send the engine to sleep and wait until it has given its memory back. Raises EngineUnavailable, TimeoutError."""
    while True:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await client.control("sleep")
        except EngineUnavailable as refused:
            if refused.code == "engine_busy":
                if not waits:
                    raise
                await asyncio.sleep(_POLL_SECONDS)
                continue
        break
    async with asyncio.timeout(_ANSWER_SECONDS):
        while client.engine_pid == pid and client.describe().state != "asleep":  # noqa: ASYNC110  (it has no event)
            await asyncio.sleep(_POLL_SECONDS)


async def _stop(client: ProcessClient, pid: int, config: LaunchConfig) -> None:
    """Stop the engine and wait for the end of its process, which is no child of ours. Raises TimeoutError."""
    process = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    try:
        async with asyncio.timeout(config.drain_seconds + _ANSWER_SECONDS):
            await client.control("stop")
            # Neither the lock nor the end of another process has an event on this loop.
            while is_locked(engine_paths(config)) or (process is not None and not _has_ended(process)):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)
    finally:
        if process is not None:
            os.close(process)


def _has_ended(process: int) -> bool:
    """Return whether the process of a pidfd has ended, reaped or not."""
    return bool(select.select([process], [], [], 0)[0])


def _show_loading(bar: LoadingBar, model: ModelDescription) -> None:
    """Show the progress of loading; the server calls this several times a second."""
    if not bar.is_closed:
        bar.show(model)
    if model.state not in ("idle", "loading"):
        bar.close()


def _status_line(answer: _Answer) -> str:
    model, stats = answer.model, answer.stats
    if model.state == "loading":
        return progress_line(model, has_bar=False)
    parts = [f"{stats.running} running", f"{stats.waiting} waiting", f"{stats.tokens_per_second:.1f} tokens/s"]
    parts.append(f"{stats.blocks_used} of {stats.blocks_total} KV blocks used")
    message = f" ({model.message})" if model.message else ""
    return f"{model.alias}: {model.state}{message}, process {answer.pid}; {', '.join(parts)}"


def _log_to_stderr() -> None:
    """Log to stderr, unless the site has configured logging."""
    logger = logging.getLogger("streamserve")
    if not logger.hasHandlers():
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
