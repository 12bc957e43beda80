"""Laws of hardening: what changes in the site's own event streams, and that nothing else is touched."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import HttpRequest, StreamingHttpResponse
from django.test.utils import override_settings
from django.urls import path
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from streamserve.asgi.hardening import EventTooLarge, Hardening
from streamserve.asgi.middleware import StreamMiddleware
from streamserve.asgi.types import App, Receive, Scope, Send
from streamserve.routing import wrap
from tests.support.apps.asgi_app import Client
from tests.support.streams.hand_made import until

QUICK = Hardening(keepalive_seconds=0.01, event_bytes=1000)
SILENT = Hardening(keepalive_seconds=3600.0, event_bytes=1000, grace_seconds=3600.0)
EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")


class Source:
    """A generator that yields what the test puts, and records its end. `None` ends it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.ends: list[str] = []

    def put(self, *pieces: bytes | None) -> None:
        for piece in pieces:
            self.queue.put_nowait(piece)

    async def __call__(self) -> AsyncIterator[bytes]:
        try:
            while (piece := await self.queue.get()) is not None:
                yield piece
            self.ends.append("whole")
        except BaseException as error:
            self.ends.append(type(error).__name__)
            raise


class Plain:
    """A bare ASGI app that streams a source and does not listen for a disconnect."""

    def __init__(self, source: Source, *headers: tuple[bytes, bytes], status: int = 200) -> None:
        self.source, self.headers, self.status = source, [*headers] or [EVENT_STREAM], status
        self.scope: Scope = {}
        self.errors: list[BaseException] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        assert (await receive())["type"] == "http.request"
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        try:
            async with contextlib.aclosing(self.source()) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except BaseException as error:
            self.errors.append(error)
            raise


def starlette_app(source: Source) -> App:
    async def events(request: Request) -> StreamingResponse:
        return StreamingResponse(source(), media_type="text/event-stream")

    return Starlette(routes=[Route("/", events)])


def django_app(source: Source) -> App:
    async def events(request: HttpRequest) -> StreamingHttpResponse:
        return StreamingHttpResponse(source(), content_type="text/event-stream")

    urls = type("urls", (), {"urlpatterns": [path("", events)]})
    return _with_settings(lambda: get_asgi_application(), ROOT_URLCONF=urls, MIDDLEWARE=[GZIP])


GZIP = "django.middleware.gzip.GZipMiddleware"
APPS = {"plain": Plain, "starlette": starlette_app, "django": django_app}


def _with_settings(make: Callable[[], App], **changed: Any) -> App:
    """Return the Django app of those settings; each request is served under them."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with override_settings(**changed):
            await make()(scope, receive, send)

    return app


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture(params=APPS)
def app(request: pytest.FixtureRequest, source: Source) -> App:
    """The same stream in three frameworks."""
    made: App = APPS[request.param](source)
    return made


def get(app: App, options: Hardening | bool = SILENT, *headers: tuple[bytes, bytes], **scope: Any) -> Client:
    """Begin a request through the hardening."""
    more = {"query_string": b"", "headers": [(b"host", b"localhost"), *headers], **scope}
    return Client(StreamMiddleware(app, harden=options), **more)


def body(client: Client) -> bytes:
    return client.body if client.messages else b""


async def test_headers_and_first_bytes(app: App, source: Source) -> None:
    """Headers and first bytes precede the app's body, so that no proxy holds the stream back; the rest is unchanged."""
    client = get(app)
    await until(lambda: len(client.messages) >= 2, "the first bytes")
    headers = dict(client.headers)
    assert body(client) == b": ok\n\n"
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-cache, no-transform"
    assert (headers[b"x-accel-buffering"], headers[b"content-encoding"]) == (b"no", b"identity")
    source.put(b"data: 1\n\n", b"data: 2\n\n", None)
    await client.task
    assert body(client) == b": ok\n\ndata: 1\n\ndata: 2\n\n"
    assert client.is_complete
    assert source.ends == ["whole"]


