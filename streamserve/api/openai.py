"""The endpoints under /v1/, in the OpenAI shape; `/v1/completions/stream` as plain tokens. asyncio; framework-free.

Closing the connection stops the answer, as there, unless the caller means to come back: a request with an
`Idempotency-Key`, or with `"on_disconnect": "park"`, is as durable as a native stream.

In `/v1/completions` each prompt of a body is a stream of its own: with a row, a place in the caller's quota, and a
reader. All begin before the response does, or none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from streamserve.api import native as native_api
from streamserve.api.answers import Answers
from streamserve.api.anthropic import id_header
from streamserve.api.call import Call, Caller, Reply, json_reply
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
from streamserve.dialects.anthropic import message as anthropic_message
from streamserve.dialects.fold import Answer
from streamserve.dialects.openai import chat as openai_chat
from streamserve.dialects.openai import completions as openai_completions
from streamserve.dialects.openai import plain_tokens, shapes, stored_chat
from streamserve.dialects.openai import request as openai_request
from streamserve.dialects.openai.completions import CompletionEncoder, CompletionRequest, Joined
from streamserve.dialects.openai.plain_tokens import PlainRequest
from streamserve.dialects.openai.stored_chat import ListQuery, StoredChat
from streamserve.dialects.pace import Pace, pace_of_query
from streamserve.dialects.query import query_values
from streamserve.protocol.errors import BadRequest, Forbidden, NotFinished, NotFound, StreamserveError
from streamserve.protocol.events import SUCCESS_REASONS, Done, LoggedEvent, Token, Usage
from streamserve.protocol.measures import RESPONSES
from streamserve.protocol.requests import GenerateRequest, Once
from streamserve.streams.quota import Places
from streamserve.streams.reader.delivery import Delivery, JoinedDelivery
from streamserve.streams.reader.follow import collect
from streamserve.streams.store import Record
from streamserve.streams.stream import Stream


class StoredChats(Protocol):
    """The chat completions that a site stores for its tenants. Completions of other tenants are as unknown ids."""

    async def keep(self, stream: Stream, messages: Sequence[Mapping[str, Any]], metadata: Mapping[str, str], /) -> None:
        """Store the answer of that stream once it has ended well; nothing where the site does not store."""

    async def fill(self, stream_id: str, /) -> None:
        """Store an answer that has just ended, if it is kept, without waiting for the end of its stream's record."""

    async def find(self, caller: Caller, stream_id: str, /) -> StoredChat | None:
        """Return the completion; None if it is not stored, or not whole. Raises NotFound if it was deleted."""

    async def page(self, caller: Caller, query: ListQuery, /) -> tuple[Sequence[StoredChat], bool]:
        """Return a part of the tenant's completions, and whether there are more."""

    async def annotate(self, caller: Caller, stream_id: str, metadata: Mapping[str, str], /) -> StoredChat:
        """Replace the metadata. Raises NotFound, NotFinished."""

    async def delete(self, caller: Caller, stream_id: str, /) -> None:
        """Delete the completion with its events. Raises NotFound, NotFinished."""


async def list_chats(call: Call, answers: Answers, chats: StoredChats | None = None) -> Reply:
    """GET /v1/chat/completions: list those that are stored."""
    query = stored_chat.parse_list(call.query(), answers.limits)
    found, has_more = await _stored(chats, "chat/completions").page(call.caller, query)
    return json_reply(stored_chat.page_json(found, has_more=has_more))


