"""`OPERATIONS`: of each endpoint its body, its query, and what it replies, by the tables that validate. Values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from streamserve.api import (
    ag_ui,
    ai_sdk,
    anthropic,
    attachments,
    conversation_routes,
    durable,
    jobs,
    mcp,
    native,
    ops,
    pipelines,
    timings,
    usage,
)
from streamserve.api.batch import batches, files
from streamserve.api.call import Endpoint
from streamserve.api.openai import (
    chats,
    completions,
    conversations,
    embeddings,
    models,
    moderations,
    plain_tokens,
    responses,
    tokens,
)
from streamserve.api.resume import AFTER, RESUME
from streamserve.dialects import approvals as approval_dialect
from streamserve.dialects import durable as durable_dialect
from streamserve.dialects import mcp as mcp_dialect
from streamserve.dialects import native as native_dialect
from streamserve.dialects.ag_ui import request as ag_ui_request
from streamserve.dialects.ai_sdk import request as ai_sdk_request
from streamserve.dialects.anthropic import batches as message_batches
from streamserve.dialects.anthropic import message as message_dialect
from streamserve.dialects.anthropic import request as message_request
from streamserve.dialects.fields import Schema, Table, boolean, object_schema, schema_of, text
from streamserve.dialects.generate import MODEL, prompt_text
from streamserve.dialects.openai import batches as batch_dialect
from streamserve.dialects.openai import completions as completion_dialect
from streamserve.dialects.openai import embeddings as embedding_dialect
from streamserve.dialects.openai import moderations as moderation_dialect
from streamserve.dialects.openai import plain_tokens as plain_dialect
from streamserve.dialects.openai import request as chat_request
from streamserve.dialects.openai import stored_chat
from streamserve.dialects.openai import tokens as token_dialect
from streamserve.dialects.openai.responses import conversation as conversation_dialect
from streamserve.dialects.openai.responses import request as response_request
from streamserve.dialects.openai.responses import stored
from streamserve.dialects.pace import PACE
from streamserve.protocol.limits import Limits

JSON, EVENT_STREAM, LINES, TEXT, MARKDOWN, FORM, BYTES = (
    "application/json",
    "text/event-stream",
    "application/x-ndjson",
    "text/plain",
    "text/markdown",
    "multipart/form-data",
    "application/octet-stream",
)
Tables = Callable[[Limits], Table]
_NONE: Table = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What a method of a route takes and replies.

    `body`: the schema of its JSON, under the name `takes`; `form`: of the form that it takes instead. `reply` and
    `events` name components (replies.py), `media` are the types of other bodies. `is_asking`: it asks a model.
    `has_key`: it takes an Idempotency-Key. `says_why`: what a 503 has is the reply.
    """

    takes: str = ""
    body: Callable[[Limits], Schema] | None = None
    is_body_optional: bool = False
    form: Callable[[Limits], Schema] | None = None
    query: Table | Tables = field(default_factory=dict)
    reply: str = ""
    events: str = ""
    media: tuple[str, ...] = ()
    status: int = 200
    statuses: tuple[int, ...] = ()
    is_asking: bool = False
    has_key: bool = False
    is_resuming: bool = False
    says_why: bool = False


def _body(table: Tables) -> Callable[[Limits], Schema]:
    return lambda limits: object_schema(table(limits))


def _fixed(table: Table) -> Callable[[Limits], Schema]:
    return lambda limits: object_schema(table)


def _native(limits: Limits, *left_out: str, in_conversations: bool = False, more: Table = _NONE) -> Schema:
    table = native_dialect.body_fields(limits, has_page=False, in_conversations=in_conversations)
    return object_schema({**{name: one for name, one in table.items() if name not in left_out}, **more})


def run_body(limits: Limits) -> Schema:
    """Return the body of `POST /pipelines/{name}`."""
    return _native(limits, more={"stream": boolean})


def _asked(limits: Limits) -> Schema:
    content = prompt_text(limits)
    return _native(limits, *conversation_routes.IN_PATH, in_conversations=True, more={"content": content})


def _job(limits: Limits) -> Schema:
    name = {"pipeline": MODEL, "webhook": text(0, 200)}
    new = _native(limits, *jobs.OF_READERS, more=name)
    return {"anyOf": [{**new, "required": ["pipeline"]}, object_schema(jobs.CONTINUED)]}


