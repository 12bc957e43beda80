"""HTTP requests under FlowServer: bounded heads and bodies, and no cut response that looks whole. Event loop only.

`FlowConnection` is Twisted's HTTP/1.1 parser with deadlines, which answers a request that it refuses; `FlowRequest` is
daphne's request with a body limit, which ends in an error when its app does. The app of a body with a file is called at
once, and takes it as it arrives; any other body is stored before.
Importing this module imports daphne, whose server module installs Twisted's reactor; that import comes first.

Relies on, in daphne 4.2.3: `http_protocol.py` WebRequest (`process`, `handle_reply`, `handle_exception`,
`check_timeouts`, `finish`, `send_disconnect`, `_response_started`), HTTPFactory.buildProtocol; in Twisted 26.10:
`web/http.py` HTTPChannel (`allHeadersReceived`, `allContentReceived`, `requestDone`, `persistent`,
`_networkProducer`, `_send100Continue`, `_command`, `_path`, `_version`), Request (`gotLength`, `requestReceived`,
`handleContentChunk`, `producer`, `chunked`, `content`, `_parsePOSTFormSubmission`), _GenericHTTPChannelProtocol.
"""

from __future__ import annotations

import daphne.server  # noqa: F401  # first: installs the reactor

# isort: split

import time
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote_to_bytes

from daphne.http_protocol import HTTPFactory, WebRequest

# By name: `twisted.web.http` as a module looks up each attribute slowly (a proxy for deprecations).
from twisted.web.http import NO_BODY_CODES, HTTPChannel, Request, _GenericHTTPChannelProtocol
from twisted.web.http_headers import Headers

from streamserve.asgi.flow.transport import FlowTransport, StreamedBody
from streamserve.asgi.types import Message

# A response of this kind may end early: its events show whether it is whole, and its readers reconnect.
_ENDS_ANYWHERE = b"text/event-stream"

_TEXT, _JSON = "text/plain; charset=utf-8", "application/json"
_RESTARTING = "The server is restarting. Try again."
# The location of docs/deploy/nginx.conf that asks another worker. Only this value is accepted, so a forged header
# cannot name another location.
_ANOTHER_WORKER = b"@another_worker"


class FlowConnection(HTTPChannel):  # type: ignore[misc]  # Twisted is not type-checked here
    """One HTTP/1.1 connection."""

    flow_transport: FlowTransport
    has_asked = False
    _is_answering = False
    _is_refusing = False

    def connectionMade(self) -> None:
        super().connectionMade()
        self.flow_transport = self.factory.server.add_transport(self.transport, self)

    def dataReceived(self, data: bytes) -> None:
        if self._is_refusing:
            return
        if not self._is_answering and self.flow_transport.head_since is None:
            self.flow_transport.head_since = time.monotonic()
        super().dataReceived(data)

    def allHeadersReceived(self) -> None:
        self.flow_transport.body_since, self.flow_transport.num_body = time.monotonic(), 0
        super().allHeadersReceived()
        request = self.requests[-1]
        if request.streamed is not None:  # its app, and the guard in front of that, bound the body
            self._note_asked()
            request.requestReceived(self._command, self._path, self._version)

    def allContentReceived(self) -> None:
        self._note_asked()
        super().allContentReceived()

    def _note_asked(self) -> None:
        self._is_answering = self.has_asked = True
        self.flow_transport.head_since = self.flow_transport.body_since = None

    def _send100Continue(self) -> None:
        streamed = self.requests[-1].streamed
        if streamed is None:
            super()._send100Continue()
        else:
            streamed.invite = super()._send100Continue

    def requestDone(self, request: Any) -> None:
        self._is_answering = False
        if request.is_arriving:
            self.requests.remove(request)
            self._networkProducer.resumeProducing()
            self._linger()
        else:
            super().requestDone(request)  # also reads the next request, if it has arrived

    def refuse(self, status: int, reason: str, text: str, content_type: str = _TEXT) -> None:
        """Answer a request before it is whole; drop what still arrives, then close."""
        body = text.encode()
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: {content_type}\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self._linger()

    def _linger(self) -> None:
        """Drop what still arrives, and close: a reset would overtake the answer."""
        self._is_refusing = True
        self.flow_transport.linger_since = time.monotonic()
        self._networkProducer.unregisterProducer()
        if self.flow_transport.tcp is self.transport:
            self.transport.loseWriteConnection()
        else:  # TLS closes both directions
            self.transport.loseConnection()


