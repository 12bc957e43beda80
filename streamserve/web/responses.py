"""`StreamResponse`: hand a delivery over to the ASGI layer, or stream it through Django when that layer is absent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from asgiref.sync import SyncToAsync, sync_to_async
from django.db import connections
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse

from streamserve.asgi.handover import HEADER, offer
from streamserve.streams.reader.delivery import Delivery


def stream_response(request: HttpRequest, delivery: Delivery) -> HttpResponseBase:
    """Return the response that streams `delivery`.

    Under StreamMiddleware it is empty but for a one-time ticket: Django finishes at once, and thread, database
    connection and request are released before the first token. Without it, Django streams, and the generator releases.
    """
    scope: Any = getattr(request, "scope", {})
    hands_over = bool(scope.get("streamserve"))
    response: HttpResponseBase = HttpResponse() if hands_over else _Streamed(_released(delivery))
    for name, value in delivery.headers:
        response[name.decode("ascii")] = value.decode("latin-1")
    if hands_over:
        response[HEADER] = offer(delivery)
    return response


class _Streamed(StreamingHttpResponse):
    """Closes its own iterator when the client leaves; Django would leave that to the garbage collector."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async with aclosing(self._iterator) as chunks:  # type: ignore[attr-defined]
            async for chunk in chunks:
                yield chunk


async def _released(delivery: Delivery) -> AsyncIterator[bytes]:
    """Yield the delivery's bytes, holding neither thread nor connection while waiting.

    Inside the generator, because the middleware's `process_response` uses both after the view has returned.
    """
    await release_request_thread()
    stream = delivery.__aiter__()
    async with aclosing(stream):  # type: ignore[type-var]
        async for chunk in stream:
            yield chunk


async def close_connections() -> None:
    """Give this request's database connections back; the ORM opens them again when something asks."""
    await sync_to_async(_close_idle)()


async def release_request_thread() -> None:
    """Close connections and end the thread that asgiref keeps for this request (its ThreadSensitiveContext)."""
    await close_connections()
    context = SyncToAsync.thread_sensitive_context.get(None)
    executor = SyncToAsync.context_to_thread_executor.pop(context, None) if context is not None else None
    if executor is not None:
        executor.shutdown(wait=False)


def _close_idle() -> None:
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()