async def create_chat(call: Call, answers: Answers, chats: StoredChats | None = None) -> Reply:
    """POST /v1/chat/completions, streamed or whole."""
    body = await call.json(answers.limits)
    asked = openai_request.parse(body, answers.limits, default_model=answers.default_model)
    once = once_of(call, "chat/completions", body)
    on_disconnect = asked.on_disconnect or ("abort" if once is None else "park")
    request = answers.with_class(asked.generate, asked, call.caller, "chat_completions")
    try:
        stream = await answers.begin(call, request, on_disconnect, once=once)
    except BadRequest as error:
        if error.param == "grammar":  # the engine's name for what one of this API's fields held
            error.param = "tools" if request.grammar is None else asked.grammar_field
        raise
    if asked.store and chats is not None:
        try:
            await chats.keep(stream, _messages_of(body), asked.metadata)
        except BaseException:
            stream.abandon()
            raise
    shown: dict[str, Any] = {
        "include_reasoning": asked.include_reasoning,
        "reasoning_field": answers.config.reasoning_field,
        "return_token_ids": asked.return_token_ids,
        "prompt_token_ids": await _prompt_ids(call, answers, stream, request) if asked.return_token_ids else None,
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
        return Reply(body=Delivery(answers.streams, stream, encoder, pace=pace))
    events = await call.wait(collect(answers.streams, stream))
    answer = Answer.of(events, request.n)
    whole = openai_chat.completion_json(answer, **shown, **openai_chat.identity(stream))
    if asked.store and chats is not None:
        await chats.fill(stream.id)
    return json_reply(whole, headers={"X-Stream-Id": stream.id})


async def _prompt_ids(call: Call, answers: Answers, stream: Stream, request: GenerateRequest) -> tuple[int, ...]:
    """Return the ids of a stream's prompt. Ends the stream and raises where it has none to show."""
    try:
        if not stream.has_token_ids or isinstance(answers.clients[stream.model], PipelineClient | FilteredClient):
            message = f"{_IDS} is not supported by {stream.model}, which shows no ids of tokens. Leave it out."
            raise BadRequest(message, code="unsupported_parameter", param=_IDS)
        asked = answers.with_own_system(request)
        if asked.has_public_system:
            message = f"{_IDS} would show this server's own system prompt. Send a prompt, or messages with"
            raise BadRequest(f"{message} a system prompt of yours.", code="conflicting_fields", param=_IDS)
        return await call.wait(answers.clients[stream.model].tokenize(asked))
    except BaseException:
        stream.abandon()
        raise


_IDS = "return_token_ids"


def _messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a request; none where it sends a pipeline its `input` alone."""
    if body.get("prompt") is not None:
        return [{"role": "user", "content": body["prompt"]}]
    return body.get("messages") or []


async def annotate_chat(call: Call, answers: Answers, chats: StoredChats | None = None) -> Reply:
    """POST /v1/chat/completions/chatcmpl-{stream id}: replace the metadata of a stored completion."""
    stream_id = call.params["stream_id"]
    stored = _stored(chats, f"chat/completions/chatcmpl-{stream_id}")
    metadata = stored_chat.parse_update(await call.json(answers.limits), answers.limits)
    return json_reply(stored_chat.completion_json(await stored.annotate(call.caller, stream_id, metadata)))


async def delete_chat(call: Call, answers: Answers, chats: StoredChats | None = None) -> Reply:
    """DELETE /v1/chat/completions/chatcmpl-{stream id}: delete a stored completion, with its events."""
    stream_id = call.params["stream_id"]
    await _stored(chats, f"chat/completions/chatcmpl-{stream_id}").delete(call.caller, stream_id)
    answers.streams.forget(stream_id)
    return json_reply(stored_chat.deleted_json(stream_id))


async def chat_messages(call: Call, chats: StoredChats) -> Reply:
    """GET /v1/chat/completions/chatcmpl-{stream id}/messages: the messages of a stored completion's request."""
    stream_id = call.params["stream_id"]
    found = await chats.find(call.caller, stream_id)
    if found is None:
        raise stored_chat.no_completion(f"chatcmpl-{stream_id}")
    return json_reply(stored_chat.messages_json(found, call.query()))


async def chat(call: Call, answers: Answers, chats: StoredChats | None = None) -> Reply:
    """GET /v1/chat/completions/chatcmpl-{stream id}: the whole answer.

    It is the stored completion, or made from the events while they are kept, whether the answer was streamed or not.
    Afterwards it is the text that the site stores, if it does. Raises NotFinished while the answer is being made.
    """
    stream_id = call.params["stream_id"]
    stored = None if chats is None else await chats.find(call.caller, stream_id)
    if stored is not None:
        return json_reply(stored_chat.completion_json(stored))
    found = await answers.find(call.caller, stream_id=stream_id)
    stream, record = found.stream, found.record
    if stream is None:
        if record is None or not record.text or record.finish_reason not in SUCCESS_REASONS:
            raise gone()
        return json_reply(_stored_text(record))
    if stream.state != "finished":
        raise NotFinished(f"The answer is still being made. Ask again, or read /v1/streams/{stream.id}/events.")
    events = await call.wait(collect(answers.streams, stream))
    shown = {"reasoning_field": answers.config.reasoning_field, **openai_chat.identity(stream)}
    return json_reply(openai_chat.completion_json(Answer.of(events), **shown))


def _stored(chats: StoredChats | None, path: str) -> StoredChats:
    """Return the stored completions. Raises NotFound where there is no database, as at an unknown address."""
    if chats is None:
        raise unknown_url(f"/v1/{path}")
    return chats


def _stored_text(record: Record) -> dict[str, Any]:
    """Return what is left of an answer whose events are dropped: its text, without thoughts and calls."""
    usage = Usage(
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        cached_tokens=record.cached_tokens,
    )
    answer = Answer()
    answer.feed(Token(text=record.text, token_ids=()))
    answer.feed(Done(finish_reason=record.finish_reason, usage=usage))
    return openai_chat.completion_json(
        answer, completion_id=f"chatcmpl-{record.id}", model=record.model, created=int(record.created)
    )


async def stream_events(call: Call, answers: Answers) -> Reply:
    """GET /v1/streams/{id}/events: the chunks, or events of a message, that the reader lacks, and those that follow."""
    default_format = ANTHROPIC if anthropic_message.VERSION_HEADER in call.headers else OPENAI
    return await native_api.stream_events(call, answers, default_format=default_format)


async def models(call: Call, answers: Answers) -> Reply:
    """GET /v1/models: the served models, in the shape of the API whose headers are sent."""
    models = [client.describe() for client in answers.clients.values()]
    if anthropic_message.VERSION_HEADER in call.headers:
        return json_reply(anthropic_message.models_json(models, call.query()), headers=id_header(call.request_id))
    return json_reply(shapes.models_json(models))


async def model(call: Call, answers: Answers) -> Reply:
    """GET /v1/models/{id}: a served model."""
    described = answers.client(call.params["model"]).describe()
    if anthropic_message.VERSION_HEADER in call.headers:
        return json_reply(anthropic_message.model_json(described), headers=id_header(call.request_id))
    return json_reply(shapes.model_json(described))


def unknown_url(path: str) -> NotFound:
    """Return the error for an address under /v1 where nothing is."""
    known = ", ".join(f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "models"))
    return NotFound(f"There is no {path} here. Known: {known}.", code="unknown_url")


