"""For operators and probes: /livez, /readyz, /metrics."""

from __future__ import annotations

from typing import Any

from django.conf import settings as django_settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase

from streamserve.auth import Principal
from streamserve.clients.base import ModelDescription
from streamserve.metrics import CONTENT_TYPE, render_metrics
from streamserve.protocol.errors import NotFound
from streamserve.routes import ANYONE, OPS_CALLERS, Access, json_response, route
from streamserve.runtime import get_clients, get_runtime, start_loading

_READ = ("GET", "HEAD")


@route(Access(callers=ANYONE, methods=_READ))
async def livez(request: HttpRequest, principal: None) -> HttpResponseBase:
    """GET /livez: this process answers."""
    return json_response({"live": True})


@route(Access(callers=ANYONE, methods=_READ))
async def readyz(request: HttpRequest, principal: None) -> HttpResponseBase:
    """GET /readyz: 200 once every model is ready, else 503 with how far loading has come. Asking starts loading."""
    start_loading()
    models = [client.describe() for client in get_clients().values()]
    ready = all(model.state == "ready" for model in models)
    body = {"ready": ready, "models": [_progress(model) for model in models]}
    return json_response(body, status=200 if ready else 503)


def _progress(model: ModelDescription) -> dict[str, Any]:
    return {
        "alias": model.alias,
        "state": model.state,
        "stage": model.stage,
        "fraction": round(model.fraction, 3),
        "elapsed_seconds": round(model.elapsed_seconds, 2),
        "message": _shown(model),
    }


def _shown(model: ModelDescription) -> str:
    """A failure names folders and libraries: for the site's developer, and the server's log."""
    if django_settings.DEBUG or not model.message:
        return model.message
    return "The model could not be loaded. The server's log says why." if model.state == "failed" else ""


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
