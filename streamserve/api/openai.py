"""The endpoints under /v1/, in the OpenAI shape. Closing the connection stops the answer. asyncio; framework-free."""

from __future__ import annotations

from streamserve.api.call import Call, Reply, Site, json_reply, with_class
from streamserve.dialects import openai_chat
from streamserve.protocol.errors import NotFound
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect


async def chat_completions(call: Call, site: Site) -> Reply:
    """POST /v1/chat/completions, streamed or whole."""
    asked = openai_chat.parse(await call.json(site.limits), site.limits, default_model=site.default_model)
    request = with_class(asked.generate, asked.latency_class, call.caller, site, "chat_completions")
    stream = await site.start(call.caller, request, "abort")
    if asked.stream:
        return Reply(body=Delivery(site.streams, stream, openai_chat.encoder_for(stream, asked)))
    events = await call.wait(collect(site.streams, stream))
    whole = openai_chat.collect(events, **openai_chat.identity(stream, asked))
    return json_reply(whole, headers={"X-Stream-Id": stream.id})


async def models(call: Call, site: Site) -> Reply:
    """GET /v1/models: the served models."""
    return json_reply(openai_chat.models_json([client.describe() for client in site.clients.values()]))


async def model(call: Call, site: Site) -> Reply:
    """GET /v1/models/{id}: one of them."""
    alias = call.params["model"]
    if alias not in site.clients:
        raise NotFound(f"There is no model {alias!r} here.", code="model_not_found", param="model")
    return json_reply(openai_chat.model_json(site.clients[alias].describe()))


async def unknown(call: Call, site: None) -> Reply:
    """Any other address under /v1/: a 404 that SDKs can read."""
    path = call.params["path"]
    raise NotFound(f"There is no /v1/{path} here. Known: /v1/chat/completions, /v1/models.", code="unknown_url")
