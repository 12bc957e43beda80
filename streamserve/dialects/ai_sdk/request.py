"""`POST /ai/chat` bodies → `ChatRequest`: UI messages as turns, and which of them asks for an answer. Pure.

    {id, messages, trigger, messageId}  or  {id, message, …}     the last message alone: the server has the others
    text, file, tool-NAME, dynamic-tool                          the parts that a model gets; all others are the page's

One UI message of an assistant may be several answers, parted by `step-start`, with the results of the page's tools
between them: each is a turn of its own. Further answers are named `<message>:<number>`, as pieces of the message that
the server has, results `<message>/<call>`: they are new. Calls of a pipeline's own functions are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from streamserve.dialects.ai_sdk.message import result_text
from streamserve.dialects.asked import ASKED, Asked, asked_of
from streamserve.dialects.fields import (
    Fields,
    Reader,
    Table,
    any_object,
    conflict,
    described,
    list_of,
    object_schema,
    one_of,
    read,
    required,
    schema_of,
    text,
    wrong_type,
    wrong_value,
)
from streamserve.dialects.generate import build, request_fields, sampling_fields
from streamserve.dialects.messages import any_text, arguments_text, refuse_too_long
from streamserve.dialects.tools import tool_fields, with_tools
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Approved, GenerateRequest, Message

TRIGGERS = ("submit-message", "regenerate-message")
# What becomes of an answer whose tabs are closed; `finish` is made to its end all the same.
ON_DISCONNECT = ("park", "finish", "abort")
PIECE = ":"
_ROLES = ("system", "user", "assistant")
_MAX_ID_CHARS, _MAX_PIECE_CHARS = 120, 64
_MAX_PARTS = 4_096
_NOT_HERE = ("messages", "prompt", "n", "echo", "continue_final_message")
_STATES = (
    *("input-streaming", "input-available", "approval-requested", "approval-responded"),
    *("output-available", "output-error", "output-denied"),
)
_ENDED = ("output-available", "output-error", "output-denied")


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTurn:
    """A turn that the page has sent, under the id of its message, or of the message's piece."""

    id: str
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Asked):
    """A checked body. `generate` has no messages yet, and a `model` "" for the conversation's.

    `edited_id`: the last message, which replaces the message that had this id. `continued_id`: the assistant's message
    that the answer goes on with, as the page has it. `approvals` answer what a pipeline has asked there.
    """

    chat_id: str
    generate: GenerateRequest
    sent: tuple[SentTurn, ...]
    edited_id: str = ""
    continued_id: str = ""
    approvals: tuple[Approved, ...] = ()
    on_disconnect: str = "park"


@dataclass(frozen=True, slots=True, kw_only=True)
class _UIMessage:
    id: str
    role: str
    turns: tuple[SentTurn, ...]
    approvals: tuple[Approved, ...] = ()


def parse(body: Mapping[str, Any], limits: Limits) -> ChatRequest:
    """Check every field of a body; raise `BadRequest` naming the first wrong field."""
    values = read(body, body_fields(limits))
    chat_id: str = values["id"]
    if "message" in values:
        if "messages" in values:
            raise conflict("Send messages, or message, the last of them alone.", "message")
        values["messages"] = (values.pop("message"),)
    regenerates = values.get("trigger") == "regenerate-message"
    found = _answered(required(values, "messages"), regenerates=regenerates)
    last = found[-1]
    turns = tuple(turn for one in found for turn in one.turns)
    refuse_too_long([turn.message for turn in turns], "messages", limits)
    is_edit = not regenerates and last.role == "user" and values.get("messageId") == last.id
    values["messages"] = tuple(turn.message for turn in turns)
    generate = build(values, limits, default_model="")
    if "tools" in values or "tool_choice" in values:
        generate = with_tools(generate, values)
    return ChatRequest(
        chat_id=chat_id,
        generate=replace(generate, messages=None),
        sent=turns,
        edited_id=last.id if is_edit else "",
        continued_id=last.id if last.role == "assistant" else "",
        approvals=last.approvals,
        **asked_of(values),
    )


def _answered(found: tuple[_UIMessage, ...], *, regenerates: bool) -> tuple[_UIMessage, ...]:
    """Return the messages up to the message that asks for an answer. Raises BadRequest where none asks."""
    while regenerates and found and found[-1].role == "assistant":
        found = found[:-1]
    last = found[-1] if found else None
    has_result = last is not None and last.turns and last.turns[-1].message.role == "tool"
    if last is None or (last.role == "assistant" and not has_result and not last.approvals):
        message = (
            "The last message asks for nothing: send a user's message, or an answer with the results of its tools."
        )
        raise BadRequest(message, code="empty_prompt", param="messages")
    return found


