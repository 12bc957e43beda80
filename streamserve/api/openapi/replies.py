"""`REPLIES` and `EVENTS`: what replies and events look like, by name, shown by the functions that write them. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec

from streamserve.api.answers import Found
from streamserve.api.native import state_json
from streamserve.api.openapi.samples import (
    ATTACHMENTS,
    BATCHES,
    CONVERSATIONS,
    EMBEDDER,
    FAILED,
    FILES,
    ID,
    JOBS,
    MESSAGES,
    MODEL,
    MORE,
    PLAIN,
    RICH,
    RUN,
    SAMPLES,
    SHARES,
    STOPPED,
    USAGE,
    Sample,
    frames,
)
from streamserve.api.openapi.samples import EVENTS as OF_STREAMS
from streamserve.api.openapi.shape import shape_of
from streamserve.api.ops import model_state
from streamserve.dialects import durable, native
from streamserve.dialects.ag_ui import events as ag_ui
from streamserve.dialects.ai_sdk import chunks
from streamserve.dialects.anthropic import batches as message_batches
from streamserve.dialects.anthropic import message
from streamserve.dialects.encoder import Encoder
from streamserve.dialects.fields import Schema
from streamserve.dialects.fold import Answer
from streamserve.dialects.openai import batches, chat, completions, embeddings, moderations, shapes, tokens
from streamserve.dialects.openai.plain_tokens import PlainEncoder
from streamserve.dialects.openai.responses import output
from streamserve.dialects.plain import TokensEncoder
from streamserve.protocol.embeddings import Embedded
from streamserve.protocol.errors import ErrorBody
from streamserve.protocol.requests import Admission
from streamserve.streams.store import Record

_ERROR = ErrorBody(
    http_status=400, code="invalid_value", message="n must be between 1 and 8.", param="n", request_id=ID
)
_BARE = ErrorBody(
    http_status=404, code="stream_not_found", message="There is no such stream.", param=None, request_id=""
)
_ADMISSION = Admission(owner="u", tenant="u", stream_id=ID)
_HEAD: Mapping[str, Any] = {"model": "helpdesk", "tools": [], "instructions": None}


def _of(*values: Any) -> Callable[[], Schema]:
    return lambda: shape_of(*values)


def _page(name: str, items: list[Any]) -> Schema:
    """Return the shape of a part of a native list."""
    return shape_of({name: items, "has_more": True, "last_id": ID}, {name: [], "has_more": False, "last_id": None})


def _openai_page(items: list[Any]) -> Schema:
    return shape_of(batches.list_json(items, has_more=True), batches.list_json([], has_more=False))


def _chats() -> list[dict[str, Any]]:
    answers = [(sample, Answer.of(sample.log)) for sample in SAMPLES]
    ids: dict[str, Any] = {"return_token_ids": True, "prompt_token_ids": (1,)}
    return [
        chat.completion_json(answer, **chat.identity(sample), **options)
        for sample, answer in answers
        for options in ({}, ids)
    ]


def _text_completions() -> Schema:
    answers = [(sample, Answer.of(sample.log)) for sample in (PLAIN, STOPPED, RICH)]
    whole = (completions.completion_json([one]) for one in answers)
    return shape_of(*whole, completions.completion_json(answers[:1], shows_prompt=True, prompt_token_ids=[(1,)]))


def _messages() -> Schema:
    answers = ((sample, Answer.of(sample.log)) for sample in SAMPLES)
    return shape_of(*(message.message_json(answer, **message.identity(sample)) for sample, answer in answers))


def _responses() -> Schema:
    logs = ((sample, sample.log) for sample in (*SAMPLES, FAILED))
    begun = output.response_json((), PLAIN, _HEAD, status="queued")
    return shape_of(begun, *(output.response_json(log, sample, _HEAD) for sample, log in logs))


def _runs() -> Schema:
    answers = ((sample, Answer.of(sample.log)) for sample in SAMPLES)
    named: dict[str, Any] = {"stream_id": ID, "pipeline": "billing", "created": 0}
    return shape_of(*(native.run_json(answer, **named) for _, answer in answers))


def _embeddings() -> Schema:
    embedded = Embedded(vectors=(b"\0\0\0\0",), num_tokens=1)
    shown = (
        embeddings.embeddings_json(embedded, model="search", encoding_format=one)
        for one in (embeddings.FLOAT, embeddings.BASE64)
    )
    return shape_of(*(msgspec.json.decode(one) for one in shown))


def _usage() -> Schema:
    row = USAGE.as_json()
    total = {name: value for name, value in row.items() if name not in ("day", "model", "kind")}
    return shape_of({"usage": [row], "total": total})


def _conversation_export() -> Schema:
    return shape_of(*({"conversation": one.as_json(), "messages": _MESSAGES} for one in CONVERSATIONS))


def _states() -> Schema:
    """Return the shape of a stream's state: while it is in memory, and of its record."""
    live = {"resumable": True, **native.outline_json(RUN.outline)}
    record = Record(admission=_ADMISSION, log_id="1", model="helpdesk", created=0.0)
    ended = replace(
        record, is_finished=True, finish_reason="stop", phases={"queue": 0.1}, error_code="timeout", text="Hi"
    )
    found = [state_json(Found(stream=None, record=one)) for one in (record, ended)]
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    began = {**found[0], **live, "usage": {**usage, "total_tokens": 2}, "finish_reason": None, "error_code": None}
    return shape_of(*found, began)


