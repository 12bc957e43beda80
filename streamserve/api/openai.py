"""The endpoints under /v1/, in the OpenAI shape; `/v1/completions/stream` as plain tokens. asyncio; framework-free.

Closing the connection stops the answer, as there, unless the caller means to come back: a request with an
`Idempotency-Key`, or with `"on_disconnect": "park"`, is as durable as a native one.

In `/v1/completions` each prompt of a body is a stream of its own: with a row, a place in the caller's quota, and a
reader. All begin before the response does, or none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from streamserve.api import native as native_api
from streamserve.api.anthropic import id_header
from streamserve.api.call import Call, Reply, Site, StoredChats, json_reply, with_class
from streamserve.api.idempotency import once_of, part_of
from streamserve.api.resume import (
    ANTHROPIC,
    OPENAI,
    HeadOnly,
    counting_pace,
    gone,
    gone_reply,
    stream_of_event,
)
from streamserve.clients.filtered import FilteredClient
from streamserve.clients.pipeline.client import PipelineClient
from streamserve.dialects import native
from streamserve.dialects.anthropic import message as anthropic_message
from streamserve.dialects.openai import chat as openai_chat
from streamserve.dialects.openai import completions as openai_completions
from streamserve.dialects.openai import plain_tokens, stored_chat
from streamserve.dialects.openai.completions import CompletionEncoder, CompletionRequest, Joined
from streamserve.dialects.openai.plain_tokens import PlainRequest
from streamserve.dialects.pace import Pace, pace_of_query
from streamserve.protocol.errors import BadRequest, Forbidden, NotFinished, NotFound, StreamserveError, no_model
from streamserve.protocol.events import SUCCESS_REASONS, LoggedEvent, Usage
from streamserve.protocol.measures import RESPONSES
from streamserve.protocol.requests import GenerateRequest
from streamserve.streams.quota import Places
from streamserve.streams.reader.delivery import Delivery, JoinedDelivery
from streamserve.streams.reader.follow import collect
from streamserve.streams.store import Once, Record
from streamserve.streams.stream import Stream


async def chat_completions(call: Call, site: Site) -> Reply:
    """POST /v1/chat/completions, streamed or whole. GET: list those that are stored."""
    if call.method == "GET":
        query = stored_chat.parse_list(call.query(), site.limits)
        found, has_more = await _stored(site, "chat/completions").page(call.caller, query)
        return json_reply(stored_chat.page_json(found, has_more=has_more))
    body = await call.json(site.limits)
    asked = openai_chat.parse(body, site.limits, default_model=site.default_model)
    once = once_of(call, "chat/completions", body)
    on_disconnect = asked.on_disconnect or ("abort" if once is None else "park")
    request = with_class(asked.generate, asked.latency_class, call.caller, site, "chat_completions")
    try:
        stream = await call.start(site, request, on_disconnect, once=once)
    except BadRequest as error:
        if error.param == "grammar":  # the engine's word for what stood in one of this API's fields
            error.param = "tools" if request.grammar is None else asked.grammar_field
        raise
    if asked.store and site.stored_chats is not None:
        try:
            await site.stored_chats.keep(stream, _messages_of(body), asked.metadata)
        except BaseException:
            stream.abandon()
            raise
    shown: dict[str, Any] = {
        "include_reasoning": asked.include_reasoning,
        "reasoning_field": site.reasoning_field,
        "return_token_ids": asked.return_token_ids,
        "prompt_token_ids": await _prompt_ids(call, site, stream, request) if asked.return_token_ids else None,
    }
    if asked.stream:
        encoder = openai_chat.encoder_for(
            stream,
            include_usage=asked.include_usage,
            continuous_usage=asked.continuous_usage,
            include_obfuscation=asked.include_obfuscation,
            **shown,
        )
        pace = counting_pace(asked.pace, stream) if asked.continuous_usage else asked.pace
        return Reply(body=Delivery(site.streams, stream, encoder, pace=pace))
    events = await call.wait(collect(site.streams, stream))
    whole = openai_chat.collect(events, **shown, **openai_chat.identity(stream))
    if asked.store and site.stored_chats is not None:
        await site.stored_chats.fill(stream.id)
    return json_reply(whole, headers={"X-Stream-Id": stream.id})


async def _prompt_ids(call: Call, site: Site, stream: Stream, request: GenerateRequest) -> tuple[int, ...]:
    """Return the ids of a stream's prompt. Ends the stream and raises where it has none to show."""
    try:
        if not stream.has_token_ids or isinstance(site.clients[stream.model], PipelineClient | FilteredClient):
            message = f"{_IDS} is not supported by {stream.model}, which shows no ids of tokens. Leave it out."
            raise BadRequest(message, code="unsupported_parameter", param=_IDS)
        asked = site.with_own_system(request)
        if asked.has_public_system:
            message = (
                f"{_IDS} would show this server's own system prompt. Send messages with one of yours, or a prompt."
            )
            raise BadRequest(message, code="conflicting_fields", param=_IDS)
        return await call.wait(site.clients[stream.model].tokenize(asked))
    except BaseException:
        stream.abandon()
        raise


