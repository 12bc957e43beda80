"""The endpoints of `/v1/responses`: create, retrieve, cancel, delete, the items of the input. asyncio; framework-free.

A response is a stream, and what was asked beside it (`Responses`). A streamed response that is stored is as durable as
a native stream: a client that has lost its connection reads the rest by `starting_after`. Without `stream` closing the
connection stops the answer, unless the request has an `Idempotency-Key` or `background`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Caller, Reply, json_reply
from streamserve.api.conversations import Prepared, conversations_off, no_conversation
from streamserve.api.idempotency import once_of
from streamserve.api.resume import HeadOnly, after_of, gone, not_there
from streamserve.api.threads import Place, Sent, Threads, appended
from streamserve.clients.base import until_loaded
from streamserve.dialects.fold import Failed, Fold
from streamserve.dialects.openai.responses import output, request, stored
from streamserve.dialects.openai.responses.items import INPUT, Item, messages_of
from streamserve.dialects.openai.responses.request import ResponseRequest
from streamserve.dialects.openai.responses.stored import StoredResponse, no_previous, no_response
from streamserve.protocol.errors import BadRequest, Gone, NotFinished, NotFound
from streamserve.protocol.events import LoggedEvent
from streamserve.protocol.requests import Once, Turn
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream

SOURCE = "responses"  # of the conversations that responses begin: the chat page does not list them


class Responses(Protocol):
    """What is kept of responses beside their events. Responses of other tenants are as unknown ids."""

    async def keep(self, stream: Stream, response: StoredResponse, /) -> None:
        """Keep a response that has begun, unless it is kept already."""

    async def find(self, caller: Caller, stream_id: str, /) -> StoredResponse | None:
        """Return the response; None if it is not kept, or was deleted."""

    async def fill(self, stream_id: str, /) -> None:
        """Store an answer that has just ended, where the site stores answers."""

    async def delete(self, caller: Caller, stream_id: str, /) -> None:
        """Delete the response with its events. Raises NotFound, NotFinished."""


class LocalResponses:
    """Responses of streams that belong to this process alone: they are kept for as long as their streams."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._kept: WeakKeyDictionary[Stream, StoredResponse] = WeakKeyDictionary()

    async def keep(self, stream: Stream, response: StoredResponse, /) -> None:
        self._kept.setdefault(stream, response)

    async def find(self, caller: Caller, stream_id: str, /) -> StoredResponse | None:
        stream = self._streams.find(stream_id)
        return None if stream is None or stream.tenant != caller.tenant else self._kept.get(stream)

    async def fill(self, stream_id: str, /) -> None:
        """Do nothing: an answer is read from its events."""

    async def delete(self, caller: Caller, stream_id: str, /) -> None:
        stream = self._streams.find(stream_id)
        if stream is None or await self.find(caller, stream_id) is None:
            raise no_response(output.response_id(stream_id))
        if stream.terminal is None:
            raise unfinished()
        del self._kept[stream]


async def create_response(
    call: Call, answers: Answers, responses: Responses | None = None, threads: Threads | None = None
) -> Reply:
    """POST /v1/responses, streamed, whole, or in the background."""
    body = await call.json(answers.limits)
    asked = request.parse(body, answers.limits, default_model=await answers.default_model(call.caller))
    if responses is None:
        asked = _unstored(asked)
    once = once_of(call, "responses", body)
    stream = None if once is None else await answers.earlier(once)
    if stream is None:
        stream = await _start(call, answers, asked, once, responses, threads)
    if asked.store and responses is not None:
        try:
            await responses.keep(stream, StoredResponse(stream_id=stream.id, head=asked.head, items=asked.items))
        except BaseException:
            stream.abandon()
            raise
    if asked.stream:
        options = {"include_obfuscation": asked.include_obfuscation}
        encoder = output.encoder_for(stream, asked.head, **options)
        return Reply(body=Delivery(answers.streams, stream, encoder, pace=asked.pace))
    headers = {"X-Stream-Id": stream.id}
    if asked.background:
        return json_reply(output.response_json((), stream, asked.head, status="queued"), headers=headers)
    events = await call.wait(collect(answers.streams, stream))
    _raise_failure(events)
    if asked.store and responses is not None:
        await responses.fill(stream.id)
    return json_reply(output.response_json(events, stream, asked.head), headers=headers)


