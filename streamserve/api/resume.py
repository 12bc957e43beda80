"""Resuming: the reader's position by its request, and the delivery that continues there. asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Reply
from streamserve.dialects.ag_ui import events as ag_ui_events
from streamserve.dialects.ai_sdk import chunks
from streamserve.dialects.anthropic import message
from streamserve.dialects.encoder import Encoder
from streamserve.dialects.fields import Table, digits, flag, one_of
from streamserve.dialects.native import NativeEncoder
from streamserve.dialects.openai import chat as openai_chat
from streamserve.dialects.openai.completions import CompletionEncoder
from streamserve.dialects.pace import PACE, Pace, pace_of_query, refuse_silent
from streamserve.dialects.plain import TextEncoder, TokensEncoder
from streamserve.dialects.query import query_values
from streamserve.protocol.errors import Gone, NotFound
from streamserve.protocol.ids import parse_event_id
from streamserve.streams.reader.channel import nothing
from streamserve.streams.reader.delivery import Closing, Delivery, stream_headers
from streamserve.streams.stream import Stream

OPENAI, COMPLETIONS, ANTHROPIC, AI_SDK, AG_UI = "openai", "completions", "anthropic", "ai-sdk", "ag-ui"
_MAX_SEQ_CHARS = 16  # the digits of 2**53, the largest exact integer in JavaScript


class HeadOnly(Closing):
    """The body of the answer to a HEAD: the headers of a stream, and no reader of it."""

    def __init__(self, content_type: str, stream_id: str = "") -> None:
        self.id, self.headers = stream_id, stream_headers(content_type, stream_id)
        self.stream = self

    async def run(self, send: Callable[[bytes], Awaitable[None]], num_untaken: Callable[[], int] = nothing) -> None:
        """Send nothing."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield nothing."""
        return
        yield b""

    def cut_off(self) -> None:
        """Do nothing: no bytes follow."""


def head_of_new(format_: str) -> Reply:
    """Return what a HEAD gets where a GET would start an answer in one of FORMATS. It has no id yet."""
    types = {"text": TextEncoder.content_type, "tokens": TokensEncoder.content_type}
    return Reply(body=HeadOnly(types.get(format_, NativeEncoder.content_type)))


