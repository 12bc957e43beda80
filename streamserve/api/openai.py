"""The endpoints under /v1/, in the OpenAI shape. asyncio; framework-free.

Closing the connection stops the answer, as there, unless the caller means to come back: a request with an
`Idempotency-Key`, or with `"on_disconnect": "park"`, is as durable as a native one.
"""

from __future__ import annotations

from streamserve.api import native
from streamserve.api.anthropic import id_header
from streamserve.api.call import Call, Reply, Site, json_reply, with_class
from streamserve.api.idempotency import once_of
from streamserve.api.resume import ANTHROPIC, OPENAI
from streamserve.dialects import openai_chat
from streamserve.dialects.anthropic import shapes
from streamserve.protocol.errors import BadRequest, NotFound, no_model
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect


async def chat_completions(call: Call, site: Site) -> Reply:
    """POST /v1/chat/completions, streamed or whole."""
    body = await call.json(site.limits)
    asked = openai_chat.parse(body, site.limits, default_model=site.default_model)
    once = once_of(call, "chat/completions", body)
    on_disconnect = asked.on_disconnect or ("abort" if once is None else "park")
    request = with_class(asked.generate, asked.latency_class, call.caller, site, "chat_completions")
    try:
        stream = await site.start(call.caller, request, on_disconnect, received_at=call.received_at, once=once)
    except BadRequest as error:
        if error.param == "grammar":  # the engine's word for what stood in one of this API's fields
            error.param = "tools" if request.grammar is None else asked.grammar_field
        raise
    if asked.stream:
        encoder = openai_chat.encoder_for(
            stream,
            include_usage=asked.include_usage,
            include_obfuscation=asked.include_obfuscation,
            reasoning_field=site.reasoning_field,
        )
        return Reply(body=Delivery(site.streams, stream, encoder))
    events = await call.wait(collect(site.streams, stream))
    whole = openai_chat.collect(events, reasoning_field=site.reasoning_field, **openai_chat.identity(stream))
    return json_reply(whole, headers={"X-Stream-Id": stream.id})


async def stream_events(call: Call, site: Site) -> Reply:
    """GET /v1/streams/{id}/events: the chunks, or events of a message, that the reader lacks, and those that follow."""
    default_format = ANTHROPIC if shapes.VERSION_HEADER in call.headers else OPENAI
    return await native.stream_events(call, site, default_format=default_format)


async def models(call: Call, site: Site) -> Reply:
    """GET /v1/models: the served models, in the shape of the API whose headers are sent."""
    models = [client.describe() for client in site.clients.values()]
    if shapes.VERSION_HEADER in call.headers:
        return json_reply(shapes.models_json(models, call.query()), headers=id_header(call.request_id))
    return json_reply(openai_chat.models_json(models))


async def model(call: Call, site: Site) -> Reply:
    """GET /v1/models/{id}: one of them."""
    alias = call.params["model"]
    if alias not in site.clients:
        raise no_model(alias, site.clients)
    described = site.clients[alias].describe()
    if shapes.VERSION_HEADER in call.headers:
        return json_reply(shapes.model_json(described), headers=id_header(call.request_id))
    return json_reply(openai_chat.model_json(described))


async def unknown(call: Call, site: None) -> Reply:
    """Any other address under /v1/: a 404 that SDKs can read."""
    path = call.params["path"]
    known = ", ".join(f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "models"))
    raise NotFound(f"There is no /v1/{path} here. Known: {known}.", code="unknown_url")
