"""`StreamResponse`: a delivery as a Starlette response, for FastAPI too. Needs the package starlette.

return StreamResponse(Delivery(streams, stream, NativeEncoder(stream.log_id, stream)))
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from streamserve.asgi.handover import respond
from streamserve.dialects import native
from streamserve.protocol.errors import StreamserveError, headers_of, to_body
from streamserve.streams.reader.delivery import Delivery


class StreamResponse(Response):
    """Streams `delivery`, then runs `background`. In a StreamMiddleware the stream follows when both have returned."""

    def __init__(
        self, delivery: Delivery, *, headers: Mapping[str, str] | None = None, background: BackgroundTask | None = None
    ) -> None:
        super().__init__(headers=headers, background=background)
        self._delivery = delivery

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await respond(scope, receive, send, self._delivery, status=self.status_code, headers=self.raw_headers)
        if self.background is not None:
            await self.background()


def error_response(request: Request, error: Exception) -> Response:
    """Return the response of a StreamserveError: `exception_handlers={StreamserveError: error_response}`."""
    assert isinstance(error, StreamserveError)
    return JSONResponse(native.error_json(to_body(error)), status_code=error.http_status, headers=headers_of(error))