_IDS = "return_token_ids"


def _messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a request; none of one that sends a pipeline its `input` alone."""
    if body.get("prompt") is not None:
        return [{"role": "user", "content": body["prompt"]}]
    return body.get("messages") or []


async def chat_completion(call: Call, site: Site) -> Reply:
    """GET /v1/chat/completions/chatcmpl-{stream id}: see `_again`. POST replaces the metadata of one that is stored.

    DELETE deletes it.
    """
    stream_id = call.params["stream_id"]
    if call.method == "GET":
        return await _again(call, site, stream_id)
    stored = _stored(site, f"chat/completions/chatcmpl-{stream_id}")
    if call.method == "POST":
        metadata = stored_chat.parse_update(await call.json(site.limits), site.limits)
        return json_reply(stored_chat.completion_json(await stored.annotate(call.caller, stream_id, metadata)))
    await stored.delete(call.caller, stream_id)
    site.streams.forget(stream_id)
    return json_reply(stored_chat.deleted_json(stream_id))


async def chat_messages(call: Call, site: Site) -> Reply:
    """GET /v1/chat/completions/chatcmpl-{stream id}/messages: those of the request, of one that is stored."""
    stream_id = call.params["stream_id"]
    found = await _stored(site, f"chat/completions/chatcmpl-{stream_id}/messages").find(call.caller, stream_id)
    if found is None:
        raise stored_chat.no_completion(f"chatcmpl-{stream_id}")
    return json_reply(stored_chat.messages_json(found, call.query()))


async def _again(call: Call, site: Site, stream_id: str) -> Reply:
    """Return the whole answer: stored, or from its events while they are kept, whether it was streamed or not.

    Afterwards it is the text that the site stores, if it does. Raises NotFinished while the answer is being made.
    """
    stored = None if site.stored_chats is None else await site.stored_chats.find(call.caller, stream_id)
    if stored is not None:
        return json_reply(stored_chat.completion_json(stored))
    found = await site.find(call.caller, stream_id=stream_id)
    stream, record = found.stream, found.record
    if stream is None:
        if record is None or not record.text or record.finish_reason not in SUCCESS_REASONS:
            raise gone()
        return json_reply(_stored_text(record))
    if stream.state != "finished":
        raise NotFinished(f"The answer is still being made. Ask again, or read /v1/streams/{stream.id}/events.")
    events = await call.wait(collect(site.streams, stream))
    named = {**openai_chat.identity(stream), "n": stored_chat.num_choices(events)}
    return json_reply(openai_chat.collect(events, reasoning_field=site.reasoning_field, **named))


def _stored(site: Site, path: str) -> StoredChats:
    """Return the stored completions. Raises NotFound where there is no database, as at an unknown address."""
    if site.stored_chats is None:
        raise unknown_url(f"/v1/{path}")
    return site.stored_chats


def _stored_text(record: Record) -> dict[str, Any]:
    usage = Usage(
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        cached_tokens=record.cached_tokens,
    )
    return openai_chat.from_text(
        record.text,
        completion_id=f"chatcmpl-{record.id}",
        model=record.model,
        created=int(record.created),
        finish_reason=record.finish_reason,
        usage=usage,
    )


async def stream_events(call: Call, site: Site) -> Reply:
    """GET /v1/streams/{id}/events: the chunks, or events of a message, that the reader lacks, and those that follow."""
    default_format = ANTHROPIC if anthropic_message.VERSION_HEADER in call.headers else OPENAI
    return await native_api.stream_events(call, site, default_format=default_format)


async def models(call: Call, site: Site) -> Reply:
    """GET /v1/models: the served models, in the shape of the API whose headers are sent."""
    models = [client.describe() for client in site.clients.values()]
    if anthropic_message.VERSION_HEADER in call.headers:
        return json_reply(anthropic_message.models_json(models, call.query()), headers=id_header(call.request_id))
    return json_reply(openai_chat.models_json(models))


async def model(call: Call, site: Site) -> Reply:
    """GET /v1/models/{id}: one of them."""
    alias = call.params["model"]
    if alias not in site.clients:
        raise no_model(alias, site.clients)
    described = site.clients[alias].describe()
    if anthropic_message.VERSION_HEADER in call.headers:
        return json_reply(anthropic_message.model_json(described), headers=id_header(call.request_id))
    return json_reply(openai_chat.model_json(described))


def unknown_url(path: str) -> NotFound:
    """Return the error for an address under /v1 where nothing is."""
    known = ", ".join(f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "models"))
    return NotFound(f"There is no {path} here. Known: {known}.", code="unknown_url")


CLASS_ROUTE = "completions"
_PROMPT_IN_URL = (
    "Answers are not started by GET here, because the prompt would be in the access logs. POST it to "
    "/v1/completions/stream, or turn PROMPT_IN_URL on in STREAMSERVE."
)


async def completions(call: Call, site: Site) -> Reply:
    """POST /v1/completions, streamed or whole."""
    body = await call.json(site.limits)
    asked = openai_completions.parse(body, site.limits, default_model=site.default_model)
    streams = await _start_all(call, site, asked, once_of(call, "completions", body))
    prompt_ids = await _prompts_ids(call, site, streams, asked) if asked.return_token_ids else None
    if asked.stream:
        return Reply(body=_delivery(site, streams, asked, prompt_ids))
    events = await call.wait(_collect_all(site, streams))
    whole = openai_completions.collect(
        list(zip(streams, events, strict=True)), shows_prompt=asked.shows_prompt, prompt_token_ids=prompt_ids
    )
    return json_reply(whole, headers={"X-Stream-Id": ", ".join(stream.id for stream in streams)})


async def _start_all(call: Call, site: Site, asked: CompletionRequest, once: Once | None) -> list[Stream]:
    """Start a stream for each prompt. Where one is refused, those before it end, and the refusal is the response.

    They take their places together: those that have begun would wait for their reader.
    """
    on_disconnect = asked.on_disconnect or ("abort" if once is None else "park")
    streams: list[Stream] = []
    places = Places(len(asked.generates))
    try:
        for index, generate in enumerate(asked.generates):
            request = with_class(generate, asked.latency_class, call.caller, site, CLASS_ROUTE)
            key = None if once is None else part_of(once, index)
            streams.append(await call.start(site, request, on_disconnect, once=key, places=places))
    except BaseException as error:
        for stream in streams:
            stream.abandon()
        if isinstance(error, BadRequest) and error.param == "grammar":
            error.param = asked.grammar_field
        raise
    finally:
        places.close()
    return streams


async def _prompts_ids(
    call: Call, site: Site, streams: list[Stream], asked: CompletionRequest
) -> list[tuple[int, ...]]:
    """Return the ids of each stream's prompt. Where there are none, all streams end."""
    try:
        asking = zip(streams, asked.generates, strict=True)
        return [await _prompt_ids(call, site, stream, request) for stream, request in asking]
    except BaseException:
        for stream in streams:
            stream.abandon()
        raise


