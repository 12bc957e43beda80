"""`AppServer`: what stands between a connection and its app: gates, the task, what it sends, and how that ends.

daphne's `send` returns at once and Twisted buffers without end (daphne#170); here it waits for the reader, as DESIGN.md
7 says. Its reaper dies of the first exception after a head; here nothing one connection does costs another. Event loop
only. Importing this module installs Twisted's reactor.

Relies on, in daphne 4.2.3 `server.py` Server: `self.connections[protocol]` is a dict with "application_instance" and
"disconnected"; `protocol_connected` is called once for each request and WebSocket; `application_checker` and
`timeout_checker` are started by `run` and go on by themselves. `ws_protocol.py` WebSocketProtocol: `muted`,
`handshake_deferred`, `application_queue`, `sendCloseFrame`, `closeHandshakeTimeout`. flow_server.py checks them.
"""

from __future__ import annotations

import daphne.server

# isort: split

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from daphne.ws_protocol import ConnectionDeny
from twisted.internet import reactor

from streamserve.asgi.drain import Drain
from streamserve.asgi.flow.app_lifespan import LifespanTask
from streamserve.asgi.flow.config import FlowConfig
from streamserve.asgi.flow.requests import FlowChannel, FlowRequest
from streamserve.asgi.flow.transport import FlowControl, FlowTransport, Inbox, piece_bytes
from streamserve.asgi.types import Message, Scope

logger = logging.getLogger("streamserve.asgi")

# In a scope's "extensions": {"drain": Drain, "num_untaken": () -> bytes the reader's system has not taken yet,
# "channel": FlowChannel, of a response over HTTP/1.1}.
EXTENSION = "streamserve.flow"

_INTERNAL_ERROR = 1011
# RFC 6455, 7.4.1, and the IANA registry: what may stand in a close frame. Autobahn's sendClose knows 1000 and 3000 up.
_CLOSE_CODES = {1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014}
# Autobahn cuts a peer that does not answer our close frame within a second: too short behind unread data.
_CLOSE_SECONDS = 5.0
# A send to nobody yields to the loop so often: an app that awaits nothing else would hold it for ever.
_DROPS_A_YIELD = 100
# So many messages that no reader was waited for, then others get their turn: a quick reader never makes an app wait.
_QUICK_A_YIELD = 8
_GONE = FlowControl(None)  # of a connection that is forgotten
_GONE.let_go()


