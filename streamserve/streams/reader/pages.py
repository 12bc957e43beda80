"""A stream's log, read a page at a time: `read_page`, and `take_snapshot`, one event in place of many. asyncio.

A snapshot is the whole answer, once, for a reader that has missed much of it. It folds the log from its beginning, page
by page: a page and the answer are in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from streamserve.dialects.fold import Answer
from streamserve.protocol.errors import Gone
from streamserve.protocol.events import (
    Approval,
    BlockStart,
    BlockStop,
    ChoiceDone,
    Citation,
    Custom,
    LoggedEvent,
    Meta,
    State,
    Token,
)
from streamserve.streams.log.base import EventLog
from streamserve.streams.stream import Stream

# Events held at once; also how many a replay goes through before other tasks have their turn. As many plain tokens, or
# fewer events with other candidates: the page before shows how large they are.
PAGE = 64


async def read_page(log: EventLog, stream: Stream, after: int, limit: int = PAGE) -> list[LoggedEvent]:
    """Return at most a page of events that follow `after`, which is not the last event.

    Raises Gone where there are none: the log was dropped, or has lost them.
    """
    page: list[LoggedEvent] = []
    if not stream.is_lost:
        with contextlib.suppress(KeyError):
            page = await log.read(stream.log_id, after, min(limit, PAGE))
    if not page:
        raise Gone("The stream's events are no longer kept.")
    return page


# The events that a snapshot holds.
_OF_ANSWER = (Token, BlockStart, BlockStop, ChoiceDone, Citation, Approval, State, Custom)
# (after, limit) -> some of the events that follow `after`, at least one event while there are any.
ReadPage = Callable[[int, int], Awaitable[list[LoggedEvent]]]


async def take_snapshot(read_page: ReadPage, after: int, until: int) -> list[LoggedEvent]:
    """Return the events for a reader that has the events up to `after`, in place of the events up to `until`.

    That is `meta` if it lacks it, a snapshot as of the last event that added to the answer, and the events behind that
    event: a status that holds, the terminal event. [] if the reader has the whole answer so far, or if there are
    logprobs, which no snapshot has.
    """
    answer, head, behind, seq, answer_seq = Answer(), list[LoggedEvent](), list[LoggedEvent](), 0, 0
    while seq < until:
        page = await read_page(seq, until - seq)
        if not page:
            return []
        for logged in page:
            seq, event = logged.seq, logged.event
            if isinstance(event, Token) and event.logprobs is not None:
                return []
            if isinstance(event, _OF_ANSWER):
                answer.feed(event)
                answer_seq = seq
                behind.clear()
            elif seq > after:
                (head if isinstance(event, Meta) else behind).append(logged)
        await asyncio.sleep(0)
    if answer_seq <= after:
        return []
    return [*head, LoggedEvent(seq=answer_seq, event=answer.snapshot(answer_seq)), *behind]
