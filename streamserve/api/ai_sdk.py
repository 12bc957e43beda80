"""`/ai/chat`: the AI SDK's `useChat` on our streams. asyncio; framework-free. docs/ai-sdk.md.

    POST /ai/chat             start an answer: the chat's id is a thread (threads.py)
    GET  /ai/chat/{id}        the messages that are kept, for `useChat({messages})`
    GET  /ai/chat/{id}/stream the answer that runs, or has ended unseen: from its beginning, or what the reader lacks
    POST /ai/chat/{id}/stop   end it

A page that closes its connection stops nothing: it cannot tell a stop from a lost network. A message of a page may be
several answers, with results of tools between them; a reader that rebuilds it gets those before as well (`_Shown`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Reply, json_reply
from streamserve.api.conversations import Conversations, MessageView, id_headers, path_of, turn_in
from streamserve.api.idempotency import continuation_of, once_of
from streamserve.api.interrupts import with_approvals
from streamserve.api.resume import AI_SDK, HeadOnly, after_of
from streamserve.api.threads import Sent, Threads, ThreadView, thread_key, with_thread
from streamserve.dialects.ai_sdk import chunks, request
from streamserve.dialects.ai_sdk.message import UIMessage, note_answers, usage_json
from streamserve.dialects.ai_sdk.request import ChatRequest
from streamserve.dialects.fields import read
from streamserve.dialects.fold import Answer
from streamserve.dialects.pace import pace_of_query
from streamserve.dialects.query import query_values
from streamserve.protocol.errors import NotFinished, NotFound, no_stream
from streamserve.protocol.events import Usage
from streamserve.protocol.requests import GenerateRequest, Once, ThreadKey, Turn
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect
from streamserve.streams.stream import Stream


async def start_chat(
    call: Call, answers: Answers, threads: Threads, conversations: Conversations | None = None
) -> Reply:
    """POST /ai/chat {id, messages, trigger, messageId?, …}: start an answer in a chat, and stream it."""
    body = await call.json(answers.limits)
    asked = request.parse(body, answers.limits)
    key = thread_key(AI_SDK, asked.chat_id, "id")
    once = once_of(call, "ai/chat", body)
    turn, stream = None, await _earlier(call, answers, threads, asked, key, once)
    if stream is None:
        try:
            generate, turn = await _asked(call, answers, threads, asked, key, once)
        except NotFinished:  # perhaps of the same request, which another task has begun meanwhile
            stream = await _earlier(call, answers, threads, asked, key, once)
            if stream is None:
                raise
    if stream is None:
        stream = await answers.begin(
            call, generate, asked.on_disconnect, once=once, begins_unloaded=True, turn=turn, thread=key
        )
    turn = await turn_in(stream, turn, conversations)
    message_id = asked.continued_id or ("" if turn is None else turn.answer_id)
    encoder = chunks.encoder_for(stream, message_id=message_id)
    delivery = Delivery(answers.streams, stream, encoder, pace=asked.pace)
    return Reply(body=delivery, headers={**chunks.HEADER, **id_headers(turn)})


async def _earlier(
    call: Call, answers: Answers, threads: Threads, asked: ChatRequest, key: ThreadKey, once: Once | None
) -> Stream | None:
    """Return the answer that the request's Idempotency-Key has started before, if it has."""
    if once is None:
        return None
    if not asked.approvals:
        return await answers.earlier(once)
    view = await threads.find(call.caller, key)
    last = None if view is None else await _stream_of(call, answers, view)
    if last is None or not {one.id for one in asked.approvals} <= {one.id for one in last.request.approvals}:
        return None
    return await answers.earlier(continuation_of(last.request.continues, once))


async def _asked(
    call: Call, answers: Answers, threads: Threads, asked: ChatRequest, key: ThreadKey, once: Once | None
) -> tuple[GenerateRequest, Turn | None]:
    """Return the request, with its messages, and what its start adds to the chat's conversation."""
    follow = partial(with_thread, caller=call.caller, key=key, answers=answers, threads=threads)
    if asked.approvals:
        view = await threads.find(call.caller, key)
        if view is None:
            raise no_stream()
        own = await with_approvals(call.caller, view.stream_id, asked.approvals, answers, once)
        return await follow(own, [], continues=True)
    sent = [Sent(id=one.id, message=one.message) for one in asked.sent]
    if asked.edited_id:
        sent[-1] = replace(sent[-1], is_edit=True)
    generate, turn = await follow(asked.generate, sent)
    return answers.with_class(generate, asked, call.caller, "streams"), turn


async def chat_messages(
    call: Call, answers: Answers, threads: Threads, conversations: Conversations | None = None
) -> Reply:
    """GET /ai/chat/{id}: the messages of the branch that is shown; none where the site keeps no conversations."""
    key = _key(call)
    view = await threads.find(call.caller, key)
    shown = _Shown(call, answers, conversations, view)
    return json_reply({"id": key.client_id, "messages": [one for one in await shown.messages() if one["parts"]]})