async def test_comments_in_silence_only_between_events(app: App, source: Source) -> None:
    """No comment comes while an event is open, even between the CR and LF that end it; after it comments come."""
    client = get(app, QUICK)
    await until(lambda: body(client).count(b": keepalive\n") >= 2, "comments before the first event")
    for piece in (b"data: 1\r\n", b"\r"):
        source.put(piece)
        await until(lambda end=piece: body(client).endswith(end), "the piece is sent")
        num_sent = len(client.messages)
        await asyncio.sleep(5 * QUICK.keepalive_seconds)  # enough time for several comments
        assert len(client.messages) == num_sent
    source.put(b"\n")
    await until(lambda: body(client).endswith(b"data: 1\r\n\r\n: keepalive\n"), "comments go on")
    source.put(b"data: 2\n\n", None)
    await client.task
    assert body(client).replace(b": keepalive\n", b"") == b": ok\n\ndata: 1\r\n\r\ndata: 2\n\n"


async def test_an_event_that_is_too_large_ends_the_response(app: App, source: Source) -> None:
    """What came before the event is delivered, the rest is not, and the end is an error to every client."""
    client = get(app)
    source.put(b"data: 1\n\n", b"data: " + b"x" * 600, b"y" * 600 + b"\n\n", b"data: 3\n\n")
    with pytest.raises(EventTooLarge):
        await client.task
    assert body(client) == b": ok\n\ndata: 1\n\ndata: " + b"x" * 600
    assert not client.is_complete
    assert source.ends == ["CancelledError"]


async def test_many_small_events_have_no_bound_together(app: App, source: Source) -> None:
    """The bound is for each event, not for all of them together."""
    client = get(app)
    source.put(*(b"data: %d\n\n" % number * 10 for number in range(100)), None)
    await client.task
    assert body(client).count(b"\n\n") == 1001


async def test_a_disconnect_ends_a_waiting_generator(app: App, source: Source) -> None:
    """Wherever the app's generator waits, its `finally` has run when the request is over."""
    client = get(app)
    source.put(b"data: 1\n\n")
    await until(lambda: b"data: 1" in body(client), "the stream has begun")
    client.leave()
    await client.task
    assert source.ends == ["CancelledError"]


async def test_a_disconnect_ends_a_blocked_generator(app: App, source: Source) -> None:
    """A disconnect also ends an app that waits in `send`."""
    client = get(app)
    source.put(b"data: 1\n\n")
    await until(lambda: b"data: 1" in body(client), "the stream has begun")
    client.go.clear()
    source.put(b"data: 2\n\n")
    await until(lambda: client.is_blocked, "the app is held in send")
    client.leave()
    await asyncio.sleep(0)
    client.go.set()
    await client.task
    assert source.ends == ["CancelledError"]


async def test_an_endless_generator_that_never_waits_is_ended() -> None:
    """Without hardening the generator would run for ever, and block every other task of the process."""
    ends = []

    async def numbers(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [EVENT_STREAM]})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        finally:
            ends.append("ended")

    client = get(numbers)
    await until(lambda: len(client.messages) > 10, "it runs")
    client.leave()
    await client.task
    assert ends == ["ended"]


async def test_what_follows_the_response_is_not_ended() -> None:
    """A background task runs on, though its client leaves when it has everything."""
    go, ends = asyncio.Event(), []

    async def work() -> None:
        await go.wait()
        ends.append("done")

    async def events(request: Request) -> StreamingResponse:
        async def one() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"

        return StreamingResponse(one(), media_type="text/event-stream", background=BackgroundTask(work))

    client = get(Starlette(routes=[Route("/", events)]))
    await until(lambda: client.is_complete, "the response is whole")
    client.leave()
    await asyncio.sleep(0)
    go.set()
    await client.task
    assert ends == ["done"]


async def test_the_servers_own_cancellation_goes_through(source: Source) -> None:
    """A server's cancellation of the app is not taken for a client that left."""
    client = get(Plain(source))
    await until(lambda: len(client.messages) >= 2, "the stream has begun")
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert source.ends == ["CancelledError"]


