"""docs/reference/errors.md: every error code, from `CODES`."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from docs.generate.text import head, linked, table
from streamserve.protocol.codes import CODES, FILE, JOB, PYTHON, SOCKET, STREAM, Code

_INTRO = """
A program decides by the `code`; the `message` is safe to show, and names the way out.

| API | body of an error |
|---|---|
| native | `{"error": {"code", "message", "param"}}` |
| OpenAI, under `/v1` | `{"error": {"message", "type", "param", "code"}}` |
| Anthropic, under `/v1/messages`; under `/v1` with `anthropic-version` | [its own](../anthropic.md#errors) |

OpenAI's `type` is `invalid_request_error`, `authentication_error`, `permission_error`, `rate_limit_error` or
`server_error`. `param` is the path of the field to blame (`messages[1].content`), or null. A response with 429 or 503,
or with a 507 that may pass, has `Retry-After`. Every response has `X-Request-Id`, under which the site's log has the
cause of a 500.

After the head of a stream the same codes come in its [`error` event](events.md#error), with `retryable`.
"""
_NAMES = {499: "Client Closed Request"}
_PLACES = {
    STREAM: "They come in the `error` event of a stream, or as the status of a whole answer.",
    SOCKET: "They come in an `error` message of a [WebSocket](../websocket.md).",
    FILE: "They are in the `errors` of a [batch](../batches.md#states), or in a row of its error file.",
    JOB: "They are the error of a [job](../jobs.md) that failed, or of its webhook.",
    PYTHON: "They are raised by the functions of [Python](../python.md).",
}


def page() -> str:
    """Return the page: the codes by their first status, then those that have none, by their place."""
    parts = [head("Reference: errors", _INTRO, "`CODES` (streamserve/protocol/codes.py)")]
    for status in sorted({place for code in CODES.values() for place in code.places if isinstance(place, int)}):
        name = _NAMES.get(status) or HTTPStatus(status).phrase
        parts.append(f"\n## {name}: {status}\n\n{_table(code for code in CODES.values() if code.places[0] == status)}")
    for place, text in _PLACES.items():
        if codes := [code for code in CODES.values() if code.places[0] == place]:
            parts.append(f"\n## Only in a {place}\n\n{text}\n\n{_table(codes)}".replace("in a Python", "in Python"))
    return "".join(parts)


def _table(codes: Iterable[Code]) -> str:
    return table(["code", "also in", "meaning"], [_row(code) for code in codes])


def _row(code: Code) -> list[str]:
    also = ", ".join(str(place) for place in code.places[1:])
    return [f"`{code.code}`", also, linked(code.meaning)]
