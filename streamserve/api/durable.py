"""`/streams/{id}/log`: the events of a stream by the Durable Streams protocol, read side. asyncio.

What is read twice is the same twice: the events as they are in the log, by offset. A response names the offset behind
its last event, whether that is the end so far, and whether more can follow.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Reply
from streamserve.api.resume import gone
from streamserve.dialects import durable
from streamserve.dialects.durable import LogEncoder, Read
from streamserve.dialects.pace import Pace
from streamserve.protocol.errors import Gone
from streamserve.protocol.events import is_terminal
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.pages import PAGE, read_page
from streamserve.streams.reader.poll import Poll
from streamserve.streams.stream import Stream

# How long a long-poll waits for events: below the 30 s and 60 s of common proxies.
POLL_SECONDS = 20.0
# A response ends with the page of events that reaches either.
_MAX_EVENTS, _MAX_CHARS = 1024, 256 * 1024
# Bodies of a caller's: kept by the caller's own cache alone, which asks each time whether they still hold.
_KEPT = {"Cache-Control": "private, no-cache"}
_NEVER_KEPT = {"Cache-Control": "private, no-store"}
_SAFE = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
# Events leave as they are committed, never joined.
_AT_ONCE = Pace(interval_ms=0)


async def read_log(call: Call, answers: Answers) -> Reply:
    """GET /streams/{id}/log: the events of a stream as a Durable Stream, after an offset; also live."""
    found = await answers.find(call.caller, stream_id=call.params["stream_id"])
    read = durable.parse(call.query())
    stream = found.stream
    if stream is None or stream.is_lost:
        raise gone()
    after = _place(read, stream)
    if call.is_head:
        return _reply(stream, _Part.behind(stream, stream.last_seq), _NEVER_KEPT)
    if read.live == durable.SSE:
        return _follow(answers, stream, after, read)
    if read.live == durable.LONG_POLL:
        return await call.wait(_poll(answers, stream, after, read))
    part = await _read(answers, stream, after)
    if read.seq is None:
        return _reply(stream, part, _NEVER_KEPT)
    if (poll := Poll.paused_at(stream, after)) is not None:  # it catches up, and will wait again
        poll.resume(after)
        poll.pause(part.until)
    return _unless_known(call, stream, part)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The events after `after` up to `until`, as JSON."""

    after: int
    until: int
    is_tail: bool
    is_closed: bool
    items: list[str]

    @classmethod
    def behind(cls, stream: Stream, seq: int) -> _Part:
        """Return what a reader gets who has all events."""
        is_closed = stream.terminal is not None
        return cls(after=seq, until=seq, is_tail=True, is_closed=is_closed, items=[])


def _place(read: Read, stream: Stream) -> int:
    """Return the last event that the reader has. Raises Gone for an event that the stream does not have."""
    if read.seq is None:
        return stream.last_seq
    if read.log_id not in ("", stream.log_id) or read.seq > stream.last_seq:
        message = "This stream has no such offset. Read on from a Stream-Next-Offset of its own, or from -1."
        raise Gone(message, code="unknown_event_id", param="offset")
    return read.seq


async def _read(answers: Answers, stream: Stream, after: int) -> _Part:
    """Return the events after `after` that are committed now, or the first of them. Raises Gone, LogUnavailable."""
    if stream.is_lost:
        raise gone()
    tail = stream.last_seq
    if after >= tail:
        return _Part.behind(stream, after)
    items, size, seq, is_closed = list[str](), 0, after, False
    while seq < tail and len(items) < _MAX_EVENTS and size < _MAX_CHARS:
        for logged in await read_page(answers.streams.log, stream, seq, min(tail - seq, PAGE)):
            items.append(durable.item_of(logged))
            size += len(items[-1])
            seq, is_closed = logged.seq, is_terminal(logged.event)
    return _Part(after=after, until=seq, is_tail=seq == tail, is_closed=is_closed, items=items)


async def _poll(answers: Answers, stream: Stream, after: int, read: Read) -> Reply:
    """Wait for events, as a reader of the stream: 200 with them, 204 without."""
    cursor = {"Stream-Cursor": durable.cursor_at(time.time(), read.cursor)}
    if stream.terminal is not None:
        part = await _read(answers, stream, after)
    else:
        poll = Poll.begin(answers.streams, stream, after)
        try:
            await poll.wait(POLL_SECONDS)
            part = await _read(answers, stream, after)
        except BaseException:  # its client has gone, too
            poll.close()
            raise
        poll.pause(part.until)
    if part.items:
        return _reply(stream, part, {**_NEVER_KEPT, **cursor})
    return Reply(status=204, headers={**_headers(stream, part), **_NEVER_KEPT, **cursor})


def _follow(answers: Answers, stream: Stream, after: int, read: Read) -> Reply:
    encoder = LogEncoder(stream, after, durable.cursor_at(time.time(), read.cursor))
    if stream.terminal is not None and after >= stream.last_seq:
        body = encoder.control(after, is_closed=True)
        return Reply(body=body, headers={"Content-Type": encoder.content_type, **_NEVER_KEPT, **_SAFE})
    return Reply(body=Delivery(answers.streams, stream, encoder, after=after, pace=_AT_ONCE), headers=_SAFE)


def _unless_known(call: Call, stream: Stream, part: _Part) -> Reply:
    """Return the part, or 304 to a reader who has it."""
    etag = durable.etag_of(stream.log_id, part.after, part.until, is_closed=part.is_closed)
    known = (tag.strip().removeprefix("W/") for tag in call.headers.get("if-none-match", "").split(","))
    if etag in known:
        return Reply(status=304, headers={**_headers(stream, part), **_KEPT, "ETag": etag})
    return _reply(stream, part, {**_KEPT, "ETag": etag})


def _reply(stream: Stream, part: _Part, headers: dict[str, str]) -> Reply:
    body = f"[{','.join(part.items)}]".encode()
    return Reply(body=body, headers={"Content-Type": "application/json", **_headers(stream, part), **headers})


def _headers(stream: Stream, part: _Part) -> dict[str, str]:
    out = {"Stream-Next-Offset": durable.offset_of(stream.log_id, part.until), **_SAFE}
    if part.is_tail:
        out["Stream-Up-To-Date"] = "true"
    if part.is_closed:
        out["Stream-Closed"] = "true"
    return out
