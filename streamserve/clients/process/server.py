"""`EngineServer`: an engine process: a `ThreadClient` or `ThreadEmbedder`, served to one site over a unix socket.

    main (started by a client)     ─┐
    manage.py streamserve_engine   ─┴► run: take the lock, listen, EngineServer.serve until there is a reason to end

One event loop, beside the engine's own thread. Nothing before the lock imports torch. Knows no Django.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO

from streamserve.clients.factory import make_client, make_embedder
from streamserve.clients.process.config import (
    LaunchConfig,
    config_from_json,
    config_hash,
    dated,
    engine_paths,
    listening,
    locked,
    prepare_folder,
)
from streamserve.clients.process.frame_socket import Connection
from streamserve.clients.process.memory import FIRST_USE_SECONDS, QUIET_SECONDS, HostMemory
from streamserve.clients.process.messages import (
    PROTOCOL,
    Goodbye,
    State,
    Welcome,
    decode_hello,
    encode,
    is_replaced,
)
from streamserve.clients.process.server_session import Served, ServerSession
from streamserve.clients.process.supervision import FlightRecord, Watchdog, flight_record
from streamserve.engine.plan import Flight
from streamserve.protocol.engine import ModelDescription
from streamserve.protocol.errors import EngineUnavailable, StreamserveError
from streamserve.protocol.frames import FrameError
from streamserve.protocol.history import History

logger = logging.getLogger(__name__)

OnProgress = Callable[[ModelDescription], None]

_HELLO_SECONDS = 10.0
# How often the engine is checked, and how often at least its state is sent: the heartbeat.
_TICK_SECONDS, _STATE_SECONDS = 0.2, 1.0
_DRAIN_POLL_SECONDS = 0.05
# How long clients may take to read the last frames, and how long threads may take to end.
_LEAVE_SECONDS, _EXIT_SECONDS = 2.0, 10.0
_LISTENING = b"+"
ASLEEP = 4  # exit status


class EngineServer:
    """Serves one engine until `stop`, idleness, or the engine's death."""

    def __init__(
        self,
        config: LaunchConfig,
        on_progress: OnProgress | None = None,
        record: FlightRecord | None = None,
        *,
        begins_asleep: bool = False,
    ) -> None:
        self._config = dated(config)
        self._hash = config_hash(config)
        self._started_at = time.monotonic()
        self._watchdog = Watchdog(max(config.engine.step_seconds, config.hang_seconds), _TICK_SECONDS)
        self._memory = None if config.memory_bytes is None else HostMemory(config, config.memory_bytes)
        self._client = self._make_client(config)
        self._begins_asleep = begins_asleep
        self._num_asked = 0  # at the last check
        self._has_answered = False
        self._idle_since: float | None = None  # loaded, and nothing to answer since
        self._record = record
        self._on_progress = on_progress
        self._state_seconds = min(_STATE_SECONDS, config.hang_seconds / 4)
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._sessions: set[ServerSession] = set()
        self._alone_seconds = 0.0
        self._sent: tuple[ModelDescription | None, float] = (None, 0.0)
        self._history = History()
        self._drain: asyncio.Task[None] | None = None
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def _make_client(self, config: LaunchConfig) -> Served:
        delay = config.echo_step_seconds
        if config.embedder is not None:
            return make_embedder(config.embedder, step_delay_seconds=delay, on_step=self._on_step, memory=self._memory)
        return make_client(
            config.model,
            config.engine,
            step_delay_seconds=delay,
            on_step=self._on_step,
            compiles=True,
            memory=self._memory,
        )

    async def serve(self, listener: socket.socket) -> int:
        """Serve until there is a reason to end; returns the exit status: 1 for a dead engine, ASLEEP after a sleep."""
        loop = asyncio.get_running_loop()
        self._add_signal_handlers(loop)
        server = await loop.create_unix_server(lambda: Connection(self._accept), sock=listener)
        if not self._begins_asleep:
            self._client.start()
        ticks = loop.create_task(self._tick())
        ticks.add_done_callback(lambda _: self._finish("failed"))
        reason = await self._end
        server.close()
        ticks.cancel()
        await self._leave(reason)
        return ASLEEP if reason == "asleep" else int(reason == "failed")

    # The life of a connection

    def _accept(self, connection: Connection) -> None:
        task = asyncio.get_running_loop().create_task(self._serve_client(connection))
        self._connections[connection] = task
        task.add_done_callback(lambda _: self._connections.pop(connection))

    async def _serve_client(self, connection: Connection) -> None:
        """Serve a client until its connection is lost, then cancel what it left open."""
        session = ServerSession(connection, self._client, self.control)
        try:
            await self._handshake(connection)
            self._sessions.add(session)
            self._send_state(newcomer=session)
            await connection.run(session.take)
        except (FrameError, TimeoutError) as error:
            logger.warning("process %d: %s: connection dropped", connection.peer.pid, error or "no handshake")
        except Exception:  # the edge of one client's task
            logger.exception("process %d: connection dropped", connection.peer.pid)
        finally:
            connection.abort()
            self._sessions.discard(session)
            session.close()

    async def _handshake(self, connection: Connection) -> None:
        """Exchange versions; raises FrameError or TimeoutError. A more recent config than ours ends this engine."""
        async with asyncio.timeout(_HELLO_SECONDS):
            payload = await connection.receive()
        if payload is None:
            raise FrameError("it disconnected before the handshake")
        hello = decode_hello(payload)
        connection.send(encode(self._welcome))
        if is_replaced(self._welcome, hello):
            self.stop("replaced")
        elif hello.protocol != PROTOCOL:
            raise FrameError(f"it speaks protocol {hello.protocol}, this engine {PROTOCOL}")

    @property
    def _welcome(self) -> Welcome:
        assert self._config.made_at is not None
        return Welcome(
            protocol=PROTOCOL,
            config_hash=self._hash,
            made_at=self._config.made_at,
            pid=os.getpid(),
            started_at=self._started_at,
        )

    # Reasons to end

    async def control(self, action: str) -> None:
        """Carry out an operator's action: an action of EngineClient.control, or "stop"."""
        if action == "stop":
            self.stop("stopped")
        elif action == "sleep":
            self._sleep()
        elif action == "wake":
            self._client.start()
            self._send_state()
        else:
            await self._client.control(action)
            self._send_state()

    def _sleep(self) -> None:
        """End, and give the memory back. Raises EngineUnavailable while it answers, or an operator has paused it."""
        state = self._describe().state
        is_answering = any(session.is_answering for session in self._sessions)
        if state == "asleep":
            return
        if state != "ready" or is_answering:
            why = "answers" if state == "ready" else f"is {state}"
            raise EngineUnavailable(
                f"model {self._config.model.alias} {why}, and does not go to sleep now.", code="engine_busy"
            )
        self._finish("asleep")

    def stop(self, reason: str) -> None:
        """Drain: end when every open answer is finished, or after `drain_seconds`."""
        if self._drain is None:
            logger.info("the engine of model %s drains: %s", self._config.model.alias, reason)
            self._drain = asyncio.get_running_loop().create_task(self._drain_and_end(reason))

    async def _drain_and_end(self, reason: str) -> None:
        with suppress(TimeoutError, StreamserveError):  # a dead engine ends as well
            async with asyncio.timeout(self._config.drain_seconds):
                await self._client.control("drain")
                self._send_state()
                while any(session.is_busy for session in self._sessions):  # noqa: ASYNC110  (sessions have no event)
                    await asyncio.sleep(_DRAIN_POLL_SECONDS)
        self._finish(reason)

    def _finish(self, reason: str) -> None:
        if not self._end.done():
            self._end.set_result(reason)

    def _add_signal_handlers(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_signal_handler(signal.SIGTERM, self._on_signal)
        if self._config.autostart:  # Ctrl-C is for the client
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        else:
            loop.add_signal_handler(signal.SIGINT, self._on_signal)

    def _on_signal(self) -> None:
        """Drain; a second signal ends at once."""
        if self._drain is not None:
            self._finish("stopped")
        self.stop("stopped")

    async def _leave(self, reason: str) -> None:
        """Send every client a goodbye and close the engine. A dead engine sends its state, with the error, instead."""
        logger.info("the engine of model %s ends: %s", self._config.model.alias, reason)
        for session in self._sessions:
            session.send(self._state() if reason == "failed" else Goodbye(reason))
        for connection in self._connections:
            connection.close()
        if self._connections:
            await asyncio.wait(self._connections.values(), timeout=_LEAVE_SECONDS)
        for task in [*self._connections.values(), self._drain]:
            if task is not None:
                task.cancel()
        with _exiting_within(_EXIT_SECONDS):
            await self._client.aclose()

    # Checks

    def _on_step(self, flight: Flight) -> None:
        """Note what is in flight, before it can end this process. Engine thread."""
        if self._record is not None:
            self._record.write(flight)
        self._watchdog.on_step(flight)

    async def _tick(self) -> None:
        """Check the engine periodically until the end; the server ends if a check raises."""
        while True:
            self._check()
            await asyncio.sleep(_TICK_SECONDS)

    def _check(self) -> None:
        now, description = time.monotonic(), self._describe()
        self._watchdog.check(self._client.stats(), now)
        if self._on_progress is not None:
            self._on_progress(description)
        if description.state == "failed":
            self._finish("failed")
        elif self._config.autostart and self._is_idle():
            self._finish("idle")
        elif self._drain is None and self._goes_to_sleep(now, description.state):
            self._finish("asleep")
        elif description != self._sent[0] or now - self._sent[1] >= self._state_seconds:
            self._send_state()

    def _goes_to_sleep(self, now: float, state: str) -> bool:
        """Return whether it sleeps now: for another engine, or because it has had nothing to answer for long."""
        num_asked = sum(session.num_asked for session in self._sessions)
        is_asked = num_asked != self._num_asked or any(session.is_answering for session in self._sessions)
        self._num_asked = num_asked
        if state != "ready" or is_asked:
            self._idle_since = None
            self._has_answered = self._has_answered or state == "ready"
        elif self._idle_since is None:
            self._idle_since = now
        free_from = None
        if self._idle_since is not None:
            free_from = self._idle_since + (QUIET_SECONDS if self._has_answered else FIRST_USE_SECONDS)
        if self._memory is not None and self._memory.look(free_from):
            return True
        after = self._config.sleep_after_seconds
        return after > 0 and self._idle_since is not None and now - self._idle_since >= after

    def _is_idle(self) -> bool:
        """Count the seconds without a client, except those in which loading holds the GIL and none can connect."""
        self._alone_seconds = 0.0 if self._connections else self._alone_seconds + _TICK_SECONDS
        return self._alone_seconds > self._config.idle_seconds

    def _send_state(self, newcomer: ServerSession | None = None) -> None:
        """Send the state to all clients. A client that receives none for `hang_seconds` kills this process.

        All get each report, so that all keep the same history; a newcomer gets what was kept before it, too.
        """
        state = self._state()
        self._sent = state.description, time.monotonic()
        self._history.note(state.stats.point(state.stats.reported_at))
        for session in self._sessions:
            session.send(self._with_past(state) if session is newcomer else state)

    def _describe(self) -> ModelDescription:
        description = replace(self._client.describe(), on_demand=self._config.is_lazy)
        return replace(description, state="asleep") if description.state == "idle" else description

    def _state(self) -> State:
        return State(self._describe(), replace(self._client.stats(), reported_at=time.time()))

    def _with_past(self, state: State) -> State:
        return State(state.description, replace(state.stats, past=self._history.points()))


def run(
    config: LaunchConfig,
    on_progress: OnProgress | None = None,
    *,
    on_listening: Callable[[], None] | None = None,
    begins_asleep: bool = False,
) -> int:
    """Run the config's engine until its end; returns the exit status: 0 also when another process runs it already.

    `begins_asleep`: it is loaded when it is first asked. ASLEEP: it has gone to sleep, and its memory goes with this
    process. Main thread. Raises EnginePathError.
    """
    paths = engine_paths(config)
    prepare_folder(paths)
    with locked(paths, until_exit=True) as is_ours:
        if not is_ours:
            logger.info("model %s has an engine already", config.model.alias)
            return 0
        with listening(paths) as listener, flight_record(paths.flight) as record:
            if on_listening is not None:
                on_listening()
            status = asyncio.run(_serve(config, on_progress, listener, record, begins_asleep=begins_asleep))
            if status in (0, ASLEEP):
                paths.flight.unlink(missing_ok=True)
            return status


async def _serve(
    config: LaunchConfig,
    on_progress: OnProgress | None,
    listener: socket.socket,
    record: FlightRecord,
    *,
    begins_asleep: bool,
) -> int:
    return await EngineServer(config, on_progress, record, begins_asleep=begins_asleep).serve(listener)


def main() -> int:
    """Read a config as JSON from stdin and run its engine in a forked process; the parent ends once that listens."""
    config = dated(config_from_json(sys.stdin.buffer.read()))
    reading_end, writing_end = os.pipe()
    if os.fork():
        os.close(writing_end)
        return 0 if os.read(reading_end, 1) == _LISTENING else 1
    os.close(reading_end)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    starter = os.fdopen(writing_end, "wb", buffering=0)
    status = run(config, on_listening=lambda: _release(starter))
    if status == 0:  # also when another process has the lock
        _release(starter)
    logging.shutdown()
    os._exit(0 if status == ASLEEP else status)  # its memory is wanted: Python takes seconds to end on a busy machine


def _release(starter: IO[bytes]) -> None:
    if not starter.closed:
        with suppress(BrokenPipeError), starter:
            starter.write(_LISTENING)


@contextmanager
def _exiting_within(seconds: float) -> Iterator[None]:
    """End the process if a thread (loading, or in a long step) does not end in time."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


if __name__ == "__main__":
    sys.exit(main())
