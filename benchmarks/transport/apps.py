"""The applications of `benchmarks.transport`: the same events by streamserve, by Django itself and by sse-starlette.

A source makes a word at each step. A step comes every `pace` seconds for all streams at once, as an engine's does, or
at once if `pace` is 0. The path is `/sse?n=…&pace=…&size=…` (`size`: the least characters of a word); streamserve also
has `/ws` and `/events?id=…&after=…`. `/gone` returns the time at which a disconnect last reached a source. Nothing but
the transport is computed.
"""

from __future__ import annotations

# ruff: noqa: E402  (Django wants its settings before it is imported)
import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from django.conf import settings

settings.configure(
    ALLOWED_HOSTS=["*"],
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "streamserve"],
    LOGGING_CONFIG=None,
    ROOT_URLCONF=__name__,
    SECRET_KEY="benchmark",
    STREAMSERVE={"TESTING": True, "FLOW_SERVER": False},  # `daphne` stays stock daphne
)

import django

django.setup()

from django.core.asgi import get_asgi_application
from django.http import HttpRequest, HttpResponseBase, StreamingHttpResponse
from django.urls import path
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from streamserve.api.call import Reply
from streamserve.asgi.middleware import StreamMiddleware
from streamserve.asgi.types import App, Receive, Scope, Send
from streamserve.dialects.native import NativeEncoder, websocket_message
from streamserve.protocol.engine import Accepted
from streamserve.protocol.events import Done, Event, Token
from streamserve.protocol.requests import Admission, GenerateRequest
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import follow
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from streamserve.web.views import to_django

_gone: list[float] = [0.0]  # by the machine's monotonic clock

LEAD_TOKENS = 256


