"""`POST /ag-ui/{name}` bodies, `RunAgentInput` of AG-UI 1.0 → `RunRequest`. Pure.

    {threadId, runId, messages, tools?, context?, state?, forwardedProps?, resume?}

Fields that are unknown are left out, as the protocol asks. Messages of thoughts and activities are the page's own. The
`context` becomes a system message. Fields of `POST /streams` in `forwardedProps` (temperature, max_tokens, …) are
taken; a pipeline gets the whole object as its `input`, and has tools of its own. An answer to an interrupt is
true or false, or an object with `approved`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NoReturn

from streamserve.dialects.asked import ASKED, Asked, asked_of
from streamserve.dialects.fields import (
    Fields,
    Reader,
    Table,
    any_object,
    anything,
    described,
    list_of,
    object_schema,
    one_of,
    read,
    required,
    schema_of,
    text,
    wire_object,
    wrong_type,
    wrong_value,
)
from streamserve.dialects.generate import build, request_fields, sampling_fields
from streamserve.dialects.generate import state as run_state
from streamserve.dialects.messages import any_text, message_of, message_table, refuse_many_containers, refuse_too_long
from streamserve.dialects.tools import schema_of_arguments, several_tools, tool_name, with_tools
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.ids import is_stream_id
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Approved, GenerateRequest, Message, Tool

# Separates a stream's id from a call's in the id of an interrupt (events.py).
PIECE = ":"
_ROLES = ("developer", "system", "assistant", "user", "tool", "activity", "reasoning")
_PAGES_OWN = ("activity", "reasoning")
_MAX_ID_CHARS, _MAX_INTERRUPTS, _MAX_CONTEXTS, _MAX_PARTS = 200, 64, 256, 1_024
# Fields of `POST /streams` that stand elsewhere here, or do not fit.
_NOT_FORWARDED = (
    *("model", "messages", "prompt", "n", "input", "state", "echo", "continue_final_message"),
    *("metadata", "prediction"),
)
# What a message's fields are called there and here, for the `param` of an error.
_NAMES = {"tool_calls": "toolCalls", "tool_call_id": "toolCallId"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SentMessage:
    """A message as its client has sent it."""

    id: str
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The answers to the interrupts of one run: its stream's id, and what each call may do."""

    stream_id: str
    approvals: tuple[Approved, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest(Asked):
    """A checked body. `generate` has no messages yet. With `resume` the run goes on with an interrupted run."""

    thread_id: str
    run_id: str
    generate: GenerateRequest
    sent: tuple[SentMessage, ...]
    resume: Answered | None = None
    on_disconnect: str = "park"


def parse(body: Mapping[str, Any], limits: Limits, *, model: str, is_pipeline: bool) -> RunRequest:
    """Check every field of a body; raise `BadRequest` naming the first wrong field."""
    table = body_fields(limits)
    values = _some(body, "", table)
    forwarded: dict[str, Any] = values.get("forwardedProps", {})
    known = _forwarded(limits)
    given = read({name: forwarded[name] for name in forwarded if name in known}, known, prefix="forwardedProps.")
    sent = (*_context(values.get("context", ())), *values["messages"])
    refuse_too_long([one.message for one in sent], "messages", limits)
    thread_id, run_id = values["threadId"], values["runId"]
    fields: dict[str, Any] = {"model": model, "messages": (), **given}
    if is_pipeline:
        fields |= {"input": forwarded, "state": values.get("state", {})}
    generate = build(fields, limits, default_model=model)
    if not is_pipeline:
        generate = with_tools(generate, {"tools": values.get("tools", ())})
    return RunRequest(
        thread_id=thread_id,
        run_id=run_id,
        generate=replace(generate, messages=None),
        sent=sent,
        resume=_resume(values.get("resume", ())),
        **asked_of(given),
    )


@lru_cache(maxsize=8)
def body_fields(limits: Limits) -> Table:
    """Return the readers of a body's fields."""
    messages = _messages(limits)
    readers = {
        "threadId": text(1, _MAX_ID_CHARS),
        "runId": text(1, _MAX_ID_CHARS),
        "parentRunId": any_text,
        "protocolVersion": any_text,
        "messages": messages,
        "tools": several_tools(_one_tool(limits), limits),
        "context": list_of(_one_context(limits), high=_MAX_CONTEXTS),
        "state": run_state,
        "forwardedProps": wire_object,
        "resume": list_of(_answer, high=_MAX_INTERRUPTS),
    }
    return Fields(readers, "messages", "threadId", "runId")


@lru_cache(maxsize=8)
def _forwarded(limits: Limits) -> Table:
    """Return the readers of the fields of `POST /streams` that `forwardedProps` may have."""
    native = {**sampling_fields(limits), **request_fields(limits), **ASKED}
    return {name: reader for name, reader in native.items() if name not in _NOT_FORWARDED}


def _some(value: Any, param: str, table: Table) -> dict[str, Any]:
    """Return the checked fields of an object that `table` has; other fields are left out."""
    given = any_object(value, param)
    return read({name: given[name] for name in given if name in table}, table, prefix=f"{param}." if param else "")


def _one_tool(limits: Limits) -> Reader:
    some_text = text(0, limits.max_prompt_chars)
    table = Fields({"name": tool_name, "description": some_text, "parameters": schema_of_arguments}, "name")

    @described(lambda: {"title": "RunTool", **object_schema(table, is_open=True)})
    def reader(value: Any, param: str) -> Tool:
        return Tool(**_some(value, param, table))

    return reader


def _one_context(limits: Limits) -> Reader:
    some_text = text(0, limits.max_prompt_chars)
    table = Fields({"description": some_text, "value": some_text}, "description", "value")

    @described(lambda: object_schema(table, is_open=True))
    def reader(value: Any, param: str) -> str:
        fields = _some(value, param, table)
        return ": ".join(fields[name] for name in ("description", "value") if fields[name])

    return reader


def _context(lines: Sequence[str]) -> tuple[SentMessage, ...]:
    """Return the system message of what the page knows; none where it sends nothing."""
    if not lines:
        return ()
    return (SentMessage(id="", message=Message(role="system", content="\n\n".join(lines), param="context")),)


# Messages


def _messages(limits: Limits) -> Reader:
    table = message_table(limits)
    properties = {"role": schema_of(one_of(*_ROLES)), "id": schema_of(text(1, _MAX_ID_CHARS)), "content": {}}

    @described({"title": "RunMessage", "type": "object", "properties": properties, "required": ["role", "id"]})
    def one(value: Any, param: str) -> SentMessage | None:
        return _message(value, param, table)

    several = list_of(one, high=limits.max_messages)

    @described(lambda: schema_of(several))
    def reader(value: Any, param: str) -> tuple[SentMessage, ...]:
        sent = tuple(one for one in several(value, param) if one is not None)
        refuse_many_containers([one.message for one in sent], param, limits)
        return sent

    return reader


def _message(value: Any, param: str, table: Table) -> SentMessage | None:
    """Return a message; None for a message of the page's own, and for an answer that says nothing."""
    given = any_object(value, param)
    role = one_of(*_ROLES)(required(given, "role", prefix=param + "."), param + ".role")
    id_ = text(1, _MAX_ID_CHARS)(required(given, "id", prefix=param + "."), param + ".id")
    if role in _PAGES_OWN:
        return None
    fields: dict[str, Any] = {name: given[name] for name in ("role", "name") if name in given}
    fields["content"] = _content(given.get("content"), param + ".content")
    if role == "assistant":
        fields["tool_calls"] = given.get("toolCalls")
    elif role == "tool":
        fields["tool_call_id"] = required(given, "toolCallId", prefix=param + ".")
        if not fields["content"] and given.get("error") is not None:
            fields["content"] = f"Error: {any_text(given['error'], param + '.error')}"
    try:
        message = message_of(fields, param, table)
    except BadRequest as error:
        where = error.param or param
        for theirs, ours in _NAMES.items():
            where = where.replace(theirs, ours)
        raise BadRequest(error.message.replace(error.param or param, where), code=error.code, param=where) from error
    says_nothing = role == "assistant" and not message.content and not message.extra.get("tool_calls")
    return None if says_nothing else SentMessage(id=id_, message=message)


def _content(value: Any, param: str) -> Any:
    """Return a content as `messages` has it: text, or parts."""
    if not isinstance(value, list):
        return value
    return list(list_of(_part, high=_MAX_PARTS)(value, param))


def _part(value: Any, param: str) -> dict[str, Any]:
    """Return a part in the shape of OpenAI's; a video, and a sound elsewhere, no model here takes."""
    part = any_object(value, param)
    kind = any_text(required(part, "type", prefix=param + "."), param + ".type")
    if kind == "text":
        return {"type": "text", "text": part.get("text")}
    if kind not in ("image", "audio", "document"):
        _unsupported(param, kind[:64])
    where = param + ".source"
    source = any_object(required(part, "source", prefix=param + "."), where)
    found = one_of("data", "url", "file")(required(source, "type", prefix=where + "."), where + ".type")
    data = any_text(required(source, "value", prefix=where + "."), where + ".value")
    media = any_text(source.get("mimeType") or "", where + ".mimeType")
    if kind == "audio":
        if found != "data":
            _unsupported(param, f"audio with a source of type {found}")
        return {"type": "input_audio", "input_audio": {"data": data, "format": media.rpartition("/")[2] or "wav"}}
    if found == "file":
        return {"type": "file", "file": {"file_id": data}}
    url = f"data:{media};base64,{data}" if found == "data" else data
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "file", "file": {"file_data": url}}