def _log_item() -> Schema:
    return shape_of(*(msgspec.json.decode(durable.item_of(one)) for one in RICH.log))


_READY = {"ready": True, "reason": ""}
_CONVERSATIONS = [one.as_json() for one in CONVERSATIONS]
_MESSAGES = [one.as_json() for one in MESSAGES]
_SHARES = [one.as_json() for one in SHARES]
_MESSAGE_BATCHES = [message_batches.batch_json(one) for one in BATCHES]
_EDGES = {"first_id": ID, "last_id": ID}

# By the name of the component.
REPLIES: Mapping[str, Callable[[], Schema]] = {
    "Error": _of(native.error_json(_ERROR), native.error_json(_BARE)),
    "OpenAIError": _of(shapes.error_json(_ERROR), shapes.error_json(_BARE)),
    "MessageError": _of(message.error_json(_ERROR), message.error_json(_BARE)),
    "RunError": _of(ag_ui.error_json(_ERROR)),
    "RpcError": lambda: {"type": "object"},
    "Run": _runs,
    "JobView": _of(*(one.as_json() for one in JOBS)),
    "JobList": lambda: _page("jobs", [one.as_json() for one in JOBS]),
    "Conversation": _of(*_CONVERSATIONS),
    "ConversationList": lambda: _page("conversations", _CONVERSATIONS),
    "ConversationMessage": _of(*_MESSAGES),
    "ConversationMessageList": lambda: _page("messages", _MESSAGES),
    "ConversationExport": _conversation_export,
    "Share": _of(*_SHARES),
    "NewShare": _of(*({**one, "url": "/shared/x"} for one in _SHARES)),
    "ShareList": lambda: _page("shares", _SHARES),
    "Revoked": _of({"id": ID, "revoked": True}),
    "Deleted": _of({"id": ID, "deleted": True}),
    "Counted": _of({"counted": True}),
    "Attachment": _of(*(one.as_json() for one in ATTACHMENTS)),
    "AttachmentList": lambda: _page("attachments", [one.as_json() for one in ATTACHMENTS]),
    "Pipelines": _of(
        {"pipelines": [{"name": "a", "title": "A", "model": one, "description": ""} for one in ("m", None)]}
    ),
    "UIMessages": lambda: {
        "type": "object",
        "properties": {"id": {"type": "string"}, "messages": {"type": "array", "items": {"type": "object"}}},
        "required": ["id", "messages"],
    },
    "StoppedChat": _of({"id": ID, "stopped": True}),
    "ThreadMessages": _of({"threadId": ID, "messages": [{}], "state": {}, "interrupts": [{}]}),
    "StoppedThread": _of({"threadId": ID, "stopped": True}),
    "Usage": _usage,
    "ChatCompletion": lambda: shape_of(*_chats()),
    "StoredChatCompletion": lambda: shape_of(*_chats(), *({**one, "metadata": {}} for one in _chats())),
    "ChatCompletionList": lambda: _openai_page([{**one, "metadata": {}} for one in _chats()]),
    "DeletedObject": _of({"id": ID, "object": "file", "deleted": True}),
    "ObjectList": lambda: _openai_page([{"id": ID}]),
    "Response": _responses,
    "InputTokens": _of({"object": "response.input_tokens", "input_tokens": 1}),
    "ResponseConversation": _of({"id": ID, "object": "conversation", "created_at": 1, "metadata": {}}),
    "ResponseItem": _of({"id": ID, "type": "message"}),
    "Completion": _text_completions,
    "EmbeddingList": _embeddings,
    "Moderation": lambda: shape_of(moderations.moderations_json([{}], model="site")),
    "Message": _messages,
    "TokenCount": _of({"input_tokens": 1}),
    "MessageBatch": _of(*_MESSAGE_BATCHES),
    "MessageBatchList": _of(
        {"data": _MESSAGE_BATCHES, "has_more": True, **_EDGES},
        {"data": [], "has_more": False, **dict.fromkeys(_EDGES)},
    ),
    "DeletedMessageBatch": _of(message_batches.deleted_json(ID)),
    "ModelList": lambda: shape_of(shapes.models_json([MODEL, EMBEDDER])),
    "Model": _of(shapes.model_json(MODEL), shapes.model_json(EMBEDDER)),
    "File": _of(*map(batches.file_json, FILES)),
    "FileList": lambda: _openai_page([batches.file_json(one) for one in FILES]),
    "Batch": _of(*map(batches.batch_json, BATCHES)),
    "BatchList": lambda: _openai_page([batches.batch_json(one) for one in BATCHES]),
    "RpcResult": lambda: {"type": "object", "properties": {"jsonrpc": {"const": "2.0"}}, "required": ["jsonrpc"]},
    "Tokens": _of(tokens.tokenize_json([1], None, max_model_len=1), tokens.tokenize_json([1], ["a"], max_model_len=1)),
    "Prompt": _of({"prompt": "Hi"}),
    "Live": _of({"live": True}),
    "StreamState": _states,
    "Ready": lambda: shape_of(_READY, {**_READY, "models": [model_state(MODEL, shows_message=True)]}),
    "OpenAPI": _of({"openapi": "3.1.1", "info": {}, "paths": {}}),
    "LogItem": _log_item,
    "LogItems": lambda: {"type": "array", "items": _log_item()},
}


