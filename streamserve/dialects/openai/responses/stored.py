"""Responses that are kept for their callers: their value, queries of lists, and the JSON of each. Pure.

Shapes as the official client's types have them (openai 3.52, `types/responses`, `pagination.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamserve.dialects.fields import Table, digits, flag, read
from streamserve.dialects.openai.batches import page_fields, parse_page
from streamserve.dialects.openai.responses.items import Item, with_ids
from streamserve.dialects.openai.responses.output import PREFIX
from streamserve.protocol.errors import BadRequest, NotFound

MOST, USUAL = 100, 20
_ID = re.compile(f"{PREFIX}([0-9a-f]{{32}})")
_CONVERSATION = re.compile("conv_([0-9a-f]{32})")
_LISTED = ("limit", "order", "after")
RETRIEVED: Table = {"stream": flag, "starting_after": digits(0, 10**15 - 1), "include_obfuscation": flag}
LISTED: Table = {name: reader for name, reader in page_fields(MOST).items() if name in _LISTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response that is kept. `head` repeats what was asked, `items` are those that the request has sent.

    `whole` is the response as it was answered, None where its events are still to be read.
    """

    stream_id: str
    head: Mapping[str, Any]
    items: Sequence[Item] = ()
    whole: Mapping[str, Any] | None = None

    @property
    def previous_id(self) -> str:
        """The id of the response that it continues, "" for none."""
        return self.head.get("previous_response_id") or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieve:
    """How a response is read. `starting_after`: the number of the last event that the reader has, -1 for none."""

    stream: bool = False
    starting_after: int = -1
    options: Mapping[str, Any] = field(default_factory=dict)


def stream_id_of(response_id: str) -> str:
    """Return the stream's id; "" of anything else."""
    found = _ID.fullmatch(response_id)
    return found[1] if found else ""


def conversation_row(conversation_id: str) -> str:
    """Return the id of a conversation's row; "" of anything else."""
    found = _CONVERSATION.fullmatch(conversation_id)
    return found[1] if found else ""


def no_response(response_id: str) -> NotFound:
    """Return the error for an id that names no response of the caller's, whatever it looks like."""
    message = (
        f"No response {response_id[:64]!r} is kept here. It was asked with store false, was deleted, or is too old."
    )
    return NotFound(message, code="response_not_found", param="response_id")


def no_previous(previous_id: str) -> BadRequest:
    """Return the error for a previous response that cannot be continued, as that API names it."""
    message = f"No response {previous_id[:64]!r} is kept here. Send its items as input, and leave this field out."
    return BadRequest(message, code="previous_response_not_found", param="previous_response_id")


def parse_retrieve(query: Mapping[str, str]) -> Retrieve:
    """Return how a query wants a response. `include` has no effect: a response is shown whole."""
    values = read(_known(query, tuple(RETRIEVED)), RETRIEVED)
    stream, after = values.get("stream", False), values.get("starting_after", -1)
    if after >= 0 and not stream:
        raise BadRequest("'starting_after' is for streams; send stream=true too.", param="starting_after")
    options = {"include_obfuscation": values.get("include_obfuscation", False)}
    return Retrieve(stream=stream, starting_after=after, options=options)


def _known(query: Mapping[str, str], known: Sequence[str]) -> dict[str, str]:
    """Return the query without `include`. Raises BadRequest for a parameter that is not known."""
    rest = {name: value for name, value in query.items() if not name.startswith("include[") and name != "include"}
    for name in rest:
        if name not in known:
            message = f"Unknown parameter {name[:48]!r}. Known: {', '.join(known)}, include."
            raise BadRequest(message, code="unknown_field", param=name[:48])
    return rest


def deleted_json(response_id: str) -> dict[str, Any]:
    """Return what a deletion answers."""
    return {"id": response_id, "object": "response", "deleted": True}


def page_json(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of a list of items, oldest first, that a query asks for."""
    page = parse_page(_known(query, _LISTED), most=MOST, usual=USUAL)
    shown = list(items[::-1] if page.is_newest_first else items)
    if page.after:
        ids = [one["id"] for one in shown]
        if page.after not in ids:
            raise NotFound(f"There is no item {page.after[:64]!r} here.", code="item_not_found", param="after")
        shown = shown[ids.index(page.after) + 1 :]
    part = shown[: page.limit]
    edges = {"first_id": part[0]["id"], "last_id": part[-1]["id"]} if part else {"first_id": None, "last_id": None}
    return {"object": "list", "data": part, "has_more": len(shown) > page.limit, **edges}


def input_items_json(stored: StoredResponse, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of a response's input that a query asks for."""
    return page_json(with_ids(stored.items, f"{PREFIX}{stored.stream_id}"), query)