async def test_an_app_that_reads_late_gets_its_body() -> None:
    """A message received while the client is watched is kept for the app."""
    bodies = []

    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [EVENT_STREAM]})
        for _ in range(3):
            bodies.append((await receive())["body"])
        await send({"type": "http.response.body", "body": b"data: 1\n\n"})

    client = get(echo)
    client._incoming.get_nowait()
    client._incoming.put_nowait({"type": "http.request", "body": b"one", "more_body": True})
    await until(lambda: len(client.messages) >= 2, "the head")
    for data, has_more in ((b"two", True), (b"three", False)):
        client._incoming.put_nowait({"type": "http.request", "body": data, "more_body": has_more})
    await client.task
    assert bodies == [b"one", b"two", b"three"]


@pytest.mark.parametrize(
    ("headers", "status", "method"),
    [
        pytest.param([(b"content-type", b"text/plain"), (b"content-length", b"9")], 200, "GET", id="another type"),
        pytest.param([EVENT_STREAM], 503, "GET", id="an error"),
        pytest.param([EVENT_STREAM], 200, "HEAD", id="a HEAD"),
    ],
)
async def test_nothing_else_is_touched(source: Source, headers: Any, status: int, method: str) -> None:
    """Other responses keep every header and every byte."""
    client = get(Plain(source, *headers, status=status), QUICK, method=method)
    source.put(b"data: 1\n\n", None)
    await client.task
    assert client.messages == [
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True},
        {"type": "http.response.body", "body": b""},
    ]


async def test_headers_of_the_app_stay() -> None:
    """The app's cache rules and encoding stay, a byte order mark too; a length that is no longer true is removed."""
    source = Source()
    headers = [EVENT_STREAM, (b"Cache-Control", b"private"), (b"Content-Length", b"12"), (b"X-Own", b"1")]
    client = get(Plain(source, *headers))
    source.put(b"\xef\xbb\xbfdata: 1\n\n", None)
    await client.task
    sent = dict(client.headers)
    assert (sent[b"cache-control"], sent[b"x-own"], b"content-length" in sent) == (b"private", b"1", False)
    assert body(client) == b": ok\n\ndata: 1\n\n"


async def test_an_event_stream_is_not_compressed(source: Source) -> None:
    """GZipMiddleware inside sees no Accept-Encoding for event streams; it may compress others, without comments."""
    accept = (b"accept-encoding", b"gzip")
    client = get(django_app(source), QUICK, accept, (b"accept", b"text/event-stream"))
    source.put(b"data: 1\n\n" * 50, None)
    await client.task
    assert dict(client.headers)[b"content-encoding"] == b"identity"
    assert body(client).replace(b": keepalive\n", b"") == b": ok\n\n" + b"data: 1\n\n" * 50
    source.put(b"data: 1\n\n" * 50, None)
    client = get(django_app(source), QUICK, accept)
    await client.task
    assert dict(client.headers)[b"content-encoding"] == b"gzip"
    assert gzip.decompress(body(client)) == b"data: 1\n\n" * 50


async def test_off_by_default(source: Source) -> None:
    """A StreamMiddleware without it passes the stream on unchanged."""
    client = get(Plain(source), False)
    source.put(b"data: 1\n\n", None)
    await client.task
    assert client.headers == [EVENT_STREAM]
    assert body(client) == b"data: 1\n\n"


@pytest.mark.parametrize("is_on", [False, True])
async def test_a_site_turns_it_on(source: Source, is_on: bool) -> None:
    """STREAMSERVE["HARDEN_EVENT_STREAMS"] is read when the site's application is made."""
    with override_settings(STREAMSERVE={**settings.STREAMSERVE, "HARDEN_EVENT_STREAMS": is_on}):
        wrapped = wrap(Plain(source))
    client = Client(wrapped, query_string=b"")
    source.put(b"data: 1\n\n", None)
    await client.task
    assert body(client).startswith(b": ok\n\n") == is_on
