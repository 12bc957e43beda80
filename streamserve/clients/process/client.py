"""`ProcessClient`: an engine in a process of its own, shared by all workers of a site. The default for sites.

    _live:  connect ─► greet ─► follow until the connection is lost ─► pause ─► connect ...
              │ nobody there, and it is our part: spawn

Lives on the event loop of a worker; never imports torch. An engine that ends without a goodbye, or is silent for too
long (it is killed), has failed; its generations end as parked, and their streams ask the next engine to go on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from contextlib import suppress
from contextvars import Context
from dataclasses import replace

from streamserve.clients.process.circuit_breaker import CircuitBreaker
from streamserve.clients.process.client_session import ClientSession, ProcessGeneration
from streamserve.clients.process.config import LaunchConfig, config_hash, dated
from streamserve.clients.process.frame_socket import Connection
from streamserve.clients.process.messages import (
    PROTOCOL,
    Control,
    Hello,
    State,
    Tokenize,
    Warm,
    decode_to_worker,
    decode_welcome,
    encode,
    is_replaced,
)
from streamserve.clients.process.paths import PlaceError, is_claimed, place_of, prepare_folder
from streamserve.clients.process.spawn import SpawnFailed, spawn
from streamserve.clients.thread.generation import error_event
from streamserve.protocol.errors import EngineUnavailable
from streamserve.protocol.frames import FrameError
from streamserve.protocol.requests import GenerateRequest
from streamserve.protocol.stats import EngineStats, ModelDescription

logger = logging.getLogger(__name__)

# Importing torch and reading weights hold the GIL for seconds: an engine that loads may be silent for longer.
_LOADING_PATIENCE = 6
_DIAL_SECONDS = 0.2


class EngineLost(Exception):
    """The engine has failed: it is gone without a goodbye, or cannot be understood."""


class NobodyAnswers(Exception):
    """There is no engine to talk to now; that is no failure of one."""


# What can be wrong with an engine; anything else is our own fault, and is logged with its traceback.
_EXPECTED = (EngineLost, SpawnFailed, PlaceError, FrameError, OSError)


class ProcessClient:
    """An `EngineClient` for the engine of `spec`: found, or started if `autostart`. One event loop."""

    def __init__(self, spec: LaunchConfig) -> None:
        self.alias = spec.model.alias
        self.engine_pid: int | None = None  # of the engine that says how it is; None while there is none
        self._spec = spec = dated(spec)
        assert spec.made_at is not None
        self._hello = Hello(protocol=PROTOCOL, config_hash=config_hash(spec), made_at=spec.made_at)
        self._place = place_of(spec)
        self._failures = CircuitBreaker(spec.max_failures, spec.failure_seconds)
        self._description = ModelDescription(alias=self.alias, state="idle", created=int(time.time()))
        self._stats = EngineStats()
        self._num_lost = 0
        self._link: ClientSession | None = None
        self._is_told = self._was_ready = False  # the engine of this connection: has said how it is; was ready once
        self._alone_since: float | None = None
        self._spawn_at = 0.0  # not before
        self._retry_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @classmethod
    def visiting(cls, spec: LaunchConfig) -> ProcessClient:
        """Return a client for operators: it takes the engine as it finds it, and neither starts nor replaces one."""
        return cls(replace(spec, autostart=False, made_at=0.0))

    @property
    def is_connected(self) -> bool:
        """Whether an engine is there to talk to, and has said how it is."""
        return self._link is not None and self._is_told

    async def generate(self, request: GenerateRequest) -> ProcessGeneration:
        """Accept the request or raise: BadRequest (never fits, bad template), Refused (not now)."""
        return await self._require_link().open(request)

    async def tokenize(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the prompt's token ids as `generate` would see them."""
        answer = await self._require_link().ask(lambda request_id: Tokenize(request_id, request))
        assert isinstance(answer, tuple)
        return answer

    async def warm(self, request: GenerateRequest) -> None:
        """Prefill the prompt into the prefix cache and generate nothing; returns when that is done."""
        await self._require_link().ask(lambda request_id: Warm(request_id, request))

    async def control(self, action: str) -> None:
        """Pause, resume or drain for all workers; "stop" drains and then ends the process."""
        await self._require_link().ask(lambda request_id: Control(request_id, action))

    def start(self) -> None:
        """Begin to look for the engine, if that has not begun; returns at once. On the event loop."""
        if self._task is None and not self._is_closed:
            self._describe("loading", "connecting")
            # An empty context: this outlives the request that happened to be the first.
            self._task = asyncio.get_running_loop().create_task(self._live(), context=Context())

    def describe(self) -> ModelDescription:
        """Say what the model is and how far loading has come. Never blocks."""
        return self._description

    def stats(self) -> EngineStats:
        """Return the figures of the last second. Never blocks."""
        return self._stats

    async def aclose(self) -> None:
        """End every generation with an `error` event and disconnect; the engine itself goes on."""
        self._is_closed = True
        if self._link is not None:
            self._link.fail(error_event("engine_closed"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._describe("failed", message="the client was closed.")

    # The life of a connection

    async def _live(self) -> None:
        """Be connected, for as long as this client lives."""
        while True:
            try:
                connection = await self._connect()
                try:
                    await self._greet(connection)
                    await self._follow(connection)
                finally:
                    connection.abort()
                    await connection.lost()
                pause = 0.0
            except NobodyAnswers as reason:
                pause = self._wait(str(reason))
            except Exception as error:  # the edge of the task
                pause = self._fail(error)
            self._retry_at = time.monotonic() + pause
            await asyncio.sleep(pause)

    async def _connect(self) -> Connection:
        """Reach the engine; start one if there is none and that is our part."""
        prepare_folder(self._place)
        with suppress(OSError):
            return await self._dial()
        if not self._spec.autostart:
            raise NobodyAnswers(f"No engine runs for model {self.alias}. Start it: manage.py streamserve_engine.")
        if time.monotonic() < self._spawn_at or is_claimed(self._place):
            raise NobodyAnswers("Another engine is coming or going.")
        self._describe("loading", "starting")
        await spawn(self._spec)
        try:
            return await self._dial()
        except OSError as error:
            raise NobodyAnswers("The engine has gone again.") from error

    async def _dial(self) -> Connection:
        path = str(self._place.socket)
        _, connection = await asyncio.get_running_loop().create_unix_connection(Connection, path)
        return connection

    async def _greet(self, connection: Connection) -> None:
        """Exchange who we are. An engine with older settings than ours makes way: wait until it has."""
        self._is_told = self._was_ready = False
        connection.watch(self._patience, lambda: self._kill(connection))
        connection.send(encode(self._hello))
        payload = await connection.receive()
        if payload is None:
            raise NobodyAnswers("The engine hung up.")
        welcome = decode_welcome(payload)
        if is_replaced(welcome, self._hello):
            # Invariant: `was_ready` promises an engine, so that requests wait for the next one instead of being refused.
            self._description = replace(self._description, was_ready=True)
            self._describe("loading", "replacing")
            await connection.lost()
            raise NobodyAnswers("The engine of older settings has gone.")
        if welcome.protocol != PROTOCOL:
            raise EngineLost("the engine is of another version; restart this worker")

    async def _follow(self, connection: Connection) -> None:
        """Take what comes until the connection is lost; raises EngineLost unless the engine took its leave."""
        self._alone_since = None
        link = self._link = ClientSession(connection, lambda state: self._take_state(state, connection.peer.pid))
        try:
            while (payload := await connection.receive()) is not None:
                link.take(decode_to_worker(payload))
        finally:
            self._link = self.engine_pid = None
            link.lose()
        if link.goodbye is None:
            raise EngineLost(f"the engine ended without a goodbye; see {self._place.log}")
        if link.goodbye == "replaced":  # by a worker with younger settings, which starts the next one
            self._spawn_at = time.monotonic() + self._spec.hang_seconds

    def _patience(self) -> float:
        return self._spec.hang_seconds * (1 if self._was_ready else _LOADING_PATIENCE)

    def _kill(self, connection: Connection) -> None:
        """End an engine that gives no sign of life. It is still there: a dead one's connection would be lost."""
        logger.error("engine %d of model %s is silent: killed", connection.peer.pid, self.alias)
        if connection.peer.pid > 0:
            with suppress(ProcessLookupError):
                os.kill(connection.peer.pid, signal.SIGKILL)
        connection.abort()

    # What becomes of us; each returns how long to wait before the next try.

    def _wait(self, reason: str) -> float:
        """Nobody to talk to: for some time that is as good as loading."""
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        is_late = now - self._alone_since > self._spec.failure_seconds
        state = "failed" if is_late or self._failures.is_given_up else "loading"
        self._describe(state, "waiting", reason)
        return _DIAL_SECONDS

    def _fail(self, error: Exception) -> float:
        """An engine has failed. One that could not load will not do so a moment later."""
        now, said = time.monotonic(), self._description
        self._num_lost += 1
        has_said_why = self._is_told and said.state == "failed"
        reason = said.message if has_said_why else str(error)
        logger.error("model %s: %s", self.alias, reason, exc_info=None if isinstance(error, _EXPECTED) else error)
        if has_said_why and not self._was_ready:
            self._failures.give_up(now)
        else:
            self._failures.note(now)
        self._is_told = False
        self._describe("failed" if self._failures.is_given_up else "loading", "replacing", reason)
        return self._failures.pause()

    def _take_state(self, state: State, pid: int) -> None:
        self.engine_pid = pid
        self._was_ready = self._was_ready or state.description.state not in ("loading", "failed")
        was_ready = self._was_ready or self._description.was_ready
        self._description = replace(state.description, was_ready=was_ready)
        self._stats = replace(state.stats, lost_engines=self._num_lost)
        self._is_told = True

    def _describe(self, state: str, stage: str = "", message: str = "") -> None:
        """Say what we know ourselves; once connected, the engine says the rest."""
        self._stats = EngineStats(lost_engines=self._num_lost)
        self._description = replace(
            self._description, state=state, stage=stage, message=message, fraction=0.0, loaded_bytes=0, total_bytes=0
        )

    def _require_link(self) -> ClientSession:
        """Return the way to the engine, or begin to look for one and refuse for now."""
        self.start()
        if self._link is not None:
            return self._link
        if self._description.state == "failed":
            left = math.ceil(self._retry_at - time.monotonic())
            raise EngineUnavailable(f"model {self.alias} is not available.", code="engine_died", retry_after=left)
        raise EngineUnavailable(
            f"model {self.alias} is loading. Try again in a moment.", code="engine_loading", retry_after=2
        )