def _rating(limits: Limits) -> Schema:
    return {**object_schema(conversation_routes.RATE), "required": ["rating"]}


def _notes(table: Tables) -> Callable[[Limits], Schema]:
    """Return the body of an update of metadata, which may be null."""
    return lambda limits: {**object_schema(table(limits)), "required": ["metadata"]}


def _form(limits: Limits, table: Table = _NONE) -> Schema:
    fields = object_schema(table)
    file = {"type": "string", "format": "binary"}
    properties = {name: schema_of(reader) for name, reader in table.items()}
    return {**fields, "properties": {**properties, "file": file}, "required": [*fields.get("required", ()), "file"]}


def _count(limits: Limits) -> Schema:
    return {**object_schema(message_request.body_fields(limits)), "required": ["messages"]}


def _message(limits: Limits) -> Schema:
    return {**object_schema(message_request.body_fields(limits)), "required": ["max_tokens"]}


def _counted_response(limits: Limits) -> Schema:
    schema = object_schema(response_request.body_fields(limits))
    return {**schema, "properties": {**schema["properties"], "personality": {}}}


def _run(limits: Limits) -> Schema:
    return object_schema(ag_ui_request.body_fields(limits), is_open=True)


def _scalars(table: Table) -> Table:
    """Return the fields that a query can spell: texts, numbers, true and false."""
    kinds = ("string", "integer", "number", "boolean")
    return {name: reader for name, reader in table.items() if schema_of(reader).get("type") in kinds}


def _prompt_query(limits: Limits) -> Table:
    return _scalars(native_dialect.body_fields(limits, has_page=False, in_conversations=False))


def _tokens_query(limits: Limits) -> Table:
    return _scalars(plain_dialect.body_fields(limits))


def _object(limits: Limits) -> Schema:
    """Return the body of a POST that takes any object, or none."""
    return {"type": "object"}


_EMPTY = _fixed({})
_streams = partial(Operation, events="StreamEvent", media=(TEXT,))
_asks = partial(Operation, is_asking=True, has_key=True)
_resumes = partial(Operation, is_resuming=True, query=RESUME)
_openai_list = partial(Operation, query=stored.LISTED)

