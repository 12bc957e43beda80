"""The endpoints of `/v1/models`, and what all of `/v1` shares with Anthropic's API. asyncio; framework-free."""

from __future__ import annotations

from streamserve.api import native as native_api
from streamserve.api.answers import Answers
from streamserve.api.anthropic import id_header
from streamserve.api.call import Call, Reply, json_reply
from streamserve.api.resume import ANTHROPIC, OPENAI
from streamserve.dialects.anthropic import message as anthropic_message
from streamserve.dialects.openai import shapes
from streamserve.protocol.errors import NotFound


async def stream_events(call: Call, answers: Answers) -> Reply:
    """GET /v1/streams/{id}/events: the chunks, or events of a message, that the reader lacks, and those that follow."""
    default_format = ANTHROPIC if anthropic_message.VERSION_HEADER in call.headers else OPENAI
    return await native_api.stream_events(call, answers, default_format=default_format)


async def models(call: Call, answers: Answers) -> Reply:
    """GET /v1/models: what the caller may use, in the shape of the API whose headers are sent."""
    models = [client.describe() for client in (await answers.clients_of(call.caller)).values()]
    if anthropic_message.VERSION_HEADER in call.headers:  # an API without embeddings
        return json_reply(anthropic_message.models_json(models, call.query()), headers=id_header(call.request_id))
    models += [client.describe() for client in (await answers.embedders_of(call.caller)).values()]
    return json_reply(shapes.models_json(models))


async def model(call: Call, answers: Answers) -> Reply:
    """GET /v1/models/{id}: a served model."""
    alias, is_anthropic = call.params["model"], anthropic_message.VERSION_HEADER in call.headers
    embedders = {} if is_anthropic else await answers.embedders_of(call.caller)
    if alias in embedders:
        return json_reply(shapes.model_json(embedders[alias].describe()))
    described = (await answers.client(call.caller, alias)).describe()
    if is_anthropic:
        return json_reply(anthropic_message.model_json(described), headers=id_header(call.request_id))
    return json_reply(shapes.model_json(described))


def unknown_url(path: str) -> NotFound:
    """Return the error for an address under /v1 where nothing is."""
    known = ", ".join(f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings", "messages", "models"))
    known = ", ".join(f"/v1/{name}" for name in ("chat/completions", "responses", "completions", "messages", "models"))
    return NotFound(f"There is no {path} here. Known: {known}.", code="unknown_url")
