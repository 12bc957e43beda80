"""The endpoints under /v1/messages, in Anthropic's shape. asyncio; framework-free.

As in chat completions, closing the connection stops the answer, unless the caller means to come back.
"""

from __future__ import annotations

from dataclasses import replace

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Reply, json_reply
from streamserve.api.idempotency import once_of
from streamserve.clients.base import until_loaded
from streamserve.dialects.anthropic import message, request
from streamserve.dialects.anthropic.request import MessagesRequest
from streamserve.dialects.fold import Answer
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.requests import Once
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect
from streamserve.streams.stream import Stream


def id_header(request_id: str) -> dict[str, str]:
    """Return the header in which the official client looks for the request's id."""
    return {"Request-Id": request_id}


async def messages(call: Call, answers: Answers) -> Reply:
    """POST /v1/messages, streamed or whole."""
    fields = await call.json(answers.limits)
    asked = request.parse(fields, answers.limits, default_model=await answers.default_model(call.caller))
    stream = await _start(call, answers, asked, once_of(call, "messages", fields))
    if asked.stream:
        encoder = message.encoder_for(stream, shows_thinking=asked.shows_thinking)
        body = Delivery(answers.streams, stream, encoder, pace=asked.pace)
        return Reply(body=body, headers=id_header(call.request_id))
    events = await call.wait(collect(answers.streams, stream))
    named = message.identity(stream)
    whole = message.message_json(Answer.of(events), shows_thinking=asked.shows_thinking, **named)
    return json_reply(whole, headers={"X-Stream-Id": stream.id, **id_header(call.request_id)})


async def count_tokens(call: Call, answers: Answers) -> Reply:
    """POST /v1/messages/count_tokens: the length of the prompt that a message would have. Generates nothing."""
    fields = await call.json(answers.limits)
    asked = request.parse_count(fields, answers.limits, default_model=await answers.default_model(call.caller))
    asked, client = answers.with_own_system(asked), await answers.client(call.caller, asked.model)
    await call.wait(until_loaded(client, answers.streams.settings.engine_wait_seconds))
    try:
        token_ids = await call.wait(client.tokenize(asked))
    except BadRequest as error:
        error.param = request.field_of(error.param, asked)
        raise
    return json_reply({"input_tokens": len(token_ids)}, headers=id_header(call.request_id))


async def _start(call: Call, answers: Answers, asked: MessagesRequest, once: Once | None) -> Stream:
    """Start the answer. A model without a switch for thinking is asked without it, unless the caller named it."""
    on_disconnect = asked.on_disconnect or ("abort" if once is None else "park")
    generate = answers.with_class(asked.generate, asked, call.caller, "messages")
    while True:
        try:
            return await answers.begin(call, generate, on_disconnect, once=once)
        except BadRequest as error:
            is_of_kwargs = error.param == "chat_template_kwargs"
            if is_of_kwargs and not asked.asks_for_thinking and generate.chat_template_kwargs != asked.template_kwargs:
                generate = replace(generate, chat_template_kwargs=asked.template_kwargs)
                continue
            if not (is_of_kwargs and asked.template_kwargs):
                error.param = request.field_of(error.param, generate)
            raise
