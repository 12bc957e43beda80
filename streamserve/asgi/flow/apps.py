"""`AppServer`: what lies between a connection and its app: flow control, the app's task, its messages, its end.

daphne's `send` returns at once and Twisted buffers without bound (daphne#170); here it waits for the reader (DESIGN.md,
7). daphne's reaper ends at the first exception after a head; here an exception costs one connection only. Event loop
only. Importing this module installs Twisted's reactor.

Relies on, in daphne 4.2.3 `server.py` Server: `self.connections[protocol]` is a dict with "application_instance" and
"disconnected"; `protocol_connected` is called once for each request and WebSocket; `application_checker` and
`timeout_checker` are started by `run` and reschedule themselves. `ws_protocol.py` WebSocketProtocol: `muted`,
`handshake_deferred`, `application_queue`, `sendCloseFrame`, `closeHandshakeTimeout`. install.py checks them.
"""

from __future__ import annotations

import daphne.server

# isort: split

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from daphne.ws_protocol import ConnectionDeny
from twisted.internet import reactor

from streamserve.asgi.drain import Drain
from streamserve.asgi.flow.requests import FlowRequest
from streamserve.asgi.flow.transport import FlowConfig, FlowControl, FlowTransport, Inbox, piece_bytes
from streamserve.asgi.guard import Guard, GuardedApp, RouteBound
from streamserve.asgi.types import App, Message, Scope

logger = logging.getLogger("streamserve.asgi")

# In a scope's "extensions": {"drain": Drain, "num_untaken": () -> bytes the reader's system has not acknowledged}.
EXTENSION = "streamserve.flow"

_INTERNAL_ERROR = 1011
# RFC 6455, 7.4.1, and the IANA registry: the codes of close frames. Autobahn's sendClose knows 1000 and 3000 up.
_CLOSE_CODES = {1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014}
# Autobahn closes the connection when the peer does not answer a close frame within a second: too short behind unread
# data.
_CLOSE_SECONDS = 5.0
# A dropped send yields to the loop this often: an app that awaits nothing else would block it for ever.
_DROPS_A_YIELD = 100
# A send that needs no wait yields to the loop this often: with a fast reader an app might never wait.
_QUICK_A_YIELD = 8
_GONE = FlowControl(None)  # for a connection that was removed
_GONE.release()


