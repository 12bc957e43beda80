"""`EngineLink`: keeps a process linked to its model's engine process: finds it, starts it, watches it, has it replaced.

    _live:  connect ─► handshake ─► follow until the connection is lost ─► pause ─► connect ...
              │ no engine, and autostart: spawn

Its task lives on the event loop of a web process or worker; it never imports torch. An engine that ends without a
goodbye, or sends no heartbeat (then it is killed), has failed; the answers over this connection end as parked, and
their streams ask the next engine to continue. Knows no request: those are `ClientSession`'s, of which each
connection has its own.

`spawn` starts an engine process that outlives its client; no child is left to reap.

    client ──Popen──► starter ──fork──► engine     a session of its own: Ctrl-C and autoreload do not reach it
             ◄─exit 0─   ◄── one byte ──            "the socket is there"

The starter's exit status is 0 once the engine listens, and 1 if it never does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from pathlib import Path

from streamserve.clients.base import not_loaded
from streamserve.clients.process.client_session import ClientSession
from streamserve.clients.process.config import (
    EnginePathError,
    LaunchConfig,
    config_hash,
    config_to_json,
    dated,
    engine_paths,
    is_locked,
    open_log,
    prepare_folder,
)
from streamserve.clients.process.frame_socket import Connection
from streamserve.clients.process.messages import PROTOCOL, Control, Hello, State, decode_welcome, encode, is_replaced
from streamserve.clients.process.supervision import CircuitBreaker, ProcessActivity, last_flight
from streamserve.clients.thread.source import error_event
from streamserve.protocol.engine import ABSENT, TOO_LARGE, EngineStats, ModelDescription
from streamserve.protocol.errors import EngineUnavailable
from streamserve.protocol.frames import FrameError

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.2


class EngineLost(Exception):
    """The engine has failed: it ended without a goodbye, or its messages cannot be decoded."""


class SuspectLost(EngineLost):
    """An engine that serves other answers has ended in a suspect's own step: that answer ends, the model is sound."""


class NoEngine(Exception):
    """There is no engine to connect to now, and none has failed."""


class EngineAsleep(NoEngine):
    """No engine process exists, and nothing has been asked of the model since."""


class EngineAbsent(NoEngine):
    """No engine process exists, and this process starts none."""


class SpawnFailed(Exception):
    """The engine process ended before it listened; its output has the reason."""


# What can be wrong with an engine; any other exception is a fault of ours, and is logged with its traceback.
_EXPECTED = (EngineLost, SpawnFailed, EnginePathError, FrameError, OSError)