_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus} | {499: b"Client Closed Request"}


class FlowRequest(WebRequest):  # type: ignore[misc]  # daphne ships no types
    """One request and its response."""

    _num_body = _body_limit = 0
    _refusal = b""  # the JSON for a body over the limit of this path
    _is_refused = _has_begun = False
    _response_started: bool  # daphne's
    streamed: StreamedBody | None = None  # a body with a file: its app runs while it arrives
    is_arriving = False  # and it is not whole yet

    def setResponseCode(self, code: int, message: bytes | None = None) -> None:
        """Name the status on the status line. Twisted knows few, and calls a 429 "Unknown Status"."""
        super().setResponseCode(code, message or _PHRASES.get(code))

    # The request

    def gotLength(self, length: int | None) -> None:
        """Refuse a body by its announced length, before any of it is stored."""
        self._parsePOSTFormSubmission = False  # Twisted would parse a form in memory; the app does
        takes_file = self._set_body_limit()
        if length is not None and length > self._body_limit:
            super().gotLength(0)
            self._refuse_body()
        elif takes_file and length != 0 and isinstance(self.channel, FlowConnection):
            super().gotLength(0)
            self.streamed = StreamedBody(self.channel._networkProducer)
            self.is_arriving = True
        else:
            super().gotLength(length)

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        """Start the app, or end the body of one that runs."""
        if self._has_begun and self.streamed is not None:
            self.is_arriving = False
            self.streamed.feed(b"", is_last=True)
        else:
            self._has_begun = True
            super().requestReceived(command, path, version)

    def handleContentChunk(self, data: bytes) -> None:
        """Refuse a body as soon as it exceeds the limit."""
        if self.streamed is not None:
            self.streamed.feed(data)
            return
        self._num_body += len(data)
        transport = getattr(self.channel, "flow_transport", None)
        if transport is not None:
            transport.num_body = self._num_body
        if self._is_refused:
            return
        if self._num_body > self._body_limit:
            self._refuse_body()
        else:
            super().handleContentChunk(data)

    def _set_body_limit(self) -> bool:
        """Set how large the body may be; return whether it may have a file.

        The request has no path yet; its channel does (of HTTP/2: a stream).
        """
        self._body_limit = int(self.server.options.body_bytes)
        raw = getattr(self.channel, "_path", None) or getattr(self.channel, "path", None) or b""
        path = unquote_to_bytes(raw.partition(b"?")[0]).decode("utf-8", "replace")
        bound = self.server.drain.body_bound_of(path)
        if bound is not None and (bound[2] or bound[0] <= self._body_limit):
            self._body_limit, self._refusal, _ = bound
        return bound is not None and bound[2]

    def _refuse_body(self) -> None:
        self._is_refused = True
        self.requestHeaders.removeHeader(b"expect")  # else the channel still sends 100 Continue
        text, content_type = self._refusal.decode(), _JSON
        if not text:
            text = f"The request body is larger than {self._body_limit} bytes, which is the limit here."
            content_type = _TEXT
        if isinstance(self.channel, FlowConnection):
            self.channel.refuse(413, "Content Too Large", text, content_type)
        else:  # HTTP/2: each request is a stream
            self.answer(413, text, content_type=content_type)

    def process(self) -> Any:
        """Start the app, unless the request was refused or the server is going down."""
        if self._is_refused:
            return None
        drain = self.server.drain
        if drain.is_draining and not drain.serves(self.path.decode("latin-1")):
            headers = [(b"retry-after", drain.retry_after)]
            # An nginx in front that sends this header retries the request at another worker.
            if self.requestHeaders.getRawHeaders(b"streamserve-if-draining", []) == [_ANOTHER_WORKER]:
                headers.append((b"x-accel-redirect", _ANOTHER_WORKER))
            self.answer(503, _RESTARTING, *headers)
            return None
        return super().process()

    # The response

    def answer(self, status: int, text: str, *headers: tuple[bytes, bytes], content_type: str = _TEXT) -> None:
        """Send a whole response of the server and close the connection after it."""
        kind = (b"content-type", content_type.encode())
        length = (b"content-length", b"%d" % len(text.encode()))
        self.close_after()
        self.handle_reply({"type": "http.response.start", "status": status, "headers": [kind, length, *headers]})
        self.handle_reply({"type": "http.response.body", "body": text.encode()})

    def close_after(self) -> None:
        """Close the connection after this response, and announce that if its head is not sent yet."""
        self.channel.persistent = 0
        self.responseHeaders.setRawHeaders(b"Connection", [b"close"])

    def handle_reply(self, message: Message) -> None:
        """Send a message of the app, without a body where HTTP allows none: it would be read as the next response."""
        if self.finished or self.channel is None:
            return
        if message["type"] != "http.response.body":
            if message["type"] == "http.response.start" and (self.is_arriving or self.server.drain.is_draining):
                self.close_after()
            super().handle_reply(message)
        elif self.method == b"HEAD" or self.code in NO_BODY_CODES:
            super().handle_reply({**message, "body": b""})
        elif message.get("more_body") and self.startedWriting:
            body = message.get("body", b"")
            if self.chunked and body and not self._disconnected:  # what Request.write does, in one write
                self.sentLength += len(body)
                self.channel.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            else:
                Request.write(self, body)  # daphne does no more with it
        else:
            super().handle_reply(message)

    def finish(self) -> None:
        """End the response. Unregister its flow control first: Twisted raises if a producer is left."""
        if self.producer:
            self.unregisterProducer()
        super().finish()

    def handle_exception(self, exception: BaseException) -> None:
        """Answer the failure of the app: 500 if nothing was written, else break the response off.

        daphne starts the response again here; the ValueError of that ends `Server.application_checker` for good.
        """
        if self._discard_head():
            super().handle_exception(exception)
        else:
            self.break_off()

    def check_timeouts(self) -> None:
        """Enforce http_timeout, without the last chunk that makes a cut response look whole."""
        if self.finished or self.channel is None:
            return
        is_late = self.server.http_timeout and self.duration() > self.server.http_timeout
        if is_late and not self._discard_head():
            self.break_off()
        else:
            super().check_timeouts()

    def break_off(self) -> None:
        """End a response that is not whole in a way that its reader notices."""
        channel = self.channel
        if self.finished or channel is None:
            return
        # The app gets its disconnect now: the connection may take time to close.
        if self.application_queue:
            self.send_disconnect()
        self.server.protocol_disconnected(self)
        if not isinstance(channel, FlowConnection):
            channel.abortConnection()
        elif self.chunked or self.responseHeaders.hasHeader(b"content-length"):
            channel.loseConnection()  # sends what was written, without the last chunk
        else:  # the body ends with the connection: only a reset shows that it is cut
            channel.forceAbortClient()

    def end_early(self, retry_after: bytes) -> None:
        """End the response because the server shuts down: 503, a clean end of an event stream, or break it off."""
        if self.finished or self.channel is None:
            return
        if self._discard_head():
            self.answer(503, _RESTARTING, (b"retry-after", retry_after))
        elif self.responseHeaders.getRawHeaders(b"content-type", [b""])[0].startswith(_ENDS_ANYWHERE):
            self.channel.persistent = 0
            self.finish()
        else:
            self.break_off()

    def _discard_head(self) -> bool:
        """Discard the response's head unless it was written; return whether another response may be sent."""
        if self.startedWriting:
            return False
        if self._response_started:
            self._response_started = False
            self.responseHeaders = Headers()
        return True


class FlowFactory(HTTPFactory):  # type: ignore[misc]  # daphne ships no types
    """Makes the protocols of a new connection."""

    def protocol(self) -> Any:
        """Return the protocol of a connection; Twisted calls it. HTTP/2 may be negotiated over it."""
        return _GenericHTTPChannelProtocol(FlowConnection())

    def buildProtocol(self, addr: Any) -> Any:
        protocol = super().buildProtocol(addr)
        protocol.requestFactory = FlowRequest
        return protocol
