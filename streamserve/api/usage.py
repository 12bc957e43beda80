"""`/usage`: what the caller has used, by day, model and kind. asyncio; framework-free. docs/usage.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import date
from decimal import Decimal
from typing import Any, Protocol

from streamserve.api.call import Call, Caller, Reply, json_reply
from streamserve.dialects.fields import Table, digits, read
from streamserve.protocol.errors import NotFound

MAX_DAYS, _DAYS = 366, 30
LIST: Table = {"days": digits(1, MAX_DAYS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What is added to a day. `engine_seconds`: how long engines worked on it, prompt and answer."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_tokens: int = 0
    errors: int = 0
    refused: int = 0
    engine_seconds: float = 0.0

    def __add__(self, other: Used) -> Used:
        """Return both together."""
        return Used(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    def as_json(self) -> dict[str, Any]:
        """Return its JSON."""
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**values, "engine_seconds": round(self.engine_seconds, 3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageView:
    """What a caller's tenant has used of a model on a day, in one kind of work."""

    day: date
    model: str
    kind: str
    used: Used
    cost: Decimal

    def as_json(self) -> dict[str, Any]:
        """Return its JSON."""
        what = {"day": self.day.isoformat(), "model": self.model, "kind": self.kind}
        return {**what, **self.used.as_json(), "cost": float(self.cost)}


class Usage(Protocol):
    """The usage of a site's callers: of a site that keeps it."""

    async def page(self, caller: Caller, num_days: int) -> Sequence[UsageView]:
        """Return what the caller's tenant has used in the last days, today included, the newest first."""


async def list_usage(call: Call, usage: Usage) -> Reply:
    """GET /usage?days=: what the caller has used, by day, model and kind, and the sum."""
    found = await usage.page(call.caller, read(call.query(), LIST).get("days", _DAYS))
    total, cost = Used(), Decimal(0)
    for one in found:
        total, cost = total + one.used, cost + one.cost
    return json_reply({"usage": [one.as_json() for one in found], "total": {**total.as_json(), "cost": float(cost)}})


def usage_off() -> NotFound:
    """Return the error of a site that keeps no usage."""
    return NotFound("This site keeps no usage: USAGE in STREAMSERVE is off.", code="usage_off")
