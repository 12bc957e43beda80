"""The plain dialects, which show the text of an answer and little else: `text`, and `tokens`. Pure.

Thinking and tool calls are not text, and are left out. They show one choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamserve.dialects.encoder import Frame, FrameIds, PieceEncoder
from streamserve.dialects.fold import GOING_DOWN, Delta, Failed, Fold, Piece, Succeeded
from streamserve.protocol.events import TEXT, GoingAway, LoggedEvent
from streamserve.protocol.sse import frame, one_line_json

NO_TEXT = frame(one_line_json({"token": ""}))  # in `tokens`


class TextEncoder:
    """Plain text over a chunked response.

    Plain text has no keepalive, no ids and no place for an error apart from the text itself, so an answer that did not
    succeed ends in a line of its own, `[error <code>: <message>]`. A reader that needs certainty asks for `tokens` or
    `native`.
    """

    content_type = "text/plain; charset=utf-8"
    first_bytes = b""
    keepalive = keepalive_event = b""
    takes_snapshots = False

    def __init__(self) -> None:
        self._fold = Fold()

    def encode(self, logged: LoggedEvent) -> bytes:
        """Return the new text; a lone surrogate, which UTF-8 cannot carry, becomes a question mark."""
        return "".join(map(self._text_of, self._fold.feed(logged.event))).encode("utf-8", "replace")

    def going_away(self, notice: GoingAway) -> bytes:
        """Return an error line: the text does not show that it is incomplete, and has no place to resume from."""
        return self._text_of(GOING_DOWN).encode()

    def _text_of(self, piece: Piece) -> str:
        if isinstance(piece, Failed):
            return f"\n[error {piece.code}: {piece.message}]\n"
        return piece.token.text if isinstance(piece, Delta) and piece.block.kind == TEXT else ""


class TokensEncoder(PieceEncoder):
    """The plainest SSE: `data: {"token": "…"}` until `data: [DONE]`.

    `[DONE]` follows success only; any other end is a last `data: {"error": {…}}`.
    """

    keepalive_event = NO_TEXT

    def __init__(self, log_id: str) -> None:
        super().__init__(FrameIds(log_id, ""))

    def show(self, piece: Piece) -> Sequence[Frame]:
        """Return one frame for new text and for the end, nothing for the rest."""
        if isinstance(piece, Delta):
            text = piece.token.text if piece.block.kind == TEXT else ""
            return [Frame(one_line_json({"token": text}))] if text else []
        if isinstance(piece, Succeeded):
            return [Frame("[DONE]")]
        return [self.error(piece)] if isinstance(piece, Failed) else []

    def error(self, failed: Failed) -> Frame:
        """Return the last frame of an answer that failed."""
        return Frame(one_line_json({"error": {"code": failed.code, "message": failed.message, "param": None}}))

    def going_away(self, notice: GoingAway) -> bytes:
        """Return b"": without `[DONE]` the answer is not over, and an EventSource connects again by itself."""
        return b""
