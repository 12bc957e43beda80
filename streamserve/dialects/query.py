"""The fields of a query as the JSON values that they spell: of routes that take them in their address. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from streamserve.protocol.errors import BadRequest

_INTEGER = re.compile(r"-?[0-9]{1,20}")
_DECIMAL = re.compile(r"-?[0-9]{1,20}\.[0-9]{1,20}")
# Fields that are text whatever they look like: `?prompt=42` asks "42".
_TEXT_FIELDS = frozenset({"prompt", "model", "stop", "bad_words", "format", "on_disconnect", "keepalive"})


def query_values(query: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a query's fields."""
    return {name: _scalar(name, query[name]) for name in query}


def _scalar(name: str, text: str) -> Any:
    """Return a query value as the JSON value it spells; any other stays text, which its field's reader refuses."""
    try:
        (name + text).encode()
    except UnicodeEncodeError:
        raise BadRequest("The query holds half of a surrogate pair.", code="invalid_value") from None
    if name in _TEXT_FIELDS:
        return text
    if _INTEGER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text):
        return float(text)
    return {"true": True, "false": False}.get(text, text)
