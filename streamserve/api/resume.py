"""Resuming: the reader's position by its request, and the delivery that continues there. asyncio."""

from __future__ import annotations

from collections.abc import Mapping

from streamserve.api.call import Call, Reply, Site
from streamserve.dialects.anthropic import message
from streamserve.dialects.base import Encoder
from streamserve.dialects.native import FORMATS, NativeEncoder, TextEncoder, TokensEncoder, query_values
from streamserve.dialects.openai import chat as openai_chat
from streamserve.dialects.openai.completions import CompletionEncoder
from streamserve.dialects.pace import pace_of_query, refuse_silent
from streamserve.protocol.errors import BadRequest, Gone, NotFound
from streamserve.protocol.ids import parse_event_id
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.stream import Stream

OPENAI, COMPLETIONS, ANTHROPIC = "openai", "completions", "anthropic"
RESUME_FORMATS = (*FORMATS, OPENAI, COMPLETIONS, ANTHROPIC)
_MAX_SEQ_CHARS = 16  # the digits of 2**53, the largest exact integer in JavaScript


def encoder_for(format_: str, stream: Stream) -> Encoder:
    """Return the native dialect's encoder of one of FORMATS."""
    if format_ == "tokens":
        return TokensEncoder(stream.log_id)
    return TextEncoder() if format_ == "text" else NativeEncoder(stream.log_id, stream)


def after_of(call: Call, stream: Stream, query: Mapping[str, str]) -> int | None:
    """Return the seq in `Last-Event-ID`, else in the parameter `after`; None if the id is of another log."""
    event_id, after = call.headers.get("last-event-id"), query.get("after")
    if event_id:
        parsed = parse_event_id(event_id)
        return parsed[1] if parsed is not None and parsed[0] == stream.log_id else None
    if after is None:
        return 0
    if not (after.isascii() and after.isdigit() and len(after) <= _MAX_SEQ_CHARS):
        raise BadRequest("'after' is the number of the last event you have, 0 for none.", param="after")
    return int(after)


async def stream_of_event(call: Call, site: Site, event_id: str) -> tuple[Stream | None, int]:
    """Return the caller's stream that a Last-Event-ID names, None where there is none, and the event's seq."""
    parsed = parse_event_id(event_id)
    if parsed is None:
        return None, 0
    log_id, after = parsed
    try:
        return (await site.find(call.caller, log_id=log_id)).stream, after
    except NotFound:
        return None, after


def resume(
    call: Call,
    site: Site,
    stream: Stream,
    after: int | None,
    query: Mapping[str, str],
    *,
    default_format: str = "native",
) -> Reply:
    """Return the events after `after`; 204 to a reader that has all of them."""
    encoder, pace = _chosen_encoder(site, stream, query, default_format), pace_of_query(query_values(query))
    refuse_silent(query, query.get("format", default_format))
    if after is None or not 0 <= after <= stream.last_seq:
        return gone_reply(call, not_there(stream, after))
    if stream.terminal is not None and after >= stream.last_seq:
        return Reply(status=204)
    return Reply(body=Delivery(site.streams, stream, encoder, after=after, pace=pace))


def _chosen_encoder(site: Site, stream: Stream, query: Mapping[str, str], default_format: str) -> Encoder:
    """Return the encoder that the query names. `include_usage` repeats the option of the request."""
    format_ = query.get("format", default_format)
    if format_ not in RESUME_FORMATS:
        raise BadRequest(f"'format' is one of {', '.join(RESUME_FORMATS)}.", param="format")
    include_usage = query.get("include_usage", "false")
    if include_usage not in ("true", "false"):
        raise BadRequest("'include_usage' is true or false.", param="include_usage")
    if format_ == OPENAI:
        return openai_chat.encoder_for(
            stream, include_usage=include_usage == "true", reasoning_field=site.reasoning_field
        )
    if format_ == ANTHROPIC:
        return message.encoder_for(stream)
    if format_ == COMPLETIONS:
        return CompletionEncoder(stream, include_usage=include_usage == "true")
    return encoder_for(format_, stream)


def gone() -> Gone:
    """Return the error for events that are not kept."""
    return Gone("These events are no longer kept. Ask the question again.")


def not_there(stream: Stream, after: int | None) -> Gone:
    """Return the error for a reader's position that the stream does not have; None is an id of no event of it."""
    if after is None:
        message = f"Last-Event-ID names no event of this stream. Its ids are {stream.log_id}-1 and on."
        return Gone(f"{message} Send the last one you have, or none.", code="unknown_event_id", param="Last-Event-ID")
    message = f"This stream has {stream.last_seq:,} events so far, and none with the number {after:,}."
    return Gone(f"{message} Resume after one that you have, or after 0.", code="unknown_event_id", param="after")


def gone_reply(call: Call, error: Gone | None = None) -> Reply:
    """Raise the error, by default `gone()`; return 204 to an EventSource instead, which would reconnect forever."""
    if "text/event-stream" in call.headers.get("accept", ""):
        return Reply(status=204)
    raise error or gone()