def _unsupported(param: str, kind: str) -> NoReturn:
    raise BadRequest(f"{param} is of type {kind}, which no model here takes.", code="unsupported_content", param=param)


# Answers to interrupts


_status = one_of("resolved", "cancelled")
_RESUME: Table = Fields(
    {"interruptId": text(1, 1_024), "status": _status, "payload": anything, "metadata": any_object},
    *("interruptId", "status"),
)


@described(lambda: object_schema(_RESUME, is_open=True))
def _answer(value: Any, param: str) -> tuple[str, Approved]:
    """Return the interrupted stream's id, and what its user answers to one call."""
    fields = _some(value, param, _RESUME)
    stream_id, _, call_id = fields["interruptId"].partition(PIECE)
    if not is_stream_id(stream_id) or not call_id:
        wrong_value(param + ".interruptId", "is the id of no interrupt of this server")
    if fields["status"] == "cancelled":
        return stream_id, Approved(id=call_id, allow=False)
    allow, message = _payload(fields.get("payload"), param + ".payload")
    return stream_id, Approved(id=call_id, allow=allow, message=message)


def _payload(value: Any, param: str) -> tuple[bool, str]:
    if isinstance(value, bool):
        return value, ""
    if not isinstance(value, dict):
        wrong_type(value, param, "true, false, or an object with `approved`")
    approved = required(value, "approved", prefix=param + ".")
    if not isinstance(approved, bool):
        wrong_type(approved, param + ".approved", "a boolean")
    return approved, text(0, 2_000)(value.get("message") or "", param + ".message")


def _resume(answers: Sequence[tuple[str, Approved]]) -> Answered | None:
    """Return the answers of one run. Raises BadRequest for answers to two."""
    if not answers:
        return None
    stream_ids = [stream_id for stream_id, _ in answers]
    for index, stream_id in enumerate(stream_ids):
        if stream_id != stream_ids[0]:
            wrong_value(f"resume[{index}].interruptId", "is of another run than the first")
    return Answered(stream_id=stream_ids[0], approvals=tuple(approved for _, approved in answers))
