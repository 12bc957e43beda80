"""`EngineServer`: an engine process, a `ThreadClient` served to the workers of one site over a unix socket.

    main (a worker has started us)  ─┐
    manage.py streamserve_engine    ─┴► run: take the lock, listen, EngineServer.serve until there is a reason to end

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
from typing import IO

from streamserve.clients.factory import make_client
from streamserve.clients.process.config import LaunchConfig, config_hash, dated, spec_from_json
from streamserve.clients.process.frame_socket import Connection
from streamserve.clients.process.messages import (
    PROTOCOL,
    Goodbye,
    State,
    Welcome,
    decode_hello,
    decode_to_engine,
    encode,
    is_replaced,
)
from streamserve.clients.process.paths import claimed, listening, place_of, prepare_folder
from streamserve.clients.process.server_session import ServerSession
from streamserve.clients.process.watchdog import Watchdog
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.frames import FrameError
from streamserve.protocol.stats import ModelDescription

logger = logging.getLogger(__name__)

OnProgress = Callable[[ModelDescription], None]

_HELLO_SECONDS = 10.0
# How often to look around, and how often at least to say that we live.
_TICK_SECONDS, _STATE_SECONDS = 0.2, 1.0
# How long workers may take to read what is on its way to them, and how long threads may take to end.
_LEAVE_SECONDS, _EXIT_SECONDS = 2.0, 10.0
_LISTENING = b"+"


class EngineServer:
    """Serves one engine until `stop`, idleness, or the engine's death."""

    def __init__(self, spec: LaunchConfig, on_progress: OnProgress | None = None) -> None:
        self._spec = dated(spec)
        self._hash = config_hash(spec)
        self._started_at = time.monotonic()
        self._watchdog = Watchdog(max(spec.engine.step_seconds, spec.hang_seconds))
        self._client = make_client(
            spec.model, spec.engine, step_delay_seconds=spec.echo_step_seconds, on_step=self._watchdog.on_step
        )
        self._on_progress = on_progress
        self._state_seconds = min(_STATE_SECONDS, spec.hang_seconds / 4)
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._sessions: set[ServerSession] = set()
        self._lonely_seconds = 0.0
        self._told: tuple[ModelDescription | None, float] = (None, 0.0)
        self._drain: asyncio.Task[None] | None = None
        self._is_quiet = asyncio.Event()
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def serve(self, listener: socket.socket) -> int:
        """Serve until there is a reason to end; returns the exit status, 1 for a dead engine."""
        loop = asyncio.get_running_loop()
        self._mind_signals(loop)
        server = await loop.create_unix_server(lambda: Connection(self._accept), sock=listener)
        self._client.start()
        ticks = loop.create_task(self._tick())
        ticks.add_done_callback(lambda _: self._finish("failed"))
        reason = await self._end
        server.close()
        ticks.cancel()
        await self._leave(reason)
        return int(reason == "failed")

    # The life of a connection

    def _accept(self, connection: Connection) -> None:
        task = asyncio.get_running_loop().create_task(self._attend(connection))
        self._connections[connection] = task
        task.add_done_callback(lambda _: self._connections.pop(connection))

    async def _attend(self, connection: Connection) -> None:
        """Greet a worker, do what it asks, and cancel what it leaves behind."""
        session = ServerSession(connection, self._client, self.control, self._note_quiet)
        try:
            await self._greet(connection)
            self._sessions.add(session)
            session.tell(self._state())
            while (payload := await connection.receive()) is not None:
                session.take(decode_to_engine(payload))
        except (FrameError, TimeoutError) as error:
            logger.warning("process %d: %s: connection dropped", connection.peer.pid, error or "no greeting")
        except Exception:  # the edge of one worker's task
            logger.exception("process %d: connection dropped", connection.peer.pid)
        finally:
            connection.abort()
            self._sessions.discard(session)
            session.close()

    async def _greet(self, connection: Connection) -> None:
        """Exchange who we are; raises FrameError or TimeoutError. A younger config than ours ends us."""
        async with asyncio.timeout(_HELLO_SECONDS):
            payload = await connection.receive()
        if payload is None:
            raise FrameError("it left without a greeting")
        hello = decode_hello(payload)
        connection.send(encode(self._welcome))
        if is_replaced(self._welcome, hello):
            self.stop("replaced")
        elif hello.protocol != PROTOCOL:
            raise FrameError(f"it speaks protocol {hello.protocol}, this engine {PROTOCOL}")

    @property
    def _welcome(self) -> Welcome:
        assert self._spec.made_at is not None
        return Welcome(
            protocol=PROTOCOL,
            config_hash=self._hash,
            made_at=self._spec.made_at,
            pid=os.getpid(),
            started_at=self._started_at,
        )

    # Reasons to end

    async def control(self, action: str) -> None:
        """Do what an operator asks: EngineClient.control's actions, or "stop"."""
        if action == "stop":
            self.stop("stopped")
            return
        await self._client.control(action)
        self._tell_state()

    def stop(self, reason: str) -> None:
        """End when what has begun is finished, or after `drain_seconds`."""
        if self._drain is None:
            logger.info("the engine of model %s drains: %s", self._spec.model.alias, reason)
            self._drain = asyncio.get_running_loop().create_task(self._run_dry(reason))

    async def _run_dry(self, reason: str) -> None:
        with suppress(TimeoutError, StreamserveError):  # an engine that cannot be asked any more ends all the same
            async with asyncio.timeout(self._spec.drain_seconds):
                await self._client.control("drain")
                self._tell_state()
                self._note_quiet()
                await self._is_quiet.wait()
        self._finish(reason)

    def _note_quiet(self) -> None:
        if self._drain is not None and not any(session.is_busy for session in self._sessions):
            self._is_quiet.set()

    def _finish(self, reason: str) -> None:
        if not self._end.done():
            self._end.set_result(reason)

    def _mind_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_signal_handler(signal.SIGTERM, self._on_signal)
        if self._spec.autostart:  # Ctrl-C is meant for the worker that started us
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        else:
            loop.add_signal_handler(signal.SIGINT, self._on_signal)

    def _on_signal(self) -> None:
        """Drain; a second signal ends that too."""
        if self._drain is not None:
            self._finish("stopped")
        self.stop("stopped")

    async def _leave(self, reason: str) -> None:
        """Take leave of every worker and close the engine. A dead one says what it died of, and no goodbye."""
        logger.info("the engine of model %s ends: %s", self._spec.model.alias, reason)
        for session in self._sessions:
            session.tell(self._state() if reason == "failed" else Goodbye(reason))
        for connection in self._connections:
            connection.close()
        if self._connections:
            await asyncio.wait(self._connections.values(), timeout=_LEAVE_SECONDS)
        for task in [*self._connections.values(), self._drain]:
            if task is not None:
                task.cancel()
        with _exiting_within(_EXIT_SECONDS):
            await self._client.aclose()

    # Looking around

    async def _tick(self) -> None:
        """Look around, now and then, until the end. If that breaks, this is the end."""
        while True:
            self._look()
            await asyncio.sleep(_TICK_SECONDS)

    def _look(self) -> None:
        now, description = time.monotonic(), self._client.describe()
        self._watchdog.look(self._client.stats(), now)
        if self._on_progress is not None:
            self._on_progress(description)
        if description.state == "failed":
            self._finish("failed")
        elif self._spec.autostart and self._is_idle():
            self._finish("idle")
        elif description != self._told[0] or now - self._told[1] >= self._state_seconds:
            self._tell_state()

    def _is_idle(self) -> bool:
        """Count the seconds without a worker; not those in which none could come, as loading holds the GIL."""
        self._lonely_seconds = 0.0 if self._connections else self._lonely_seconds + _TICK_SECONDS
        return self._lonely_seconds > self._spec.idle_seconds

    def _tell_state(self) -> None:
        """Say how we are to all workers; whoever hears nothing for `hang_seconds` kills us."""
        state = self._state()
        self._told = state.description, time.monotonic()
        for session in self._sessions:
            session.tell(state)

    def _state(self) -> State:
        return State(self._client.describe(), self._client.stats())


