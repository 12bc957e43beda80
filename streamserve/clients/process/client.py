"""`ProcessClient`: an engine in a process of its own, shared by all workers of a site. The default for sites.

    _live:  connect ─► handshake ─► follow until the connection is lost ─► pause ─► connect ...
              │ no engine, and autostart: spawn

Lives on the event loop of a worker; never imports torch. An engine that ends without a goodbye, or sends no heartbeat
(then it is killed), has failed; its generations end as parked, and their streams ask the next engine to continue.

`spawn` starts an engine process that outlives the worker; no child is left to reap.

    worker ──Popen──► starter ──fork──► engine     a session of its own: Ctrl-C and autoreload do not reach it
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

from streamserve.clients.base import Generation
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
from streamserve.clients.process.messages import (
    PROTOCOL,
    Control,
    Hello,
    Open,
    State,
    Tokenize,
    Warm,
    decode_welcome,
    encode,
    is_replaced,
)
from streamserve.clients.process.supervision import CircuitBreaker, ProcessActivity, last_flight
from streamserve.clients.thread.source import error_event
from streamserve.protocol.engine import ABSENT, EngineStats, ModelDescription
from streamserve.protocol.errors import EngineUnavailable
from streamserve.protocol.frames import FrameError
from streamserve.protocol.requests import GenerateRequest

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.2


class EngineLost(Exception):
    """The engine has failed: it ended without a goodbye, or its messages cannot be decoded."""


class NoEngine(Exception):
    """There is no engine to connect to now, and none has failed."""


class EngineAbsent(NoEngine):
    """No engine process exists, and this client starts none."""


class SpawnFailed(Exception):
    """The engine process ended before it listened; its output has the reason."""


# What can be wrong with an engine; any other exception is a fault of ours, and is logged with its traceback.
_EXPECTED = (EngineLost, SpawnFailed, EnginePathError, FrameError, OSError)


class ProcessClient:
    """An `EngineClient` for the engine of `config`: found, or started if `autostart`. One event loop."""

    def __init__(self, config: LaunchConfig) -> None:
        self.alias = config.model.alias
        self.engine_pid: int | None = None  # of the connected engine, once it has sent its state
        self._config = config = dated(config)
        assert config.made_at is not None
        self._hello = Hello(protocol=PROTOCOL, config_hash=config_hash(config), made_at=config.made_at)
        self._paths = engine_paths(config)
        self._breaker = CircuitBreaker(config.max_failures, config.failure_seconds)
        self._description = ModelDescription(alias=self.alias, state="idle", created=int(time.time()))
        self._stats = EngineStats()
        self._num_lost = 0
        self._session: ClientSession | None = None
        self._was_trial = False  # a sound engine has ended in a suspect's own step
        self._served_at = -math.inf  # an engine has said that it computed tokens
        self._has_state = self._was_ready = False  # the engine of this connection: has sent its state; was ready once
        self._without_engine_since: float | None = None
        self._spawn_after = 0.0
        self._retry_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @classmethod
    def visiting(cls, config: LaunchConfig) -> ProcessClient:
        """Return a client for operators: it uses the engine as it is, and neither starts nor replaces one."""
        return cls(replace(config, autostart=False, made_at=0.0))

    @property
    def is_connected(self) -> bool:
        """Whether an engine is connected and has sent its state."""
        return self._session is not None and self._has_state

    async def generate(self, request: GenerateRequest) -> Generation:
        """Accept the request or raise: BadRequest (never fits, bad template), Refused (not now)."""
        answer = await self._require_session().ask(Open, request)
        assert isinstance(answer, Generation)
        return answer

    async def tokenize(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the prompt's token ids as `generate` would see them."""
        answer = await self._require_session().ask(Tokenize, request)
        assert isinstance(answer, tuple)
        return answer

    async def warm(self, request: GenerateRequest) -> None:
        """Prefill the prompt into the prefix cache and generate nothing; returns when that is done."""
        await self._require_session().ask(Warm, request)

    async def control(self, action: str) -> None:
        """Pause, resume or drain for all workers; "stop" drains and then ends the process."""
        await self._require_session().ask(Control, action)

    def start(self) -> None:
        """Start looking for the engine, once; returns at once. On the event loop."""
        if self._task is None and not self._is_closed:
            self._describe("loading", "connecting")
            # An empty context: this task outlives the request that happened to come first.
            self._task = asyncio.get_running_loop().create_task(self._live(), context=Context())

    def describe(self) -> ModelDescription:
        """Return what the model is and how far loading has come. Never blocks."""
        return self._description

    def stats(self) -> EngineStats:
        """Return the counts of the last second. Never blocks."""
        return self._stats

    async def aclose(self) -> None:
        """End every generation with an `error` event and disconnect; the engine process stays."""
        self._is_closed = True
        if self._session is not None:
            self._session.close(error_event("engine_closed"))
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
        """Connect to the engine; with `autostart`, start one if there is none."""
        prepare_folder(self._paths)
        with suppress(OSError):
            return await self._dial()
        if is_locked(self._paths) or (self._config.autostart and time.monotonic() < self._spawn_after):
            raise NoEngine("Another engine is starting or ending.")
        if not self._config.autostart:
            raise EngineAbsent(
                f"No engine runs for the model {self.alias!r}. Start it with: manage.py streamserve_engine {self.alias}"
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
        self._has_state = self._was_ready = False
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
            # `was_ready` promises an engine: requests wait for the next one instead of being refused.
            self._description = replace(self._description, was_ready=True)
            self._describe("loading", "replacing")
            await connection.lost()
            raise NoEngine("The engine with older settings has ended.")
        if welcome.protocol != PROTOCOL:
            raise EngineLost("the engine is of another version; restart this worker")

    async def _follow(self, connection: Connection) -> None:
        """Handle messages until the connection is lost; raises EngineLost unless the engine has sent a goodbye."""
        self._without_engine_since = None
        session = ClientSession(connection, lambda state: self._take_state(state, connection.peer.pid))
        self._session = session
        try:
            await connection.run(session.take)
        finally:
            self._session = self.engine_pid = None
            flight = last_flight(self._paths.flight, connection.peer.pid)
            session.close(flight=flight)
        if session.goodbye is None:
            # A suspect's own step ended an engine of a model that serves others: that answer ends, the model is sound.
            has_served = time.monotonic() - self._served_at < self._config.failure_seconds
            self._was_trial = flight.is_trial and has_served
            raise EngineLost(f"the engine ended without a goodbye; see {self._paths.log}")
        if session.goodbye == "replaced":  # by a worker with more recent settings, which starts the next one
            self._spawn_after = time.monotonic() + self._config.hang_seconds

    def _busy(self, activity: ProcessActivity, seconds: float) -> float:
        """Return for how many of the last `seconds` the engine was busy; where that is not known, while it loads."""
        if activity.is_known:
            return activity.busy_seconds(seconds)
        return 0.0 if self._was_ready else seconds

    def _kill(self, connection: Connection) -> None:
        """End an engine without a heartbeat. Its process exists: if it were dead, the connection would be lost."""
        logger.error("engine %d of model %s is silent: killed", connection.peer.pid, self.alias)
        if connection.peer.pid > 0:
            with suppress(ProcessLookupError):
                os.kill(connection.peer.pid, signal.SIGKILL)
        connection.abort()

    # The next state; both return how long to wait before the next try.

    def _wait(self, reason: NoEngine) -> float:
        """Describe a missing engine: as loading for `failure_seconds`; as failed at once if there never was one."""
        now = time.monotonic()
        self._without_engine_since = self._without_engine_since or now
        is_absent = isinstance(reason, EngineAbsent)
        is_late = now - self._without_engine_since > self._config.failure_seconds
        has_failed = is_late or self._breaker.is_open or (is_absent and not self._description.was_ready)
        self._describe("failed" if has_failed else "loading", ABSENT if is_absent else "waiting", str(reason))
        return _RETRY_SECONDS

    def _fail(self, error: Exception) -> float:
        """Count a failed engine. One that could not load is not tried again soon: it would fail again."""
        now, description = time.monotonic(), self._description
        self._num_lost += 1
        has_load_error = self._has_state and description.state == "failed"
        reason = description.message if has_load_error else str(error)
        logger.error("model %s: %s", self.alias, reason, exc_info=None if isinstance(error, _EXPECTED) else error)
        if has_load_error and not self._was_ready:
            self._breaker.trip(now)
        elif not self._was_trial:
            self._breaker.note(now)
        self._has_state = self._was_trial = False
        self._describe("failed" if self._breaker.is_open else "loading", "replacing", reason)
        return self._breaker.pause()

    def _take_state(self, state: State, pid: int) -> None:
        self.engine_pid = pid
        self._was_ready = self._was_ready or state.description.state not in ("loading", "failed")
        was_ready = self._was_ready or self._description.was_ready
        if state.stats.generation_tokens > self._stats.generation_tokens:
            self._served_at = time.monotonic()
        self._description = replace(state.description, was_ready=was_ready)
        self._stats = replace(state.stats, lost_engines=self._num_lost)
        self._has_state = True

    def _describe(self, state: str, stage: str = "", message: str = "") -> None:
        """Describe the engine while it is not connected; afterwards its own states do."""
        self._stats = EngineStats(lost_engines=self._num_lost)
        self._description = replace(
            self._description, state=state, stage=stage, message=message, fraction=0.0, loaded_bytes=0, total_bytes=0
        )

    def _require_session(self) -> ClientSession:
        """Return the session of the connected engine; without one, start looking and refuse for now."""
        if self._session is not None:
            return self._session
        self.start()
        if self._description.state == "failed":
            left = math.ceil(self._retry_at - time.monotonic())
            if self._description.stage == ABSENT:
                raise EngineUnavailable(self._description.message, code="no_engine", retry_after=max(2, left))
            raise EngineUnavailable(f"model {self.alias} is not available.", code="engine_died", retry_after=left)
        raise EngineUnavailable(
            f"model {self.alias} is loading. Try again in a moment.", code="engine_loading", retry_after=2
        )


# The package may lie where only the worker's own sys.path finds it; the current folder is never searched (-P).
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from streamserve.clients.process.server import main; sys.exit(main())"
)
_ROOT = str(Path(__file__).resolve().parents[3])
_POLL_SECONDS = 0.02


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