_PROMPT_IN_URL = (
    "Answers are not started by GET here, because the prompt would be in the access logs. POST it to "
    "/v1/completions/stream, or turn PROMPT_IN_URL on in STREAMSERVE."
)


async def completions(call: Call, answers: Answers) -> Reply:
    """POST /v1/completions, streamed or whole."""
    body = await call.json(answers.limits)
    asked = openai_completions.parse(body, answers.limits, default_model=answers.default_model)
    streams = await _start_all(call, answers, asked, once_of(call, "completions", body))
    prompt_ids = await _prompts_ids(call, answers, streams, asked) if asked.return_token_ids else None
    if asked.stream:
        return Reply(body=_delivery(answers, streams, asked, prompt_ids))
    events = await call.wait(_collect_all(answers, streams))
    folded = [(stream, Answer.of(log, stream.request.n)) for stream, log in zip(streams, events, strict=True)]
    whole = openai_completions.completion_json(folded, shows_prompt=asked.shows_prompt, prompt_token_ids=prompt_ids)
    return json_reply(whole, headers={"X-Stream-Id": ", ".join(stream.id for stream in streams)})


async def _start_all(call: Call, answers: Answers, asked: CompletionRequest, once: Once | None) -> list[Stream]:
    """Start a stream for each prompt. Where a prompt is refused, the streams before it end, and that is the response.

    They take their places together: those that have begun would wait for their reader.
    """
    on_disconnect = asked.on_disconnect or ("abort" if once is None else "park")
    streams: list[Stream] = []
    places = Places(len(asked.generates))
    try:
        for index, generate in enumerate(asked.generates):
            request = answers.with_class(generate, asked, call.caller, "completions")
            key = None if once is None else part_of(once, index)
            streams.append(await answers.begin(call, request, on_disconnect, once=key, places=places))
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
    call: Call, answers: Answers, streams: list[Stream], asked: CompletionRequest
) -> list[tuple[int, ...]]:
    """Return the ids of each stream's prompt. Where there are none, all streams end."""
    try:
        asking = zip(streams, asked.generates, strict=True)
        return [await _prompt_ids(call, answers, stream, request) for stream, request in asking]
    except BaseException:
        for stream in streams:
            stream.abandon()
        raise


