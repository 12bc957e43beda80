"""`ResponseRows`: what is kept of responses beside their events. See `Responses` in api/openai/responses.py.

    keep ──► the row: what was asked ──► fill, at the stream's end, on a site that stores ──► the whole response too

Where the site does not store, a row goes when the events of its stream go (`purge`): then nothing of it can be read.
Any event loop of a process that has the site's log.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.db import transaction
from django.utils import timezone

from streamserve.api.call import Caller
from streamserve.api.logs import get_logger
from streamserve.api.openai.responses import unfinished
from streamserve.dialects.openai.responses.output import response_id, response_json
from streamserve.dialects.openai.responses.stored import StoredResponse, no_response
from streamserve.models import StoredResponse as ResponseRow
from streamserve.models import Stream as StreamRow
from streamserve.protocol.events import LoggedEvent, is_terminal
from streamserve.rows import orm
from streamserve.rows.answer_messages import AnswerMessages
from streamserve.rows.queries import delete_in_parts
from streamserve.streams.log.base import EventLog, LogUnavailable, new_log_id
from streamserve.streams.stream import Stream

log = get_logger(__name__)

_ROWS = ResponseRow.objects


class ResponseRows:
    """`keeps`: whether the site stores answers. `purge_before` returns when a log must have ended that is dropped."""

    def __init__(self, event_log: EventLog, *, keeps: bool, purge_before: Callable[[float], float]) -> None:
        self._log, self._keeps, self._purge_before = event_log, keeps, purge_before
        self._messages = AnswerMessages(event_log)

    async def keep(self, stream: Stream, response: StoredResponse, /) -> None:
        """Insert the row of a stream, unless it exists: a request may be sent again with its Idempotency-Key."""
        columns = {"tenant": stream.tenant, "head": _text(response.head), "items": _text(response.items)}
        if await orm.write(_insert, stream.id, columns):
            await self.fill(stream.id)

    async def find(self, caller: Caller, stream_id: str, /) -> StoredResponse | None:
        """Return the response; None if it is not kept, or was deleted."""
        if not stream_id:
            return None
        rows = _ROWS.filter(stream_id=stream_id, tenant=caller.tenant, deleted_at=None)
        row = await orm.read(rows.first)
        if row is not None and self._keeps and not row.whole:
            await self.fill(stream_id)
            row = await orm.read(rows.first)
        return None if row is None else _value_of(row)

    async def fill(self, stream_id: str, /) -> None:
        """Write an ended response into its row, if the site stores and the row lacks it."""
        if not self._keeps:
            return
        lacking = _ROWS.filter(stream_id=stream_id, deleted_at=None, whole="")
        row = await orm.read(lacking.select_related("stream").first)
        if row is None:
            return
        events: list[LoggedEvent] = []
        try:
            while page := await self._log.read(row.stream.log_id, events[-1].seq if events else 0):
                events += page
        except KeyError:
            return  # its events are gone
        except LogUnavailable:
            log.warning("response_not_filled", stream_id=stream_id)
            return
        if events and is_terminal(events[-1].event):
            begun = _Begun(row.stream_id, int(row.stream.created_at.timestamp()))
            whole = response_json(events, begun, json.loads(row.head))
            await orm.write(lacking.update, whole=_text(whole))

    async def delete(self, caller: Caller, stream_id: str, /) -> None:
        """Empty the row, and drop the events and the text of its stream. A message of a conversation keeps its own."""
        rows = _ROWS.filter(stream_id=stream_id, tenant=caller.tenant, deleted_at=None).select_related("stream")
        row = await orm.read(rows.first)
        if row is None:
            raise no_response(response_id(stream_id))
        if row.stream.state != "finished":
            raise unfinished()
        await self._messages.write(stream_id)
        await self._log.drop(await orm.write(_forget, row))

    async def purge(self) -> None:
        """Drop the rows of responses whose events are gone, where the site does not store."""
        if self._keeps:
            return
        before = datetime.fromtimestamp(self._purge_before(time.time()), UTC)
        ended = _ROWS.filter(stream__state="finished", stream__finished_at__lt=before)
        await orm.bulk(delete_in_parts, ended)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A stream by its row, as a dialect names it."""

    id: str
    created: int


def _insert(stream_id: str, columns: dict[str, str]) -> bool:
    """Insert the row; return whether it was new."""
    return _ROWS.get_or_create(stream_id=stream_id, defaults=columns)[1]


def _forget(row: ResponseRow) -> str:
    """Empty the row and the stream's text; return the id of its log.

    The stream's row gets the id of no log: other processes that keep the stream find by it that its events are gone.
    """
    with transaction.atomic(using=_ROWS.db):
        log_id = StreamRow.objects.values_list("log_id", flat=True).get(pk=row.stream_id)
        emptied = _ROWS.filter(pk=row.pk, deleted_at=None)
        if emptied.update(deleted_at=timezone.now(), head="", items="", whole=""):
            StreamRow.objects.filter(pk=row.stream_id).update(text="", log_id=new_log_id())
    return log_id


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))  # ASCII: NUL is escaped


def _value_of(row: ResponseRow) -> StoredResponse:
    whole = json.loads(row.whole) if row.whole else None
    return StoredResponse(stream_id=row.stream_id, head=json.loads(row.head), items=json.loads(row.items), whole=whole)


def forget_user(instance: Any, using: str, **kwargs: Any) -> None:
    """Delete what is kept of a deleted user's responses, in that transaction."""
    _ROWS.using(using).filter(tenant=f"user:{instance.pk}").delete()