class AppServer(daphne.server.Server):  # type: ignore[misc]  # daphne ships no types
    """The part of daphne's server that runs apps."""

    options: FlowConfig
    drain: Drain

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most = RouteBound(body_bytes=self.options.body_bytes, way_out="Send less.")
        guard = Guard(body_seconds=self.options.head_seconds, bound_of=self._bound_of)
        self.application: App = GuardedApp(self.application, guard)
        self.connections: dict[Any, dict[str, Any]] = {}  # by request or WebSocket protocol
        self.transports: dict[Any, FlowTransport] = {}  # by Twisted's transport
        self.lifespan = LifespanTask(self.application, {EXTENSION: {"drain": self.drain}})
        self._piece_bytes = piece_bytes(self.options)
        self._num_dropped = self._num_quick = 0

    def _bound_of(self, path: str) -> RouteBound:
        """Return the bound of a body: the server's, but for a smaller bound of the route, and for routes with files."""
        bound = self.drain.bound_of(path)
        has_own = bound is not None and (bound.file_bytes or bound.body_bytes <= self._most.body_bytes)
        return bound if bound is not None and has_own else self._most

    def protocol_connected(self, protocol: Any) -> None:
        """Register the flow control of a new request or WebSocket with Twisted."""
        super().protocol_connected(protocol)
        if isinstance(protocol, FlowRequest):
            transport = protocol.channel.flow_transport
            control = FlowControl(None)
            protocol.registerProducer(control, True)
            if protocol.channel._waitingForTransport:
                control.pauseProducing()  # earlier responses of this connection are still unsent
        else:
            transport = self.transports.get(protocol.transport)
            control = FlowControl(transport)
            protocol.closeHandshakeTimeout = _CLOSE_SECONDS
            protocol.transport.unregisterProducer()  # the HTTPChannel before the upgrade
            protocol.transport.registerProducer(control, True)
        self.connections[protocol].update(control=control, transport=transport)

    def protocol_disconnected(self, protocol: Any) -> None:
        """Note that a response is done, or its client has left. daphne may call it again when it is removed."""
        details = self.connections.get(protocol)
        if details is not None:
            details["control"].release()
            details.setdefault("disconnected", time.time())
            if "application_instance" not in details:
                del self.connections[protocol]

    def create_application(self, protocol: Any, scope: Scope) -> asyncio.Queue[Message] | None:
        """Start the app of a request or WebSocket; return what `receive` reads. Unlike daphne's, settles at its end."""
        details = self.connections.get(protocol)
        if details is None:
            return None
        assert "application_instance" not in details
        is_request = isinstance(protocol, FlowRequest)
        inbox = protocol.inbox if is_request else Inbox(protocol.transport)
        scope.setdefault("asgi", {"version": "3.0"})
        control, transport = details["control"], details["transport"]
        send: Callable[[Message], Awaitable[None]] = partial(self.send, protocol, control)
        if is_request:
            send = Sender(send, protocol, control, self._piece_bytes)
        num_untaken = partial(_num_untaken, transport)
        scope["extensions"] = {EXTENSION: {"drain": self.drain, "num_untaken": num_untaken}}
        scope["state"] = self.lifespan.state.copy()
        task = asyncio.ensure_future(self._run_app(scope, inbox, send))
        details["application_instance"] = task
        task.add_done_callback(lambda _: guarded(self._settle, protocol))
        return inbox

    def _run_app(self, scope: Scope, inbox: asyncio.Queue[Message], send: Callable[..., Any]) -> Awaitable[None]:
        if self.lifespan.is_started:
            return self.application(scope, inbox.get, send)
        return self._run_when_started(scope, inbox, send)

    async def _run_when_started(self, scope: Scope, inbox: asyncio.Queue[Message], send: Callable[..., Any]) -> None:
        await self.lifespan.wait_started()
        await self.application(scope, inbox.get, send)

    # Messages of apps

    async def handle_reply(self, protocol: Any, message: Message) -> None:
        """Send a message of the app. daphne calls this as `send`; apps get `send` here, which looks nothing up."""
        details = self.connections.get(protocol)
        await self.send(protocol, details["control"] if details is not None else _GONE, message)

    async def send(self, protocol: Any, control: FlowControl, message: Message) -> None:
        """Write a message, and wait until there is room for another."""
        kind = message.get("type")
        if control.is_gone:
            await self._drop()
            return
        if kind == "http.response.body":
            is_small = len(message.get("body", b"")) <= self._piece_bytes
            if is_small and control.is_open and not control.write_lock.locked():
                protocol.handle_reply(message)  # the usual case: nothing to wait for
                self._num_quick += 1
                if self._num_quick % _QUICK_A_YIELD == 0:
                    await asyncio.sleep(0)
            else:
                await self._write_body(protocol, control, message)
        elif kind == "websocket.close" and protocol.state == protocol.STATE_OPEN:
            _close_websocket(protocol, message)
            return
        else:
            if not control.is_open:
                await control.wait()
            await super().handle_reply(protocol, message)
        if not control.is_open:
            await control.wait()

    async def _write_body(self, protocol: Any, control: FlowControl, message: Message) -> None:
        """Write a body message in pieces: Twisted would buffer it whole. Cancelled, write the rest at once."""
        rest, size = memoryview(message.get("body", b"")), self._piece_bytes
        async with control.write_lock:
            try:
                while len(rest) > size and not control.is_gone:
                    await control.wait()
                    piece, rest = rest[:size], rest[size:]
                    protocol.handle_reply({**message, "body": bytes(piece), "more_body": True})
                await control.wait()
            finally:  # what follows, the place to resume from, must not lie inside an event
                if not control.is_gone:
                    protocol.handle_reply({**message, "body": bytes(rest)})

    async def _drop(self) -> None:
        """Return without waiting, so that a cancel reaches the app and not this `send`; yield to the loop at times."""
        self._num_dropped += 1
        if self._num_dropped % _DROPS_A_YIELD == 0:
            await asyncio.sleep(0)

    # Ends of apps

    def application_checker(self) -> None:
        """Settle every app each second. An exception does not end it."""
        for protocol in list(self.connections):
            guarded(self._settle, protocol)
        reactor.callLater(1, self.application_checker)

    def timeout_checker(self) -> None:
        """Enforce daphne's own time-outs and send its pings. An exception does not end it."""
        for protocol, details in list(self.connections.items()):
            if "disconnected" not in details:
                guarded(protocol.check_timeouts)
        reactor.callLater(2, self.timeout_checker)

    def _settle(self, protocol: Any) -> None:
        """Close what an ended app left open, cancel an app that outlives its client, remove what has ended."""
        details = self.connections.get(protocol)
        if details is None:
            return
        task = details.get("application_instance")
        if task is not None and task.done():
            del details["application_instance"]
            self._conclude(protocol, task, has_left="disconnected" in details)
        elif task is not None and _seconds_since(details.get("disconnected")) > self.application_close_timeout:
            logger.warning("Application instance %r took too long to shut down and was cancelled.", task)
            task.cancel()
        if "disconnected" in details and "application_instance" not in details:
            self.connections.pop(protocol, None)

    def _conclude(self, protocol: Any, task: asyncio.Future[None], *, has_left: bool) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("Exception inside application: %s", error, exc_info=error)
        if has_left:
            return
        if not isinstance(protocol, FlowRequest):
            self.end_websocket(protocol, _INTERNAL_ERROR if error or task.cancelled() else 1000, 500)
            return
        if error is None:
            logger.error("The application returned without completing its response to %s", protocol.path)
        protocol.handle_exception(error or RuntimeError("no response"))

    def end_websocket(self, protocol: Any, code: int, status: int) -> None:
        """Close with `code`, or deny the handshake with `status`. The app gets its disconnect at once."""
        if protocol.state == protocol.STATE_CONNECTING:
            if hasattr(protocol, "handshake_deferred"):
                handshake = protocol.handshake_deferred
                del protocol.handshake_deferred
                handshake.errback(ConnectionDeny(code=status, reason="Not available"))
        else:
            protocol.sendCloseFrame(code=code)
        if not protocol.muted and hasattr(protocol, "application_queue"):
            protocol.muted = True
            protocol.application_queue.put_nowait({"type": "websocket.disconnect", "code": code})
        self.protocol_disconnected(protocol)


