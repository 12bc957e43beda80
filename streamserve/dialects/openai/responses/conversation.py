"""Conversations of the Responses API: bodies, and the messages that are kept as items. Pure.

A kept message is one item, an answer as many as it has blocks; its items have the ids that they had in its response.
Shapes as the official client's types have them (openai 3.52, `types/conversations`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from streamserve.dialects.fields import Fields, Table, anything, described, list_of, read, schema_of
from streamserve.dialects.fold import THINKING, TOOL_USE
from streamserve.dialects.generate import metadata
from streamserve.dialects.openai.responses.items import Item, messages_of, read_items
from streamserve.dialects.openai.responses.output import SERVER_LABEL, SERVER_TOOL_USE, TOOL_RESULT, annotation_json
from streamserve.protocol.errors import BadRequest, NotFound
from streamserve.protocol.events import TEXT, Citation
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import SYSTEM_ROLES, Message

PREFIX = "conv_"
MOST_ITEMS = 20  # that are added at a time, as there
_ITEM = re.compile(r"[a-z]{1,4}_([0-9a-f]{32})(?:_[0-9]{1,6})?")


class KeptMessage(Protocol):
    """A message of a conversation."""

    @property
    def id(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def blocks(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def citations(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def text(self) -> str: ...
    @property
    def stream_id(self) -> str: ...


def new_fields(limits: Limits) -> Table:
    """Return the readers of the fields of a new conversation."""
    return {"items": _items(limits), "metadata": metadata(limits)}


def metadata_fields(limits: Limits) -> Table:
    """Return the readers of the fields of an update."""
    return {"metadata": metadata(limits)}


def item_fields(limits: Limits) -> Table:
    """Return the readers of the fields of items that are added."""
    return Fields({"items": _items(limits)}, "items")


def parse_new(body: Mapping[str, Any], limits: Limits) -> tuple[list[Message], Mapping[str, str]]:
    """Return the messages and the metadata of a new conversation."""
    values = read(body, new_fields(limits))
    return values.get("items", []), values.get("metadata", {})


def parse_metadata(body: Mapping[str, Any], limits: Limits) -> Mapping[str, str]:
    """Return the metadata that replaces the old; null is none."""
    if "metadata" not in body:
        raise BadRequest("metadata is missing.", code="missing_field", param="metadata")
    found: Mapping[str, str] = read(body, metadata_fields(limits)).get("metadata", {})
    return found


def parse_items(body: Mapping[str, Any], limits: Limits) -> list[Message]:
    """Return the messages that are added."""
    found: list[Message] = read(body, item_fields(limits))["items"]
    if not found:
        raise BadRequest("items must not be empty.", code="invalid_value", param="items")
    return found


def _items(limits: Limits) -> Any:
    several = read_items(limits)
    count = list_of(anything, high=MOST_ITEMS)

    @described(lambda: {**schema_of(several)["anyOf"][1], "minItems": 0, "maxItems": MOST_ITEMS})
    def reader(value: Any, param: str) -> list[Message]:
        if value == []:
            return []
        count(value, param)
        messages = messages_of(several(value, param), param)
        for message in messages:
            if message.role in SYSTEM_ROLES or message.parts:
                what = f"of role {message.role}" if message.role in SYSTEM_ROLES else "with images or files"
                said = f"{message.param}: a conversation keeps no message {what}. Send it with each response."
                raise BadRequest(said, code="unsupported_content", param=message.param)
        return messages

    return reader


def conversation_json(row_id: str, created: int, notes: Mapping[str, str]) -> dict[str, Any]:
    """Return a conversation."""
    return {"id": f"{PREFIX}{row_id}", "object": "conversation", "created_at": created, "metadata": dict(notes)}


def deleted_json(row_id: str) -> dict[str, Any]:
    """Return what a deletion answers."""
    return {"id": f"{PREFIX}{row_id}", "object": "conversation.deleted", "deleted": True}


def row_of(item_id: str) -> str:
    """Return the id of the message, or of the stream, that an item's id is made of; "" of anything else."""
    found = _ITEM.fullmatch(item_id)
    return found[1] if found else ""


def no_item(item_id: str, param: str = "item_id") -> NotFound:
    """Return the error for an id that no item of the conversation has."""
    return NotFound(f"There is no item {item_id[:64]!r} here.", code="item_not_found", param=param)


def items_of(messages: Iterable[KeptMessage]) -> list[Item]:
    """Return the items of messages, in order. An answer that runs has none yet."""
    return [item for message in messages for item in _items_of(message)]


def _items_of(message: KeptMessage) -> list[Item]:
    if message.role == "user":
        part = {"type": "input_text", "text": message.text}
        return [_message(f"msg_{message.id}", "user", part)]
    if message.role == "tool":
        call_id = next((block.get("id") for block in message.blocks), "")
        shown = {"call_id": call_id, "output": message.text, "status": "completed"}
        return [{"id": f"fco_{message.id}", "type": "function_call_output", **shown}]
    results = {block.get("id"): block["text"] for block in message.blocks if block["kind"] == TOOL_RESULT}
    found = [_item(message, block, results) for block in message.blocks]
    return [item for item in found if item is not None]


def _item(message: KeptMessage, block: Mapping[str, Any], results: Mapping[Any, str]) -> Item | None:
    number, text = f"{message.stream_id or message.id}_{block['index']}", block["text"]
    if block["kind"] == TEXT:
        part = {"type": "output_text", "text": text, "annotations": _annotations(message, block), "logprobs": []}
        return _message(f"msg_{number}", "assistant", part) if text else None
    if block["kind"] == THINKING:
        return {"id": f"rs_{number}", "type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}
    called = {"name": block.get("name") or "", "arguments": text, "status": "completed"}
    if block["kind"] == TOOL_USE:
        return {"id": f"fc_{number}", "type": "function_call", "call_id": block.get("id") or f"fc_{number}", **called}
    if block["kind"] == SERVER_TOOL_USE:
        own = {"server_label": SERVER_LABEL, "output": results.get(block.get("id")), "error": None}
        return {"id": f"mcp_{number}", "type": "mcp_call", **called, **own}
    return None


def _message(item_id: str, role: str, part: Mapping[str, Any]) -> Item:
    return {"id": item_id, "type": "message", "role": role, "status": "completed", "content": [dict(part)]}


def _annotations(message: KeptMessage, block: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the sources of a block; those of the answer as a whole are of its last text."""
    last = max((one["index"] for one in message.blocks if one["kind"] == TEXT), default=0)
    length, found = len(block["text"]), []
    for one in message.citations:
        if one.get("url") and one.get("index", last) == block["index"]:
            start, end = one.get("start", length), one.get("end", length)
            found.append(annotation_json(Citation(**one), min(start, length), min(end, length)))
    return found