class EngineLink:
    """See above. `session` is the newest connection's, and None before its handshake.

    `description` and `stats` are the engine's own while it is connected.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self.session: ClientSession | None = None
        self.description = ModelDescription(
            alias=config.model.alias, state="idle", created=int(time.time()), on_demand=config.is_lazy
        )
        self.stats = EngineStats()
        self._config = config = dated(config)
        assert config.made_at is not None
        self._hello = Hello(protocol=PROTOCOL, config_hash=config_hash(config), made_at=config.made_at)
        self._paths = engine_paths(config)
        self._breaker = CircuitBreaker(config.max_failures, config.failure_seconds)
        self._num_lost = 0
        self._served_at = -math.inf  # an engine has reported that it computed tokens
        self._without_engine_since: float | None = None
        self._is_asleep = config.is_lazy  # nothing is asked: no engine is started
        self._asleep_until = -math.inf  # an operator's engine process that goes to sleep is back before that
        self._spawn_after = 0.0
        self._retry_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        """Whether an engine is connected and has sent its state."""
        return self.session is not None and self.session.is_open and self.session.has_state

    def start(self) -> None:
        """Start looking for the engine, once; returns at once. On the event loop."""
        if self._task is None and not self._is_closed:
            self._describe("loading", "connecting")
            # An empty context: this task outlives the request that happened to come first.
            self._task = asyncio.get_running_loop().create_task(self._live(), context=Context())

    def wake(self) -> None:
        """Have the engine loaded, also where it sleeps; returns at once."""
        self.start()
        self._is_asleep = False
        if self.description.state == "asleep":
            if self.session is not None and self.session.is_open:
                self.session.wake()
            else:
                self._describe("loading", "starting")

    async def control(self, action: str) -> None:
        """Carry out an operator's action in the engine. A sleeping engine is not loaded for it, but by "wake"."""
        if action == "wake":
            self.wake()
            return
        is_open = self.session is not None and self.session.is_open
        if self.description.state == "asleep" and not is_open:
            if action == "sleep":
                return
            raise EngineUnavailable(f"model {self._config.model.alias} is asleep.", code="engine_asleep")
        await self.require().ask(lambda new_id: Control(new_id, action))

    def require(self) -> ClientSession:
        """Return the session of the connected engine; without an engine, start looking and refuse for now."""
        if self.session is not None and self.session.is_open:
            return self.session
        self.wake()
        alias = self._config.model.alias
        if self.description.state == "failed":
            left = math.ceil(self._retry_at - time.monotonic())
            if self.description.stage == ABSENT:
                raise EngineUnavailable(self.description.message, code="no_engine", retry_after=max(2, left))
            if self.description.stage == TOO_LARGE:
                raise EngineUnavailable(self.description.message, code=TOO_LARGE, retry_after=max(2, left))
            raise EngineUnavailable(f"model {alias} is not available.", code="engine_died", retry_after=left)
        raise not_loaded(self.description)

    async def aclose(self) -> None:
        """End every generation with an `error` event and disconnect; the engine process stays."""
        self._is_closed = True
        if self.session is not None:
            self.session.close(error_event("engine_closed"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._describe("failed", message="the client was closed.")

    # The life of a connection

    async def _live(self) -> None:
        """Stay connected, for as long as this client lives."""
        while True:
            try:
                connection = await self._connect()
                try:
                    await self._handshake(connection)
                    await self._follow(connection)
                finally:
                    connection.abort()
                    await connection.lost()
                pause = 0.0
            except NoEngine as reason:
                pause = self._wait(reason)
            except Exception as error:  # the edge of the task
                pause = self._fail(error)
            self._retry_at = time.monotonic() + pause
            await asyncio.sleep(pause)

    async def _connect(self) -> Connection:
        """Connect to the engine; with `autostart`, start an engine process if there is none."""
        self.session = None
        prepare_folder(self._paths)
        with suppress(OSError):
            return await self._dial()
        if is_locked(self._paths) or (self._config.autostart and time.monotonic() < self._spawn_after):
            raise NoEngine("Another engine is starting or ending.")
        if self._is_asleep and (self._config.autostart or time.monotonic() < self._asleep_until):
            raise EngineAsleep
        if not self._config.autostart:
            alias = self._config.model.alias
            raise EngineAbsent(
                f"No engine runs for the model {alias!r}. Start it with: manage.py streamserve_engine {alias}"
            )
        self._describe("loading", "starting")
        await spawn(self._config)
        try:
            return await self._dial()
        except OSError as error:
            raise NoEngine("The engine has ended again.") from error

    async def _dial(self) -> Connection:
        path = str(self._paths.socket)
        _, connection = await asyncio.get_running_loop().create_unix_connection(Connection, path)
        return connection

    async def _handshake(self, connection: Connection) -> None:
        """Exchange versions. An engine with older settings than ours drains and ends: wait until it has."""
        activity = ProcessActivity(connection.peer.pid)
        connection.watch(
            self._config.hang_seconds, lambda seconds: self._busy(activity, seconds), lambda: self._kill(connection)
        )
        connection.send(encode(self._hello))
        payload = await connection.receive()
        if payload is None:
            raise NoEngine("The engine closed the connection.")
        welcome = decode_welcome(payload)
        if is_replaced(welcome, self._hello):
            # `was_ready` promises an engine: requests wait for the next engine instead of being refused.
            self.description = replace(self.description, was_ready=True)
            self._describe("loading", "replacing")
            await connection.lost()
            raise NoEngine("The engine with older settings has ended.")
        if welcome.protocol != PROTOCOL:
            raise EngineLost("the engine is of another version; restart this process")

    async def _follow(self, connection: Connection) -> None:
        """Handle messages until the connection is lost; raises EngineLost unless the engine has sent a goodbye."""
        self._without_engine_since = None
        session = self.session = ClientSession(connection, self._take_state)
        try:
            await connection.run(session.take)
        finally:
            flight = last_flight(self._paths.flight, connection.peer.pid)
            session.close(flight=flight)
        # What is asked from now on wakes it.
        self._is_asleep = session.goodbye == "asleep" or (self._config.is_lazy and session.goodbye is not None)
        if session.goodbye == "asleep":
            self._asleep_until = time.monotonic() + self._config.failure_seconds
        if session.goodbye is None:
            has_served = time.monotonic() - self._served_at < self._config.failure_seconds
            lost = SuspectLost if flight.is_trial and has_served else EngineLost
            raise lost(f"the engine ended without a goodbye; see {self._paths.log}")
        if session.goodbye == "replaced":  # by a client with more recent settings, which starts the next engine
            self._spawn_after = time.monotonic() + self._config.hang_seconds

    def _busy(self, activity: ProcessActivity, seconds: float) -> float:
        """Return for how many of the last `seconds` the engine was busy; where that is not known, while it loads."""
        if activity.is_known:
            return activity.busy_seconds(seconds)
        is_loading = self.session is None or not self.session.was_ready
        return seconds if is_loading else 0.0

    def _kill(self, connection: Connection) -> None:
        """End an engine without a heartbeat. Its process exists: if it were dead, the connection would be lost."""
        logger.error("engine %d of model %s is silent: killed", connection.peer.pid, self._config.model.alias)
        if connection.peer.pid > 0:
            with suppress(ProcessLookupError):
                os.kill(connection.peer.pid, signal.SIGKILL)
        connection.abort()

    # The next state; both return how long to wait before the next try.

    def _wait(self, reason: NoEngine) -> float:
        """Describe a missing engine: as loading for `failure_seconds`; as failed at once if there was none before."""
        now = time.monotonic()
        if isinstance(reason, EngineAsleep):
            self._without_engine_since = None
            if self.description.state != "asleep":
                self._describe("asleep")
            return _RETRY_SECONDS
        self._without_engine_since = self._without_engine_since or now
        is_absent = isinstance(reason, EngineAbsent)
        is_late = now - self._without_engine_since > self._config.failure_seconds
        if self._breaker.is_open and not is_absent and self.description.state == "failed":
            return _RETRY_SECONDS  # why it failed is still what a reader should know
        has_failed = is_late or self._breaker.is_open or (is_absent and not self.description.was_ready)
        self._describe("failed" if has_failed else "loading", ABSENT if is_absent else "waiting", str(reason))
        return _RETRY_SECONDS

    def _fail(self, error: Exception) -> float:
        """Count a failed engine. An engine that could not load is not tried again soon: it would fail again."""
        now, session, description = time.monotonic(), self.session, self.description
        self._num_lost += 1
        self._is_asleep = False
        has_load_error = session is not None and session.has_state and description.state == "failed"
        reason = description.message if has_load_error else str(error)
        traceback = None if isinstance(error, _EXPECTED) else error
        logger.error("model %s: %s", self._config.model.alias, reason, exc_info=traceback)
        if has_load_error and session is not None and not session.was_ready:
            self._breaker.trip(now)
        elif not isinstance(error, SuspectLost):
            self._breaker.note(now)
        stage = TOO_LARGE if has_load_error and description.stage == TOO_LARGE else "replacing"
        self._describe("failed" if self._breaker.is_open else "loading", stage, reason)
        return self._breaker.pause()

    def _take_state(self, state: State) -> None:
        if state.stats.generation_tokens > self.stats.generation_tokens:
            self._served_at = time.monotonic()
        was_ready = self.description.was_ready or (self.session is not None and self.session.was_ready)
        self.description = replace(state.description, was_ready=was_ready)
        past = state.stats.past or self.stats.past  # only the first report of a connection has it
        self.stats = replace(state.stats, lost_engines=self._num_lost, past=past)

    def _describe(self, state: str, stage: str = "", message: str = "") -> None:
        """Describe the engine while it is not connected; afterwards its own states do."""
        self.stats = EngineStats(lost_engines=self._num_lost)
        self.description = replace(
            self.description, state=state, stage=stage, message=message, fraction=0.0, loaded_bytes=0, total_bytes=0
        )


# The package may lie where only the client's own sys.path finds it; the current folder is never searched (-P).
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from streamserve.clients.process.server import main; sys.exit(main())"
)
_ROOT = str(Path(__file__).resolve().parents[3])
_POLL_SECONDS = 0.02


async def spawn(config: LaunchConfig) -> None:
    """Start the config's engine; returns when it or another engine listens. Raises SpawnFailed, OSError."""
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