def _delivery(
    site: Site, streams: list[Stream], asked: CompletionRequest, prompt_ids: list[tuple[int, ...]] | None
) -> Delivery | JoinedDelivery:
    shown: dict[str, Any] = {
        "include_usage": asked.include_usage,
        "continuous_usage": asked.continuous_usage,
        "return_token_ids": asked.return_token_ids,
    }
    if len(streams) == 1:
        prompt = None if prompt_ids is None else prompt_ids[0]
        encoder = CompletionEncoder(streams[0], prompt_token_ids=prompt, **shown)
        pace = counting_pace(asked.pace, streams[0]) if asked.continuous_usage else asked.pace
        return Delivery(site.streams, streams[0], encoder, pace=pace)
    joined = Joined(len(streams), include_usage=asked.include_usage)
    parts: list[tuple[Stream, CompletionEncoder]] = []
    for stream in streams:
        encoder = CompletionEncoder(
            stream,
            prompt_token_ids=None if prompt_ids is None else prompt_ids[len(parts)],
            joined=joined,
            **shown,
            completion_id=openai_completions.id_of(streams[0]),
            first_index=sum(one.request.n for one, _ in parts),
        )
        parts.append((stream, encoder))
    return JoinedDelivery(site.streams, parts, joined.last_bytes, pace=asked.pace)


