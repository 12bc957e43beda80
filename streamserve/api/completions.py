"""`/v1/completions`: text continued, in the OpenAI shape. asyncio; framework-free.

Each prompt of a body is a stream of its own: with a row, a place in the caller's quota, and a reader. All begin before
the response does, or none. As in chat completions, closing the connection stops them, unless the caller means to come
back.
"""

from __future__ import annotations

import asyncio

from streamserve.api.call import Call, Reply, Site, json_reply, with_class
from streamserve.api.idempotency import once_of, part_of
from streamserve.dialects import openai_completions
from streamserve.dialects.openai_completions import CompletionEncoder, CompletionRequest, Joined
from streamserve.protocol.events import LoggedEvent
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect
from streamserve.streams.reader.joined import JoinedDelivery
from streamserve.streams.store import Once
from streamserve.streams.stream import Stream

CLASS_ROUTE = "completions"


async def completions(call: Call, site: Site) -> Reply:
    """POST /v1/completions, streamed or whole."""
    body = await call.json(site.limits)
    asked = openai_completions.parse(body, site.limits, default_model=site.default_model)
    streams = await _start_all(call, site, asked, once_of(call, "completions", body))
    if asked.stream:
        return Reply(body=_delivery(site, streams, asked))
    events = await call.wait(_collect_all(site, streams))
    whole = openai_completions.collect(list(zip(streams, events, strict=True)))
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
    except BaseException:
        for stream in streams:
            stream.abandon()
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
