"""Laws of FlowServer on a site: which hooks the drain calls, and what is answered meanwhile."""

from __future__ import annotations

import asyncio

from streamserve.asgi.drain import Drain
from streamserve.asgi.middleware import StreamMiddleware
from streamserve.asgi.types import Receive, Scope, Send


async def test_middleware_registers_its_drain_hooks_once() -> None:
    """However many requests came, each hook is called once, and the named paths are answered while draining."""
    called: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        called.append("app")

    middleware = StreamMiddleware(app)
    middleware.on_going_away(lambda: called.append("going away"))
    middleware.serve_while_draining("/readyz")
    drain = Drain()
    scope = {"type": "websocket", "extensions": {"streamserve.flow": {"drain": drain}}}
    for _ in range(3):
        await middleware(scope, _never, _ignore)
    await drain.conduct(_Empty(), 0.0)
    assert called == ["app"] * 3 + ["going away"]
    assert (drain.serves("/readyz"), drain.serves("/streams")) == (True, False)


async def _never() -> dict[str, object]:
    await asyncio.Event().wait()
    return {}


async def _ignore(message: object) -> None:
    pass


class _Empty:
    """A server without connections."""

    def is_busy(self) -> bool:
        return False

    def is_running(self) -> bool:
        return False

    def has_unsent(self) -> bool:
        return False

    def has_newcomers(self) -> bool:
        return False

    def stop_listening(self) -> None:
        pass

    def end_all(self) -> None:
        pass

    def cancel_all(self) -> None:
        pass