class Steps:
    """Calls all waiters every `pace` seconds while there are any; at the loop's next turn if `pace` is 0."""

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self._waiting: list[Callable[[], None]] = []

    def call(self, waiter: Callable[[], None]) -> None:
        """Call `waiter` at the next step."""
        loop = asyncio.get_running_loop()
        if not self._pace:
            loop.call_soon(waiter)
            return
        if not self._waiting:
            loop.call_at((loop.time() // self._pace + 1) * self._pace, self._step)
        self._waiting.append(waiter)

    def _step(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter()


_steps: dict[float, Steps] = {}


def steps(pace: float) -> Steps:
    """Return the steps with that pace."""
    if pace not in _steps:
        _steps[pace] = Steps(pace)
    return _steps[pace]


async def step(pace: float) -> None:
    """Wait for the next step."""
    if pace:
        future = asyncio.get_running_loop().create_future()
        steps(pace).call(partial(_wake, future))
        await future
    else:
        await asyncio.sleep(0)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def word(index: int, size: int) -> str:
    """Return the word of a step, at least `size` characters."""
    return f" word{index % 100}".ljust(size, ".")


class Source:
    """A generation of n words. `prompt` of its request is "n pace size"."""

    parked = None
    num_cached_tokens = 0

    def __init__(self, request: GenerateRequest) -> None:
        num, pace, size = (request.prompt or "").split()
        self._num, self._size, self._index = int(num), int(size), 0
        self._steps = steps(float(pace))
        self._reader: int | None = 0
        self._next: Event | None = self._make()
        self._is_waiting = False
        self.is_open = True
        self.on_news: Callable[[], None] | None = None
        self.accepted = Accepted(num_prompt_tokens=1, max_tokens=self._num, seed=1)

    def ready(self, most: int | None = None) -> list[Event]:
        """Take the event of this step, if any; the next one comes a step later."""
        if self._next is None:
            return []
        event, self._next = self._next, None
        self.is_open = self.is_open and not isinstance(event, Done)
        self._ask()
        return [event]

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool = False) -> None:
        """Stop LEAD_TOKENS ahead of the reader, as the engine does by parking."""
        self._reader = None if num_tokens is None else num_tokens[0]
        self._ask()

    def cancel(self) -> None:
        """Note the time."""
        self._next = self.on_news = None
        if self.is_open:
            self.is_open = False
            _gone[0] = time.monotonic()

    def _ask(self) -> None:
        is_ahead = self._reader is not None and self._index >= self._reader + LEAD_TOKENS
        if self.is_open and self._next is None and not self._is_waiting and not is_ahead:
            self._is_waiting = True
            self._steps.call(self._step)

    def _step(self) -> None:
        self._is_waiting = False
        if self.is_open:
            self._next = self._make()
        if self.on_news is not None:
            self.on_news()

    def _make(self) -> Event:
        self._index += 1
        if self._index > self._num:
            return Done(finish_reason="stop")
        return Token(text=word(self._index, self._size), token_ids=(self._index,))


class SourceClient:
    """The engine."""

    alias = "source"

    async def generate(self, request: GenerateRequest, *rest: object) -> Source:
        """Accept everything."""
        return Source(request)


LOG = FileLog(os.environ["BENCHMARK_LOG"]) if os.environ.get("BENCHMARK_LOG") else MemoryLog()
STREAMS = Streams({"source": SourceClient()}, LOG, StreamConfig(retention_seconds=0.5))  # type: ignore[dict-item]


async def _start(query: dict[str, str]) -> Stream:
    request = GenerateRequest(model="source", prompt=f"{query['n']} {query['pace']} {query.get('size', 0)}")
    return await STREAMS.start(
        request, Admission(owner="u", tenant="t", on_disconnect="abort" if "abort" in query else "park")
    )


async def ours(request: HttpRequest) -> HttpResponseBase:
    """A Django view that hands its stream over."""
    stream = await _start(request.GET.dict())
    return to_django(request, Reply(body=Delivery(STREAMS, stream, NativeEncoder(stream.log_id))))


async def events(request: HttpRequest) -> HttpResponseBase:
    """A Django view that resumes a stream."""
    stream = STREAMS.find(request.GET["id"])
    assert stream is not None
    delivery = Delivery(STREAMS, stream, NativeEncoder(stream.log_id), after=int(request.GET["after"]))
    return to_django(request, Reply(body=delivery))


async def plain(request: HttpRequest) -> HttpResponseBase:
    """A Django view that streams by StreamingHttpResponse."""
    frames = (_frame(one) async for one in words(request.GET.dict()))
    return StreamingHttpResponse(frames, content_type="text/event-stream")


urlpatterns = [path("sse", ours), path("events", events), path("plain", plain)]


async def words(query: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
    """Yield the words of `Source`, with the fields of native events."""
    num, pace, size = int(query["n"]), float(query["pace"]), int(query.get("size", 0))
    is_over = False
    try:
        for index in range(1, num + 1):
            if index > 1:
                await step(pace)
            data = {"text": word(index, size), "token_ids": [index], "index": 0, "choice": 0}
            yield {"event": "token", "id": f"abcdefghijkl-{index}", "data": json.dumps(data)}
        is_over = True
        yield {"event": "done", "id": f"abcdefghijkl-{num + 1}", "data": '{"finish_reason": "stop"}'}
    finally:
        if not is_over:
            _gone[0] = time.monotonic()


def _frame(one: dict[str, Any]) -> bytes:
    return f"event: {one['event']}\nid: {one['id']}\ndata: {one['data']}\n\n".encode()


async def _starlette(request: Request) -> EventSourceResponse:
    return EventSourceResponse(words(request.query_params))


async def _websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """Send the stream in a task, as the consumer does, and wait for the disconnect."""
    await receive()
    await send({"type": "websocket.accept"})
    stream = await _start(dict(parse_qsl(scope["query_string"].decode())))
    shown = follow(STREAMS, stream)
    relaying = asyncio.create_task(_relay(stream, shown, send))
    try:
        while (await receive())["type"] != "websocket.disconnect":
            pass
    finally:
        shown.close()
        relaying.cancel()
        await asyncio.gather(relaying, return_exceptions=True)


async def _relay(stream: Stream, shown: Any, send: Send) -> None:
    async for logged in shown:
        text = json.dumps(websocket_message(stream.id, stream.log_id, logged), ensure_ascii=False)
        await send({"type": "websocket.send", "text": text})
    await send({"type": "websocket.close", "code": 1000})


def _with_control(http: App) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await _websocket(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/gone":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": str(_gone[0]).encode()})
        else:
            await http(scope, receive, send)

    return app


_django = get_asgi_application()
django_app = _with_control(_django)
ours_app = StreamMiddleware(_with_control(_django))
starlette_app = _with_control(Starlette(routes=[Route("/sse", _starlette)]))
