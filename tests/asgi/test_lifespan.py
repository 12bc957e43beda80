"""Laws of lifespan: answered whether or not the inner app knows it, and the middleware's callbacks run at shutdown."""

from __future__ import annotations

import asyncio

import pytest

from streamserve.asgi.middleware import StreamMiddleware
from streamserve.asgi.types import App, Message, Receive, Scope, Send

COMPLETE = [{"type": "lifespan.startup.complete"}, {"type": "lifespan.shutdown.complete"}]


async def converse(app: App) -> list[Message]:
    """Ask for startup and shutdown and return the answers."""
    asked: asyncio.Queue[Message] = asyncio.Queue()
    for event in ("lifespan.startup", "lifespan.shutdown"):
        asked.put_nowait({"type": event})
    answers: list[Message] = []

    async def send(message: Message) -> None:
        answers.append(message)

    async with asyncio.timeout(60):
        await app({"type": "lifespan"}, asked.get, send)
    return answers


async def raising(scope: Scope, receive: Receive, send: Send) -> None:
    raise ValueError("No application configured for scope type 'lifespan'")


async def reading_then_raising(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    raise AssertionError(scope["type"])


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    return None


async def knowing(scope: Scope, receive: Receive, send: Send) -> None:
    for _ in range(2):
        await send({"type": f"{(await receive())['type']}.complete"})


async def half(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": f"{(await receive())['type']}.complete"})


@pytest.mark.parametrize("inner", [raising, reading_then_raising, silent, knowing, half])
async def test_every_app_is_answered(inner: App) -> None:
    """What the inner app leaves open is answered, once, and in order; callbacks run once."""
    called: list[str] = []

    async def close() -> None:
        called.append("closed")

    app = StreamMiddleware(inner)
    app.on_shutdown(close)
    app.on_shutdown(close)
    assert await converse(app) == COMPLETE
    assert called == ["closed"]


async def test_a_failing_callback_does_not_stop_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    """A failing callback is logged, and shutdown is answered."""
    called: list[str] = []

    async def bad() -> None:
        raise RuntimeError("broken")

    async def good() -> None:
        called.append("closed")

    app = StreamMiddleware(raising)
    app.on_shutdown(bad)
    app.on_shutdown(good)
    assert await converse(app) == COMPLETE
    assert called == ["closed"]
    assert "broken" in caplog.text


async def test_a_startup_that_fails_is_passed_on() -> None:
    """The inner app's own failure reaches the server, with its exception, as without the middleware."""

    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no database"})
        raise RuntimeError("no database")

    with pytest.raises(RuntimeError, match="no database"):
        await converse(StreamMiddleware(failing))