def _delivery(
    answers: Answers, streams: list[Stream], asked: CompletionRequest, prompt_ids: list[tuple[int, ...]] | None
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
        return Delivery(answers.streams, streams[0], encoder, pace=pace)
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
    return JoinedDelivery(answers.streams, parts, joined.last_bytes, pace=asked.pace)


async def _collect_all(answers: Answers, streams: list[Stream]) -> list[list[LoggedEvent]]:
    """Wait for all streams as their reader; where the wait ends early, all readers have left."""
    tasks = [asyncio.create_task(collect(answers.streams, stream), name="completion") for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def post_tokens(call: Call, answers: Answers) -> Reply:
    """POST /v1/completions/stream."""
    body = await call.json(answers.limits)
    asked = plain_tokens.parse(body, answers.limits, default_model=answers.default_model)
    return await _start_plain(call, answers, asked, once_of(call, "completions/stream", body))


async def get_tokens(call: Call, answers: Answers) -> Reply:
    """GET /v1/completions/stream: for a bare EventSource, which with a Last-Event-ID never starts again."""
    try:
        return await _get_plain(call, answers)
    except StreamserveError as error:
        if "text/event-stream" not in call.headers.get("accept", ""):
            raise
        RESPONSES.by_code[error.code] += 1
        headers = {"Content-Type": plain_tokens.PlainEncoder.content_type, "Cache-Control": "no-store"}
        return Reply(body=plain_tokens.refusal(error), headers=headers)


async def _get_plain(call: Call, answers: Answers) -> Reply:
    event_id, query = call.headers.get("last-event-id"), call.query()
    if not event_id:
        if not answers.config.takes_prompt_in_url:
            raise Forbidden(_PROMPT_IN_URL, code="prompt_in_url_off")
        return await _start_plain(
            call, answers, plain_tokens.parse_query(query, answers.limits, default_model=answers.default_model)
        )
    stream, after = await stream_of_event(call, answers, event_id)
    if stream is None or not 0 <= after <= stream.last_seq:
        return gone_reply(call)
    if stream.terminal is not None and after >= stream.last_seq:
        return Reply(status=204)
    if call.is_head:
        return Reply(body=HeadOnly(plain_tokens.PlainEncoder.content_type, stream.id))
    return Reply(body=_plain_delivery(answers, stream, pace_of_query(query_values(query)), after))


async def _start_plain(call: Call, answers: Answers, asked: PlainRequest, once: Once | None = None) -> Reply:
    if call.is_head:
        return Reply(body=HeadOnly(plain_tokens.PlainEncoder.content_type))
    request = answers.with_class(asked.generate, asked, call.caller, "completions")
    stream = await answers.begin(call, request, asked.on_disconnect, once=once)
    return Reply(body=_plain_delivery(answers, stream, asked.pace, 0))


def _plain_delivery(answers: Answers, stream: Stream, pace: Pace, after: int) -> Delivery:
    encoder = plain_tokens.PlainEncoder(stream.log_id)
    return Delivery(answers.streams, stream, encoder, after=after, pace=pace)