class AppServer(daphne.server.Server):  # type: ignore[misc]  # daphne ships no types
    """daphne's server, as far as apps see it."""

    options: FlowConfig
    drain: Drain

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.connections: dict[Any, dict[str, Any]] = {}  # by request or WebSocket protocol
        self.wires: dict[Any, FlowTransport] = {}  # by transport
        self.lifespan = LifespanTask(self.application, {EXTENSION: {"drain": self.drain}})
        self._piece_bytes = piece_bytes(self.options)
        self._num_dropped = self._num_quick = 0

    def protocol_connected(self, protocol: Any) -> None:
        """A request or a WebSocket begins: have Twisted tell its gate."""
        super().protocol_connected(protocol)
        if isinstance(protocol, FlowRequest):
            wire = getattr(protocol.channel, "wire", None)  # HTTP/2 has none: its streams are paused by themselves
            gate = FlowControl(None)
            protocol.registerProducer(gate, True)
            if getattr(protocol.channel, "_waitingForTransport", False):
                gate.pauseProducing()  # the responses before it, on this connection, are not taken yet
        else:
            wire = self.wires.get(protocol.transport)
            gate = FlowControl(wire)
            protocol.closeHandshakeTimeout = _CLOSE_SECONDS
            protocol.transport.unregisterProducer()  # the HTTPChannel that it was
            protocol.transport.registerProducer(gate, True)
        self.connections[protocol].update(gate=gate, wire=wire)

    def protocol_disconnected(self, protocol: Any) -> None:
        """Its response is done, or its client has left. May be told twice, the second time when it is forgotten."""
        details = self.connections.get(protocol)
        if details is not None:
            details["gate"].let_go()
            details.setdefault("disconnected", time.time())
            if "application_instance" not in details:
                del self.connections[protocol]

    def create_application(self, protocol: Any, scope: Scope) -> Inbox | None:
        """Start the app for a request or a WebSocket; return what `receive` reads. As daphne's, but settled at once."""
        details = self.connections.get(protocol)
        if details is None:
            return None
        assert "application_instance" not in details
        inbox = Inbox(protocol.transport if scope["type"] == "websocket" else None)
        scope.setdefault("asgi", {"version": "3.0"})
        gate, wire = details["gate"], details["wire"]
        send = partial(self._send, protocol, gate)
        num_untaken = partial(_num_untaken, wire)
        flow = {"drain": self.drain, "num_untaken": num_untaken}
        if isinstance(protocol, FlowRequest) and wire is not None:
            flow["channel"] = FlowChannel(protocol, gate, send, num_untaken)
        scope["extensions"] = {EXTENSION: flow}
        scope["state"] = self.lifespan.state.copy()
        task = asyncio.ensure_future(self._run_app(scope, inbox, send))
        details["application_instance"] = task
        task.add_done_callback(lambda _: guarded(self._settle, protocol))
        return inbox

    def _run_app(self, scope: Scope, inbox: Inbox, send: Callable[..., Any]) -> Coroutine[Any, Any, None]:
        if self.lifespan.is_started:
            return self.application(scope=scope, receive=inbox.get, send=send)  # type: ignore[no-any-return]
        return self._run_when_started(scope, inbox, send)

    async def _run_when_started(self, scope: Scope, inbox: Inbox, send: Callable[..., Any]) -> None:
        await self.lifespan.wait_started()
        await self.application(scope=scope, receive=inbox.get, send=send)

    ### What apps send

    async def handle_reply(self, protocol: Any, message: Message) -> None:
        """What daphne calls `send`; ours is `_send`, which has looked up less when it writes."""
        details = self.connections.get(protocol)
        await self._send(protocol, details["gate"] if details is not None else _GONE, message)

    async def _send(self, protocol: Any, gate: FlowControl, message: Message) -> None:
        """Write a message, and wait until there is room for another."""
        if gate.is_gone:
            await self._drop()
            return
        kind = message.get("type")
        if kind == "http.response.body":
            if gate.is_open and not gate.turn.locked() and len(message.get("body", b"")) <= self._piece_bytes:
                protocol.handle_reply(message)  # nearly always: not one wait
                self._num_quick += 1
                if self._num_quick % _QUICK_A_YIELD == 0:
                    await asyncio.sleep(0)
            else:
                await self._write_body(protocol, gate, message)
        elif kind == "websocket.close" and protocol.state == protocol.STATE_OPEN:
            _close_websocket(protocol, message)
            return
        else:
            await gate.wait()
            await super().handle_reply(protocol, message)
        if not gate.is_open:
            await gate.wait()

    async def _write_body(self, protocol: Any, gate: FlowControl, message: Message) -> None:
        """Write a body message piece by piece: the whole of a large one would lie in Twisted's buffer."""
        body, size = message.get("body", b""), self._piece_bytes
        last = max(0, (len(body) - 1) // size * size)
        async with gate.turn:
            for start in range(0, last, size):
                await gate.wait()
                if not gate.is_gone:
                    protocol.handle_reply({**message, "body": body[start : start + size], "more_body": True})
            await gate.wait()
            if not gate.is_gone:
                protocol.handle_reply({**message, "body": body[last:]} if last else message)

    async def _drop(self) -> None:
        """Return without waiting, so that a cancel reaches the app and not this `send`; but let others run."""
        self._num_dropped += 1
        if self._num_dropped % _DROPS_A_YIELD == 0:
            await asyncio.sleep(0)

    ### What apps leave behind

    def application_checker(self) -> None:
        """Look after every app, each second, come what may."""
        for protocol in list(self.connections):
            guarded(self._settle, protocol)
        reactor.callLater(1, self.application_checker)

    def timeout_checker(self) -> None:
        """Enforce daphne's own time-outs and send its pings, come what may."""
        for protocol, details in list(self.connections.items()):
            if "disconnected" not in details:
                guarded(protocol.check_timeouts)
        reactor.callLater(2, self.timeout_checker)

    def _settle(self, protocol: Any) -> None:
        """Close what an app has left open, kill one that stays, forget what has ended."""
        details = self.connections.get(protocol)
        if details is None:
            return
        task = details.get("application_instance")
        if task is not None and task.done():
            del details["application_instance"]
            self._conclude(protocol, task, has_left="disconnected" in details)
        elif task is not None and _seconds_since(details.get("disconnected")) > self.application_close_timeout:
            logger.warning("Application instance %r took too long to shut down and was killed.", task)
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
        """Close with `code`, or deny the handshake with `status`. The app hears of it now, whatever the peer does."""
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
    """Send the app's close frame with its code and reason, behind what is unsent."""
    code = message.get("code") or 1000
    if code not in _CLOSE_CODES and not 3000 <= code <= 4999:
        raise ValueError(f"{code} is no code for a close frame; take 1000, 1001, 1008, 1011 to 1013 or 3000 to 4999")
    reason = (message.get("reason") or "").encode()[:123].decode(errors="ignore").encode()
    protocol.sendCloseFrame(code=code, reasonUtf8=reason or None)


def _num_untaken(wire: FlowTransport | None) -> int:
    return wire.num_untaken if wire is not None else 0


def _seconds_since(moment: float | None) -> float:
    return 0.0 if moment is None else time.time() - moment


def guarded(work: Callable[..., Any], *args: Any) -> Any:
    """Call `work`; an exception of one connection is logged and costs no other."""
    try:
        return work(*args)
    except Exception:
        logger.exception("%s failed", getattr(work, "__name__", work))
        return None
