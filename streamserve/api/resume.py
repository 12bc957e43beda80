"""Reading on: where a reader stands by what it sends, and the delivery that goes on from there.

asyncio; framework-free. Who may read, and what a 204 looks like, is up to the routes that ask.
"""

from __future__ import annotations

from streamserve.dialects.base import Encoder
from streamserve.dialects.native import FORMATS, NativeEncoder
from streamserve.dialects.text import TextEncoder
from streamserve.dialects.tokens import TokensEncoder
from streamserve.protocol.errors import BadRequest, Gone
from streamserve.protocol.ids import parse_event_id
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream

_MAX_SEQ_CHARS = 16  # 2**53, what JavaScript counts exactly, has that many


def encoder_for(format_: str, log_id: str) -> Encoder:
    """Return the native dialect's encoder of one of FORMATS."""
    if format_ == "tokens":
        return TokensEncoder(log_id)
    return TextEncoder() if format_ == "text" else NativeEncoder(log_id)


def place_in(stream: Stream, event_id: str | None, after: str | None) -> int | None:
    """Return the seq that a `Last-Event-ID`, else an `after` parameter names; None if it is of another log."""
    if event_id:
        parsed = parse_event_id(event_id)
        return parsed[1] if parsed is not None and parsed[0] == stream.log_id else None
    if after is None:
        return 0
    if not (after.isascii() and after.isdigit() and len(after) <= _MAX_SEQ_CHARS):
        raise BadRequest("'after' is the number of the last event you have, 0 for none.", param="after")
    return int(after)


def read_on(streams: Streams, stream: Stream, after: int | None, format_: str) -> Delivery | None:
    """Return the delivery of what follows event `after`; None when the reader has everything (answer 204).

    Raises Gone for events that are not there, BadRequest for an unknown format, and what `Delivery` does.
    """
    if format_ not in FORMATS:
        raise BadRequest(f"'format' is one of {', '.join(FORMATS)}.", param="format")
    if after is None or not 0 <= after <= stream.last_seq:
        raise gone()
    if stream.terminal is not None and after >= stream.last_seq:
        return None
    return Delivery(streams, stream, encoder_for(format_, stream.log_id), after=after)


def gone() -> Gone:
    """Return the error for events that are not kept."""
    return Gone("These events are no longer kept. Ask the question again.")


def is_event_source(accept: str) -> bool:
    """Tell by its `Accept` header whether an EventSource asks: it reconnects for ever unless told 204."""
    return "text/event-stream" in accept
