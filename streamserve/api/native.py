"""The native endpoints: start, state, events, stop, watch. Each takes a `Call` and services, and returns a `Reply`.

They parse with the native dialect and find streams by `Answers`. asyncio; they know no framework and no database, and
keep no state.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from streamserve.api.answers import Answers, Found
from streamserve.api.call import Body, Call, Caller, Reply, json_reply
from streamserve.api.conversations import Conversations, id_headers, turn_in, with_history
from streamserve.api.idempotency import once_of
from streamserve.api.interrupts import with_approvals
from streamserve.api.resume import (
    HeadOnly,
    after_of,
    encoder_for,
    gone,
    gone_reply,
    head_of_new,
    not_there,
    resume,
    stream_of_event,
)
from streamserve.dialects import approvals, native
from streamserve.dialects.native import NativeEncoder, NativeRequest
from streamserve.protocol.errors import Forbidden, NotFinished
from streamserve.protocol.glass import hops
from streamserve.protocol.requests import Once
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.store import Record
from streamserve.streams.stream import Stream


class Watches(Protocol):
    """The watches of streams of any tenant, each of which is recorded: of a site with users."""

    async def find(self, caller: Caller, stream_id: str) -> tuple[str, Found]:
        """Return the name of the caller's user, and the stream.

        Raises NotFound for an unknown id, and for every id if the user may not watch.
        """

    async def begin(self, call: Call, username: str, stream: Stream, after: int) -> Body:
        """Record the watch and return its delivery."""


PROMPT_IN_URL = (
    "Answers are not started by GET here, because the prompt would be in the access logs. POST it to /streams, and "
    "follow /streams/<X-Stream-Id>/events; or turn PROMPT_IN_URL on in STREAMSERVE."
)


async def start_stream(call: Call, answers: Answers, conversations: Conversations | None = None) -> Reply:
    """POST /streams: start an answer and stream it."""
    body = await call.json(answers.limits)
    return await start_body(call, answers, conversations, body, once_of(call, "streams", body))


async def start_body(
    call: Call, answers: Answers, conversations: Conversations | None, body: dict[str, Any], once: Once | None
) -> Reply:
    """Start the answer that a body asks for, in a conversation or in none, and stream it."""
    config = answers.config
    model = await answers.default_model(call.caller)
    asked = native.parse(body, config.limits, default_model=model, unseal=config.unseal, in_conversations=True)
    return await _start(call, answers, asked, once, conversations)


async def new_stream(call: Call, answers: Answers) -> Reply:
    """GET /streams/new?prompt=...: for a bare EventSource. With a Last-Event-ID it resumes and never starts again."""
    event_id = call.headers.get("last-event-id")
    if not event_id:
        if not answers.config.takes_prompt_in_url:
            raise Forbidden(PROMPT_IN_URL, code="prompt_in_url_off")
        model = await answers.default_model(call.caller)
        asked = native.parse_query(call.query(), answers.limits, default_model=model)
        return await _start(call, answers, asked)
    stream, after = await stream_of_event(call, answers, event_id)
    return gone_reply(call) if stream is None else resume(call, answers, stream, after, call.query())


async def _start(
    call: Call,
    answers: Answers,
    asked: NativeRequest,
    once: Once | None = None,
    conversations: Conversations | None = None,
) -> Reply:
    if call.is_head:
        return head_of_new(asked.format)
    turn, stream = None, await _earlier(answers, asked, once)
    if stream is None:
        try:
            asked, turn = await with_history(asked, call.caller, answers, conversations)
        except NotFinished:  # perhaps of the same request, which another task has begun meanwhile
            stream = await _earlier(answers, asked, once)
            if stream is None:
                raise
    if stream is None:
        request = answers.with_class(asked.generate, asked, call.caller, "streams")
        # The other formats cannot show what the answer waits for.
        begins_unloaded = asked.format == "native"
        stream = await answers.begin(
            call, request, asked.on_disconnect, once=once, begins_unloaded=begins_unloaded, turn=turn
        )
    ids = {} if asked.ask is None else id_headers(await turn_in(stream, turn, conversations))
    delivery = Delivery(answers.streams, stream, encoder_for(asked.format, stream), pace=asked.pace)
    return Reply(body=delivery, headers=ids)


async def _earlier(answers: Answers, asked: NativeRequest, once: Once | None) -> Stream | None:
    """Return the answer in a conversation that the key has started: it has changed the branch, so no other begins."""
    return None if once is None or asked.ask is None else await answers.earlier(once)


async def approve(call: Call, answers: Answers, conversations: Conversations | None = None) -> Reply:
    """POST /streams/{id}/approvals {approvals: [{id, allow, message?}]}: continue an interrupted run, and stream it."""
    body, stream_id = await call.json(answers.limits), call.params["stream_id"]
    once = once_of(call, f"streams/{stream_id}/approvals", body)
    asked = approvals.parse(body)
    request = await with_approvals(call.caller, stream_id, asked.approvals, answers, once)
    turn = None if conversations is None else await conversations.continuation(stream_id)
    begins_unloaded = asked.format == "native"
    stream = await answers.begin(
        call, request, asked.on_disconnect, once=once, begins_unloaded=begins_unloaded, turn=turn
    )
    ids = {} if turn is None else id_headers(await turn_in(stream, turn, conversations))
    delivery = Delivery(answers.streams, stream, encoder_for(asked.format, stream), pace=asked.pace)
    return Reply(body=delivery, headers=ids)


async def stream_state(call: Call, answers: Answers) -> Reply:
    """GET /streams/{id}: the state of a stream."""
    return json_reply(state_json(await answers.find(call.caller, stream_id=call.params["stream_id"])))


async def stream_events(call: Call, answers: Answers, *, default_format: str = "native") -> Reply:
    """GET /streams/{id}/events: replay the events that the reader lacks, and follow."""
    found = await answers.find(call.caller, stream_id=call.params["stream_id"])
    query = call.query()
    if found.stream is None:
        return gone_reply(call)
    after = after_of(call, found.stream, query)
    return resume(call, answers, found.stream, after, query, default_format=default_format)


async def stop_stream(call: Call, answers: Answers) -> Reply:
    """POST /streams/{id}/stop {seen_seq}: end the answer at the last event that its reader has seen. Idempotent."""
    seen_seq = native.parse_stop(await call.json(answers.limits, optional=True))
    found = await answers.find(call.caller, stream_id=call.params["stream_id"])
    if found.stream is not None:
        await found.stream.stop(seen_seq)
    return json_reply(state_json(found))


async def ack_stream(call: Call, answers: Answers) -> Reply:
    """POST /streams/{id}/ack {reader, seq, away}: what a reader shows by now.

    It counts where the reader's connection is, and elsewhere that is no error: a page cannot choose the process. The
    connection then ends, so that the next ack may come to another process. No database is asked, as a page sends an ack
    each second.
    """
    ack = native.parse_ack(await call.json(answers.limits))
    stream = answers.streams.find(call.params["stream_id"])
    is_counted = False
    if stream is not None and stream.tenant == call.caller.tenant:
        is_counted = stream.readers.ack(ack.reader, ack.seq, is_away=ack.is_away, now=time.monotonic())
    must_end = not is_counted and call.is_http1
    return json_reply({"counted": is_counted}, headers={"Connection": "close"} if must_end else {})


async def watch(call: Call, watches: Watches) -> Reply:
    """GET /streams/{id}/watch: a stream of any tenant, for a user with the permission. Each watch is recorded.

    A watcher only reads: only the owner's readers pace, park and end the stream. Without the permission every id is
    a 404 here, also the caller's own.
    """
    username, found = await watches.find(call.caller, call.params["stream_id"])
    if found.stream is None:
        return gone_reply(call)
    after = after_of(call, found.stream, call.query())
    if after is None or not 0 <= after <= found.stream.last_seq:
        return gone_reply(call, not_there(found.stream, after))
    if found.stream.terminal is not None and after >= found.stream.last_seq:
        return Reply(status=204)  # nothing is shown, so nothing is recorded
    if call.is_head:
        return Reply(body=HeadOnly(NativeEncoder.content_type, found.stream.id))
    return Reply(body=await watches.begin(call, username, found.stream, after))


def state_json(found: Found) -> dict[str, Any]:
    """Return the state of a stream: from memory while it is there, else from its record."""
    if found.stream is not None:
        out = _live_json(found.stream)
    elif found.record is not None:
        out = _recorded_json(found.record)
    else:
        raise gone()
    if found.record is not None:
        out["created"] = int(found.record.created)
        if found.record.text:
            out["text"] = found.record.text
    return out | _reader_json(found)


def _live_json(stream: Stream) -> dict[str, Any]:
    summary = stream.summary()
    out = {
        "id": stream.id,
        "log_id": stream.log_id,
        "model": stream.model,
        "created": stream.created,
        "state": stream.state,
        "finish_reason": summary.finish_reason,
        "error_code": summary.error_code,
        "last_seq": stream.last_seq,
        "usage": stream.usage.as_json(),
        "latency": round(summary.latency, 4),
        "phases": {name: round(seconds, 4) for name, seconds in summary.phases.items()},
        "resumable": True,
    }
    return out | native.outline_json(stream.outline) if stream.outline else out


def _reader_json(found: Found) -> dict[str, dict[str, Any]]:
    """Return what the reader measured, with the hops between it and the server; {} without a report."""
    stream, record = found.stream, found.record
    times = (stream and stream.readers.reported) or (record and record.reader)
    if not times:
        return {}
    ttft, phases = (record.ttft, record.phases) if record is not None else (None, None)
    if stream is not None and stream.terminal is not None:
        summary = stream.summary()
        ttft, phases = summary.ttft if ttft is None else ttft, phases or summary.phases
    return {"reader": {**times.as_json(), **hops(ttft, phases, times)}}


def _recorded_json(record: Record) -> dict[str, Any]:
    out: dict[str, Any] = {
        "id": record.id,
        "log_id": record.log_id,
        "model": record.model,
        "created": int(record.created),
        "state": "finished",
        "finish_reason": record.finish_reason or None,
        # The row is running but its log is gone: the process that made it has died.
        "error_code": (record.error_code or None) if record.is_finished else "producer_lost",
        "last_seq": record.last_seq,
        "usage": {"prompt_tokens": record.prompt_tokens, "completion_tokens": record.completion_tokens},
        "resumable": False,
    }
    if record.phases is not None:
        own = (seconds for name, seconds in record.phases.items() if name != "network_in")
        out |= {"latency": round(sum(own), 4), "phases": dict(record.phases)}
    return out
