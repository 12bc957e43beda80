"""Watches every stream that a test of this suite reads, with whatever client, and checks it when the test ends.

The bytes are taken where a client gets them: `recv` and `recv_into` of this process's sockets (httpx, openai,
websockets, http.client, raw), what `Delivery` yields or sends to a client in this process, and what a test's
WebSocket communicator receives. A stream is known by the header `x-stream-id`, over a WebSocket by `event_id`.

A test that cuts streams off on purpose, other than by their own client, is marked `@pytest.mark.cut_streams("why")`.
Its streams need no end; the part that came is checked in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import h11
import pytest
from asgiref.testing import ApplicationCommunicator
from websockets.extensions.permessage_deflate import PerMessageDeflate
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, OPEN, SERVER, Protocol, Side

from streamserve.streams.reader.channel import nothing
from streamserve.streams.reader.delivery import Delivery
from tests.support.checks.stream_checks import check_relay, check_stream

_PROBE_ID = b"doctor"  # of the doctor's probes, which are no answers
LEFT, WHOLE, CUT = "left", "whole", "cut"


class Body:
    """The body of one response that carries a stream, as far as its client has it."""

    def __init__(self, watch: Watch, headers: dict[bytes, bytes]) -> None:
        self._watch = watch
        self._after = int(headers.get(b"streamserve-from", b"1")) - 1
        self._data = bytearray()
        self.end = LEFT  # until the response has ended

    def feed(self, data: bytes) -> None:
        self._data += data
        self._watch.note(self)

    def close(self, end: str) -> None:
        self.end = end
        self._watch.note(self)

    def check(self, *, may_be_cut: bool) -> None:
        """Raise AssertionError if a law is broken."""
        if self.end == CUT and not self._data:
            return  # of a HEAD request: its response has no body
        try:
            check_stream(bytes(self._data), after=self._after, is_whole=self.end != LEFT and not may_be_cut)
        except AssertionError as error:
            if self.end != CUT:
                raise
            # After the end it may break: the client has all of it, and may have closed it itself.
            last = bytes(self._data[-200:])
            raise AssertionError(f"the connection broke within a stream ({error}), after {last!r}") from None


class Relay:
    """The events that one WebSocket has shown, of any number of streams, and the resumes that its client has sent."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._messages: list[dict[str, Any]] = []

    def feed(self, text: str | bytes) -> None:
        """Take a message of either side."""
        with contextlib.suppress(ValueError, RecursionError):  # not our messages
            message = json.loads(text)
            if isinstance(message, dict) and message.get("type") in ("event", "resume"):
                self._messages.append(message)
                self._watch.note(self)

    def check(self, *, may_be_cut: bool) -> None:
        """Raise AssertionError if a law is broken."""
        check_relay(self._messages)


