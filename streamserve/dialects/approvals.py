"""The body of `POST /streams/{id}/approvals`: a user's answers to the calls of an interrupted run. Pure.

{"approvals": [{"id": "call_1", "allow": false, "message": "Too dear."}]}, and the fields of a reader
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamserve.dialects.asked import ASKED, Asked, asked_of
from streamserve.dialects.fields import (
    Fields,
    Table,
    any_object,
    boolean,
    described,
    list_of,
    object_schema,
    one_of,
    plain_text,
    read,
    text,
)
from streamserve.dialects.native import FORMATS
from streamserve.dialects.pace import refuse_silent
from streamserve.protocol.requests import Approved

MAX_APPROVALS = 100
_MAX_ID_CHARS, _MAX_MESSAGE_CHARS = 200, 2_000
_ANSWER: Table = Fields(
    {"id": text(1, _MAX_ID_CHARS), "allow": boolean, "message": plain_text(0, _MAX_MESSAGE_CHARS)}, "id", "allow"
)


@described(lambda: object_schema(_ANSWER))
def _approved(value: Any, param: str) -> Approved:
    """Read one answer."""
    return Approved(**read(any_object(value, param), _ANSWER, prefix=f"{param}."))


read_approvals = list_of(_approved, low=1, high=MAX_APPROVALS)
FIELDS: Table = Fields({"approvals": read_approvals, "format": one_of(*FORMATS), **ASKED}, "approvals")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalRequest(Asked):
    """A checked body: the answers, and how to show what follows."""

    approvals: tuple[Approved, ...]
    format: str = "native"
    on_disconnect: str = "park"


def parse(body: Mapping[str, Any]) -> ApprovalRequest:
    """Check every field of a body; raise `BadRequest` naming the first wrong field."""
    values = read(body, FIELDS)
    format_ = values.get("format", "native")
    refuse_silent(values, format_)
    return ApprovalRequest(approvals=values["approvals"], format=format_, **asked_of(values))