def encoder_for(format_: str, stream: Stream) -> Encoder:
    """Return the encoder of one of FORMATS."""
    return _ENCODERS[format_](stream, _Shown())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What a reader wants of the chunks: the query of a resume repeats the options of the request.

    `last_id` is the id of the last frame that it has.
    """

    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    include_reasoning: bool = True
    show_thinking: bool = True
    reasoning_field: str = openai_chat.REASONING_FIELDS[0]
    last_id: str = ""


def _chat(stream: Stream, shown: _Shown) -> Encoder:
    return openai_chat.encoder_for(
        stream,
        include_usage=shown.include_usage,
        continuous_usage=shown.continuous_usage,
        return_token_ids=shown.return_token_ids,
        include_reasoning=shown.include_reasoning,
        reasoning_field=shown.reasoning_field,
        last_id=shown.last_id,
    )


def _completion(stream: Stream, shown: _Shown) -> Encoder:
    return CompletionEncoder(
        stream,
        include_usage=shown.include_usage,
        continuous_usage=shown.continuous_usage,
        return_token_ids=shown.return_token_ids,
        last_id=shown.last_id,
    )


def _message(stream: Stream, shown: _Shown) -> Encoder:
    return message.encoder_for(stream, shows_thinking=shown.show_thinking, last_id=shown.last_id)


# By the `format` of a resume; the first three are for new native streams (FORMATS).
_ENCODERS: Mapping[str, Callable[[Stream, _Shown], Encoder]] = {
    "native": lambda stream, shown: NativeEncoder(stream.log_id, stream),
    "tokens": lambda stream, shown: TokensEncoder(stream.log_id),
    "text": lambda stream, shown: TextEncoder(),
    OPENAI: _chat,
    COMPLETIONS: _completion,
    ANTHROPIC: _message,
    AI_SDK: lambda stream, shown: chunks.encoder_for(stream, last_id=shown.last_id),
    AG_UI: lambda stream, shown: ag_ui_events.encoder_for(stream, last_id=shown.last_id),
}


# The query of a resume; its other parameters count for nothing.
AFTER: Table = {"after": digits(0, 10**_MAX_SEQ_CHARS - 1)}
RESUME: Table = {
    **AFTER,
    "format": one_of(*_ENCODERS),
    **dict.fromkeys(
        ("include_usage", "continuous_usage_stats", "return_token_ids", "include_reasoning", "show_thinking"), flag
    ),
    **PACE,
}


def after_of(call: Call, stream: Stream, query: Mapping[str, str]) -> int | None:
    """Return the seq in `Last-Event-ID`, else in the parameter `after`; None if the id is of another log."""
    event_id, after = call.headers.get("last-event-id"), query.get("after")
    if event_id:
        parsed = parse_event_id(event_id)
        return parsed[1] if parsed is not None and parsed[0] == stream.log_id else None
    return 0 if after is None else int(AFTER["after"](after, "after"))


async def stream_of_event(call: Call, answers: Answers, event_id: str) -> tuple[Stream | None, int]:
    """Return the caller's stream that a Last-Event-ID names, None where there is none, and the event's seq."""
    parsed = parse_event_id(event_id)
    if parsed is None:
        return None, 0
    log_id, after = parsed
    try:
        return (await answers.find(call.caller, log_id=log_id)).stream, after
    except NotFound:
        return None, after


def resume(
    call: Call,
    answers: Answers,
    stream: Stream,
    after: int | None,
    query: Mapping[str, str],
    *,
    default_format: str = "native",
) -> Reply:
    """Return the events after `after`; 204 to a reader that has all of them."""
    format_ = RESUME["format"](query.get("format", default_format), "format")
    shown = _shown(call, answers, query)
    encoder, pace = _ENCODERS[format_](stream, shown), pace_of_query(query_values(query))
    refuse_silent(query, format_)
    if after is None or not 0 <= after <= stream.last_seq:
        return gone_reply(call, not_there(stream, after))
    if stream.terminal is not None and after >= stream.last_seq:
        return Reply(status=204)
    if call.is_head:
        return Reply(body=HeadOnly(encoder.content_type, stream.id))
    if shown.continuous_usage and format_ in (OPENAI, COMPLETIONS):
        pace = counting_pace(pace, stream)
    return Reply(body=Delivery(answers.streams, stream, encoder, after=after, pace=pace))


def counting_pace(pace: Pace, stream: Stream) -> Pace:
    """Return the pace of a reader that counts by its chunks: where tokens have no ids each has a frame of its own."""
    return pace if stream.has_token_ids else replace(pace, interval_ms=0)


def _shown(call: Call, answers: Answers, query: Mapping[str, str]) -> _Shown:
    include_usage = _flag(query, "include_usage")
    return _Shown(
        include_usage=include_usage,
        continuous_usage=include_usage and _flag(query, "continuous_usage_stats"),
        return_token_ids=_flag(query, "return_token_ids"),
        include_reasoning=_flag(query, "include_reasoning", default=True),
        show_thinking=_flag(query, "show_thinking", default=True),
        reasoning_field=answers.config.reasoning_field,
        last_id=call.headers.get("last-event-id", ""),
    )


def _flag(query: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    return bool(flag(query[name], name)) if name in query else default


def gone() -> Gone:
    """Return the error for events that are not kept."""
    return Gone("These events are no longer kept. Ask the question again.")


def not_there(stream: Stream, after: int | None) -> Gone:
    """Return the error for a reader's position that the stream does not have; None is an id of no event of it."""
    if after is None:
        message = f"Last-Event-ID names no event of this stream. Its ids are {stream.log_id}-1, {stream.log_id}-2, …"
        return Gone(f"{message} Send the last id you have, or none.", code="unknown_event_id", param="Last-Event-ID")
    message = f"This stream has {stream.last_seq:,} events so far, and none with the number {after:,}."
    return Gone(f"{message} Resume after an event that you have, or after 0.", code="unknown_event_id", param="after")


def gone_reply(call: Call, error: Gone | None = None) -> Reply:
    """Raise the error, by default `gone()`; return 204 to an EventSource instead, which would reconnect forever."""
    if "text/event-stream" in call.headers.get("accept", ""):
        return Reply(status=204)
    raise error or gone()
