"""`/v1/completions`: text continued, in the OpenAI shape; `/stream` below it: as plain tokens. asyncio; framework-free.

Each prompt of a body is a stream of its own: with a row, a place in the caller's quota, and a reader. All begin before
the response does, or none. As in chat completions, closing the connection stops them, unless the caller means to come
back.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from streamserve.api.call import Call, Reply, Site, json_reply, with_class
from streamserve.api.idempotency import once_of, part_of
from streamserve.api.resume import gone_reply, stream_of_event
from streamserve.dialects.openai import completions as openai_completions
from streamserve.dialects.openai import plain_tokens
from streamserve.dialects.openai.completions import CompletionEncoder, CompletionRequest, Joined
from streamserve.dialects.openai.plain_tokens import Pace, PlainRequest
from streamserve.protocol.errors import BadRequest, Forbidden, StreamserveError
from streamserve.protocol.events import LoggedEvent
from streamserve.protocol.measures import RESPONSES
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect
from streamserve.streams.reader.joined import JoinedDelivery
from streamserve.streams.store import Once
from streamserve.streams.stream import Stream

CLASS_ROUTE = "completions"
_PROMPT_IN_URL = (
    "Answers are not started by GET here, because the prompt would be in the access logs. POST it to "
    "/v1/completions/stream, or turn PROMPT_IN_URL on in STREAMSERVE."
)
# Tokens of one frame where the reader has chosen how often frames come.
_MOST_TOKENS = 10_000


async def completions(call: Call, site: Site) -> Reply:
    """POST /v1/completions, streamed or whole."""
    body = await call.json(site.limits)
    asked = openai_completions.parse(body, site.limits, default_model=site.default_model)
    streams = await _start_all(call, site, asked, once_of(call, "completions", body))
    if asked.stream:
        return Reply(body=_delivery(site, streams, asked))
    events = await call.wait(_collect_all(site, streams))
    whole = openai_completions.collect(list(zip(streams, events, strict=True)), shows_prompt=asked.shows_prompt)
    return json_reply(whole, headers={"X-Stream-Id": ", ".join(stream.id for stream in streams)})


async def _start_all(call: Call, site: Site, asked: CompletionRequest, once: Once | None) -> list[Stream]:
    """Start a stream for each prompt. Where one is refused, those before it end, and the refusal is the response."""
    on_disconnect = asked.on_disconnect or ("abort" if once is None else "park")
    streams: list[Stream] = []
    try:
        for index, generate in enumerate(asked.generates):
            request = with_class(generate, asked.latency_class, call.caller, site, CLASS_ROUTE)
            key = None if once is None else part_of(once, index)
            stream = await site.start(call.caller, request, on_disconnect, received_at=call.received_at, once=key)
            streams.append(stream)
    except BaseException as error:
        for stream in streams:
            stream.abandon()
        if isinstance(error, BadRequest) and error.param == "grammar":
            error.param = asked.grammar_field
        raise
    return streams


def _delivery(site: Site, streams: list[Stream], asked: CompletionRequest) -> Delivery | JoinedDelivery:
    if len(streams) == 1:
        encoder = CompletionEncoder(streams[0], include_usage=asked.include_usage)
        return Delivery(site.streams, streams[0], encoder)
    joined = Joined(len(streams), include_usage=asked.include_usage)
    parts: list[tuple[Stream, CompletionEncoder]] = []
    for stream in streams:
        encoder = CompletionEncoder(
            stream,
            include_usage=asked.include_usage,
            joined=joined,
            completion_id=openai_completions.id_of(streams[0]),
            first_index=sum(one.request.n for one, _ in parts),
        )
        parts.append((stream, encoder))
    return JoinedDelivery(site.streams, parts, joined.last_bytes)


async def _collect_all(site: Site, streams: list[Stream]) -> list[list[LoggedEvent]]:
    """Wait for all streams as their reader; where the wait ends early, all readers have left."""
    tasks = [asyncio.create_task(collect(site.streams, stream), name="completion") for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def token_stream(call: Call, site: Site) -> Reply:
    """POST /v1/completions/stream; GET for a bare EventSource, which with a Last-Event-ID never starts again."""
    if call.method == "POST":
        body = await call.json(site.limits)
        asked = plain_tokens.parse(body, site.limits, default_model=site.default_model)
        return await _start_plain(call, site, asked, once_of(call, "completions/stream", body))
    try:
        return await _get_plain(call, site)
    except StreamserveError as error:
        if "text/event-stream" not in call.headers.get("accept", ""):
            raise
        RESPONSES.by_code[error.code] += 1
        headers = {"Content-Type": plain_tokens.PlainEncoder.content_type, "Cache-Control": "no-store"}
        return Reply(body=plain_tokens.refusal(error), headers=headers)


async def _get_plain(call: Call, site: Site) -> Reply:
    event_id, query = call.headers.get("last-event-id"), call.query()
    if not event_id:
        if not site.takes_prompt_in_url:
            raise Forbidden(_PROMPT_IN_URL, code="prompt_in_url_off")
        return await _start_plain(
            call, site, plain_tokens.parse_query(query, site.limits, default_model=site.default_model)
        )
    stream, after = await stream_of_event(call, site, event_id)
    if stream is None or not 0 <= after <= stream.last_seq:
        return gone_reply(call)
    if stream.terminal is not None and after >= stream.last_seq:
        return Reply(status=204)
    return Reply(body=_plain_delivery(site, stream, plain_tokens.pace_of_query(query), after))


async def _start_plain(call: Call, site: Site, asked: PlainRequest, once: Once | None = None) -> Reply:
    request = with_class(asked.generate, asked.latency_class, call.caller, site, CLASS_ROUTE)
    stream = await site.start(call.caller, request, asked.on_disconnect, received_at=call.received_at, once=once)
    return Reply(body=_plain_delivery(site, stream, asked.pace, 0))


def _plain_delivery(site: Site, stream: Stream, pace: Pace, after: int) -> Delivery:
    """Return the delivery at the reader's own pace, where it has chosen one."""
    config = site.streams.settings
    if pace.keepalive_seconds is not None:
        config = replace(config, keepalive_seconds=pace.keepalive_seconds)
    if pace.interval_seconds is not None:
        config = replace(config, coalesce_seconds=pace.interval_seconds, coalesce_tokens=_MOST_TOKENS)
    encoder = plain_tokens.PlainEncoder(stream.log_id)
    return Delivery(site.streams, stream, encoder, after=after, config=config)