class Connection:
    """The bytes that one socket has received: HTTP/1 responses, then perhaps a WebSocket; other bytes are ignored."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._http: h11.Connection | None = None
        self._has_begun = False
        self._body: Body | None = None
        self._websocket: tuple[_Texts, _Texts] | None = None  # from the server, from the client
        self._relay = Relay(watch)

    def feed(self, data: bytes) -> None:
        """Take the result of a `recv`; b"" is the end."""
        if not self._has_begun:
            self._has_begun = True
            self._http = _asking() if b"HTTP/1.".startswith(data[:7]) else None
        if self._websocket is not None:
            self._websocket[0].feed(data)
        elif self._http is not None:
            self._http.receive_data(data)
            self._read_http(self._http)

    def sent(self, data: bytes) -> None:
        """Take the bytes of a `send`."""
        if self._websocket is not None:
            self._websocket[1].feed(data)

    def cut(self) -> None:
        """Note that the connection was reset."""
        if self._body is not None:
            self._body.close(CUT)
        self._http = self._body = None

    def _read_http(self, http: h11.Connection) -> None:
        try:
            while (event := http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.ConnectionClosed) or not self._take(http, event):
                    self._http = None
                    return
        except h11.RemoteProtocolError:
            self.cut()
            return
        if event is h11.PAUSED and http.our_state is h11.SWITCHED_PROTOCOL:
            assert self._websocket is not None
            self._websocket[0].feed(http.trailing_data[0])

    def _take(self, http: h11.Connection, event: Any) -> bool:
        """Act on one event; return whether more may follow."""
        if isinstance(event, h11.InformationalResponse) and event.status_code == 101:
            extensions = dict(event.headers).get(b"sec-websocket-extensions", b"")
            self._websocket = _Texts(CLIENT, extensions, self._relay.feed), _Texts(SERVER, extensions, self._relay.feed)
        elif isinstance(event, h11.Response):
            headers = dict(event.headers)
            has_id = headers.get(b"x-stream-id", _PROBE_ID) != _PROBE_ID
            is_stream = has_id and headers.get(b"content-type", b"").startswith(b"text/event-stream")
            self._body = Body(self._watch, headers) if is_stream else None
        elif isinstance(event, h11.Data) and self._body is not None:
            self._body.feed(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            return self._finish(http)
        return True

    def _finish(self, http: h11.Connection) -> bool:
        if self._body is not None:
            self._body.close(WHOLE)
        self._body = None
        if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
            return False
        http.start_next_cycle()
        _ask(http)
        return True


class _Texts:
    """The whole text messages of one direction of a WebSocket."""

    def __init__(self, side: Side, extensions: bytes, then: Callable[[bytes], None]) -> None:
        self._protocol = Protocol(side, state=OPEN, max_size=None)
        self._then = then
        self._text = b""
        if b"permessage-deflate" in extensions:
            is_fresh = [f"{name}_no_context_takeover".encode() in extensions for name in ("server", "client")]
            theirs, ours = is_fresh if side is CLIENT else reversed(is_fresh)
            self._protocol.extensions = [PerMessageDeflate(theirs, ours, 15, 15)]

    def feed(self, data: bytes) -> None:
        if data:
            self._protocol.receive_data(data)
        for frame in self._protocol.events_received():
            if isinstance(frame, Frame) and frame.opcode in (Opcode.TEXT, Opcode.CONT):
                self._text = frame.data if frame.opcode is Opcode.TEXT else self._text + frame.data
                if frame.fin:
                    self._then(self._text)


def _asking() -> h11.Connection:
    http = h11.Connection(h11.CLIENT)
    _ask(http)
    return http


def _ask(http: h11.Connection) -> None:
    """Feed h11 a stand-in for the client's request, which is not known; only the response to a HEAD needs it."""
    upgrade = [("Host", "any"), ("Connection", "Upgrade"), ("Upgrade", "websocket")]
    http.send(h11.Request(method="GET", target="/", headers=upgrade))
    http.send(h11.EndOfMessage())


class Watch:
    """The streams that were read since the last check."""

    def __init__(self) -> None:
        self._seen: dict[Body | Relay, None] = {}
        self._lock = threading.RLock()  # clients read in threads

    def note(self, one: Body | Relay) -> None:
        """Note that bytes of a stream came, or its end."""
        with self._lock:
            self._seen[one] = None

    def faults(self, *, may_be_cut: bool = False) -> list[str]:
        """Return the violations in what was read since the last call."""
        with self._lock:
            seen, self._seen = list(self._seen), {}
        return [fault for one in seen if (fault := _fault(one, may_be_cut)) is not None]


def _fault(one: Body | Relay, may_be_cut: bool) -> str | None:
    try:
        one.check(may_be_cut=may_be_cut)
    except (AssertionError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}".partition("\nassert ")[0]
    return None


def install(watch: Watch) -> Callable[[], None]:
    """Patch every place where clients of this process get bytes; return the undo."""
    patches = pytest.MonkeyPatch()
    _listen_to_sockets(patches, watch)
    _listen_to_deliveries(patches, watch)
    _listen_to_communicators(patches, watch)
    return patches.undo