async def chat_stream(
    call: Call, answers: Answers, threads: Threads, conversations: Conversations | None = None
) -> Reply:
    """GET /ai/chat/{id}/stream: the answer that runs, or has ended unseen; 204 where there is none.

    From its beginning, as `useChat` reads it; with a `Last-Event-ID` or `?after=` what the reader lacks.
    """
    view = await threads.find(call.caller, _key(call))
    stream = None if view is None else await _stream_of(call, answers, view)
    query = call.query()
    pace = pace_of_query(query_values(query))
    if stream is None:
        return Reply(status=204)
    after, last_id = after_of(call, stream, query), call.headers.get("last-event-id", "")
    # A place that this answer has; an id of the chat's answer before is none: the reader lacks all of this.
    is_rest = after is not None and after <= stream.last_seq and bool(after or last_id)
    num_seen = (after or 0) if is_rest else stream.readers.seen_seq
    if stream.terminal is not None and num_seen >= stream.last_seq:
        return Reply(status=204)
    if call.is_head:
        return Reply(body=HeadOnly(chunks.ChunkEncoder.content_type, stream.id), headers=chunks.HEADER)
    shown = _Shown(call, answers, conversations, view)
    message_id, before = await shown.before(stream)
    if is_rest:
        encoder = chunks.encoder_for(stream, message_id=message_id, last_id=last_id)
    else:
        encoder = chunks.encoder_for(stream, message_id=message_id, before=before)
    delivery = Delivery(answers.streams, stream, encoder, after=(after or 0) if is_rest else 0, pace=pace)
    return Reply(body=delivery, headers=chunks.HEADER)


async def stop_chat(call: Call, answers: Answers, threads: Threads) -> Reply:
    """POST /ai/chat/{id}/stop: end the chat's answer. Idempotent, also for a chat without an answer."""
    read(await call.json(answers.limits, optional=True), {})
    key = _key(call)
    view = await threads.find(call.caller, key)
    stream = None if view is None else await _stream_of(call, answers, view)
    is_running = stream is not None and stream.terminal is None
    if stream is not None:
        await stream.stop()
    return json_reply({"id": key.client_id, "stopped": is_running})


def _key(call: Call) -> ThreadKey:
    return thread_key(AI_SDK, call.params["chat_id"], "id")


async def _stream_of(call: Call, answers: Answers, view: ThreadView) -> Stream | None:
    """Return the chat's last stream; None once its events are dropped, and for a model that the caller may not use."""
    try:
        return (await answers.find(call.caller, stream_id=view.stream_id)).stream
    except NotFound:
        return None


_MAX_BEFORE = 64  # answers of one message that a reader rebuilds


@dataclass(frozen=True, slots=True)
class _Shown:
    """What of a chat stands in its page: of its conversation, or of its last streams where none is kept."""

    call: Call
    answers: Answers
    conversations: Conversations | None
    view: ThreadView | None

    async def messages(self) -> list[dict[str, Any]]:
        """Return the messages that are kept, without the answer that runs."""
        if self.view is None or not self.view.conversation_id or self.conversations is None:
            return []
        found, rows = await self.conversations.whole(self.call.caller, self.view.conversation_id)
        return ui_messages(path_of(rows, found.leaf))

    async def before(self, stream: Stream) -> tuple[str, bytes]:
        """Return the id of the message that a stream is of, and the frames of its answers before."""
        turn = None if self.conversations is None else await self.conversations.turn_of(stream.id)
        if turn is None or self.conversations is None:
            return await self._interrupted_before(stream)
        _, rows = await self.conversations.whole(self.call.caller, turn.conversation_id)
        *_, last = ui_messages(path_of(rows, turn.answer_id)[:-1]) or [{"role": "user"}]
        if last["role"] == "user":
            return turn.answer_id, b""
        note_answers(last["parts"], stream.request.approvals)
        return last["id"], chunks.replay_frames(last)

    async def _interrupted_before(self, stream: Stream) -> tuple[str, bytes]:
        """Do what `before` does, by the streams that the stream continues."""
        earlier: list[Stream] = []
        first = stream
        while first.request.continues and len(earlier) < _MAX_BEFORE:
            found = await self.answers.find(self.call.caller, stream_id=first.request.continues)
            if found.stream is None:
                break
            first = found.stream
            earlier.insert(0, first)
        if not earlier:
            return stream.id, b""
        message = UIMessage(first.id)
        for one in earlier:
            answer = Answer.of(await collect(self.answers.streams, one))
            message.add_answer(
                [block.as_json() for block in answer.choices[0].block_texts()],
                citations=[citation.payload() for citation in answer.citations],
                approvals=[approval.payload() for approval in answer.approvals],
                customs=[custom.payload() for custom in answer.customs],
                state=answer.state,
            )
        note_answers(message.parts, stream.request.approvals)
        return message.id, chunks.replay_frames(message.as_json())


def ui_messages(path: Sequence[MessageView]) -> list[dict[str, Any]]:
    """Return a branch as UI messages: an answer with its results and continuations is one of them."""
    out: list[dict[str, Any]] = []
    whole: UIMessage | None = None
    for row in path:
        if row.role == "user":
            whole = None
            out.append(_question(row))
        elif row.role == "tool":
            if whole is not None:
                for block in row.blocks:
                    whole.add_result(block.get("id") or "", block["text"])
        elif row.state != "running":
            if whole is None:
                whole = UIMessage(row.client_id or row.id)
                out.append(whole.as_json())
            _add_answer(whole, row)
    return out


def _question(row: MessageView) -> dict[str, Any]:
    metadata = {"created": int(row.created_at.timestamp())}
    parts = [{"type": "text", "text": row.text}]
    return {"id": row.client_id or row.id, "role": "user", "metadata": metadata, "parts": parts}


def _add_answer(whole: UIMessage, row: MessageView) -> None:
    whole.add_answer(
        row.blocks, citations=row.citations, approvals=row.approvals, customs=row.customs, state=row.run_state
    )
    usage = Usage(
        prompt_tokens=row.prompt_tokens, cached_tokens=row.cached_tokens, completion_tokens=row.completion_tokens
    )
    whole.metadata.update(
        model=row.model,
        streamId=row.stream_id,
        created=int(row.created_at.timestamp()),
        usage=usage_json(usage),
        finishReason=row.finish_reason or row.error_code,
    )