OPERATIONS: Mapping[Endpoint, Operation] = {
    native.start_stream: _asks(
        takes="StreamRequest", body=partial(_native, in_conversations=True), events="StreamEvent", media=(TEXT,)
    ),
    native.new_stream: _streams(is_asking=True, is_resuming=True, query=_prompt_query),
    native.stream_state: Operation(reply="StreamState", statuses=(410,)),
    native.stream_events: _resumes(events="StreamEvent", media=(TEXT,)),
    durable.read_log: Operation(
        reply="LogItems", events="LogItem", query=durable_dialect.QUERY, is_resuming=True, statuses=(304,)
    ),
    native.stop_stream: Operation(
        body=_fixed(native_dialect.STOP_FIELDS), is_body_optional=True, reply="StreamState", statuses=(410,)
    ),
    native.approve: _asks(
        takes="ApprovalRequest", body=_fixed(approval_dialect.FIELDS), events="StreamEvent", media=(TEXT,)
    ),
    native.ack_stream: Operation(body=_fixed(native_dialect.ACK_FIELDS), reply="Counted"),
    timings.report: Operation(takes="ReaderTimes", body=_fixed(native_dialect.TIMES_FIELDS), reply="Counted"),
    native.watch: Operation(events="StreamEvent", query=AFTER, is_resuming=True),
    pipelines.pipelines: Operation(reply="Pipelines"),
    pipelines.get_run: Operation(
        query=PACE, reply="Run", events="StreamEvent", media=(TEXT,), is_asking=True, is_resuming=True
    ),
    pipelines.post_run: _asks(takes="RunRequest", body=run_body, reply="Run", events="StreamEvent", media=(TEXT,)),
    jobs.list_jobs: Operation(query=jobs.LIST, reply="JobList"),
    jobs.enqueue: _asks(takes="JobRequest", body=_job, reply="JobView", status=202),
    jobs.job: Operation(reply="JobView"),
    jobs.job_events: _resumes(events="StreamEvent", media=(TEXT,)),
    jobs.cancel_job: Operation(body=_object, is_body_optional=True, reply="JobView"),
    conversation_routes.list_conversations: Operation(
        query=conversation_routes.LIST, reply="ConversationList", statuses=(304,)
    ),
    conversation_routes.create: Operation(
        body=_fixed(conversation_routes.NEW), is_body_optional=True, reply="Conversation", status=201
    ),
    conversation_routes.conversation: Operation(reply="Conversation", statuses=(304,)),
    conversation_routes.change: Operation(body=_fixed(conversation_routes.CHANGE), reply="Conversation"),
    conversation_routes.delete: Operation(reply="Deleted"),
    conversation_routes.list_messages: Operation(
        query=conversation_routes.PAGE, reply="ConversationMessageList", statuses=(304,)
    ),
    conversation_routes.ask: _asks(takes="Question", body=_asked, events="StreamEvent", media=(TEXT,)),
    conversation_routes.rate: Operation(body=_rating, reply="ConversationMessage"),
    conversation_routes.export: Operation(
        query=conversation_routes.EXPORT, reply="ConversationExport", media=(MARKDOWN,)
    ),
    conversation_routes.list_shares: Operation(query=conversation_routes.PAGE, reply="ShareList"),
    conversation_routes.share: Operation(
        body=_fixed(conversation_routes.SHARE), is_body_optional=True, reply="NewShare", status=201
    ),
    conversation_routes.revoke_share: Operation(reply="Revoked"),
    attachments.list_attachments: Operation(query=attachments.LIST, reply="AttachmentList"),
    attachments.upload: Operation(form=_form, reply="Attachment", status=201, statuses=(507,)),
    attachments.attachment: Operation(reply="Attachment"),
    attachments.delete: Operation(reply="Deleted"),
    attachments.content: Operation(media=(BYTES,)),
    ai_sdk.start_chat: _asks(takes="UIChatRequest", body=_body(ai_sdk_request.body_fields), events="UIMessageChunk"),
    ai_sdk.chat_messages: Operation(reply="UIMessages"),
    ai_sdk.chat_stream: Operation(events="UIMessageChunk", query={**AFTER, **PACE}, is_resuming=True),
    ai_sdk.stop_chat: Operation(body=_EMPTY, is_body_optional=True, reply="StoppedChat"),
    ag_ui.start_run: _asks(takes="RunAgentInput", body=_run, events="RunEvent", query=AFTER),
    ag_ui.thread_messages: Operation(reply="ThreadMessages"),
    ag_ui.thread_stream: Operation(events="RunEvent", query={**AFTER, "runId": text(0, 200), **PACE}, is_resuming=True),
    ag_ui.stop_thread: Operation(body=_EMPTY, is_body_optional=True, reply="StoppedThread"),
    usage.list_usage: Operation(query=usage.LIST, reply="Usage"),
    chats.list_chats: Operation(query=stored_chat.LIST, reply="ChatCompletionList"),
    chats.create_chat: _asks(
        takes="ChatCompletionRequest",
        body=_body(chat_request.body_fields),
        reply="ChatCompletion",
        events="ChatCompletionChunk",
    ),
    chats.chat: Operation(reply="StoredChatCompletion", statuses=(409, 410)),
    chats.annotate_chat: Operation(body=_notes(stored_chat.update_fields), reply="StoredChatCompletion"),
    chats.delete_chat: Operation(reply="DeletedObject"),
    chats.chat_messages: Operation(query=stored_chat.MESSAGES, reply="StoredMessageList"),
    responses.create_response: _asks(
        takes="ResponseRequest",
        body=_body(response_request.body_fields),
        reply="Response",
        events="ResponseEvent",
    ),
    responses.count_tokens: Operation(
        takes="ResponseTokensRequest", body=_counted_response, reply="InputTokens", is_asking=True
    ),
    responses.retrieve: Operation(query=stored.RETRIEVED, reply="Response", events="ResponseEvent", is_resuming=True),
    responses.delete: Operation(reply="DeletedObject"),
    responses.cancel: Operation(reply="Response", statuses=(410,)),
    responses.input_items: _openai_list(reply="ResponseItemList"),
    conversations.create: Operation(
        body=_body(conversation_dialect.new_fields), is_body_optional=True, reply="ResponseConversation"
    ),
    conversations.conversation: Operation(reply="ResponseConversation"),
    conversations.update: Operation(body=_notes(conversation_dialect.metadata_fields), reply="ResponseConversation"),
    conversations.delete: Operation(reply="DeletedObject"),
    conversations.list_items: _openai_list(reply="ResponseItemList"),
    conversations.add_items: Operation(body=_body(conversation_dialect.item_fields), reply="ResponseItemList"),
    conversations.item: Operation(reply="ResponseItem"),
    conversations.delete_item: Operation(reply="ResponseConversation"),
    completions.completions: _asks(
        takes="CompletionRequest",
        body=_body(completion_dialect.body_fields),
        reply="Completion",
        events="CompletionChunk",
    ),
    plain_tokens.get_tokens: Operation(query=_tokens_query, events="PlainToken", is_asking=True, is_resuming=True),
    plain_tokens.post_tokens: _asks(takes="TokensRequest", body=_body(plain_dialect.body_fields), events="PlainToken"),
    embeddings.embeddings: Operation(
        takes="EmbeddingsRequest", body=_body(embedding_dialect.body_fields), reply="EmbeddingList", is_asking=True
    ),
    moderations.moderations: Operation(
        takes="ModerationRequest", body=_body(moderation_dialect.body_fields), reply="Moderation"
    ),
    anthropic.messages: _asks(takes="MessageRequest", body=_message, reply="Message", events="MessageEvent"),
    anthropic.count_tokens: Operation(takes="CountTokensRequest", body=_count, reply="TokenCount", is_asking=True),
    batches.list_messages: Operation(query=message_dialect.LIST, reply="MessageBatchList"),
    batches.create_messages: Operation(
        has_key=True,
        takes="MessageBatchRequest",
        body=_body(message_batches.body_fields),
        reply="MessageBatch",
        statuses=(507,),
    ),
    batches.message_batch: Operation(reply="MessageBatch"),
    batches.delete_messages: Operation(reply="DeletedMessageBatch"),
    batches.cancel_messages: Operation(body=_object, is_body_optional=True, reply="MessageBatch"),
    batches.message_results: Operation(media=(BYTES,)),
    models.stream_events: _resumes(events="ChatCompletionChunk", media=(TEXT,)),
    models.models: Operation(reply="ModelList"),
    models.model: Operation(reply="Model"),
    files.list_files: Operation(query=batch_dialect.page_fields(batch_dialect.MOST_FILES), reply="FileList"),
    files.upload: Operation(
        has_key=True, form=partial(_form, table=batch_dialect.UPLOAD_FIELDS), reply="File", statuses=(507,)
    ),
    files.file: Operation(reply="File"),
    files.delete: Operation(reply="DeletedObject"),
    files.content: Operation(media=(BYTES,)),
    batches.list_batches: Operation(query=batch_dialect.page_fields(batch_dialect.MOST_BATCHES), reply="BatchList"),
    batches.create: Operation(has_key=True, takes="BatchRequest", body=_body(batch_dialect.body_fields), reply="Batch"),
    batches.batch: Operation(reply="Batch"),
    batches.cancel: Operation(body=_object, is_body_optional=True, reply="Batch"),
    mcp.get_events: Operation(events="RpcMessage", is_resuming=True, statuses=(405,)),
    mcp.post_message: Operation(
        takes="RpcRequest",
        body=lambda limits: mcp_dialect.MESSAGE,
        reply="RpcResult",
        events="RpcMessage",
        is_asking=True,
        statuses=(202,),
    ),
    tokens.tokenize: Operation(
        takes="TokenizeRequest", body=_body(token_dialect.tokenize_fields), reply="Tokens", is_asking=True
    ),
    tokens.detokenize: Operation(
        takes="DetokenizeRequest", body=_body(token_dialect.detokenize_fields), reply="Prompt", is_asking=True
    ),
    ops.livez: Operation(reply="Live"),
    ops.readyz: Operation(reply="Ready", says_why=True),
    ops.metrics: Operation(media=(TEXT,)),
}
# What the document says of itself.
ITSELF = Operation(reply="OpenAPI", statuses=(304,))
