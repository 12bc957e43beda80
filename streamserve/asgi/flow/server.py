"""`FlowServer`: the process: accepts, watches its connections, starts and goes down. Its event loop is daphne's.

Importing this module installs Twisted's reactor: only flow_server.py does, inside functions. Relies on, in daphne
4.2.3 `server.py` Server: `run` assigns `self.http_factory` before it listens with it, calls `kill_all_applications`
before the reactor's shutdown and waits for its Deferred, and hands each port to `listen_success`; in Twisted 26.10
`reactor.sigTerm` and `sigInt`, which stand as signal handlers when the reactor runs.
"""

from __future__ import annotations

import daphne.server  # noqa: F401  # first: installs the reactor

# isort: split

import asyncio
import atexit
import logging
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from twisted.internet import defer, reactor

from streamserve.asgi.drain import end_tasks
from streamserve.asgi.flow.apps import AppServer, guarded
from streamserve.asgi.flow.requests import FlowFactory, FlowRequest
from streamserve.asgi.flow.transport import FlowTransport, accept_last

logger = logging.getLogger("streamserve.asgi")

SERVICE_RESTART = 1012
_LIFESPAN_SECONDS = 5.0


class FlowServer(AppServer):
    """Set `options` and `drain` in a subclass; daphne makes the instance (flow_server.py)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ports: list[Any] = []
        self._is_stopping = False
        self._has_ended = threading.Event()
        self._starting: asyncio.Task[None] | None = None

    @property
    def http_factory(self) -> Any:
        """What `run` listens with."""
        return self._http_factory

    @http_factory.setter
    def http_factory(self, stock: Any) -> None:
        self._http_factory = FlowFactory(self)

    def run(self) -> None:
        """Serve until stopped."""
        reactor.callLater(0, self._on_running)
        super().run()
        self._has_ended.set()

    def _on_running(self) -> None:
        """The reactor runs and has set its signal handlers; ours take their places."""
        self._starting = asyncio.get_running_loop().create_task(self._start(), name="lifespan start")
        reactor.callLater(self.options.sweep_seconds, self._sweep)
        if not self.signal_handlers:  # under the autoreloader, in a thread of its own
            atexit.register(self._end_at_exit)
            return
        for number, stock in ((signal.SIGTERM, reactor.sigTerm), (signal.SIGINT, reactor.sigInt)):
            if signal.getsignal(number) == stock:
                signal.signal(number, self._on_signal)

    async def _start(self) -> None:
        await self.lifespan.start()
        if self.lifespan.failure is not None:
            logger.error("the app could not start: %s", self.lifespan.failure)
            self.abort_start = True  # daphne's command line exits with 1 then
            self.stop()

    ### Going down

    def _on_signal(self, number: int, frame: object) -> None:
        """SIGTERM drains; SIGINT (somebody sits there), or a second signal, waits for nobody."""
        if number == signal.SIGINT:
            self.drain.hurry()
        reactor.callFromThread(self.stop)

    def stop(self) -> None:
        """Begin to go down; told again, hurry."""
        if self._is_stopping:
            self.drain.hurry()
        else:
            self._is_stopping = True
            super().stop()

    def _end_at_exit(self) -> None:
        """The interpreter exits around our thread: have what runs end in order, at once."""
        self.drain.hurry()
        reactor.callFromThread(self.stop)
        self._has_ended.wait(2.0)

    def kill_all_applications(self) -> Any:
        """Drain. The reactor waits for the Deferred before it shuts down, and works on."""
        seconds = self.options.drain_seconds if self.signal_handlers else 0
        return defer.Deferred.fromFuture(asyncio.ensure_future(self._go_down(seconds)))

    async def _go_down(self, drain_seconds: float) -> None:
        try:
            await self.drain.conduct(self, drain_seconds)
            await self.lifespan.stop(_LIFESPAN_SECONDS)
            for wire in self.wires.values():
                wire.close()
            await end_tasks()
        except Exception:
            logger.exception("the drain failed")

    def running(self) -> Iterator[asyncio.Future[None]]:
        """Yield the tasks of apps that run."""
        for details in self.connections.values():
            task = details.get("application_instance")
            if task is not None and not task.done():
                yield task

    def is_running(self) -> bool:
        return any(True for _ in self.running())

    def has_unsent(self) -> bool:
        return any(wire.is_open and wire.num_unsent for wire in self.wires.values())

    def is_busy(self) -> bool:
        return self.is_running() or self.has_unsent()

    def listen_success(self, port: Any) -> None:
        self._ports.append(port)
        super().listen_success(port)

    def stop_listening(self) -> None:
        for port in self._ports:
            accept_last(port)
            port.stopListening()

    def has_newcomers(self) -> bool:
        return any(wire.is_open and not wire.channel.has_asked for wire in self.wires.values())

    def end_all(self) -> None:
        for protocol, details in list(self.connections.items()):
            if "disconnected" not in details:
                guarded(self._end, protocol)

    def _end(self, protocol: Any) -> None:
        if isinstance(protocol, FlowRequest):
            protocol.end_early(self.drain.retry_after)
        else:
            self.end_websocket(protocol, SERVICE_RESTART, 503)

    def cancel_all(self) -> None:
        for task in self.running():
            task.cancel()

    ### Connections

    def add_wire(self, transport: Any, channel: Any) -> FlowTransport:
        """A connection was accepted."""
        wire = self.wires[transport] = FlowTransport(transport, channel, self.options)
        return wire

    def _sweep(self) -> None:
        """Look at every connection: who is late, who takes nothing, who has gone."""
        now = time.monotonic()
        for transport, wire in list(self.wires.items()):
            if not wire.is_open:
                wire.forget()
                del self.wires[transport]
                continue
            why = guarded(wire.check, now)
            if why is not None:
                logger.info("connection of %s ended: %s", wire.transport.getPeer(), why)
        reactor.callLater(self.options.sweep_seconds, self._sweep)
