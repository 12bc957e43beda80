"""The endpoint of `/v1/completions`. asyncio; framework-free.

Each prompt of a body is a stream of its own: with a row, a place in the caller's quota, and a reader. All begin before
the response does, or none. When a connection closes: see chats.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Reply, json_reply
from streamserve.api.idempotency import once_of, part_of
from streamserve.api.resume import counting_pace
from streamserve.clients.filtered import FilteredClient
from streamserve.clients.pipeline.client import PipelineClient
from streamserve.dialects.fold import Answer
from streamserve.dialects.openai import completions as openai_completions
from streamserve.dialects.openai.completions import CompletionEncoder, CompletionRequest, Joined
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.events import LoggedEvent
from streamserve.protocol.requests import GenerateRequest, Once
from streamserve.streams.quota import Places
from streamserve.streams.reader.delivery import Delivery, JoinedDelivery
from streamserve.streams.reader.follow import collect
from streamserve.streams.stream import Stream

_IDS = "return_token_ids"


async def completions(call: Call, answers: Answers) -> Reply:
    """POST /v1/completions, streamed or whole."""
    body = await call.json(answers.limits)
    asked = openai_completions.parse(body, answers.limits, default_model=await answers.default_model(call.caller))
    streams = await _start_all(call, answers, asked, once_of(call, "completions", body))
    prompt_ids = await _prompts_ids(call, answers, streams, asked) if asked.return_token_ids else None
    if asked.stream:
        return Reply(body=_delivery(answers, streams, asked, prompt_ids))
    events = await call.wait(_collect_all(answers, streams))
    folded = [(stream, Answer.of(log, stream.request.n)) for stream, log in zip(streams, events, strict=True)]
    whole = openai_completions.completion_json(folded, shows_prompt=asked.shows_prompt, prompt_token_ids=prompt_ids)
    return json_reply(whole, headers={"X-Stream-Id": ", ".join(stream.id for stream in streams)})


async def _start_all(call: Call, answers: Answers, asked: CompletionRequest, once: Once | None) -> list[Stream]:
    """Start a stream for each prompt. Where a prompt is refused, the streams before it end, and that is the response.

    They take their places together: those that have begun would wait for their reader.
    """
    on_disconnect = asked.on_disconnect or ("abort" if once is None else "park")
    streams: list[Stream] = []
    places = Places(len(asked.generates))
    try:
        for index, generate in enumerate(asked.generates):
            request = answers.with_class(generate, asked, call.caller, "completions")
            key = None if once is None else part_of(once, index)
            streams.append(await answers.begin(call, request, on_disconnect, once=key, places=places))
    except BaseException as error:
        for stream in streams:
            stream.abandon()
        if isinstance(error, BadRequest) and error.param == "grammar":
            error.param = asked.grammar_field
        raise
    finally:
        places.close()
    return streams


async def _prompts_ids(
    call: Call, answers: Answers, streams: list[Stream], asked: CompletionRequest
) -> list[tuple[int, ...]]:
    """Return the ids of each stream's prompt. Where there are none, all streams end."""
    try:
        asking = zip(streams, asked.generates, strict=True)
        return [await prompt_ids(call, answers, stream, request) for stream, request in asking]
    except BaseException:
        for stream in streams:
            stream.abandon()
        raise


def _delivery(
    answers: Answers, streams: list[Stream], asked: CompletionRequest, prompt_ids: list[tuple[int, ...]] | None
) -> Delivery | JoinedDelivery:
    shown: dict[str, Any] = {
        "include_usage": asked.include_usage,
        "continuous_usage": asked.continuous_usage,
        "return_token_ids": asked.return_token_ids,
    }
    if len(streams) == 1:
        prompt = None if prompt_ids is None else prompt_ids[0]
        encoder = CompletionEncoder(streams[0], prompt_token_ids=prompt, **shown)
        pace = counting_pace(asked.pace, streams[0]) if asked.continuous_usage else asked.pace
        return Delivery(answers.streams, streams[0], encoder, pace=pace)
    joined = Joined(len(streams), include_usage=asked.include_usage)
    parts: list[tuple[Stream, CompletionEncoder]] = []
    for stream in streams:
        encoder = CompletionEncoder(
            stream,
            prompt_token_ids=None if prompt_ids is None else prompt_ids[len(parts)],
            joined=joined,
            **shown,
            completion_id=openai_completions.id_of(streams[0]),
            first_index=sum(one.request.n for one, _ in parts),
        )
        parts.append((stream, encoder))
    return JoinedDelivery(answers.streams, parts, joined.last_bytes, pace=asked.pace)


async def _collect_all(answers: Answers, streams: list[Stream]) -> list[list[LoggedEvent]]:
    """Wait for all streams as their reader; where the wait ends early, all readers have left."""
    tasks = [asyncio.create_task(collect(answers.streams, stream), name="completion") for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def prompt_ids(call: Call, answers: Answers, stream: Stream, request: GenerateRequest) -> tuple[int, ...]:
    """Return the ids of a stream's prompt. Ends the stream and raises where it has none to show."""
    try:
        if not stream.has_token_ids or isinstance(answers.clients[stream.model], PipelineClient | FilteredClient):
            message = f"{_IDS} is not supported by {stream.model}, which shows no ids of tokens. Leave it out."
            raise BadRequest(message, code="unsupported_parameter", param=_IDS)
        asked = answers.with_own_system(request)
        if asked.has_public_system:
            message = f"{_IDS} would show this server's own system prompt. Send a prompt, or messages with"
            raise BadRequest(f"{message} a system prompt of yours.", code="conflicting_fields", param=_IDS)
        return await call.wait(answers.clients[stream.model].tokenize(asked))
    except BaseException:
        stream.abandon()
        raise
