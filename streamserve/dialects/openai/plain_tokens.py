"""`/v1/completions/stream`: bodies and queries in, `data: {"token": "…"}` until `data: [DONE]` out. Pure.

The pages of tutorials read it: a bare EventSource, or a loop that splits lines. So every line is `data:`, `id:` or
`event: error`, and a keepalive is a token without text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamserve.dialects.asked import ASKED, Asked, asked_of
from streamserve.dialects.encoder import Frame
from streamserve.dialects.fields import Table, conflict, read
from streamserve.dialects.fold import Failed
from streamserve.dialects.generate import alias_fields, build, request_fields, sampling_fields
from streamserve.dialects.openai.shapes import error_json
from streamserve.dialects.plain import NO_TEXT, TokensEncoder
from streamserve.dialects.query import query_values
from streamserve.protocol.errors import StreamserveError, to_body
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GenerateRequest
from streamserve.protocol.sse import frame, one_line_json

# The id of a refusal: an EventSource that connects again sends it, and is answered 204, at which it stops.
REFUSED_ID = "refused"


class PlainEncoder(TokensEncoder):
    """`TokensEncoder` without comments. An error is an `error` event, whose data an EventSource gives to `onerror`."""

    first_bytes = keepalive = NO_TEXT

    def error(self, failed: Failed) -> Frame:
        """Return the error in this API's shape."""
        return Frame(one_line_json(error_json(to_body(failed.error()))), event="error")


def refusal(error: StreamserveError) -> bytes:
    """Return an error as the only event of a response: a page with an EventSource cannot read the body of a 4xx."""
    return frame(one_line_json(error_json(to_body(error))), event="error", id=REFUSED_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRequest(Asked):
    """A checked body or query. An answer without a reader is parked by default."""

    generate: GenerateRequest
    on_disconnect: str = "park"


def body_fields(limits: Limits) -> Table:
    """Return the readers of a body's fields."""
    return {**sampling_fields(limits), **alias_fields(limits), **request_fields(limits), **ASKED}


def parse(body: Mapping[str, Any], limits: Limits, *, default_model: str) -> PlainRequest:
    """Check every field; raise `BadRequest` naming the first wrong field."""
    values = read(body, body_fields(limits))
    if values.get("n", 1) > 1:
        raise conflict("This stream shows one choice; use /v1/completions or /streams for n above 1.", "n")
    if "logprobs" in values:
        raise conflict("This stream shows no logprobs; use /v1/completions or /streams.", "logprobs")
    return PlainRequest(generate=build(values, limits, default_model=default_model), **asked_of(values))


def parse_query(query: Mapping[str, str], limits: Limits, *, default_model: str) -> PlainRequest:
    """Check a query: the fields of `parse` whose values are text, numbers or true and false."""
    return parse(query_values(query), limits, default_model=default_model)
