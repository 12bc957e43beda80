"""Laws of the `Receiver`: no wait at the server is cancelled while the request lasts, and every part sees its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamserve.asgi.application import Request
from streamserve.asgi.middleware import StreamMiddleware
from streamserve.asgi.receiver import _MAX_AHEAD, RECEIVER, Receiver
from streamserve.asgi.types import Message, Receive, Scope, Send

BODY: Message = {"type": "http.request", "body": b"a", "more_body": True}
REST: Message = {"type": "http.request", "body": b"b", "more_body": False}
LEFT: Message = {"type": "http.disconnect"}


class StrictServer:
    """A `receive` as gunicorn 27 has it: once a wait was cancelled, the client counts as gone."""

    def __init__(self, *messages: Message) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        for message in messages:
            self.messages.put_nowait(message)
        self.num_waiting = 0
        self.is_broken = False

    async def receive(self) -> Message:
        assert not self.num_waiting, "two parts wait at the server"
        if self.is_broken:
            return LEFT
        self.num_waiting += 1
        try:
            return await self.messages.get()
        except asyncio.CancelledError:
            self.is_broken = True
            raise
        finally:
            self.num_waiting -= 1


async def test_a_wait_that_is_given_up_cancels_nothing_at_the_server() -> None:
    """The next one gets the disconnect when it comes, and only then."""
    server = StrictServer(BODY, REST)
    receiver = Receiver(server.receive)
    assert [await receiver.receive() for _ in range(2)] == [BODY, REST]
    for _ in range(3):
        waiting = asyncio.create_task(receiver.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert not server.is_broken
    both = [asyncio.create_task(receiver.receive()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in both)
    server.messages.put_nowait(LEFT)
    assert await asyncio.gather(*both, receiver.receive()) == [LEFT] * 3
    assert receiver.has_left


async def test_calls_are_made_once_when_the_client_leaves() -> None:
    """Also where it leaves in the middle of its body; one that was taken back is not."""
    server, calls = StrictServer(BODY, LEFT), list[str]()
    receiver = Receiver(server.receive)
    receiver.on_left(lambda: calls.append("early"))
    receiver.on_left(late := lambda: calls.append("taken back"))
    receiver.off_left(late)
    assert [await receiver.receive() for _ in range(3)] == [BODY, LEFT, LEFT]
    receiver.on_left(lambda: calls.append("afterwards"))
    assert calls == ["early", "afterwards"]


async def test_a_call_waits_for_the_body_and_then_watches() -> None:
    """The body is its reader's; behind it the disconnect is seen although nothing asks for a message."""
    server, has_left = StrictServer(BODY), asyncio.Event()
    receiver = Receiver(server.receive)
    receiver.on_left(has_left.set)
    await asyncio.sleep(0)
    assert not server.num_waiting
    assert await receiver.receive() == BODY
    server.messages.put_nowait(REST)
    assert await receiver.receive() == REST
    server.messages.put_nowait(LEFT)
    await asyncio.wait_for(has_left.wait(), 60)
    receiver.close()


async def test_a_body_is_kept_while_the_client_is_watched() -> None:
    """Nothing of it is lost or out of order, however late the app reads; of a long one the server keeps the rest."""
    pieces = [{"type": "http.request", "body": b"%d" % number, "more_body": True} for number in range(3 * _MAX_AHEAD)]
    server = StrictServer(*pieces)
    receiver = Receiver(server.receive)
    receiver.watching()
    for _ in range(3 * len(pieces)):
        await asyncio.sleep(0)
    assert server.messages.qsize() == len(pieces) - _MAX_AHEAD
    assert [await receiver.receive() for _ in pieces] == pieces
    server.messages.put_nowait(LEFT)
    assert (await receiver.receive(), receiver.has_left, receiver.is_told) == (LEFT, True, True)


async def test_an_app_that_waits_or_was_told_knows_that_its_client_left() -> None:
    """Any other app is not told, also where the server says it to the watch."""
    server = StrictServer(REST)
    receiver = Receiver(server.receive)
    receiver.watching()
    assert not receiver.is_told
    assert await receiver.receive() == REST
    assert not receiver.is_told
    waiting = asyncio.create_task(receiver.receive())
    await asyncio.sleep(0)
    assert receiver.is_told
    receiver.leave()
    assert await waiting == LEFT
    assert receiver.is_told
    receiver.close()


async def test_a_body_that_is_dropped_lets_others_run() -> None:
    """A server whose `receive` never has to wait does not hold the loop."""

    async def receive() -> Message:
        return BODY

    receiver = Receiver(receive)
    receiver.drop_body()
    watching = receiver.watching()
    for _ in range(3):
        await asyncio.sleep(0)
    receiver.close()
    await asyncio.gather(watching, return_exceptions=True)
    assert watching.cancelled()


@pytest.mark.parametrize("has_body", [True, False])
async def test_an_app_that_stops_waiting_may_wait_again(has_body: bool) -> None:
    """A framework gives up its wait for a disconnect (Django, Starlette), and an answer begins: it is not cut."""
    server, seen = StrictServer(REST), list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if has_body:
            await receive()
        request = Request(scope, receive, send)
        await request.wait(asyncio.sleep(0))
        waiting = asyncio.create_task(receive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not server.is_broken
        scope[RECEIVER].on_left(lambda: seen.append("left"))
        server.messages.put_nowait(LEFT)
        seen.append((await receive())["type"])

    async def send(message: Any) -> None: ...

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    await StreamMiddleware(app)(scope, server.receive, send)
    assert seen == ["left", "http.disconnect"]
