"""Laws of the hand-over: what the inner app sees, what the client gets, and what a disconnect does at each moment."""

from __future__ import annotations

import asyncio

import pytest

from streamserve.asgi.handover import HEADER, DeliveryFailed, offer
from streamserve.asgi.middleware import StreamMiddleware
from streamserve.asgi.types import Message, Receive, Scope, Send
from streamserve.dialects.native import NativeEncoder
from streamserve.protocol.events import Done
from streamserve.protocol.requests import Admission
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.support.apps.asgi_app import Client, HandingOver
from tests.support.checks.stream_checks import check_native
from tests.support.streams.hand_made import ScriptedClient, ask, tok, until

DONE = Done(finish_reason="stop")


class Site:
    """An inner app over the scripted engine, wrapped; `stream` is the one it started last."""

    def __init__(self, streams: Streams) -> None:
        self.inner = HandingOver(self._make)
        self.app = StreamMiddleware(self.inner)
        self.stream: Stream | None = None
        self._streams = streams

    async def _make(self) -> Delivery:
        self.stream = await self._streams.start(ask("scripted"), Admission(owner="u1", tenant="t1"))
        return Delivery(self._streams, self.stream, NativeEncoder(self.stream.log_id))


@pytest.fixture
def site(streams: Streams) -> Site:
    return Site(streams)


async def test_a_stream_goes_out_whole(site: Site, scripted: ScriptedClient) -> None:
    """The start, the frames and an end are sent; the inner body is dropped and the app got the request's."""
    client = Client(site.app, method="POST", body=b'{"prompt": "hi"}')
    await until(lambda: len(client.messages) >= 2, "the head is sent")
    scripted.last.push(tok("a"), tok("b"), DONE)
    await client.task
    assert [frame.event for frame in check_native(client.body)] == ["meta", "token", "done"]
    assert client.is_complete
    assert site.inner.body == b'{"prompt": "hi"}'
    assert site.inner.scope["streamserve"]


def unnamed(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """Return the header; of the reader's own id only its name."""
    return (header[0], b"") if header[0] == b"streamserve-reader" else header


async def test_headers_are_merged_and_ours_win(site: Site, scripted: ScriptedClient) -> None:
    """Status, cookies, CORS and CSP stay; headers of the empty body go; names are lower-case, as ASGI requires."""
    site.inner.status = 201
    site.inner.headers += [(b"Set-Cookie", b"b=2"), (b"Content-Security-Policy", b"x"), (b"ETag", b'"0"')]
    site.inner.headers += [(b"Content-Encoding", b"gzip"), (b"Cache-Control", b"private")]
    client = Client(site.app)
    await until(lambda: bool(client.messages), "the head is sent")
    assert site.stream is not None
    assert client.start["status"] == 201
    ours = Delivery(site._streams, site.stream, NativeEncoder(site.stream.log_id)).headers
    theirs = [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"content-security-policy", b"x")]
    assert sorted(map(unnamed, client.headers)) == sorted([*theirs, *map(unnamed, ours)])
    client.leave()
    await client.task


async def test_the_inner_app_has_returned_before_the_head(site: Site, scripted: ScriptedClient) -> None:
    """The inner app's thread and connection are free before the first byte, however long it takes afterwards."""
    site.inner.before_return.clear()
    client = Client(site.app)
    client.on_send = lambda message: (_ for _ in ()).throw(AssertionError) if not site.inner.has_returned else None
    await until(lambda: site.stream is not None, "the inner app has started a stream")
    for _ in range(20):
        await asyncio.sleep(0)
    assert client.messages == []
    site.inner.before_return.set()
    await until(lambda: len(client.messages) >= 2, "then head and first bytes are sent")
    client.leave()
    await client.task


async def test_a_disconnect_cancels_in_the_same_iteration(site: Site, scripted: ScriptedClient) -> None:
    """When the disconnect is read, the generation is cancelled before anything else runs; no end is faked."""
    client = Client(site.app)
    await until(lambda: len(client.messages) >= 3, "meta is sent")
    was_cancelled: list[bool] = []
    client.leave()  # wakes the watching task; what is called next runs right after it
    asyncio.get_running_loop().call_soon(lambda: was_cancelled.append(scripted.last.is_cancelled))
    await until(lambda: bool(was_cancelled), "the loop has turned")
    assert was_cancelled == [True]
    assert site.stream is not None
    assert (site.stream.state, site.stream.readers.num_attached) == ("parked", 0)
    async with asyncio.timeout(60):
        await client.task
    assert not client.is_complete
    assert [task for task in asyncio.all_tasks() if "delivery" in task.get_name()] == []


