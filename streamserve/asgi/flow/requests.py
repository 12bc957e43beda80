"""HTTP requests under FlowServer: bodies as they arrive, and no cut response that looks whole. Event loop only.

`FlowConnection` is Twisted's HTTP/1.1 parser, which answers a head that comes too slowly or is too large;
`FlowRequest` is daphne's request. Its app is called when its head is there, and takes the body piece for piece, as
under other servers; what a body may have is the guard's (asgi/guard.py). A response ends in an error when its app does.
Importing this module imports daphne, whose server module installs Twisted's reactor; that import comes first.

Relies on, in daphne 4.2.3: `http_protocol.py` WebRequest (`process`, `handle_reply`, `handle_exception`,
`check_timeouts`, `finish`, `send_disconnect`, `_response_started`), HTTPFactory.buildProtocol; in Twisted 26.10:
`web/http.py` HTTPChannel (`allHeadersReceived`, `allContentReceived`, `requestDone`, `resumeProducing`, `persistent`,
`rawDataReceived`, `_networkProducer`, `_send100Continue`, `_command`, `_path`, `_version`, `lineReceived`,
`lineLengthExceeded`, `headerReceived`, `__first_line`, `_respondToBadRequestAndDisconnect`), Request (`gotLength`,
`requestReceived`, `handleContentChunk`, `producer`, `chunked`, `_disconnected`, `_parsePOSTFormSubmission`).
"""

from __future__ import annotations

import daphne.server  # noqa: F401  # first: installs the reactor

# isort: split

import time
from http import HTTPStatus
from typing import Any

from daphne.http_protocol import HTTPFactory, WebRequest

# By name: `twisted.web.http` as a module looks up each attribute slowly (a proxy for deprecations).
from twisted.web.http import NO_BODY_CODES, HTTPChannel
from twisted.web.http_headers import Headers

from streamserve.asgi.flow.transport import FlowTransport, RequestInbox
from streamserve.asgi.types import Message

# A response of this kind may end early: its events show whether it is whole, and its readers reconnect.
_ENDS_ANYWHERE = b"text/event-stream"

_CLOSE = (b"connection", b"close")
_RESTARTING = "The server is restarting. Try again."
# The location of docs/deploy/nginx.conf that asks another web process. Only this value is accepted, so a forged header
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
        """Start the app of a request with a body, which takes it as it arrives."""
        self.flow_transport.head_since = None
        self._is_answering = self.has_asked = True
        super().allHeadersReceived()
        request = self.requests[-1]
        if request.is_arriving:
            self.setTimeout(None)  # Twisted's own, for an idle connection
            request.requestReceived(self._command, self._path, self._version)

    def rawDataReceived(self, data: bytes) -> None:
        if not self._is_refusing:
            super().rawDataReceived(data)

    def allContentReceived(self) -> None:
        if not self._is_refusing:
            self.setTimeout(self.factory.timeOut)  # until the request is done: super() notes it for then
            super().allContentReceived()

    def resumeProducing(self) -> None:
        """Resume when the reader has taken what was written, but do not read on for an app that is behind."""
        super().resumeProducing()
        if self._is_answering and self.requests and self.requests[-1].inbox.is_paused:
            self._networkProducer.pauseProducing()

    def _send100Continue(self) -> None:
        self.requests[-1].inbox.invite = super()._send100Continue

    def requestDone(self, request: Any) -> None:
        self._is_answering = False
        if request.is_arriving:
            self.requests.remove(request)
            self._networkProducer.resumeProducing()
            self._linger()
        else:
            super().requestDone(request)  # also reads the next request, if it has arrived

    def lineReceived(self, line: bytes) -> None:
        """Take a line of the head, unless the head is refused: lines after the bad line are dropped."""
        if self._is_refusing:
            return
        if self._receivedHeaderSize + len(line) > self.totalHeadersSize:
            self._refuse_large()
        else:
            super().lineReceived(line)

    def lineLengthExceeded(self, line: bytes) -> None:
        """Answer a line of the head that is longer than a whole head may be. Twisted closes without an answer."""
        self._refuse_large()

    def headerReceived(self, line: bytes) -> bool:
        """Take a header, unless there are too many."""
        if self._is_refusing:
            return False
        if self._receivedHeaderCount >= self.maxHeaders:
            self._refuse(431, f"The request has more than {self.maxHeaders:,} headers.")
            return False
        return bool(super().headerReceived(line))

    def _respondToBadRequestAndDisconnect(self) -> None:
        if self._is_answering:  # its body's chunks are not valid, and a response may have begun
            super()._respondToBadRequestAndDisconnect()
        else:
            self._refuse(400, "The request is not HTTP/1.1, or has a header that is not valid.")

    def _refuse_large(self) -> None:
        """Refuse a head by its size: 414 for its first line, 431 for its headers (RFC 9110, 15.5.15; RFC 6585, 5)."""
        if self._HTTPChannel__first_line:
            self._refuse(414, f"The request's first line is longer than {self.MAX_LENGTH:,} bytes.")
        else:
            self._refuse(431, f"The request's headers are larger than {self.totalHeadersSize:,} bytes.")

    def refuse_late_head(self) -> None:
        """Answer a request whose head does not end."""
        self._refuse(408, "The request did not arrive in time.")

    def _refuse(self, status: int, text: str) -> None:
        """Answer a request whose head is not whole; drop what still arrives, then close."""
        body = text.encode()
        head = b"HTTP/1.1 %d %b\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
        head += b"Content-Length: %d\r\n\r\n"
        self.transport.write(head % (status, _PHRASES[status], len(body)) + body)
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