def run(
    spec: LaunchConfig, on_progress: OnProgress | None = None, *, on_listening: Callable[[], None] | None = None
) -> int:
    """Be the engine of `spec` until its end; returns the exit status: 0 also when there is one already.

    Main thread. Raises PlaceError.
    """
    place = place_of(spec)
    prepare_folder(place)
    with claimed(place) as is_ours:
        if not is_ours:
            logger.info("model %s has an engine already", spec.model.alias)
            return 0
        with listening(place) as listener:
            if on_listening is not None:
                on_listening()
            return asyncio.run(_serve(spec, on_progress, listener))


async def _serve(spec: LaunchConfig, on_progress: OnProgress | None, listener: socket.socket) -> int:
    return await EngineServer(spec, on_progress).serve(listener)


def main() -> int:
    """Read a spec as JSON from stdin and be its engine. The process that was called ends as soon as we listen."""
    spec = dated(spec_from_json(sys.stdin.buffer.read()))
    told, tell = os.pipe()
    if os.fork():
        os.close(tell)
        return 0 if os.read(told, 1) == _LISTENING else 1
    os.close(told)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    starter = os.fdopen(tell, "wb", buffering=0)
    status = run(spec, on_listening=lambda: _let_go(starter))
    if status == 0:  # who lost the lock is no failure
        _let_go(starter)
    return status


def _let_go(starter: IO[bytes]) -> None:
    if not starter.closed:
        with suppress(BrokenPipeError), starter:
            starter.write(_LISTENING)


@contextmanager
def _exiting_within(seconds: float) -> Iterator[None]:
    """End the process if a thread (loading, or in a long step) does not come to its end."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


if __name__ == "__main__":
    sys.exit(main())
