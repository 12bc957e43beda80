"""`"format": "tokens"`: the plainest SSE there is, `data: {"token": "…"}` until `data: [DONE]`. A pure fold.

`[DONE]` follows success only. Whatever else ended the stream stands in a last `data: {"error": {…}}`.
"""

from __future__ import annotations

from typing import Any

from streamserve.dialects.ending import Ending, ending
from streamserve.protocol.events import GoingAway, LoggedEvent, Token, is_terminal
from streamserve.protocol.ids import event_id
from streamserve.protocol.sse import CONTENT_TYPE, FIRST_BYTES, KEEPALIVE, frame, one_line_json


class TokensEncoder:
    """Text of one choice, and how it ended."""

    content_type = CONTENT_TYPE
    first_bytes = FIRST_BYTES
    keepalive = KEEPALIVE
    takes_snapshots = False

    def __init__(self, log_id: str) -> None:
        self._log_id = log_id

    def encode(self, logged: LoggedEvent) -> bytes:
        """Return one frame for new text and for the end, nothing for the rest."""
        event = logged.event
        if isinstance(event, Token) and event.text:
            return self._frame(one_line_json({"token": event.text}), logged)
        if is_terminal(event):
            end = ending(event)
            return self._frame("[DONE]" if end is None else one_line_json(_error_json(end)), logged)
        return b""

    def farewell(self, farewell: GoingAway) -> bytes:
        """Say nothing: without `[DONE]` it is not over, and an EventSource comes again by itself."""
        return b""

    def _frame(self, data: str, logged: LoggedEvent) -> bytes:
        return frame(data, id=event_id(self._log_id, logged.seq) if logged.seq else None)


def _error_json(end: Ending) -> dict[str, Any]:
    return {"error": {"code": end.code, "message": end.message, "param": None}}
