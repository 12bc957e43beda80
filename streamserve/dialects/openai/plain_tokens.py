"""`/v1/completions/stream`: bodies and queries in, `data: {"token": "…"}` until `data: [DONE]` out. Pure folds.

The pages of tutorials read it: a bare EventSource, or a loop that splits lines. So every line is `data:`, `id:` or
`event: error`, and a keepalive is a token without text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamserve.dialects.base import Ending
from streamserve.dialects.fields import Table, conflict, integer, number, read
from streamserve.dialects.generate import build, request_fields, sampling_fields
from streamserve.dialects.native import TokensEncoder, on_disconnect, query_values
from streamserve.dialects.openai.chat import error_json
from streamserve.protocol.errors import StreamserveError, to_body
from streamserve.protocol.events import LoggedEvent
from streamserve.protocol.requests import GenerateRequest, Limits
from streamserve.protocol.sse import frame, one_line_json

_NO_TEXT = frame(one_line_json({"token": ""}))
# The id of a refusal: an EventSource that connects again sends it, and is answered 204, at which it stops.
REFUSED_ID = "refused"
MAX_KEEPALIVE_SECONDS, MAX_INTERVAL_MS = 300, 5_000
PACE: Table = {
    "keepalive_seconds": number(1, MAX_KEEPALIVE_SECONDS),
    "interval_ms": integer(0, MAX_INTERVAL_MS),
}


class PlainEncoder(TokensEncoder):
    """`TokensEncoder` without comments. An error is an `error` event, whose data an EventSource gives to `onerror`."""

    first_bytes = _NO_TEXT
    keepalive = _NO_TEXT

    def _error(self, end: Ending, logged: LoggedEvent) -> bytes:
        return self._frame(one_line_json(error_json(to_body(end.error()))), logged, event="error")


def refusal(error: StreamserveError) -> bytes:
    """Return an error as the only event of a response: a page with an EventSource cannot read that of a 4xx."""
    return frame(one_line_json(error_json(to_body(error))), event="error", id=REFUSED_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often a reader wants frames, as far as it says: at most one an interval; one after so long a silence."""

    keepalive_seconds: float | None = None
    interval_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRequest:
    """A checked body or query. `latency_class` None leaves it to the defaults."""

    generate: GenerateRequest
    pace: Pace
    latency_class: str | None = None
    on_disconnect: str = "park"


def parse(body: Mapping[str, Any], limits: Limits, *, default_model: str) -> PlainRequest:
    """Check every field; raise `BadRequest` naming the first wrong one."""
    values = read(body, {**sampling_fields(limits), **request_fields(limits), **PACE, "on_disconnect": on_disconnect})
    if values.get("n", 1) > 1:
        raise conflict("This stream shows one choice; use /v1/completions or /streams for n above 1.", "n")
    if "logprobs" in values:
        raise conflict("This stream shows no logprobs; use /v1/completions or /streams.", "logprobs")
    return PlainRequest(
        generate=build(values, limits, default_model=default_model),
        pace=_pace_of(values),
        latency_class=values.get("latency_class"),
        on_disconnect=values.get("on_disconnect", "park"),
    )


def parse_query(query: Mapping[str, str], limits: Limits, *, default_model: str) -> PlainRequest:
    """Check a query: the fields of `parse` whose values are text, numbers or true and false."""
    return parse(query_values(query), limits, default_model=default_model)


def pace_of_query(query: Mapping[str, str]) -> Pace:
    """Return the pace that a query asks for, whatever else is in it."""
    return _pace_of(read({name: value for name, value in query_values(query).items() if name in PACE}, PACE))


def _pace_of(values: Mapping[str, Any]) -> Pace:
    interval_ms = values.get("interval_ms")
    return Pace(
        keepalive_seconds=values.get("keepalive_seconds"),
        interval_seconds=None if interval_ms is None else interval_ms / 1000,
    )
