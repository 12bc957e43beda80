"""Django's adapter: a view for each row of `ROUTES` that admits the caller, calls the endpoint and sends its Reply.

The views are csrf_exempt, login_not_required and non-atomic: they check the caller themselves, answer programs as well
as browsers, and stream for minutes. Runs on the event loop; under WSGI every route is a 503 that names the remedy.
"""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from asgiref.sync import SyncToAsync, sync_to_async
from django.core.exceptions import ImproperlyConfigured, RequestAborted
from django.db import InterfaceError, OperationalError, connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.utils.cache import patch_vary_headers

from streamserve.api.call import ANONYMOUS, Body, Call, Caller, Reply, admitted
from streamserve.api.logs import get_logger
from streamserve.api.routes import Route, failure
from streamserve.asgi.handover import HEADER, offer
from streamserve.asgi.types import is_http1
from streamserve.protocol.errors import DatabaseUnavailable, Refused, StreamserveError
from streamserve.protocol.ids import request_id_of
from streamserve.rows.receivers import note_refusal
from streamserve.streams.reader.delivery import Delivery, JoinedDelivery
from streamserve.tracing.spans import incoming
from streamserve.web.access import admit, cors_headers
from streamserve.web.auth import give_cookie
from streamserve.web.front import LATE_BODY
from streamserve.web.permissions import permission_lost
from streamserve.web.site import ensure_embedded, get_site, misconfigured

log = get_logger(__name__)

T = TypeVar("T")
View = Callable[..., Coroutine[Any, Any, HttpResponseBase]]

_NEEDS_ASGI = "This site runs under WSGI, which cannot stream. Serve it by ASGI: daphne <project>.asgi:application."
_CHUNK_BYTES = 1 << 16
_DURABLE = {"jobs", "files", "batches"}  # the services of what workers do


def needs_asgi() -> Refused:
    """Return the error for a request that came by WSGI."""
    return Refused(_NEEDS_ASGI, code="asgi_required", retry_after=120)


def _database_away(request_id: str) -> Refused:
    """Return the error for a database that a query of the site's found locked, or away."""
    message = f"The site's database cannot be used now. Try again. The server's log has the cause under {request_id}."
    return DatabaseUnavailable(message)


def view_of(route: Route) -> View:
    """Return the view that serves `route`."""

    async def view(request: HttpRequest, **params: str) -> HttpResponseBase:
        request_id = request_id_of(request.headers.get("X-Request-Id", ""))
        caller, call = ANONYMOUS, None
        headers = {name.lower(): value for name, value in request.headers.items()}
        cors = cors_headers(route, headers, is_preflight=request.method == "OPTIONS") if "origin" in headers else {}
        if cors and request.method == "OPTIONS":
            return HttpResponse(status=204, headers=cors)
        try:
            if not hasattr(request, "scope"):
                raise needs_asgi()
            if request.method not in route.methods:
                raise route.wrong_method(request.method or "")
            caller = await admit(route.access, request, headers)
            call = _call(request, headers, caller, request_id, params)
            reply = await _reply(route, call)
        except StreamserveError as error:
            if route.asks(request.method or "") and not (call and call.started):
                note_refusal(error, caller, "http", call.model if call else params.get("name", ""))
            reply = route.error_reply(error, request_id, headers)
        except ImproperlyConfigured as error:
            reply = route.error_reply(misconfigured(error, request_id, request.path), request_id, headers)
        except RequestAborted:
            raise
        except Exception as error:
            # The edge of a request: the cause goes to the log, the client gets the id of its log line.
            trace = incoming(headers)
            trace_id = {} if trace is None else {"trace_id": trace.trace_id}
            log.exception("request_failed", request_id=request_id, path=request.path, **trace_id)
            is_away = isinstance(error, OperationalError | InterfaceError)
            failed = _database_away(request_id) if is_away else failure(request_id)
            reply = route.error_reply(failed, request_id, headers)
        response = to_django(request, reply)
        _set_headers(response, {"X-Request-Id": request_id, **cors})
        if not route.access.identifies:
            give_cookie(response, caller)
        return response

    view.__name__ = view.__qualname__ = route.name or "unknown"
    view.route = route  # type: ignore[attr-defined]
    view.csrf_exempt = True  # type: ignore[attr-defined]
    view.login_required = False  # type: ignore[attr-defined]
    return _mark_non_atomic(view)


async def _reply(route: Route, call: Call) -> Reply:
    """Return the endpoint's reply. A stream in it is broken off when the caller loses the permission to read it."""
    if route.services & _DURABLE:
        ensure_embedded()
    reply = await route.reply(call, get_site().services.by_name if route.services else {})
    if isinstance(reply.body, Delivery | JoinedDelivery):
        permissions = get_site().permissions
        permissions.hold(reply.body, call.caller, _break_off)
        reply.body.on_close(functools.partial(permissions.release, reply.body))
    return reply


