"""`"format": "text"`: the answer as plain text over a chunked response. A pure fold.

Plain text has no keepalive, no ids and no place for an error apart from the text itself, so an answer that did not
succeed ends in a line of its own, `[error <code>: <message>]`. Who needs certainty reads `tokens` or `native`.
"""

from __future__ import annotations

from streamserve.dialects.ending import ending
from streamserve.protocol.events import LoggedEvent, Token


class TextEncoder:
    """Text of one choice."""

    content_type = "text/plain; charset=utf-8"
    first_bytes = b""
    keepalive = b""

    def encode(self, logged: LoggedEvent) -> bytes:
        """Return the new text; a lone surrogate, which UTF-8 cannot carry, becomes a question mark."""
        event = logged.event
        if isinstance(event, Token):
            return event.text.encode("utf-8", "replace")
        end = ending(event)
        return b"" if end is None else f"\n[error {end.code}: {end.message}]\n".encode("utf-8", "replace")