async def test_a_request_that_cannot_be_read_on_has_no_whole_answer(site: Site, scripted: ScriptedClient) -> None:
    """A body that breaks off, or breaks a bound, while its answer streams: the engine is free, and no end is faked."""
    has_failed = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        messages = [{**await receive(), "more_body": True}]

        async def broken() -> Message:
            if messages:
                return messages.pop()
            await has_failed.wait()
            raise RuntimeError("the body is broken")

        await site.app(scope, broken, send)

    client = Client(app)
    await until(lambda: len(client.messages) >= 3, "meta is sent")
    has_failed.set()
    with pytest.raises(DeliveryFailed) as raised:
        await client.task
    assert str(raised.value.__cause__) == "the body is broken"
    assert not client.is_complete
    assert scripted.last.is_cancelled


@pytest.mark.parametrize("moment", ["before the start", "after the start"])
async def test_a_disconnect_while_the_inner_app_works(site: Site, scripted: ScriptedClient, moment: str) -> None:
    """The inner app may consume the disconnect; the delivery is given up all the same, and nothing is sent."""
    hold = site.inner.before_start if moment == "before the start" else site.inner.before_return
    hold.clear()
    listening = Listening(site.inner)
    client = Client(StreamMiddleware(listening))
    await until(lambda: site.stream is not None, "the stream is started")
    client.leave()
    await until(lambda: listening.has_seen_disconnect, "the inner app consumed it")
    hold.set()
    await client.task
    assert site.stream is not None
    assert site.stream.state == "parked"
    assert client.messages == []


class Listening:
    """An app that works and listens for the disconnect at the same time, as Django does."""

    def __init__(self, app: HandingOver) -> None:
        self._app = app
        self.has_seen_disconnect = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = await receive()

        async def replayed() -> Message:
            return first

        working = asyncio.create_task(self._app(scope, replayed, send))
        self.has_seen_disconnect = (await receive())["type"] == "http.disconnect"
        await working


async def test_a_failing_inner_app_gives_its_offer_up(site: Site, scripted: ScriptedClient) -> None:
    """Its exception is the server's; the stream it started is parked at once, not after five seconds."""
    site.inner.headers = [(b"bad", None)]  # type: ignore[list-item]

    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        await site.inner(scope, receive, send)
        raise RuntimeError("after the response")

    client = Client(StreamMiddleware(failing))
    with pytest.raises(RuntimeError, match="after the response"):
        await client.task
    assert client.messages == []
    assert site.stream is not None
    assert site.stream.state == "parked"


