"""`FlowServer`: the serving process: it starts, checks its connections, and shuts down. Its event loop is daphne's.

Importing this module installs Twisted's reactor; only install.py imports it, inside functions. Relies on, in daphne
4.2.3 `server.py` Server: `run` assigns `self.http_factory` before it listens with it, calls `kill_all_applications`
before the reactor's shutdown and waits for its Deferred, and hands each port to `listen_success`; in Twisted 26.10
`reactor.sigTerm` and `sigInt`, which stand as signal handlers when the reactor runs.
"""

from __future__ import annotations

import daphne.server  # noqa: F401  # first: installs the reactor

# isort: split

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from twisted.internet import defer, reactor

from streamserve.asgi.drain import before_exit, end_tasks
from streamserve.asgi.flow.apps import AppServer, guarded
from streamserve.asgi.flow.requests import FlowFactory, FlowRequest
from streamserve.asgi.flow.transport import FlowTransport, accept_last

logger = logging.getLogger("streamserve.asgi")

SERVICE_RESTART = 1012
_LIFESPAN_SECONDS = 5.0
# Connections that wait to be accepted. Twisted has 50: of a burst the system drops the rest, which try again after 1 s.
_BACKLOG = 2048


class FlowServer(AppServer):
    """Set `options` and `drain` in a subclass (install.py); daphne makes the instance."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ports: list[Any] = []
        self._is_stopping = False
        self._has_ended = threading.Event()
        self._starting: asyncio.Task[None] | None = None

    @property
    def http_factory(self) -> Any:
        """The factory that `run` listens with; daphne assigns its stock factory."""
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
        """Start the lifespan and the checks, and replace the signal handlers that the reactor has set by now."""
        self._starting = asyncio.get_running_loop().create_task(self._start(), name="lifespan start")
        reactor.callLater(self.options.check_seconds, self._check_connections)
        if not self.signal_handlers:  # under the autoreloader, in a thread
            before_exit(self._end_at_exit)
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

    # Shutdown

    def _on_signal(self, number: int, frame: object) -> None:
        """Drain on SIGTERM; shorten every wait on SIGINT, which is Ctrl-C, and on a second signal."""
        if number == signal.SIGINT:
            self.drain.hurry()
        reactor.callFromThread(self.stop)

    def stop(self) -> None:
        """Begin the shutdown; a second call hurries it."""
        if self._is_stopping:
            self.drain.hurry()
        else:
            self._is_stopping = True
            super().stop()

    def _end_at_exit(self) -> None:
        """Drain at once, because the interpreter exits while this server's thread runs."""
        self.drain.hurry()
        reactor.callFromThread(self.stop)
        self._has_ended.wait(2.0)

    def kill_all_applications(self) -> Any:
        """Drain. The reactor runs on until the returned Deferred fires, then shuts down."""
        seconds = self.options.drain_seconds if self.signal_handlers else 0
        return defer.Deferred.fromFuture(asyncio.ensure_future(self._shut_down(seconds)))

    async def _shut_down(self, drain_seconds: float) -> None:
        try:
            await self.drain.conduct(self, drain_seconds)
            await self.lifespan.stop(_LIFESPAN_SECONDS)
            for transport in self.transports.values():
                transport.close()
            await end_tasks()
        except Exception:
            logger.exception("the drain failed")

    def running(self) -> Iterator[asyncio.Future[None]]:
        """Yield the tasks of the apps that run."""
        for details in self.connections.values():
            task = details.get("application_instance")
            if task is not None and not task.done():
                yield task

    def is_running(self) -> bool:
        return any(True for _ in self.running())

    def has_unsent(self) -> bool:
        return any(one.is_open and one.num_unsent for one in self.transports.values())

    def is_busy(self) -> bool:
        return self.is_running() or self.has_unsent()

    def listen_success(self, port: Any) -> None:
        self._ports.append(port)
        with contextlib.suppress(AttributeError, OSError):
            port.socket.listen(_BACKLOG)
        super().listen_success(port)

    def stop_listening(self) -> None:
        for port in self._ports:
            accept_last(port)
            port.stopListening()

    def has_newcomers(self) -> bool:
        return any(one.is_open and not one.channel.has_asked for one in self.transports.values())

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

    # Connections

    def add_transport(self, transport: Any, channel: Any) -> FlowTransport:
        """Wrap the transport of an accepted connection."""
        wrapped = self.transports[transport] = FlowTransport(transport, channel, self.options)
        return wrapped

    def _check_connections(self) -> None:
        """End connections that are late or stalled, and remove closed connections."""
        now = time.monotonic()
        for key, transport in list(self.transports.items()):
            if not transport.is_open:
                transport.forget()
                del self.transports[key]
                continue
            reason = guarded(transport.check, now)
            if reason is not None:
                logger.info("connection of %s ended: %s", transport.transport.getPeer(), reason)
        reactor.callLater(self.options.check_seconds, self._check_connections)
