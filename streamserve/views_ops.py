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
from streamserve.streams.spare_log import trouble_of

_READ = ("GET", "HEAD")
# What a state means to whoever asks, where the engine itself says nothing.
_STATE_WORDS = {
    "paused": "The model is paused by an operator, and goes on when it is resumed.",
    "draining": "The model takes nothing new: it is to be stopped or replaced.",
    "failed": "The model cannot be used. The server's log says why.",
}


@route(Access(callers=ANYONE, methods=_READ))
async def livez(request: HttpRequest, principal: None) -> HttpResponseBase:
    """GET /livez: this process answers."""
    return json_response({"live": True})


@route(Access(callers=ANYONE, methods=_READ))
async def readyz(request: HttpRequest, principal: None) -> HttpResponseBase:
    """GET /readyz: 200 while every model is ready, else 503, why, and how far loading has come. It starts loading."""
    start_loading()
    models = [client.describe() for client in get_clients().values()]
    reasons = [f"{model.alias} is {model.state}" for model in models if model.state != "ready"]
    body = {
        "ready": not reasons,
        "reason": ", ".join(reasons),
        "log": trouble_of(get_runtime().log),
        "models": [_progress(model) for model in models],
    }
    return json_response(body, status=503 if reasons else 200)


def _progress(model: ModelDescription) -> dict[str, Any]:
    return {
        "alias": model.alias,
        "state": model.state,
        "stage": model.stage,
        "fraction": round(model.fraction, 3),
        "loaded_bytes": model.loaded_bytes,
        "total_bytes": model.total_bytes,
        "elapsed_seconds": round(model.elapsed_seconds, 2),
        "message": _shown(model),
    }


def _shown(model: ModelDescription) -> str:
    """A failure names folders and libraries: for the site's developer, and the server's log."""
    if django_settings.DEBUG and model.message:
        return model.message
    return _STATE_WORDS.get(model.state, "")


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