# With the name that RFC 9110 has, and Python from 3.13 on.
_NAMED = {413: b"Content Too Large", 414: b"URI Too Long", 499: b"Client Closed Request"}
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus} | _NAMED


class FlowRequest(WebRequest):  # type: ignore[misc]  # daphne ships no types
    """One request and its response."""

    _has_begun = False
    _response_started: bool  # daphne's
    inbox: RequestInbox
    is_arriving = False  # its body is not whole yet

    def setResponseCode(self, code: int, message: bytes | None = None) -> None:
        """Name the status on the status line. Twisted knows few, and calls a 429 "Unknown Status"."""
        super().setResponseCode(code, message or _PHRASES.get(code))

    # The request

    def gotLength(self, length: int | None) -> None:
        """Make the inbox. Twisted would store the body, and parse a form; here the app gets its pieces."""
        self._parsePOSTFormSubmission = False
        super().gotLength(0)
        self.inbox = RequestInbox(self.channel._networkProducer)
        self.is_arriving = length != 0

    def handleContentChunk(self, data: bytes) -> None:
        """Pass a piece of the body on."""
        self.inbox.feed(data)

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        """Start the app, or end the body of an app that runs."""
        if self._has_begun:
            self.is_arriving = False
            self.inbox.end()
            return
        self._has_begun = True
        if not self.is_arriving:
            self.inbox.end()
        super().requestReceived(command, path, version)

    def process(self) -> Any:
        """Start the app, unless the server is going down, or a handshake has a body, which would be read as frames."""
        upgrades = self.requestHeaders.getRawHeaders(b"upgrade", [b""])
        if self.is_arriving and upgrades[0].lower() == b"websocket":
            self.answer(400, "A WebSocket's handshake has no body.")
            return None
        drain = self.server.drain
        if drain.is_draining and not drain.serves(self.path.decode("latin-1")):
            headers = [(b"retry-after", drain.retry_after)]
            # An nginx in front that sends this header retries the request at another web process.
            if self.requestHeaders.getRawHeaders(b"streamserve-if-draining", []) == [_ANOTHER_WORKER]:
                headers.append((b"x-accel-redirect", _ANOTHER_WORKER))
            self.answer(503, _RESTARTING, *headers)
            return None
        return super().process()

    # The response

    def answer(self, status: int, text: str, *headers: tuple[bytes, bytes]) -> None:
        """Send a whole response of the server and close the connection after it."""
        kind = (b"content-type", b"text/plain; charset=utf-8")
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
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                is_last = _CLOSE in headers
                if is_last:
                    message = {**message, "headers": [one for one in headers if one != _CLOSE]}
                if is_last or self.is_arriving or self.server.drain.is_draining:
                    self.close_after()
            super().handle_reply(message)
        elif message.get("more_body"):
            self.write_piece(message.get("body", b""))
        elif self.method == b"HEAD" or self.code in NO_BODY_CODES:
            super().handle_reply({**message, "body": b""})
        else:
            super().handle_reply(message)

    def write_piece(self, body: bytes) -> None:
        """Write a piece of the response's body, not the last."""
        if self.chunked and body and not (self.finished or self._disconnected):
            # What Request.write does, in one write. A response to HEAD is not chunked.
            self.sentLength += len(body)
            self.channel.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        elif not self.finished and self.channel is not None:
            is_bodiless = self.method == b"HEAD" or self.code in NO_BODY_CODES
            super().handle_reply(
                {"type": "http.response.body", "body": b"" if is_bodiless else body, "more_body": True}
            )

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
        if self.chunked or self.responseHeaders.hasHeader(b"content-length"):
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
    """Makes the protocols of new connections: HTTP/1.1, from which a WebSocket upgrades."""

    protocol = FlowConnection

    def buildProtocol(self, addr: Any) -> Any:
        protocol = super().buildProtocol(addr)
        protocol.requestFactory = FlowRequest
        return protocol

    def acceptableProtocols(self) -> list[bytes]:
        """Return what TLS negotiates. Over HTTP/2 daphne has no back-pressure; a proxy speaks it to browsers."""
        return [b"http/1.1"]
