"""For operators and probes: /livez, /readyz, /metrics."""

from __future__ import annotations

from django.conf import settings as django_settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase

from streamserve.api.metrics import CONTENT_TYPE, render_metrics
from streamserve.api.readiness import readiness
from streamserve.asgi.drain import is_going_down
from streamserve.protocol.errors import NotFound
from streamserve.web.access import ANYONE, OPS_CALLERS, Access, json_response, route
from streamserve.web.auth import Principal
from streamserve.web.site import get_clients, get_runtime, get_streams, start_loading

_READ = ("GET", "HEAD")


@route(Access(callers=ANYONE, methods=_READ))
async def livez(request: HttpRequest, principal: None) -> HttpResponseBase:
    """GET /livez: this process answers."""
    return json_response({"live": True})


@route(Access(callers=ANYONE, methods=_READ))
async def readyz(request: HttpRequest, principal: None) -> HttpResponseBase:
    """GET /readyz: 200 while every model is ready, else 503, why, and how far loading has come. It starts loading."""
    start_loading()
    models = [client.describe() for client in get_clients().values()]
    status, body = readiness(
        models,
        shows_messages=django_settings.DEBUG,
        is_going_down=is_going_down(getattr(request, "scope", {})),
    )
    outage = get_streams().writer.outage
    return json_response({**body, "log": "ok" if outage is None else outage.code}, status=status)


@route(Access(callers=OPS_CALLERS, methods=_READ, scope="ops", open_in_debug=True))
async def metrics(request: HttpRequest, principal: Principal | None) -> HttpResponseBase:
    """GET /metrics: the Prometheus text format."""
    runtime = get_runtime()
    response = HttpResponse(render_metrics(runtime.clients, runtime.streams), content_type=CONTENT_TYPE)
    response["Cache-Control"] = "no-store"
    return response


@route(Access(callers=ANYONE, methods=("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")))
async def unknown(request: HttpRequest, principal: None, path: str = "") -> HttpResponseBase:
    """Any other address under /streams/: a 404 in our dialect."""
    raise NotFound("There is nothing at this address. See docs/api.md for the routes.", code="unknown_url")
