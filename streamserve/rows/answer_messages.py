"""`AnswerMessages`: writes an answer into its message, from its log, once. The end of what a `Turn` begins.

    RowStore.finish ──► end_of ──► the stream's row and the message, in one transaction
    Reaper.round    ──► write_left ──► what that could not write: its log was away, or its process was killed

Only a `running` message is written, so each is written once, by whichever process comes first. Until then its log is
touched before every purge (`keep_needed_logs`), its stream's row stays, and nothing else drops them. A log that is gone
all the same fails the message, with `producer_lost`. Any event loop of a process that has the site's log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

from django.db import transaction
from django.utils import timezone

from streamserve.api.logs import get_logger
from streamserve.models import Conversation, Message
from streamserve.models import Stream as StreamRow
from streamserve.protocol.events import LoggedEvent, is_terminal
from streamserve.rows import orm
from streamserve.rows.branch import answer_columns
from streamserve.rows.turns import withdraw
from streamserve.streams.log.base import EventLog, LogUnavailable, Refusal, append

log = get_logger(__name__)

LOST = "producer_lost"
MOST_AT_ONCE = 500  # messages that a round writes

Write = Callable[[], object]


class AnswerMessages:
    """Writes the ends of answers. Holds the log, and changes nothing but messages and their conversations."""

    def __init__(self, event_log: EventLog) -> None:
        self._log = event_log

    async def end_of(
        self, stream_id: str, log_id: str, error_code: str = "", *, has_begun: bool = True
    ) -> Write | None:
        """Return what writes the answer of an ended stream into its message, to be called in a transaction.

        None: it has no message, or has been written. An answer that has not begun was refused, and takes its messages
        along. Raises LogUnavailable.
        """
        running = Message.objects.running().filter(stream_id=stream_id)
        if not await orm.read(running.exists):
            return None
        events = await self._events(log_id)
        if not events and not has_begun:
            return partial(withdraw, stream_id)
        return partial(write_end, stream_id, events, error_code)

    async def _events(self, log_id: str) -> list[LoggedEvent]:
        """Return the log's events; [] of a log that is gone."""
        events: list[LoggedEvent] = []
        with contextlib.suppress(KeyError):
            while page := await self._log.read(log_id, events[-1].seq if events else 0):
                events += page
        return events

    async def write(self, stream_id: str) -> None:
        """Write the message of a stream whose row has ended, if that was not done. Raises LogUnavailable."""
        ended = StreamRow.objects.filter(pk=stream_id, state="finished")
        row = await orm.read(ended.only("log_id", "error_code").first)
        if row is not None:
            await self._write(stream_id, row.log_id, row.error_code)

    async def _write(self, stream_id: str, log_id: str, error_code: str) -> None:
        write = await self.end_of(stream_id, log_id, error_code)
        if write is not None:
            await orm.write(_together, write)

    async def write_left(self) -> None:
        """Write the messages whose streams have ended without that. What cannot be read now is left for later."""
        for stream_id, row in await orm.read(_left):
            try:
                await self._write(stream_id, *row)
            except LogUnavailable as error:
                log.warning("message_not_written", stream_id=stream_id, error=error.message)
                return
            except Exception:
                # A message that cannot be written does not hold up the others.
                log.exception("message_not_written", stream_id=stream_id)


def _left() -> list[tuple[str, tuple[str, str]]]:
    """Return id, log id and error code of ended streams with a running message, the oldest first.

    A stream without a row has no log.
    """
    found = [str(one) for one in Message.objects.running().streams().order_by("created_at")[:MOST_AT_ONCE]]
    rows = StreamRow.objects.filter(pk__in=found).values_list("pk", "state", "log_id", "error_code")
    by_id = {pk: (state, (log_id, error_code)) for pk, state, log_id, error_code in rows}
    ended = ("finished", ("", LOST))
    return [(one, by_id.get(one, ended)[1]) for one in found if by_id.get(one, ended)[0] == "finished"]


def _together(*writes: Write) -> None:
    """Call what writes in one transaction."""
    with transaction.atomic(using=Message.objects.db):
        for write in writes:
            write()


def write_end(stream_id: str, events: Sequence[LoggedEvent], error_code: str) -> bool:
    """Write the answer into its message; return False if that was done before. Call it in a transaction."""
    has_end = bool(events) and is_terminal(events[-1].event)
    columns = answer_columns(events, error_code or LOST)
    if not Message.objects.write_end(stream_id, **columns):
        return False
    if not has_end:
        log.warning("message_log_lost", stream_id=stream_id, error_code=columns["error_code"])
    of_message = Message.objects.filter(stream_id=stream_id).values("conversation_id")
    Conversation.objects.filter(pk__in=of_message).update(updated_at=timezone.now())
    return True


async def keep_needed_logs(event_log: EventLog) -> None:
    """Touch the logs that must not be dropped although nothing writes them.

    Those of jobs that are queued, or between two attempts, and of answers whose messages are not written yet.
    """
    for log_id, fence in await orm.read(needed_logs):
        with contextlib.suppress(Refusal, KeyError):
            await append(event_log, log_id, fence, [])


def needed_logs() -> list[tuple[str, int]]:
    """Return log id and fence of each."""
    unwritten = StreamRow.objects.filter(pk__in=Message.objects.running().streams())
    return [*StreamRow.objects.of_unfinished_jobs(), *unwritten.values_list("log_id", "fence")]
