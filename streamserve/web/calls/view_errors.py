"""An error of ours that a site's own view does not catch becomes the response that it stands for, and no 500.

    programs    the error as POST /streams answers it: status, code, message, param, Retry-After
    browsers    the site's page (its handler400, handler403, handler404), by the request's `Accept`; 401 is 403 there;
                of other statuses, for which Django has no page, the message as text

Django's exceptions end at three statuses, and our layers below know no Django; so the function that turns exceptions
into responses is given ours first, for sync and async views and every server. A site's `process_exception` comes
before it. A failure (status 500) is Django's to report. Any thread.

Relies on, in Django 5.2: `django.core.handlers.exception.response_for_exception`, which is looked up at each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from django.core.handlers import exception as djangos
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import get_resolver, get_urlconf
from django.utils.cache import patch_vary_headers

from streamserve.api.logs import get_logger
from streamserve.dialects.native import error_json
from streamserve.protocol.errors import StreamserveError, headers_of, to_body

log = get_logger(__name__)

_PAGES = (400, 403, 404)  # for which Django has handlers
_Respond = Callable[[HttpRequest, Exception], HttpResponse]


def install() -> None:
    """Put our errors before Django's. Once is enough."""
    respond: _Respond = djangos.response_for_exception
    if hasattr(respond, "__wrapped__"):
        return

    @functools.wraps(respond)
    def with_ours(request: HttpRequest, error: Exception) -> HttpResponse:
        is_ours = isinstance(error, StreamserveError) and error.http_status != 500
        return response_of(request, error) if is_ours else respond(request, error)  # type: ignore[arg-type]

    djangos.response_for_exception = with_ours  # type: ignore[assignment]  # mypy sees the wrapper's own type


def response_of(request: HttpRequest, error: StreamserveError) -> HttpResponse:
    """Return the response of an error that a view has raised."""
    response: HttpResponse
    if request.get_preferred_type(["application/json", "text/html"]) == "text/html":
        status = 403 if error.http_status == 401 else error.http_status
        if status in _PAGES:
            response = djangos.get_exception_response(request, get_resolver(get_urlconf()), status, error)
        else:
            response = HttpResponse(error.message, status=status, content_type="text/plain; charset=utf-8")
    else:
        response = JsonResponse(error_json(to_body(error)), status=error.http_status)
    for name, value in headers_of(error).items():
        response[name] = value
    patch_vary_headers(response, ["Accept"])
    log.info("view_refused", path=request.path, status=response.status_code, code=error.code)
    setattr(response, "_has_been_logged", True)  # noqa: B010  (Django's own mark, in no stub: no mail to the admins)
    return response