def _frames(*makes: Callable[[Sample], Encoder], samples: Sequence[Sample] = SAMPLES) -> Schema:
    """Return the shape of a stream's frames: of each event its data, or of all where they have no names."""
    seen: dict[str, list[Any]] = {}
    for make, sample in itertools.product(makes, samples):
        for event, data in frames(make(sample), sample):
            seen.setdefault(event, []).append(data)
    return _union({event: shape_of(*data) for event, data in seen.items()})


def _union(by_event: Mapping[str, Schema]) -> Schema:
    named = [
        {
            "type": "object",
            "properties": {"event": {"const": event}, "id": {"type": "string"}, "data": data},
            "required": ["event", "data"],
        }
        for event, data in by_event.items()
        if event
    ]
    bare = [data for event, data in by_event.items() if not event]
    return {"anyOf": named} if named else dict(bare[0])


def _native() -> Schema:
    """Return the events of native streams: of each class what its payloads look like."""
    kinds: dict[str, list[Any]] = {}
    for event in (*OF_STREAMS, *MORE):
        kinds.setdefault(event.type, []).append(event.payload())
    encoder = native.NativeEncoder
    for sample in (PLAIN, RUN):  # `meta` before `done`
        for name, data in frames(encoder(sample.log_id, sample), sample):
            kinds[name].append(data)
    farewell = {"id": ID, "after": 1, "event_id": "1-1", "retry": 1}
    return _union(
        {name: shape_of(*data) for name, data in {**kinds, "farewell": [farewell], "keepalive": [{}]}.items()}
    )


# The events of streams by the name of the component.
EVENTS: Mapping[str, Callable[[], Schema]] = {
    "StreamEvent": _native,
    "ChatCompletionChunk": lambda: _frames(
        chat.encoder_for,
        lambda one: chat.encoder_for(one, include_usage=True, continuous_usage=True, include_obfuscation=True),
        lambda one: chat.encoder_for(one, return_token_ids=True, prompt_token_ids=(1,)),
    ),
    "CompletionChunk": lambda: _frames(
        completions.CompletionEncoder,
        lambda one: completions.CompletionEncoder(one, include_usage=True, continuous_usage=True),
        lambda one: completions.CompletionEncoder(one, return_token_ids=True, prompt_token_ids=(1,)),
    ),
    "ResponseEvent": lambda: _frames(
        lambda one: output.encoder_for(one, _HEAD), lambda one: output.encoder_for(one, _HEAD, include_obfuscation=True)
    ),
    "MessageEvent": lambda: _frames(message.encoder_for),
    "UIMessageChunk": lambda: _frames(chunks.encoder_for),
    "RunEvent": lambda: _frames(ag_ui.encoder_for),
    "TokenEvent": lambda: _frames(lambda one: TokensEncoder(one.log_id), samples=(PLAIN,)),
    "PlainToken": lambda: _frames(lambda one: PlainEncoder(one.log_id), samples=(PLAIN,)),
    "RpcMessage": lambda: {"type": "object"},
}


@cache
def component(name: str) -> dict[str, Any]:
    """Return the schema of a component."""
    return dict((REPLIES.get(name) or EVENTS[name])())