def _unstored(asked: ResponseRequest) -> ResponseRequest:
    """Return the request of a batch's row, whose response is in the batch's file alone."""
    if asked.background:
        message = "A row of a batch collects a whole response: leave background out."
        raise BadRequest(message, code="unsupported_parameter", param="background")
    return replace(asked, store=False, head={**asked.head, "store": False})


async def _start(
    call: Call,
    answers: Answers,
    asked: ResponseRequest,
    once: Once | None,
    responses: Responses | None,
    threads: Threads | None,
) -> Stream:
    """Start the answer, in the conversation that it names or continues, or in a new conversation."""
    asked, turn = await _with_turn(call, answers, asked, responses, threads)
    is_durable = once is not None or (asked.stream and asked.store)
    on_disconnect = asked.on_disconnect or ("park" if is_durable else "abort")
    generate = answers.with_class(asked.generate, asked, call.caller, "responses")
    try:
        return await answers.begin(
            call,
            generate,
            "finish" if asked.background else on_disconnect,
            once=once,
            turn=turn,
            shortens=asked.shortens,
        )
    except BadRequest as error:
        error.param = request.field_of(error.param, generate)
        raise


async def _with_turn(
    call: Call, answers: Answers, asked: ResponseRequest, responses: Responses | None, threads: Threads | None
) -> tuple[ResponseRequest, Turn | None]:
    """Return the request with what came before, and what its start adds to a conversation."""
    prepared = await _prepared(call, asked, threads)
    if prepared is None:
        return await _with_history(call, asked, answers, responses), None
    return request.with_messages(asked, prepared.messages), prepared.turn


async def _prepared(call: Call, asked: ResponseRequest, threads: Threads | None) -> Prepared | None:
    """Return the prompt by what the site keeps of conversations, and what the start adds to it.

    None where nothing is kept: a request that is not stored, one with images or files, a response before it that no
    conversation has.
    """
    sent = [Sent(message=one) for one in messages_of(asked.items, INPUT)]
    place = Place(
        source=SOURCE,
        stream_id=stored.stream_id_of(asked.previous_id),
        conversation_id=stored.conversation_row(asked.conversation_id),
    )
    is_kept = asked.store and threads is not None and (asked.conversation_id or not _has_files(sent))
    if not is_kept or (asked.previous_id and not place.stream_id):
        found = None
    elif asked.conversation_id and not place.conversation_id:
        raise no_conversation()
    else:
        assert threads is not None
        found = await appended(call.caller, sent, place, threads)
    if found is None and asked.conversation_id:
        raise conversations_off()
    return found


def _has_files(sent: Sequence[Sent]) -> bool:
    return any(one.message.parts for one in sent)


async def _with_history(
    call: Call, asked: ResponseRequest, answers: Answers, responses: Responses | None
) -> ResponseRequest:
    """Return the request with the items of the responses before it, as they are kept beside their events."""
    if not asked.previous_id:
        return request.with_history(asked, (), answers.limits)
    items: list[Item] = []
    previous_id = asked.previous_id
    while previous_id:
        before = None if responses is None else await responses.find(call.caller, stored.stream_id_of(previous_id))
        if before is None:
            raise no_previous(asked.previous_id)
        try:
            whole = await _response_of(call, answers, before)
        except NotFound:
            raise no_previous(asked.previous_id) from None
        if whole["status"] in ("queued", "in_progress"):
            raise NotFinished(f"{previous_id} is still being made. Retrieve it until it has ended, then continue it.")
        items[:0] = [*before.items, *whole["output"]]
        if len(items) > answers.limits.max_messages:
            message = f"The responses before this one have more than {answers.limits.max_messages:,} items together."
            raise BadRequest(f"{message} Begin anew.", code="invalid_value", param="previous_response_id")
        previous_id = before.previous_id
    return request.with_history(asked, items, answers.limits)


