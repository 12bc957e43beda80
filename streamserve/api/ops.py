"""The endpoints for operators and probes: /livez, /readyz, /metrics; and the 404 of any other address. asyncio."""

from __future__ import annotations

from typing import Any

from streamserve.api.call import ANONYMOUS, Call, Reply, Site, json_reply
from streamserve.api.metrics import CONTENT_TYPE, render_metrics
from streamserve.protocol.engine import ABSENT, ModelDescription
from streamserve.protocol.errors import NotFound, no_stream
from streamserve.protocol.ids import is_stream_id

_OF_A_STREAM = ("", "events", "stop", "watch")  # what follows a stream's id in its addresses
# Messages of states for which the engine gives none.
_STATE_WORDS = {
    "paused": "The model is paused by an operator until it is resumed.",
    "draining": "The model accepts no requests: it is about to be stopped or replaced.",
    "failed": "The model cannot be used. The server's log has the reason.",
}


async def livez(call: Call, site: None) -> Reply:
    """GET /livez: 200 while this process answers."""
    return json_reply({"live": True})


async def readyz(call: Call, site: Site) -> Reply:
    """GET /readyz: 200 while every model is ready, else 503 with the reason.

    Callers that may chat, and everyone with DEBUG, get the models with their progress, and start loading; others get
    neither: a probe loads nothing that the server has not begun to load.
    """
    is_known = site.is_debug or call.caller is not ANONYMOUS
    reasons = ["this process is going down"] if site.is_draining else []
    models = []
    for client in site.clients.values():
        if is_known:
            client.start()
        model = client.describe()
        if model.state != "ready":
            state = "has no engine" if model.stage == ABSENT else f"is {model.state}"
            reasons.append(f"{model.alias if is_known else 'a model'} {state}")
        models.append(_model_json(model, shows_message=site.is_debug or model.stage == ABSENT))
    body: dict[str, Any] = {"ready": not reasons, "reason": ", ".join(dict.fromkeys(reasons))}
    if is_known:
        body["models"] = models
    return json_reply({**body, **site.health()}, status=503 if reasons else 200)


def _model_json(model: ModelDescription, *, shows_message: bool) -> dict[str, Any]:
    """Return a model's state and progress. The engine's own message may name folders and libraries."""
    return {
        "alias": model.alias,
        "state": model.state,
        "stage": model.stage,
        "fraction": round(model.fraction, 3),
        "loaded_bytes": model.loaded_bytes,
        "total_bytes": model.total_bytes,
        "elapsed_seconds": round(model.elapsed_seconds, 2),
        "message": (shows_message and model.message) or _STATE_WORDS.get(model.state, ""),
    }


async def metrics(call: Call, site: Site) -> Reply:
    """GET /metrics: the Prometheus text format."""
    text = render_metrics(site.clients, site.streams, await site.work())
    return Reply(body=text.encode(), headers={"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"})


async def unknown(call: Call, site: None) -> Reply:
    """Any other address: a 404 in the native dialect."""
    stream_id, _, rest = call.params.get("path", "").partition("/")
    if stream_id and rest in _OF_A_STREAM and not is_stream_id(stream_id):
        raise no_stream()
    raise NotFound("There is nothing at this address. See docs/api.md for the routes.", code="unknown_url")