async def test_an_offer_that_is_not_used_is_withdrawn(site: Site, scripted: ScriptedClient) -> None:
    """When a middleware inside replaces the response, the offer is withdrawn and the stream parked."""

    async def replacing(scope: Scope, receive: Receive, send: Send) -> None:
        async def drop(message: Message) -> None: ...

        await site.inner(scope, receive, drop)
        await send({"type": "http.response.start", "status": 403, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    client = Client(StreamMiddleware(replacing))
    await client.task
    assert (client.start["status"], client.body) == (403, b"no")
    assert site.stream is not None
    assert site.stream.state == "parked"


async def test_a_server_that_cancels_the_request(site: Site, scripted: ScriptedClient) -> None:
    """When a shutdown cancels the app's task, the stream is parked and no task is left."""
    client = Client(site.app)
    await until(lambda: len(client.messages) >= 3, "meta is sent")
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert scripted.last.is_cancelled
    assert [task for task in asyncio.all_tasks() if "delivery" in task.get_name()] == []


async def test_a_client_that_takes_nothing_and_leaves(site: Site, scripted: ScriptedClient) -> None:
    """A `send` that never returns does not keep the request open, nor does the wait for more."""
    client = Client(site.app)
    await until(lambda: len(client.messages) >= 3, "meta is sent")
    client.go.clear()
    scripted.last.push(tok("a"))
    await until(lambda: client.is_blocked, "send waits")
    client.leave()
    async with asyncio.timeout(60):
        await client.task
    assert scripted.last.is_cancelled


async def test_a_send_that_raises_oserror(site: Site, scripted: ScriptedClient) -> None:
    """ASGI 2.4 servers raise OSError: the stream is parked and the request ends."""
    client = Client(site.app)
    await until(lambda: len(client.messages) >= 3, "meta is sent")

    def fail(message: Message) -> None:
        raise OSError("broken pipe")

    client.on_send = fail
    scripted.last.push(tok("a"))
    await client.task
    assert scripted.last.is_cancelled
    assert not client.is_complete


@pytest.mark.cut_streams("its delivery fails")
async def test_a_delivery_that_fails_breaks_the_connection(
    streams: Streams, scripted: ScriptedClient, caplog: pytest.LogCaptureFixture
) -> None:
    """After the head an error is logged and raised to the server: no last chunk makes half an answer look whole."""

    class Bad(NativeEncoder):
        def encode(self, logged: object) -> bytes:
            raise ValueError("cannot encode")

    site = Site(streams)

    async def make() -> Delivery:
        site.stream = await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1"))
        return Delivery(streams, site.stream, Bad(site.stream.log_id))

    site.inner.make = make
    client = Client(site.app)
    with pytest.raises(DeliveryFailed):
        await client.task
    assert not client.is_complete
    assert client.body == NativeEncoder.first_bytes
    assert "cannot encode" in caplog.text
    assert site.stream is not None
    assert site.stream.state == "parked"


async def test_head_gets_the_headers_only(site: Site, scripted: ScriptedClient) -> None:
    """A HEAD request gets no body and has no reader."""
    client = Client(site.app, method="HEAD")
    await client.task
    assert (client.start["status"], client.body, client.is_complete) == (200, b"", True)
    assert dict(client.headers)[b"content-type"].startswith(b"text/event-stream")
    assert site.stream is not None
    assert site.stream.state == "parked"


async def test_an_id_works_once(site: Site, streams: Streams, scripted: ScriptedClient) -> None:
    """A response with an id that was taken, or that never was, is an error and never an empty success."""
    scripted_stream = await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1"))
    ticket = offer(Delivery(streams, scripted_stream, NativeEncoder(scripted_stream.log_id)))

    async def handing(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(HEADER.encode(), ticket.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    first = Client(StreamMiddleware(handing))
    await until(lambda: len(first.messages) >= 2, "the first gets the stream")
    again = Client(StreamMiddleware(handing))
    with pytest.raises(RuntimeError, match="taken before"):
        await again.task
    assert again.messages == []
    first.leave()
    await first.task


async def test_other_responses_pass_untouched(streams: Streams) -> None:
    """A response without a hand-over passes unchanged, streaming or not."""

    async def plain(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": [(b"Content-Length", b"2")]})
        await send({"type": "http.response.body", "body": b"n", "more_body": True})
        await send({"type": "http.response.body", "body": b"o"})

    client = Client(StreamMiddleware(plain))
    await client.task
    assert client.headers == [(b"Content-Length", b"2")]
    assert len(client.messages) == 3
    assert client.body == b"no"


async def test_websockets_pass_marked() -> None:
    """The scope of a WebSocket marks the middleware; messages are not touched."""
    seen: list[object] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([scope["type"], scope["streamserve"], await receive()])
        await send({"type": "websocket.accept"})

    app = StreamMiddleware(inner)
    client = Client(app, type="websocket")
    await client.task
    assert seen[:2] == ["websocket", app]
    assert client.messages == [{"type": "websocket.accept"}]


async def test_a_reader_that_takes_nothing_is_cut_off(site: Site, scripted: ScriptedClient) -> None:
    """After `stall_seconds` without a frame taken the connection breaks; its stream may be resumed."""
    site.app = StreamMiddleware(site.inner, stall_seconds=0.2)
    client = Client(site.app)
    await until(lambda: len(client.messages) >= 2, "the head is sent")
    client.go.clear()
    scripted.last.push(tok("a"))
    with pytest.raises(DeliveryFailed):
        await client.task
    assert site.stream is not None
    assert site.stream.readers.num_attached == 0
    assert site.stream.terminal is None


async def test_a_reader_that_takes_all_may_wait(site: Site, scripted: ScriptedClient) -> None:
    """A silent stream is no stalled reader."""
    site.app = StreamMiddleware(site.inner, stall_seconds=0.05)
    client = Client(site.app)
    await until(lambda: len(client.messages) >= 2, "the head is sent")
    await asyncio.wait({client.task}, timeout=0.3)
    assert not client.task.done()
    scripted.last.push(tok("a"), DONE)
    await client.task
    assert client.is_complete