def _call(
    request: HttpRequest, headers: Mapping[str, str], caller: Caller, request_id: str, params: Mapping[str, str]
) -> Call:
    """Return what an endpoint is given of `request`."""
    return Call(
        method="GET" if request.method == "HEAD" else request.method or "",
        is_head=request.method == "HEAD",
        path=request.path,
        headers=headers,
        caller=caller,
        request_id=request_id,
        body=functools.partial(_chunks, request),
        wait=_wait,
        params=params,
        query_string=request.META.get("QUERY_STRING", ""),
        address=request.META.get("REMOTE_ADDR") or "",
        is_http1=is_http1(request.scope),  # type: ignore[attr-defined]
        received_at=admitted(request.scope.get("streamserve.received_at") or time.monotonic(), headers),  # type: ignore[attr-defined]
    )


def _set_headers(response: HttpResponseBase, headers: Mapping[str, str]) -> None:
    """Set these headers; `Vary` is added to what is there."""
    for name, value in headers.items():
        if name == "Vary":
            patch_vary_headers(response, [value])
        else:
            response[name] = value


def _break_off(delivery: Delivery | JoinedDelivery) -> None:
    delivery.break_off(permission_lost())


def non_atomic(view: View) -> View:
    """Return the async `view` outside ATOMIC_REQUESTS, as a function: a bound method takes no attributes."""

    @functools.wraps(view)
    async def outside(*args: Any, **kwargs: Any) -> HttpResponseBase:
        return await view(*args, **kwargs)

    return _mark_non_atomic(outside)


def _mark_non_atomic(view: View) -> View:
    """Exempt `view` from ATOMIC_REQUESTS, which Django refuses to async views."""
    for alias in connections:
        transaction.non_atomic_requests(using=alias)(view)
    return view


def to_django(request: HttpRequest, reply: Reply) -> HttpResponseBase:
    """Return `reply` as Django's response.

    Under StreamMiddleware the response to a stream is empty except for a one-time id: Django finishes at once, and
    thread, database connection and request are released before the first token. Without it, Django streams.
    """
    body = reply.body
    response: HttpResponseBase
    if isinstance(body, bytes):
        response = HttpResponse(b"" if request.method == "HEAD" else body, status=reply.status)
        if request.method == "HEAD":
            response["Content-Length"] = str(len(body))
    elif getattr(request, "scope", {}).get("streamserve"):
        response = HttpResponse(status=reply.status, headers={HEADER: offer(body)})
    else:
        if not hasattr(request, "_dont_enforce_csrf_checks"):  # Django's test clients, which call no application
            _warn_of_unwrapped_application()
        if request.method == "HEAD":  # Django drops the body, and closes nothing
            body.close()
        response = _Streamed(_released(body), status=reply.status)
    _set_headers(response, reply.headers)
    if not isinstance(body, bytes):
        for raw_name, raw_value in body.headers:
            response[raw_name.decode("ascii")] = raw_value.decode("latin-1")
    if reply.status >= 500:
        # A failure is in the log with its cause already; an engine that is busy or loading is no error of the site.
        setattr(response, "_has_been_logged", True)  # noqa: B010  (Django's own mark, in no stub)
    return response


@functools.cache
def _warn_of_unwrapped_application() -> None:
    """Log it once: a server runs no system checks (W001)."""
    log.warning(
        "asgi_application_not_wrapped",
        hint="No WebSocket, and each stream keeps Django's response open. At the end of asgi.py: "
        "application = streamserve.routing.wrap(application)",
    )


class _Streamed(StreamingHttpResponse):
    """Closes its iterator when the client leaves; Django leaves that to the garbage collector."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async with aclosing(self._iterator) as chunks:  # type: ignore[attr-defined]
            async for chunk in chunks:
                yield chunk


async def _released(body: Body) -> AsyncIterator[bytes]:
    """Yield the body's bytes, holding neither thread nor connection while waiting.

    They are released inside the generator, because the middleware's `process_response` uses both after the view has
    returned.
    """
    await _close_connections()
    # The thread that asgiref keeps for this request (its ThreadSensitiveContext).
    context = SyncToAsync.thread_sensitive_context.get(None)
    executor = SyncToAsync.context_to_thread_executor.pop(context, None) if context is not None else None
    if executor is not None:
        executor.shutdown(wait=False)
    chunks = body.__aiter__()
    async with aclosing(chunks):  # type: ignore[type-var]
        async for chunk in chunks:
            yield chunk


async def _chunks(request: HttpRequest) -> AsyncIterator[bytes]:
    """Yield the body, which Django has in memory or a file; a large upload's body as it arrives (web/front.py)."""
    late = request.scope.get(LATE_BODY)  # type: ignore[attr-defined]
    if late is not None:
        async for chunk in late.chunks():
            yield chunk
        return
    while chunk := request.read(_CHUNK_BYTES):
        yield chunk


async def _wait(work: Coroutine[Any, Any, T], /) -> T:
    """Await `work` without a database connection. Django cancels the view and `work` when the client leaves."""
    try:
        await _close_connections()
    except BaseException:
        work.close()
        raise
    return await work


async def _close_connections() -> None:
    """Close this request's database connections, if it has a thread; the ORM reopens them on the next query."""
    context = SyncToAsync.thread_sensitive_context.get(None)
    if context is not None and context not in SyncToAsync.context_to_thread_executor:
        return

    def close() -> None:
        for connection in connections.all(initialized_only=True):
            if not connection.in_atomic_block:
                connection.close()

    await sync_to_async(close)()