async def retrieve(call: Call, answers: Answers, responses: Responses) -> Reply:
    """GET /v1/responses/{id}?stream=&starting_after=: the response as it is now, or its events."""
    kept = await _kept(call, responses)
    query = stored.parse_retrieve(call.query())
    if not query.stream:
        return json_reply(await _response_of(call, answers, kept))
    stream = (await answers.find(call.caller, stream_id=kept.stream_id)).stream
    if stream is None:
        raise gone()
    after: int | None = after_of(call, stream, {})
    if query.starting_after >= 0:
        after = output.seq_before(await _events_of(answers, stream), stream, kept.head, query.starting_after)
    if after is None or after > stream.last_seq:
        error = not_there(stream, after)
        raise error if query.starting_after < 0 else _no_such_number(query.starting_after)
    if stream.terminal is not None and after >= stream.last_seq:
        return Reply(status=204)
    last_id = call.headers.get("last-event-id", "")
    shown = {"starting_after": query.starting_after, "last_id": last_id, **query.options}
    encoder = output.encoder_for(stream, kept.head, **shown)
    if call.is_head:
        return Reply(body=HeadOnly(encoder.content_type, stream.id))
    return Reply(body=Delivery(answers.streams, stream, encoder, after=after))


async def cancel(call: Call, answers: Answers, responses: Responses) -> Reply:
    """POST /v1/responses/{id}/cancel: end the answer where it is. Idempotent."""
    kept = await _kept(call, responses)
    found = await answers.find(call.caller, stream_id=kept.stream_id)
    if found.stream is not None:
        await found.stream.stop()
    return json_reply(await _response_of(call, answers, kept))


async def delete(call: Call, answers: Answers, responses: Responses) -> Reply:
    """DELETE /v1/responses/{id}: delete the response, with its events."""
    stream_id = stored.stream_id_of(call.params["response_id"])
    await responses.delete(call.caller, stream_id)
    answers.streams.forget(stream_id)
    return json_reply(stored.deleted_json(call.params["response_id"]))


async def input_items(call: Call, responses: Responses) -> Reply:
    """GET /v1/responses/{id}/input_items?limit=&order=&after=: the items that its request has sent."""
    return json_reply(stored.input_items_json(await _kept(call, responses), call.query()))


async def count_tokens(
    call: Call, answers: Answers, responses: Responses | None = None, threads: Threads | None = None
) -> Reply:
    """POST /v1/responses/input_tokens: the length of the prompt that a response would have. Generates nothing."""
    body = await call.json(answers.limits)
    asked = request.parse_count(body, answers.limits, default_model=await answers.default_model(call.caller))
    asked, _ = await _with_turn(call, answers, asked, responses, threads)
    generate = answers.with_own_system(asked.generate)
    client = await answers.client(call.caller, generate.model)
    await call.wait(until_loaded(client, answers.streams.settings.engine_wait_seconds))
    try:
        token_ids = await call.wait(client.tokenize(generate))
    except BadRequest as error:
        error.param = request.field_of(error.param, generate)
        raise
    return json_reply({"object": "response.input_tokens", "input_tokens": len(token_ids)})


async def _kept(call: Call, responses: Responses) -> StoredResponse:
    """Return the response that the path names. Raises NotFound."""
    response_id = call.params["response_id"]
    found = await responses.find(call.caller, stored.stream_id_of(response_id))
    if found is None:
        raise no_response(response_id)
    return found


async def _response_of(call: Call, answers: Answers, kept: StoredResponse) -> dict[str, Any]:
    """Return the response as it is now. Raises NotFound once neither it nor its events are kept."""
    if kept.whole is not None:
        return dict(kept.whole)
    stream = (await answers.find(call.caller, stream_id=kept.stream_id)).stream
    if stream is None:
        raise no_response(output.response_id(kept.stream_id))
    return output.response_json(await _events_of(answers, stream), stream, kept.head)


async def _events_of(answers: Answers, stream: Stream) -> list[LoggedEvent]:
    """Return the events of a stream so far, whichever process writes them."""
    events: list[LoggedEvent] = []
    try:
        while page := await answers.streams.log.read(stream.log_id, events[-1].seq if events else 0):
            events += page
    except KeyError:
        raise no_response(output.response_id(stream.id)) from None
    return events


def _raise_failure(events: Sequence[LoggedEvent]) -> None:
    """Raise the error that an answer ended in, if it did."""
    for piece in Fold().feed(events[-1].event):
        if isinstance(piece, Failed):
            raise piece.error()


def unfinished() -> NotFinished:
    """Return the error for a response that cannot be deleted yet."""
    return NotFinished("The response is still being made. Cancel it first: POST /v1/responses/<id>/cancel.")


def _no_such_number(number: int) -> Gone:
    message = f"This response has no event with the sequence_number {number:,} yet. Send the last number you have."
    return Gone(message, code="unknown_event_id", param="starting_after")
