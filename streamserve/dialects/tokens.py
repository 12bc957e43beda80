"""`"format": "tokens"`: the plainest SSE there is, `data: {"token": "…"}` until `data: [DONE]`. A pure fold.

`[DONE]` follows success only; any other end is a last `data: {"error": {…}}`. Thinking and tool calls are left out.
"""

from __future__ import annotations

from streamserve.dialects.base import Ending, TextBlocks, ending
from streamserve.protocol.events import BlockStart, GoingAway, LoggedEvent, Token, is_terminal
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
        self._blocks = TextBlocks()

    def encode(self, logged: LoggedEvent) -> bytes:
        """Return one frame for new text and for the end, nothing for the rest."""
        event = logged.event
        if isinstance(event, Token):
            if not event.text or event not in self._blocks:
                return b""
            return self._frame(one_line_json({"token": event.text}), logged)
        if isinstance(event, BlockStart):
            self._blocks.note(event)
        if not is_terminal(event):
            return b""
        end = ending(event)
        if end is None:
            return self._frame("[DONE]", logged)
        return self._error(end, logged)

    def going_away(self, notice: GoingAway) -> bytes:
        """Return b"": without `[DONE]` the answer is not over, and an EventSource connects again by itself."""
        return b""

    def _error(self, end: Ending, logged: LoggedEvent) -> bytes:
        body = {"error": {"code": end.code, "message": end.message, "param": None}}
        return self._frame(one_line_json(body), logged)

    def _frame(self, data: str, logged: LoggedEvent, event: str | None = None) -> bytes:
        return frame(data, event=event, id=event_id(self._log_id, logged.seq) if logged.seq else None)