def _close_websocket(protocol: Any, message: Message) -> None:
    """Send the app's close frame with its code and reason, after what is unsent."""
    code = message.get("code") or 1000
    if code not in _CLOSE_CODES and not 3000 <= code <= 4999:
        raise ValueError(f"{code} is not a close code; use 1000, 1001, 1008, 1011 to 1013, or 3000 to 4999")
    reason = (message.get("reason") or "").encode()[:123].decode(errors="ignore").encode()
    protocol.sendCloseFrame(code=code, reasonUtf8=reason or None)


def _num_untaken(transport: FlowTransport | None) -> int:
    return transport.num_untaken if transport is not None else 0


def _seconds_since(moment: float | None) -> float:
    return 0.0 if moment is None else time.time() - moment


def guarded(work: Callable[..., Any], *args: Any) -> Any:
    """Call `work` for one connection; log an exception, so that other connections are still served."""
    try:
        return work(*args)
    except Exception:
        logger.exception("%s failed", getattr(work, "__name__", work))
        return None


class Sender:
    """The `send` of one request's app. `now` sends a piece of the body and returns True if that needs no wait."""

    __slots__ = ("_control", "_piece_bytes", "_request", "_send")

    def __init__(
        self, send: Callable[[Message], Awaitable[None]], request: FlowRequest, control: FlowControl, piece_bytes: int
    ) -> None:
        self._send, self._request, self._control, self._piece_bytes = send, request, control, piece_bytes

    def __call__(self, message: Message) -> Awaitable[None]:
        return self._send(message)

    def now(self, body: bytes) -> bool:
        control = self._control
        if not control.is_open or control.is_gone or control.write_lock.locked() or len(body) > self._piece_bytes:
            return False
        self._request.write_piece(body)
        return True


class LifespanTask:
    """The server's side of one app's lifespan (ASGI lifespan 2.0), which daphne has not.

    `state` is the app's, copied into each scope; `failure` is why its startup failed. An app that raises before it has
    answered does not support lifespan (Django, Channels), and is served without it, as with uvicorn's "auto".
    """

    def __init__(self, app: App, extensions: dict[str, Any]) -> None:
        self.state: dict[str, Any] = {}
        self.failure: str | None = None
        self._app, self._extensions = app, extensions
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._has_started = asyncio.Event()
        self._has_stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_started(self) -> bool:
        return self._has_started.is_set()

    async def start(self) -> None:
        """Send the startup; return when the app has answered, or does not support lifespan. It may set `failure`."""
        self._task = asyncio.create_task(self._run(), name="lifespan")
        self._incoming.put_nowait({"type": "lifespan.startup"})
        await self._has_started.wait()

    async def wait_started(self) -> None:
        await self._has_started.wait()

    async def stop(self, timeout_seconds: float) -> None:
        """Send the shutdown, and wait up to `timeout_seconds` for its answer."""
        if self._task is None or self._task.done() or not self.is_started:
            return
        self._incoming.put_nowait({"type": "lifespan.shutdown"})
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._has_stopped.wait()
        except TimeoutError:
            logger.warning("the app's shutdown took longer than %g s", timeout_seconds)

    async def _run(self) -> None:
        scope = {
            "type": "lifespan",
            "asgi": {"version": "3.0", "spec_version": "2.0"},
            "state": self.state,
            "extensions": self._extensions,
        }
        try:
            await self._app(scope, self._incoming.get, self._send)
        except Exception as error:
            if self.is_started:
                logger.error("the app failed in its lifespan", exc_info=error)
            else:
                logger.debug("the app does not support lifespan: %s", error)
        finally:
            self._has_started.set()
            self._has_stopped.set()

    async def _send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "lifespan.startup.failed":
            self.failure = str(message.get("message", "")) or "the app gave no reason"
        elif kind == "lifespan.shutdown.failed":
            logger.error("the app's shutdown failed: %s", message.get("message", ""))
        elif kind not in ("lifespan.startup.complete", "lifespan.shutdown.complete"):
            raise ValueError(f"{kind} is not a lifespan message")
        (self._has_started if "startup" in kind else self._has_stopped).set()
