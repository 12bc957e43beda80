"""`StreamMiddleware`: the outermost ASGI layer. It streams what the framework inside hands over.

    server ─── request ───► StreamMiddleware ─── request ───► Django, Starlette, …
                                  │    ◄── response start with the hand-over header (held), empty body (dropped)
                                  │    the inner app RETURNS: its thread and database connection are free
           ◄── start, stream ─────┘    while `receive` is awaited for the client's disconnect

Plain ASGI 3; knows no framework and no dialect. Wrap it around everything: `StreamMiddleware(ProtocolTypeRouter({…}))`.

`Lifespan` serves an app that may not support ASGI's lifespan, as Django and Channels do not. The inner app is called
first; what it leaves unanswered is answered here. Callbacks run at startup and at shutdown, before the inner app
receives it. Stock daphne has no lifespan: there the site's own hooks close engines and logs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from streamserve.asgi.drain import Drain, on_sigterm
from streamserve.asgi.guard import Guard, GuardedApp
from streamserve.asgi.handover import MORE_HEADERS, Exchange
from streamserve.asgi.hardening import Hardened, Hardening
from streamserve.asgi.types import App, Message, Receive, Scope, Send

logger = logging.getLogger("streamserve.asgi")

Callback = Callable[[], Awaitable[None]]


class StreamMiddleware:
    """Wraps an ASGI app. `scope["streamserve"]` is this object, so that an inner app can call `on_shutdown`.

    `harden`: also correct the app's own `text/event-stream` responses (hardening.py). `guard`: bounds of
    connections and bodies (guard.py). `stall_seconds`: a reader that takes nothing for so long is cut off; 0: that is
    left to the server. `drain_seconds`: under servers other than FlowServer, how long streams may run after SIGTERM.
    `scope["streamserve.received_at"]` is `time.monotonic()` of the request;
    `scope["streamserve.more_headers"]` is a list for headers of its response.
    """

    def __init__(
        self,
        app: App,
        *,
        harden: bool | Hardening = False,
        guard: Guard | None = None,
        stall_seconds: float = 0.0,
        drain_seconds: float = 20.0,
    ) -> None:
        options = harden if isinstance(harden, Hardening) else Hardening()
        self._app = Hardened(app, options) if harden else app
        self._guard = guard
        self._guarded = self._dispatch if guard is None else GuardedApp(self._dispatch, guard)
        self._stall_seconds, self._drain_seconds = stall_seconds, drain_seconds
        self._on_startup: list[Callback] = []
        self._on_shutdown: list[Callback] = []
        self._on_drain: list[Callable[[], None]] = []
        self._on_going_away: list[Callable[[], None]] = []
        self._paths_while_draining: set[str] = set()
        self._drain: Drain | None = None  # of the server, from the first scope that has it

    def on_going_away(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the server shuts down and its drain time is over: end your streams."""
        if callback not in self._on_going_away:
            self._on_going_away.append(callback)
            if self._drain is not None:
                self._drain.on_going_away(callback)

    def on_drain(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the server begins to shut down. Register it before the first request."""
        self._on_drain.append(callback)

    def serve_while_draining(self, *paths: str) -> None:
        """Name the paths that are answered while FlowServer drains; any other new request gets a 503."""
        self._paths_while_draining.update(paths)

    def on_startup(self, callback: Callback) -> None:
        """Await `callback` at lifespan startup."""
        self._on_startup.append(callback)

    def on_shutdown(self, callback: Callback) -> None:
        """Await `callback` at lifespan shutdown. The same callback is called once."""
        if callback not in self._on_shutdown:
            self._on_shutdown.append(callback)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        drain = scope.get("extensions", {}).get("streamserve.flow", {}).get("drain")
        if drain is not None and drain is not self._drain:
            self._join(drain, scope.get("root_path", ""))
        if scope["type"] == "lifespan":
            if drain is None:
                on_sigterm(self._on_drain, self._on_going_away, self._drain_seconds)
            await Lifespan(receive, send, on_startup=self._on_startup, on_shutdown=self._on_shutdown).serve(
                self._app, scope
            )
            return
        scope = {**scope, "streamserve": self, "streamserve.received_at": time.monotonic(), MORE_HEADERS: []}
        await self._guarded(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await Exchange(scope, receive, send, self._stall_seconds).serve(self._app)
        else:
            await self._app(scope, receive, send)

    def _join(self, drain: Drain, root_path: str) -> None:
        """Register the callbacks with the server's drain; if it has begun, call `on_drain`'s callbacks now."""
        self._drain = drain
        drain.serves = lambda path: path.removeprefix(root_path) in self._paths_while_draining
        if self._guard is not None:
            drain.bound_of = self._guard.bound_of
        for callback in self._on_drain:
            drain.on_drain(callback)
            if drain.is_draining:
                callback()
        for callback in self._on_going_away:
            drain.on_going_away(callback)


class Lifespan:
    """The lifespan messages between one server and one app; see above."""

    def __init__(
        self, receive: Receive, send: Send, *, on_startup: Iterable[Callback], on_shutdown: Iterable[Callback]
    ) -> None:
        self._receive, self._send = receive, send
        self._callbacks = {"lifespan.startup": on_startup, "lifespan.shutdown": on_shutdown}
        self._pending: str | None = None  # received, not yet answered
        self._has_answered = False
        self._is_over = False

    async def serve(self, app: App, scope: Scope) -> None:
        """Answer the server until shutdown is answered, or startup has failed."""
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            if self._has_answered:
                raise
            logger.debug("the inner app does not support lifespan", exc_info=True)
        while not self._is_over:
            if self._pending is None:
                await self.receive()
            await self.send({"type": f"{self._pending}.complete"})

    async def receive(self) -> Message:
        """Pass the server's next message on, after its callbacks."""
        message = await self._receive()
        self._pending = message["type"]
        for callback in self._callbacks[message["type"]]:
            try:
                await callback()
            except Exception:
                logger.exception("a callback of %s failed", message["type"])
        return message

    async def send(self, message: Message) -> None:
        """Pass an answer on, and note what it answers."""
        self._has_answered, self._pending = True, None
        self._is_over = message["type"] != "lifespan.startup.complete"
        await self._send(message)
