"""`"format": "text"`: the answer as plain text over a chunked response. A pure fold.

Plain text has no keepalive, no ids and no place for an error apart from the text itself, so an answer that did not
succeed ends in a line of its own, `[error <code>: <message>]`. Who needs certainty reads `tokens` or `native`.
"""

from __future__ import annotations

from streamserve.dialects.ending import LET_GO, ending
from streamserve.protocol.events import Event, GoingAway, LoggedEvent, Token


class TextEncoder:
    """Text of one choice."""

    content_type = "text/plain; charset=utf-8"
    first_bytes = b""
    keepalive = b""
    takes_snapshots = False

    def encode(self, logged: LoggedEvent) -> bytes:
        """Return the new text; a lone surrogate, which UTF-8 cannot carry, becomes a question mark."""
        event = logged.event
        if isinstance(event, Token):
            return event.text.encode("utf-8", "replace")
        return self._end(event)

    def farewell(self, farewell: GoingAway) -> bytes:
        """Say that this is not all: the text does not show it, and has no place to come back to."""
        return self._end(LET_GO)

    def _end(self, event: Event) -> bytes:
        end = ending(event)
        return b"" if end is None else f"\n[error {end.code}: {end.message}]\n".encode("utf-8", "replace")