@lru_cache(maxsize=8)
def body_fields(limits: Limits) -> Table:
    """Return the readers of a body: the fields of `POST /streams`, but for those of its prompt."""
    native = {**sampling_fields(limits), **request_fields(limits), **tool_fields(limits), **ASKED}
    one = _ui_message(limits)
    readers = {
        **{name: reader for name, reader in native.items() if name not in _NOT_HERE},
        "tools": _tools(native["tools"]),
        "on_disconnect": one_of(*ON_DISCONNECT),
        "id": text(1, 200),
        "messages": list_of(one, low=1, high=limits.max_messages),
        "message": one,
        "trigger": one_of(*TRIGGERS),
        "messageId": any_text,
    }
    return Fields(readers, "id")


def _tools(native: Reader) -> Reader:
    """Read tools as a list, as POST /streams has them, or by name: {NAME: {description, inputSchema}}."""
    table: Table = {"description": any_text, "inputSchema": any_object, "parameters": any_object}

    @described(
        lambda: {
            "anyOf": [schema_of(native), {"type": "object", "additionalProperties": object_schema(table)}],
        }
    )
    def reader(value: Any, param: str) -> Any:
        if not isinstance(value, dict):
            return native(value, param)
        functions = []
        for name, tool in value.items():
            fields = read(any_object(tool, f"{param}.{name[:64]}"), table, prefix=f"{param}.{name[:64]}.")
            schema = fields.get("inputSchema", fields.get("parameters", {"type": "object", "properties": {}}))
            function = {"name": name, "description": fields.get("description", ""), "parameters": schema}
            functions.append({"type": "function", "function": function})
        return native(functions, param)

    return reader


def _ui_message(limits: Limits) -> Reader:
    words = text(0, limits.max_body_bytes)
    parts = list_of(any_object, high=_MAX_PARTS)
    fields = {"role": schema_of(one_of(*_ROLES)), "id": {"type": "string", "maxLength": _MAX_ID_CHARS}}
    part = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
    several = {"anyOf": [{**schema_of(parts), "items": part}, {"type": "null"}]}
    properties = {**fields, "parts": several, "content": {}}

    @described({"title": "UIMessage", "type": "object", "properties": properties, "required": ["role"]})
    def reader(value: Any, param: str) -> _UIMessage:
        given = any_object(value, param)
        role = one_of(*_ROLES)(required(given, "role", prefix=param + "."), param + ".role")
        id_ = _message_id(given.get("id", ""), param + ".id")
        if isinstance(given.get("content"), str) and given.get("parts") is None:  # of an older page
            given["parts"] = [{"type": "text", "text": given["content"]}]
        found = parts(required(given, "parts", prefix=param + "."), param + ".parts")
        places = [(part, f"{param}.parts[{index}]") for index, part in enumerate(found)]
        for part, where in places:
            any_text(required(part, "type", prefix=where + "."), where + ".type")
        if role == "assistant":
            pieces = _Pieces(id_, param, words)
            for part, where in places:
                pieces.add(part, where)
            return _UIMessage(id=id_, role=role, turns=pieces.end(), approvals=tuple(pieces.approvals))
        message = _asked(role, places, param, words)
        return _UIMessage(id=id_, role=role, turns=(SentTurn(id=id_, message=message),))

    return reader


def _message_id(value: Any, param: str) -> str:
    if not isinstance(value, str):
        wrong_type(value, param, "a string")
    if len(value) > _MAX_ID_CHARS or not (value.isascii() and value.isprintable()):
        wrong_value(param, f"has at most {_MAX_ID_CHARS} printable ASCII characters")
    return value


def _asked(role: str, places: list[tuple[dict[str, Any], str]], param: str, words: Reader) -> Message:
    """Return the message of a user or of the system."""
    texts: list[str] = []
    parts: list[Mapping[str, Any]] = []
    for part, where in places:
        if part["type"] == "text":
            texts.append(words(required(part, "text", prefix=where + "."), where + ".text"))
            parts.append({"type": "text", "text": texts[-1]})
        elif part["type"] == "file" and role == "user":
            parts.append(_file(part, where))
    has_files = len(parts) > len(texts)
    return Message(role=role, content="\n".join(texts), param=param, parts=tuple(parts) if has_files else ())


