"""Stored chat completions in the OpenAI shape: queries of lists, the body of an update, and the JSON of each. Pure.

Shapes as the official client's types have them (openai 3.52, `types/chat`, `pagination.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamserve.dialects.batches import Page
from streamserve.dialects.fields import Table, read, text, wrong_value
from streamserve.dialects.generate import metadata
from streamserve.dialects.openai.batches import list_json, page_fields, parse_page
from streamserve.protocol.errors import BadRequest, NotFound
from streamserve.protocol.limits import Limits

MOST, USUAL = 100, 20
_PREFIX = "chatcmpl-"
_ID = re.compile(f"{_PREFIX}([0-9a-f]{{32}})")
_FILTER = re.compile(r"metadata\[(.*)\]", re.DOTALL)
_model = text(0, 256)
_LISTED = ("limit", "after", "order")
MESSAGES: Table = {name: reader for name, reader in page_fields(MOST).items() if name in _LISTED}
LIST: Table = {**MESSAGES, "model": _model}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChat:
    """A stored completion: its JSON as it was answered, the messages of its request, and the caller's own notes."""

    stream_id: str
    completion: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQuery:
    """Which completions are asked for: of a model ("": any), with all these pairs, after one stream's completion."""

    page: Page
    model: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


def parse_list(query: Mapping[str, str], limits: Limits) -> ListQuery:
    """Return the completions that a query asks for, oldest first unless it sets another order, as in that API."""
    pairs = {found[1]: value for name, value in query.items() if (found := _FILTER.fullmatch(name))}
    rest = {name: value for name, value in query.items() if _FILTER.fullmatch(name) is None}
    model = _model(rest.pop("model", ""), "model")
    if "\0" in model:
        wrong_value("model", "has a NUL character")
    page = parse_page({"order": "asc", **_listed(rest)}, most=MOST, usual=USUAL)
    return ListQuery(page=page, model=model, metadata=metadata(limits)(pairs, "metadata"))


def _listed(query: Mapping[str, str]) -> Mapping[str, str]:
    for name in query:
        if name not in _LISTED:
            message = f"Unknown parameter {name[:48]!r}. Known: {', '.join(_LISTED)}, model, metadata[name]."
            raise BadRequest(message, code="unknown_field", param=name[:48])
    return query


def stream_id_of(completion_id: str) -> str:
    """Return the stream's id; "" of anything else."""
    found = _ID.fullmatch(completion_id)
    return found[1] if found else ""


def no_completion(completion_id: str, param: str = "completion_id") -> NotFound:
    """Return the error for an id that names no stored completion of the caller's, whatever it looks like."""
    message = f"No chat completion {completion_id[:64]!r} is stored here. A site that has STORE on keeps answers to"
    return NotFound(f"{message} requests with store: true.", code="completion_not_found", param=param)


def update_fields(limits: Limits) -> Table:
    """Return the readers of the fields of an update."""
    return {"metadata": metadata(limits)}


def parse_update(body: Mapping[str, Any], limits: Limits) -> Mapping[str, str]:
    """Return the metadata that replaces the old; null is none."""
    if "metadata" not in body:
        raise BadRequest("metadata is missing.", code="missing_field", param="metadata")
    found: Mapping[str, str] = read(body, update_fields(limits)).get("metadata", {})
    return found


def completion_json(stored: StoredChat) -> dict[str, Any]:
    """Return the completion with its metadata."""
    return {**stored.completion, "metadata": dict(stored.metadata)}


def page_json(found: Sequence[StoredChat], *, has_more: bool) -> dict[str, Any]:
    """Return a part of the list of completions."""
    return list_json([completion_json(one) for one in found], has_more=has_more)


def deleted_json(stream_id: str) -> dict[str, Any]:
    """Return what a deletion answers."""
    return {"id": f"{_PREFIX}{stream_id}", "object": "chat.completion.deleted", "deleted": True}


def messages_json(stored: StoredChat, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of the request's messages that a query asks for."""
    page = parse_page({"order": "asc", **_listed(query)}, most=MOST, usual=USUAL)
    shown = [_message_json(f"{_PREFIX}{stored.stream_id}-{at}", one) for at, one in enumerate(stored.messages)]
    if page.is_newest_first:
        shown.reverse()
    if page.after:
        ids = [one["id"] for one in shown]
        if page.after not in ids:
            raise NotFound(f"There is no message {page.after!r} here.", code="message_not_found", param="after")
        shown = shown[ids.index(page.after) + 1 :]
    return list_json(shown[: page.limit], has_more=len(shown) > page.limit)


def _message_json(message_id: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as it was sent; content that came in parts is in `content_parts`."""
    content = message.get("content")
    has_parts = isinstance(content, list)
    own = {"id": message_id, "content": None if has_parts else content, "content_parts": content if has_parts else None}
    return {**message, **own}
