"""`"format": "text"`: the answer as plain text over a chunked response. A pure fold.

Plain text has no keepalive, no ids and no place for an error apart from the text itself, so an answer that did not
succeed ends in a line of its own, `[error <code>: <message>]`. A reader that needs certainty asks for `tokens` or
`native`. Thinking and tool calls are not text, and are left out.
"""

from __future__ import annotations

from streamserve.dialects.base import GOING_DOWN, TextBlocks, ending
from streamserve.protocol.events import BlockStart, Event, GoingAway, LoggedEvent, Token


class TextEncoder:
    """Text of one choice."""

    content_type = "text/plain; charset=utf-8"
    first_bytes = b""
    keepalive = b""
    takes_snapshots = False

    def __init__(self) -> None:
        self._blocks = TextBlocks()

    def encode(self, logged: LoggedEvent) -> bytes:
        """Return the new text; a lone surrogate, which UTF-8 cannot carry, becomes a question mark."""
        event = logged.event
        if isinstance(event, Token):
            return event.text.encode("utf-8", "replace") if event in self._blocks else b""
        if isinstance(event, BlockStart):
            self._blocks.note(event)
        return self._end(event)

    def going_away(self, notice: GoingAway) -> bytes:
        """Return an error line: the text does not show that it is incomplete, and has no place to resume from."""
        return self._end(GOING_DOWN)

    def _end(self, event: Event) -> bytes:
        end = ending(event)
        return b"" if end is None else f"\n[error {end.code}: {end.message}]\n".encode("utf-8", "replace")