async def _collect_all(site: Site, streams: list[Stream]) -> list[list[LoggedEvent]]:
    """Wait for all streams as their reader; where the wait ends early, all readers have left."""
    tasks = [asyncio.create_task(collect(site.streams, stream), name="completion") for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def token_stream(call: Call, site: Site) -> Reply:
    """POST /v1/completions/stream; GET for a bare EventSource, which with a Last-Event-ID never starts again."""
    if call.method == "POST":
        body = await call.json(site.limits)
        asked = plain_tokens.parse(body, site.limits, default_model=site.default_model)
        return await _start_plain(call, site, asked, once_of(call, "completions/stream", body))
    try:
        return await _get_plain(call, site)
    except StreamserveError as error:
        if "text/event-stream" not in call.headers.get("accept", ""):
            raise
        RESPONSES.by_code[error.code] += 1
        headers = {"Content-Type": plain_tokens.PlainEncoder.content_type, "Cache-Control": "no-store"}
        return Reply(body=plain_tokens.refusal(error), headers=headers)


async def _get_plain(call: Call, site: Site) -> Reply:
    event_id, query = call.headers.get("last-event-id"), call.query()
    if not event_id:
        if not site.takes_prompt_in_url:
            raise Forbidden(_PROMPT_IN_URL, code="prompt_in_url_off")
        return await _start_plain(
            call, site, plain_tokens.parse_query(query, site.limits, default_model=site.default_model)
        )
    stream, after = await stream_of_event(call, site, event_id)
    if stream is None or not 0 <= after <= stream.last_seq:
        return gone_reply(call)
    if stream.terminal is not None and after >= stream.last_seq:
        return Reply(status=204)
    if call.is_head:
        return Reply(body=HeadOnly(plain_tokens.PlainEncoder.content_type, stream.id))
    return Reply(body=_plain_delivery(site, stream, pace_of_query(native.query_values(query)), after))


async def _start_plain(call: Call, site: Site, asked: PlainRequest, once: Once | None = None) -> Reply:
    if call.is_head:
        return Reply(body=HeadOnly(plain_tokens.PlainEncoder.content_type))
    request = with_class(asked.generate, asked.latency_class, call.caller, site, CLASS_ROUTE)
    stream = await call.start(site, request, asked.on_disconnect, once=once)
    return Reply(body=_plain_delivery(site, stream, asked.pace, 0))


def _plain_delivery(site: Site, stream: Stream, pace: Pace, after: int) -> Delivery:
    encoder = plain_tokens.PlainEncoder(stream.log_id)
    return Delivery(site.streams, stream, encoder, after=after, pace=pace)
