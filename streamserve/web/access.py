"""`@route`: every HTTP route says who may call it. Default deny: urls.py refuses a view that did not declare it.

Wraps an async view with what all routes share: ASGI, verb, caller, CSRF or same origin, errors in the endpoint's
dialect, a request id. The views below it are marked csrf_exempt, login_not_required and non-atomic, because they check
for themselves, answer programs rather than browsers, and stream for minutes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, cast

import structlog
from django.conf import settings as django_settings
from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import ImproperlyConfigured, RequestAborted
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.views.decorators.csrf import csrf_exempt

from streamserve.conf import get_settings
from streamserve.dialects import native
from streamserve.protocol.errors import (
    BadRequest,
    ErrorBody,
    Forbidden,
    MethodNotAllowed,
    Refused,
    StreamserveError,
    Unauthorized,
    headers_of,
    to_body,
)
from streamserve.protocol.ids import request_id_of
from streamserve.protocol.json_body import check_head, read_body
from streamserve.web.auth import Principal, authenticate_request, check_csrf, check_same_origin

log = structlog.get_logger("streamserve")

CHAT_CALLERS = ("session", "key", "anonymous")
OPS_CALLERS = ("session", "key")
ANYONE = ("anyone",)
SAFE_METHODS = ("GET", "HEAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may call a route, and how. `scope` is what the caller's key (or standing) must carry."""

    callers: tuple[str, ...]
    methods: tuple[str, ...] = ("GET",)
    scope: str = "chat"
    open_in_debug: bool = False


class Endpoint(Protocol):
    """A view that has declared its access."""

    access: Access

    def __call__(self, request: HttpRequest, **kwargs: Any) -> Awaitable[HttpResponseBase]: ...


View = Callable[..., Coroutine[Any, Any, HttpResponseBase]]
ErrorJson = Callable[[ErrorBody], dict[str, Any]]


def route(access: Access, *, error_json: ErrorJson = native.error_json) -> Callable[[View], Endpoint]:
    """Declare who may call `view(request, principal, **kwargs)`; `principal` is None only for callers=ANYONE."""

    def declare(view: View) -> Endpoint:
        @functools.wraps(view)
        async def endpoint(request: HttpRequest, **kwargs: Any) -> HttpResponseBase:
            return await _answer(access, view, error_json, request, kwargs)

        wrapped = csrf_exempt(login_not_required(non_atomic(endpoint)))
        wrapped.access = access  # type: ignore[attr-defined]
        return cast(Endpoint, wrapped)

    return declare


def non_atomic(view: View) -> View:
    """Return the async `view` marked to run outside ATOMIC_REQUESTS, which Django refuses to async views."""

    @functools.wraps(view)
    async def outside(*args: Any, **kwargs: Any) -> HttpResponseBase:
        return await view(*args, **kwargs)

    for alias in connections:
        transaction.non_atomic_requests(using=alias)(outside)
    return outside


def declared(view: Any) -> Any:
    """Return `view` for a URL pattern, or fail the import: a route without declared access must not exist."""
    if not isinstance(getattr(view, "access", None), Access):
        raise ImproperlyConfigured(f"{view!r} does not declare who may call it. Decorate it with @route(Access(...)).")
    return view


async def _answer(
    access: Access, view: View, error_json: ErrorJson, request: HttpRequest, kwargs: dict[str, Any]
) -> HttpResponseBase:
    request_id = request_id_of(request.headers.get("X-Request-Id", ""))
    response: HttpResponseBase
    try:
        _require_asgi(request)
        _require_method(access, request)
        response = await view(request, await admit(access, request), **kwargs)
    except StreamserveError as error:
        response = error_response(error, error_json)
    except RequestAborted:
        raise
    except Exception:
        # The edge of a request: what went wrong goes to the log, the client gets the id to ask about.
        log.exception("request_failed", request_id=request_id, path=request.path)
        response = error_response(
            StreamserveError(f"The server failed on this request. Its log has the cause under {request_id}."),
            error_json,
        )
    if response.status_code == 405:
        response["Allow"] = ", ".join(access.methods)
    if response.status_code >= 500:
        # Failures were logged above with their cause; being busy, or loading, is nothing to log as an error.
        response._has_been_logged = True  # type: ignore[attr-defined]
    response["X-Request-Id"] = request_id
    return response


def error_response(error: StreamserveError, error_json: ErrorJson = native.error_json) -> HttpResponse:
    """Return `error` as the endpoint's dialect shows it, with the headers its status calls for."""
    response = json_response(error_json(to_body(error)), status=error.http_status)
    for name, value in headers_of(error).items():
        response[name] = value
    return response


def json_response(body: Any, *, status: int = 200) -> HttpResponse:
    """Return `body` as JSON that nobody caches."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    response = HttpResponse(text.encode(), status=status, content_type="application/json")
    response["Cache-Control"] = "no-store"
    return response


def read_json(request: HttpRequest, *, optional: bool = False) -> dict[str, Any]:
    """Return the JSON object in the body. Type, encoding and size are checked before a byte of it is read."""
    limits = get_settings().limits
    check_head(request.headers.get("Content-Length", ""), request.headers.get("Content-Encoding", ""), limits)
    body = request.read(limits.max_body_bytes + 1)
    return read_body(body, request.content_type or "", limits, optional=optional)


async def admit(access: Access, request: HttpRequest) -> Principal | None:
    """Return the caller, or raise Unauthorized or Forbidden. A cookie's authority is checked for forgery."""
    if access.callers == ANYONE or (access.open_in_debug and django_settings.DEBUG):
        return None
    principal = await authenticate_request(request)
    check_access(access, principal)
    assert principal is not None
    if principal.kind != "key":
        _check_forgery(request, principal)
    return principal


def check_access(access: Access, principal: Principal | None) -> None:
    """Raise unless `principal` may call a route with this `access`."""
    if principal is None or (principal.kind == "anonymous" and "anonymous" not in access.callers):
        raise Unauthorized("Sign in, or send an API key as 'Authorization: Bearer <key>'.")
    if principal.kind not in access.callers or access.scope not in principal.scopes:
        raise Forbidden(f"This needs the scope '{access.scope}', which you do not have.", code="insufficient_scope")


def _check_forgery(request: HttpRequest, principal: Principal) -> None:
    """Unsafe verbs need the CSRF token; reads, and visitors with no cookie to ride on, need the same origin."""
    has_nothing_to_ride = principal.kind == "anonymous" and not request.COOKIES
    if request.method in SAFE_METHODS or has_nothing_to_ride:
        headers = {name.lower(): value for name, value in request.headers.items()}
        check_same_origin(headers, scheme=request.scheme or "http", host=request.get_host())
    else:
        check_csrf(request)


def _require_asgi(request: HttpRequest) -> None:
    if not hasattr(request, "scope"):
        raise Refused(
            "This site runs under WSGI, which cannot stream. Serve it by ASGI: daphne <project>.asgi:application.",
            code="asgi_required",
            retry_after=120,
        )


def _require_method(access: Access, request: HttpRequest) -> None:
    if request.method not in access.methods:
        raise MethodNotAllowed(f"This address takes {' and '.join(access.methods)}, not {request.method}.")


def query_of(request: HttpRequest) -> dict[str, str]:
    """Return the query parameters; one given twice is a mistake, not a choice."""
    for name, values in request.GET.lists():
        if len(values) > 1:
            raise BadRequest(f"The parameter {name!r} is given {len(values)} times. Give it once.", param=name)
    return {name: value for name, value in request.GET.items() if isinstance(value, str)}
