"""`REPLIES` and `EVENTS`: what replies and events look like, by name, shown by the functions that write them. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec

from streamserve.api.ag_ui import kept_messages
from streamserve.api.ai_sdk import ui_messages
from streamserve.api.answers import Found
from streamserve.api.mcp import NAME
from streamserve.api.native import state_json
from streamserve.api.openapi.samples import (
    ATTACHMENTS,
    BATCHES,
    CONVERSATIONS,
    CONVERSED,
    EMBEDDER,
    FAILED,
    FILES,
    ID,
    JOBS,
    MESSAGES,
    MODEL,
    MORE,
    PLAIN,
    PROMPTED,
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
from streamserve.api.openapi.shape import FREE, MAPS, USUAL, Names, shape_of
from streamserve.api.ops import model_state
from streamserve.dialects import durable, mcp, native
from streamserve.dialects.ag_ui import events as ag_ui
from streamserve.dialects.ai_sdk import chunks
from streamserve.dialects.anthropic import batches as message_batches
from streamserve.dialects.anthropic import message
from streamserve.dialects.encoder import Encoder
from streamserve.dialects.fields import Schema
from streamserve.dialects.fold import Answer, Failed
from streamserve.dialects.openai import batches, chat, completions, embeddings, moderations, shapes, stored_chat, tokens
from streamserve.dialects.openai.plain_tokens import PlainEncoder
from streamserve.dialects.openai.responses import conversation, output, stored
from streamserve.dialects.openai.responses import items as response_items
from streamserve.dialects.openai.responses import request as response_request
from streamserve.protocol.embeddings import Embedded
from streamserve.protocol.errors import ErrorBody
from streamserve.protocol.events import Approval
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Admission
from streamserve.streams.store import Record

_ERROR = ErrorBody(
    http_status=400, code="invalid_value", message="n must be between 1 and 8.", param="n", request_id=ID
)
_BARE = ErrorBody(
    http_status=404, code="stream_not_found", message="There is no such stream.", param=None, request_id=""
)
_ADMISSION = Admission(owner="u", tenant="u", stream_id=ID)
_SCHEMA: Mapping[str, Any] = {"type": "object"}
# Bodies of requests for a response: what a response repeats of the shortest, and of those with every field.
_FULL: Mapping[str, Any] = {
    "input": "Hi",
    "instructions": "Be brief.",
    "max_output_tokens": 9,
    "max_tool_calls": 1,
    "metadata": {"ticket": "1042"},
    "prompt_cache_key": "shop",
    "safety_identifier": "u",
    "user": "u",
    "reasoning": {"effort": "low", "summary": "auto"},
    "tools": [
        {"type": "function", "name": "find", "description": "Find.", "parameters": _SCHEMA, "strict": True},
        {"type": "function", "name": "look"},
    ],
    "tool_choice": {"type": "function", "name": "find"},
}
_FORM = {"type": "json_schema", "name": "invoice", "description": "One.", "schema": _SCHEMA, "strict": True}
_ASKED: Sequence[Mapping[str, Any]] = (
    {"input": "Hi"},
    {**_FULL, "previous_response_id": f"resp_{ID}"},
    {"input": "Hi", "conversation": f"conv_{ID}"},
    {"input": "Hi", "text": {"format": _FORM, "verbosity": "low"}},
    {"input": "Hi", "text": {"format": {**_FORM, "description": None}}},
)


def _of(*values: Any) -> Callable[[], Schema]:
    return lambda: shape_of(*values)


def _page(name: str, items: list[Any]) -> Schema:
    """Return the shape of a part of a native list."""
    return shape_of({name: items, "has_more": True, "last_id": ID}, {name: [], "has_more": False, "last_id": None})


def _openai_page(items: list[Any]) -> Schema:
    """Return the shape of a part of a list of files, batches or completions."""
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
    answers = [(sample, Answer.of(sample.log)) for sample in (PLAIN, STOPPED, RICH, PROMPTED)]
    whole = (completions.completion_json([one]) for one in answers)
    return shape_of(*whole, completions.completion_json(answers[-1:], shows_prompt=True, prompt_token_ids=[(1,)]))


def _messages() -> Schema:
    answers = ((sample, Answer.of(sample.log)) for sample in SAMPLES)
    return shape_of(*(message.message_json(answer, **message.identity(sample)) for sample, answer in answers))


@cache
def _heads() -> Sequence[Mapping[str, Any]]:
    """Return what responses repeat of their requests."""
    return [response_request.parse(body, Limits(), default_model="helpdesk").head for body in _ASKED]


def _response_values() -> list[dict[str, Any]]:
    logs = [(sample, sample.log) for sample in (*SAMPLES, FAILED)]
    begun = [output.response_json((), PLAIN, head, status="queued") for head in _heads()]
    return [*begun, *(output.response_json(log, sample, _heads()[0]) for sample, log in logs)]


def _responses() -> Schema:
    return shape_of(*_response_values())


# Of each kind of item what a request sends of it.
_SENT: Sequence[Mapping[str, Any]] = (
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"role": "user", "content": [{"type": "input_image", "image_url": "https://example.com/a.png", "detail": "low"}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "phase": "final_answer", "id": "msg_1"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]},
    {"type": "function_call", "call_id": "call_1", "name": "find", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "1042"},
    {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "1042"}]},
    {"type": "custom_tool_call", "call_id": "call_2", "name": "run", "input": "ls"},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "a"},
)


def _items() -> Schema:
    """Return the shape of items in lists: sent, made by answers, or kept; what other servers made is as it was sent."""
    sent = response_items.with_ids(response_items.read_items(Limits())(list(_SENT), "input"), f"resp_{ID}")
    made = [item for response in _response_values() for item in response["output"]]
    known = shape_of(*sent, *made, *conversation.items_of(CONVERSED))
    foreign = {"type": {"enum": list(response_items.LEFT_OUT)}, "id": {"type": "string"}}
    return {"anyOf": [known, {"type": "object", "properties": foreign, "required": ["type", "id"]}]}


def _item_page() -> Schema:
    """Return the shape of a part of a list of items."""
    page = shape_of(stored.page_json([{"id": ID}], {}), stored.page_json([], {}))
    return {**page, "properties": {**page["properties"], "data": {"type": "array", "items": _items()}}}


def _sent_messages() -> Schema:
    """Return the shape of a stored completion's messages, which are as they were sent."""
    function = {"name": "find", "arguments": "{}"}
    called = [{"id": "call_1", "type": "function", "function": function}]
    sent: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": called},
        {"role": "tool", "content": "1042", "tool_call_id": "call_1"},
    ]
    kept = stored_chat.StoredChat(stream_id=ID, completion={}, messages=sent)
    return shape_of(stored_chat.messages_json(kept, {}), stored_chat.messages_json(replace(kept, messages=()), {}))