def _file(part: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a file as models elsewhere take it (docs/remote.md#images-and-files)."""
    kind = any_text(required(part, "mediaType", prefix=where + "."), where + ".mediaType")
    url = any_text(required(part, "url", prefix=where + "."), where + ".url")
    if kind.partition("/")[0] == "image":
        return {"type": "image_url", "image_url": {"url": url}}
    name = part.get("filename")
    named = {"filename": any_text(name, where + ".filename")} if name is not None else {}
    return {"type": "file", "file": {"file_data": url, **named}}


@dataclass(slots=True)
class _Pieces:
    """Takes the parts of an assistant's message, and makes its turns: of each step an answer, and its results."""

    id: str
    param: str
    words: Reader
    approvals: list[Approved] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _calls: list[dict[str, Any]] = field(default_factory=list)
    _results: list[SentTurn] = field(default_factory=list)
    _turns: list[SentTurn] = field(default_factory=list)
    _num_answers: int = 0

    def add(self, part: dict[str, Any], where: str) -> None:
        """Take a part."""
        kind: str = part["type"]
        if kind == "step-start":
            self._turns += self._step()
        elif kind == "text":
            self._texts.append(self.words(required(part, "text", prefix=where + "."), where + ".text"))
        elif kind == "dynamic-tool" or kind.startswith("tool-"):
            self._tool(part, where)

    def end(self) -> tuple[SentTurn, ...]:
        """Return the turns; a message in which a model has said nothing has none."""
        return (*self._turns, *self._step())

    def _step(self) -> Iterator[SentTurn]:
        texts, calls, results = self._texts, self._calls, self._results
        self._texts, self._calls, self._results = [], [], []
        if not (texts or calls):
            return
        extra = {"tool_calls": calls} if calls else {}
        message = Message(role="assistant", content="".join(texts), extra=extra, param=self.param)
        name = f"{PIECE}{self._num_answers}" if self._num_answers else ""
        yield SentTurn(id=self._piece(name), message=message)
        self._num_answers += 1
        yield from results

    def _piece(self, name: str) -> str:
        return f"{self.id}{name}" if self.id else ""

    def _tool(self, part: dict[str, Any], where: str) -> None:
        state = one_of(*_STATES)(required(part, "state", prefix=where + "."), where + ".state")
        call_id = text(1, 512)(required(part, "toolCallId", prefix=where + "."), where + ".toolCallId")
        if part.get("providerExecuted") is True:
            if state == "approval-responded":
                self.approvals.append(_approved(part, call_id, where))
            return
        if state not in _ENDED:  # a call without its result: templates want both
            return
        name = part["type"].removeprefix("tool-")
        if part["type"] == "dynamic-tool":
            name = any_text(required(part, "toolName", prefix=where + "."), where + ".toolName")
        value = part.get("input")
        arguments = value if isinstance(value, str) else arguments_text({} if value is None else value)
        self._calls.append(
            {
                "id": call_id,
                "type": "function",
                "function": {"name": text(1, 4_096)(name, where), "arguments": arguments},
            }
        )
        result = "Error: The user has refused the call." if state == "output-denied" else result_text(part)
        extra = {"tool_call_id": call_id, "name": name}
        message = Message(role="tool", content=self.words(result, where), extra=extra, param=where)
        self._results.append(SentTurn(id=self._piece(f"/{_short(call_id)}"), message=message))


def _short(call_id: str) -> str:
    """Return the id of a call as a message's piece has it."""
    is_short = len(call_id) <= _MAX_PIECE_CHARS and call_id.isascii() and call_id.isprintable()
    return call_id if is_short else hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _approved(part: Mapping[str, Any], call_id: str, where: str) -> Approved:
    """Return the user's answer to what a pipeline asks."""
    approval = any_object(required(part, "approval", prefix=where + "."), where + ".approval")
    allow = approval.get("approved")
    if type(allow) is not bool:
        message = f"{where}.approval.approved is true or false: addToolApprovalResponse sets it."
        raise BadRequest(message, code="invalid_type", param=f"{where}.approval.approved")
    reason = approval.get("reason")
    return Approved(id=call_id, allow=allow, message="" if reason is None else any_text(reason, where + ".approval"))
