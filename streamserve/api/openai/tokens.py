"""The endpoints of `/tokenize` and `/detokenize`. asyncio; framework-free."""

from __future__ import annotations

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Reply, json_reply
from streamserve.clients.base import EmbeddingClient, EngineClient, until_loaded
from streamserve.dialects.openai import tokens as dialect
from streamserve.protocol.errors import NoChatTemplate
from streamserve.protocol.spelling import Spell


async def tokenize(call: Call, answers: Answers) -> Reply:
    """POST /tokenize: the ids of a prompt's tokens, of a chat by the model's template. Generates nothing."""
    body = await call.json(answers.limits)
    asked = dialect.parse_tokenize(body, answers.limits, default_model=await answers.default_model(call.caller))
    request = asked.request
    client = await _client(call, answers, request.model)
    if asked.adds_special or request.messages is not None:
        if request.messages is not None and request.model in answers.embedders.clients:
            raise NoChatTemplate(f"The embedding model {request.model!r} has no chat template. Send prompt.")
        admission = await answers.admission(call.caller)
        ids = await call.wait(client.tokenize(request, admission))
    else:
        ids = (await call.wait(client.spell(Spell(text=request.prompt)))).token_ids
    texts = None
    if asked.shows_texts:
        texts = (await call.wait(client.spell(Spell(token_ids=ids, is_apart=True)))).texts
    return json_reply(dialect.tokenize_json(ids, texts, max_model_len=client.describe().max_model_len))


async def detokenize(call: Call, answers: Answers) -> Reply:
    """POST /detokenize: the text of tokens' ids."""
    body = await call.json(answers.limits)
    asked = dialect.parse_detokenize(body, answers.limits, default_model=await answers.default_model(call.caller))
    client = await _client(call, answers, asked.model)
    (text,) = (await call.wait(client.spell(Spell(token_ids=asked.token_ids)))).texts
    return json_reply({"prompt": text})


async def _client(call: Call, answers: Answers, alias: str) -> EngineClient | EmbeddingClient:
    """Return the client of a model that answers or embeds, once it is loaded."""
    embedders = await answers.embedders_of(call.caller)
    client = embedders[alias] if alias in embedders else await answers.client(call.caller, alias)
    await call.wait(until_loaded(client, answers.streams.settings.engine_wait_seconds))
    return client