# Of front ends: `metadata` has fields of ours there, and the `data` of a part is a run's own.
_OF_PAGES = Names(
    maps=MAPS - {"metadata"}, free={**FREE, "data": FREE["value"], "output": "Any JSON: what a tool has returned."}
)


def _ui_messages() -> Schema:
    return shape_of({"id": ID, "messages": ui_messages(CONVERSED)}, {"id": ID, "messages": []}, names=_OF_PAGES)


def _thread() -> Schema:
    kept = [one for row in CONVERSED for one in kept_messages(row)]
    asked = [ag_ui.interrupt_json(ID, one) for one in OF_STREAMS if isinstance(one, Approval)]
    return shape_of({"threadId": ID, "messages": kept, "state": {}, "interrupts": asked}, names=_OF_PAGES)


def _rpc_results() -> Schema:
    """Return the shape of a message with a result, or with the error of what was asked."""
    tool = mcp.tool_json("billing", "Billing", "Looks up a bill.", {})
    end = Failed("timeout", "It took too long.", retryable=True)
    ends = [mcp.whole_json(Answer.of(sample.log), ID) for sample in SAMPLES]
    results = [
        mcp.initialized_json("", NAME, "1"),
        mcp.discovered_json(NAME, "1"),
        *(mcp.tools_json([tool], is_modern=one) for one in (True, False)),
        *ends,
        mcp.failed_json(end, ID),
        {},
    ]
    shown = shape_of(
        *(mcp.response_json(1, one, is_modern=is_new)["result"] for one in results for is_new in (False, True))
    )
    properties = {**_rpc_error()["properties"], "result": shown}
    return {"type": "object", "properties": properties, "required": ["jsonrpc", "id"]}


def _rpc_error() -> Schema:
    versions = replace(_ERROR, code="unsupported_protocol_version")
    shown = (mcp.error_json(error, id) for error in (_ERROR, _BARE, versions) for id in (None, 1, "1"))
    return shape_of(*shown)


def _rpc_messages() -> Schema:
    """Return the shape of a stream's messages: the progress of a run, and then its result."""
    asked = mcp.Asked(id=1, token="a")
    shown = [data for _, data in frames(mcp.McpEncoder(RUN, asked), RUN)]
    steps = shape_of(*(one for one in shown if isinstance(one, dict) and "method" in one))
    token = {"type": ["string", "integer"]}
    params = {**steps["properties"]["params"]}
    params["properties"] = {**params["properties"], "progressToken": token}
    return {"anyOf": [{**steps, "properties": {**steps["properties"], "params": params}}, _rpc_results()]}


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
    cited = {**live, **native.outline_json(RICH.outline)}
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    began = {**found[0], **live, "usage": {**usage, "total_tokens": 2}, "finish_reason": None, "error_code": None}
    return shape_of(*found, began, {**began, **cited})


def _log_item() -> Schema:
    return shape_of(*(msgspec.json.decode(durable.item_of(one)) for one in RICH.log))


