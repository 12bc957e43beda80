"""The endpoints of `/v1/chat/completions`: answers, and those that a site stores. asyncio; framework-free.

Closing the connection stops the answer, as there, unless the caller means to come back: a request with an
`Idempotency-Key`, or with `"on_disconnect": "park"`, is as durable as a native stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Caller, Reply, json_reply
from streamserve.api.idempotency import once_of
from streamserve.api.openai.completions import prompt_ids
from streamserve.api.openai.models import unknown_url
from streamserve.api.resume import counting_pace, gone
from streamserve.dialects.fold import Answer
from streamserve.dialects.openai import chat as openai_chat
from streamserve.dialects.openai import request as openai_request
from streamserve.dialects.openai import stored_chat
from streamserve.dialects.openai.stored_chat import ListQuery, StoredChat
from streamserve.protocol.errors import BadRequest, NotFinished
from streamserve.protocol.events import SUCCESS_REASONS, Done, Token, Usage
from streamserve.streams.reader.delivery import Delivery
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
    asked = openai_request.parse(body, answers.limits, default_model=await answers.default_model(call.caller))
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
        "prompt_token_ids": await prompt_ids(call, answers, stream, request) if asked.return_token_ids else None,
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
