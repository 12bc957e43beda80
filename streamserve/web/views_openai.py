"""`/v1/...` in the OpenAI shape. Here, as there, closing the connection stops the answer (`on_disconnect="abort"`)."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponseBase

from streamserve.conf import get_settings
from streamserve.dialects import openai_chat
from streamserve.dialects.openai_chat import ChatRequest
from streamserve.protocol.errors import NotFound
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect
from streamserve.streams.stream import Stream
from streamserve.web.access import ANYONE, CHAT_CALLERS, Access, json_response, read_json, route
from streamserve.web.auth import Principal
from streamserve.web.responses import close_connections, stream_response
from streamserve.web.site import get_clients, get_runtime


@route(Access(callers=CHAT_CALLERS, methods=("POST",)), error_json=openai_chat.error_json)
async def chat_completions(request: HttpRequest, principal: Principal) -> HttpResponseBase:
    """POST /v1/chat/completions, streamed or whole."""
    settings, runtime = get_settings(), get_runtime()
    asked = openai_chat.parse(read_json(request), settings.limits, default_model=settings.default_model)
    stream = await runtime.start_stream(principal, asked.generate, on_disconnect="abort")
    if asked.stream:
        return stream_response(request, Delivery(runtime.streams, stream, openai_chat.encoder_for(stream, asked)))
    return await _whole(stream, asked)


async def _whole(stream: Stream, asked: ChatRequest) -> HttpResponseBase:
    """Wait for the end. When the client leaves, Django cancels this, the reader is gone, and the engine aborts."""
    await close_connections()
    events = await collect(get_runtime().streams, stream)
    response = json_response(openai_chat.collect(events, **openai_chat.identity(stream, asked)))
    response["X-Stream-Id"] = stream.id
    return response


@route(Access(callers=CHAT_CALLERS), error_json=openai_chat.error_json)
async def models(request: HttpRequest, principal: Principal) -> HttpResponseBase:
    """GET /v1/models: what may be asked for."""
    return json_response(openai_chat.models_json([client.describe() for client in get_clients().values()]))


@route(
    Access(callers=ANYONE, methods=("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")), error_json=openai_chat.error_json
)
async def unknown(request: HttpRequest, principal: None, path: str) -> HttpResponseBase:
    """Any other address under /v1/: a 404 that SDKs can read."""
    raise NotFound(f"There is no /v1/{path} here. Known: /v1/chat/completions, /v1/models.", code="unknown_url")