def _listen_to_sockets(patches: pytest.MonkeyPatch, watch: Watch) -> None:
    connections: WeakKeyDictionary[socket.socket, Connection] = WeakKeyDictionary()
    lock = threading.RLock()  # a collection in here may close a generator of a loop, which sends a byte
    recv, recv_into = socket.socket.recv, socket.socket.recv_into
    send, sendall = socket.socket.send, socket.socket.sendall

    def connection_of(one: socket.socket) -> Connection:
        with lock:
            return connections.setdefault(one, Connection(watch))

    def received(self: socket.socket, size: int, flags: int = 0) -> bytes:
        with _noting_resets(connection_of(self)):
            data = recv(self, size, flags)
        if size and not flags:
            connection_of(self).feed(data)
        return data

    def received_into(self: socket.socket, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        with _noting_resets(connection_of(self)):
            num = recv_into(self, buffer, nbytes, flags)
        if not flags:
            connection_of(self).feed(bytes(memoryview(buffer).cast("B")[:num]))
        return num

    def sent(self: socket.socket, data: Any, flags: int = 0) -> int:
        num = send(self, data, flags)
        connection_of(self).sent(bytes(memoryview(data).cast("B")[:num]))
        return num

    def sent_all(self: socket.socket, data: Any, flags: int = 0) -> None:
        connection_of(self).sent(bytes(data))
        sendall(self, data, flags)

    patches.setattr(socket.socket, "recv", received)
    patches.setattr(socket.socket, "recv_into", received_into)
    patches.setattr(socket.socket, "send", sent)
    patches.setattr(socket.socket, "sendall", sent_all)


@contextlib.contextmanager
def _noting_resets(connection: Connection) -> Iterator[None]:
    try:
        yield
    except ConnectionError:
        connection.cut()
        raise


def _listen_to_deliveries(patches: pytest.MonkeyPatch, watch: Watch) -> None:
    run, pull, close = Delivery.run, Delivery.__aiter__, Delivery.close
    running: WeakKeyDictionary[Delivery, asyncio.Task[Any] | None] = WeakKeyDictionary()
    left: WeakSet[Delivery] = WeakSet()

    def watched_close(self: Delivery) -> None:
        if running.get(self) is not asyncio.current_task():
            left.add(self)  # another task closed it: its client disconnected
        close(self)

    async def watched_run(
        self: Delivery, send: Callable[[bytes], Awaitable[None]], num_untaken: Callable[[], int] = nothing
    ) -> None:
        body = _body_of(watch, self)
        running[self] = asyncio.current_task()

        async def taken(data: bytes) -> None:
            await send(data)
            body.feed(data)

        def taken_now(data: bytes) -> bool:
            is_taken: bool = now(data)
            if is_taken:
                body.feed(data)
            return is_taken

        now = getattr(send, "now", None)
        if now is not None:
            taken.now = taken_now  # type: ignore[attr-defined]
        await run(self, taken, num_untaken)
        body.close(LEFT if self in left else WHOLE)

    async def watched_pull(self: Delivery) -> AsyncIterator[bytes]:
        body = _body_of(watch, self)
        running[self] = asyncio.current_task()
        async with contextlib.aclosing(pull(self)) as pieces:  # type: ignore[type-var]
            async for data in pieces:
                body.feed(data)
                yield data
        body.close(LEFT if self in left else WHOLE)

    patches.setattr(Delivery, "close", watched_close)
    patches.setattr(Delivery, "run", watched_run)
    patches.setattr(Delivery, "__aiter__", watched_pull)


def _body_of(watch: Watch, delivery: Delivery) -> Any:
    headers = dict(delivery.headers)
    is_watched = headers[b"content-type"].startswith(b"text/event-stream") and not delivery.is_over
    return Body(watch, headers) if is_watched else _Unwatched()


class _Unwatched:
    """Plain text, which has neither ids nor ends, or an empty replay."""

    def feed(self, data: bytes) -> None:
        pass

    def close(self, end: str) -> None:
        pass


def _listen_to_communicators(patches: pytest.MonkeyPatch, watch: Watch) -> None:
    relays: WeakKeyDictionary[ApplicationCommunicator, Relay] = WeakKeyDictionary()
    receive_output, send_input = ApplicationCommunicator.receive_output, ApplicationCommunicator.send_input

    def note(communicator: ApplicationCommunicator, message: Any, kind: str) -> None:
        if message["type"] == kind and message.get("text") is not None:
            relays.setdefault(communicator, Relay(watch)).feed(message["text"])

    async def received(self: ApplicationCommunicator, *rest: Any, **named: Any) -> Any:
        message = await receive_output(self, *rest, **named)
        note(self, message, "websocket.send")
        return message

    async def sent(self: ApplicationCommunicator, message: Any) -> None:
        note(self, message, "websocket.receive")
        await send_input(self, message)

    patches.setattr(ApplicationCommunicator, "receive_output", received)
    patches.setattr(ApplicationCommunicator, "send_input", sent)


def pytest_configure(config: pytest.Config) -> None:
    """Install the watch for the whole run."""
    config.addinivalue_line("markers", "cut_streams(why): its streams are cut off on purpose, not by their own client")
    config.addinivalue_line("markers", "sampled(why): a real model generates any bytes, also such as are no text")
    config.stash[_WATCH] = Watch()
    config.add_cleanup(install(config.stash[_WATCH]))


_WATCH: pytest.StashKey[Watch] = pytest.StashKey()


@pytest.fixture(autouse=True)
def stream_watch(request: pytest.FixtureRequest) -> Iterator[Watch]:
    """Fail a test that has read a wrong stream."""
    watch = request.config.stash[_WATCH]
    yield watch
    faults = watch.faults(may_be_cut=request.node.get_closest_marker("cut_streams") is not None)
    if request.node.get_closest_marker("sampled") is not None:
        faults = [fault for fault in faults if "a broken code point" not in fault]
    if faults:
        pytest.fail("a stream that this test has read is wrong:\n" + "\n".join(faults), pytrace=False)