def _document() -> Schema:
    """Return the shape of the document itself; what its parts look like is in OpenAPI's specification."""
    info, parts = {"title": "streamserve", "version": "1", "description": ""}, {"description": "By OpenAPI 3.1."}
    shown = shape_of({"openapi": "3.1.1", "info": info, "servers": [{"url": "/"}]})
    properties = {**shown["properties"], **{name: {"type": "object", **parts} for name in ("paths", "components")}}
    return {**shown, "properties": properties, "required": list(properties)}


_NOTES = {"ticket": "1042"}
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
    "RunError": lambda: shape_of(ag_ui.error_json(_ERROR), ag_ui.error_json(_BARE), names=_OF_PAGES),
    "RpcError": _rpc_error,
    "Run": _runs,
    "JobView": _of(*(one.as_json() for one in JOBS)),
    "JobList": lambda: _page("jobs", [one.as_json() for one in JOBS]),
    "Conversation": _of(*_CONVERSATIONS),
    "ConversationList": lambda: _page("conversations", _CONVERSATIONS),
    "ConversationMessage": _of(*_MESSAGES),
    "ConversationMessageList": lambda: _page("messages", _MESSAGES),
    "ConversationExport": _conversation_export,
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
    "UIMessages": _ui_messages,
    "StoppedChat": _of({"id": ID, "stopped": True}),
    "ThreadMessages": _thread,
    "StoppedThread": _of({"threadId": ID, "stopped": True}),
    "Usage": _usage,
    "ChatCompletion": lambda: shape_of(*_chats()),
    "StoredChatCompletion": lambda: shape_of(*_chats(), *({**one, "metadata": _NOTES} for one in _chats())),
    "ChatCompletionList": lambda: _openai_page([{**one, "metadata": _NOTES} for one in _chats()]),
    "DeletedObject": _of({"id": ID, "object": "file", "deleted": True}),
    "StoredMessageList": _sent_messages,
    "Response": _responses,
    "InputTokens": _of({"object": "response.input_tokens", "input_tokens": 1}),
    "ResponseConversation": _of({"id": ID, "object": "conversation", "created_at": 1, "metadata": _NOTES}),
    "ResponseItem": _items,
    "ResponseItemList": _item_page,
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
    "RpcResult": _rpc_results,
    "Tokens": _of(tokens.tokenize_json([1], None, max_model_len=1), tokens.tokenize_json([1], ["a"], max_model_len=1)),
    "Prompt": _of({"prompt": "Hi"}),
    "Live": _of({"live": True}),
    "StreamState": _states,
    "Ready": lambda: shape_of(_READY, {**_READY, "models": [model_state(MODEL, shows_message=True)]}),
    "OpenAPI": _document,
    "LogItem": _log_item,
    "LogItems": lambda: {"type": "array", "items": _log_item()},
}


def _frames(
    *makes: Callable[[Sample], Encoder], samples: Sequence[Sample] = (*SAMPLES, FAILED), names: Names = USUAL
) -> Schema:
    """Return the shape of a stream's frames: of each event its data; where they have no names, of all, errors apart."""
    seen: dict[str, list[Any]] = {}
    for make, sample in itertools.product(makes, samples):
        for event, data in frames(make(sample), sample):
            seen.setdefault(event, []).append(data)
    bare = seen.pop("", [])
    if not bare:
        return _union({event: shape_of(*data) for event, data in seen.items()})
    failed = [one for one in bare if "error" in one]
    shown = shape_of(*(one for one in bare if one not in failed), names=names)
    return {"anyOf": [shown, shape_of(*failed)]} if failed else shown


def _union(by_event: Mapping[str, Schema]) -> Schema:
    """Return events by their names."""
    named = [
        {
            "type": "object",
            "properties": {"event": {"const": event}, "id": {"type": "string"}, "data": data},
            "required": ["event", "data"],
        }
        for event, data in by_event.items()
    ]
    return {"anyOf": named}


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


def _response_events() -> Schema:
    """Return the events of a response's stream; the response in some of them is what a GET replies."""
    head = _heads()[0]
    shown = _frames(
        lambda one: output.encoder_for(one, head), lambda one: output.encoder_for(one, head, include_obfuscation=True)
    )
    whole = {**_responses(), "title": "Response"}
    for event in shown["anyOf"]:
        data = event["properties"]["data"]
        if "response" in data["properties"]:
            data["properties"] = {**data["properties"], "response": whole}
    return shown


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
    "ResponseEvent": _response_events,
    "MessageEvent": lambda: _frames(message.encoder_for),
    "UIMessageChunk": lambda: _frames(chunks.encoder_for, names=_OF_PAGES),
    "RunEvent": lambda: _frames(ag_ui.encoder_for, names=_OF_PAGES),
    "PlainToken": lambda: _frames(lambda one: PlainEncoder(one.log_id), samples=(PLAIN, FAILED)),
    "RpcMessage": _rpc_messages,
}


@cache
def component(name: str) -> dict[str, Any]:
    """Return the schema of a component."""
    return dict((REPLIES.get(name) or EVENTS[name])())
