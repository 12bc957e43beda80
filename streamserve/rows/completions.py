"""`CompletionRows`: chat completions that their callers asked to store. See `StoredChats` in api/openai/chats.py.

    keep ──► the row, with the request's messages ──► fill, at the stream's end ──► the whole answer too

The row and the end of the stream may be written in any order. The second of the two writes fills the row; if that did
not happen, the first request for the row does. An answer that did not end well is not stored. Any event loop of a
process that has the site's log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction

from streamserve.api.call import Caller
from streamserve.api.logs import get_logger
from streamserve.dialects.fold import Answer
from streamserve.dialects.openai import chat as openai_chat
from streamserve.dialects.openai.stored_chat import ListQuery, StoredChat, no_completion, stream_id_of
from streamserve.models import StoredCompletion, marks_of
from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import NotFinished, StreamserveError
from streamserve.protocol.events import LoggedEvent, is_terminal
from streamserve.rows import orm
from streamserve.rows.answer_messages import AnswerMessages
from streamserve.rows.queries import part_of
from streamserve.streams.log.base import EventLog, LogUnavailable, new_log_id
from streamserve.streams.stream import Stream

log = get_logger(__name__)

_ROWS = StoredCompletion.objects


class CompletionRows:
    """`keeps`: whether the site stores; if not, what it has stored before can still be read and deleted."""

    def __init__(self, event_log: EventLog, *, keeps: bool, reasoning_field: str) -> None:
        self._log, self._keeps, self._reasoning_field = event_log, keeps, reasoning_field
        self._messages = AnswerMessages(event_log)

    async def keep(self, stream: Stream, messages: Sequence[Mapping[str, Any]], metadata: Mapping[str, str], /) -> None:
        """Insert the row of a stream, unless it exists: a request may be sent again with its Idempotency-Key."""
        if self._keeps:
            columns = {"messages": _text(messages), **_columns(metadata)}
            if await orm.write(_insert, stream.id, columns):
                await self.fill(stream.id)

    async def fill(self, stream_id: str) -> None:
        """Write an ended answer into its row, if the row lacks it; delete the row if the answer ended badly.

        What cannot be read now is left for the next who looks.
        """
        lacking = _ROWS.filter(stream_id=stream_id, deleted_at=None, completion="")
        row = await orm.read(lacking.select_related("stream").first)
        if row is None:
            return
        try:
            completion = await self._completion(row.stream)
        except LogUnavailable:
            log.warning("completion_not_filled", stream_id=stream_id)
        except StreamserveError:  # the answer's own
            await orm.write(lacking.delete)
        else:
            if completion is not None:
                await orm.write(lacking.update, completion=_text(completion))
            elif row.stream.state == "finished":  # its events are gone
                await orm.write(lacking.delete)

    async def _completion(self, row: StreamRow) -> dict[str, Any] | None:
        """Return the whole answer; None where the log has no end. Raises the error that it ended in."""
        events: list[LoggedEvent] = []
        try:
            while page := await self._log.read(row.log_id, events[-1].seq if events else 0):
                events += page
        except KeyError:
            return None
        if not events or not is_terminal(events[-1].event):
            return None
        return openai_chat.completion_json(
            Answer.of(events),
            completion_id=f"chatcmpl-{row.pk}",
            model=row.model,
            created=int(row.created_at.timestamp()),
            reasoning_field=self._reasoning_field,
        )

    async def find(self, caller: Caller, stream_id: str, /) -> StoredChat | None:
        """Return the completion; None if it is not stored, or not whole yet."""
        row = await self._row(caller, stream_id)
        return _chat_of(row) if row is not None and row.completion else None

    async def page(self, caller: Caller, query: ListQuery, /) -> tuple[Sequence[StoredChat], bool]:
        """Return a part of the tenant's completions."""
        found, has_more = await orm.read(_page, caller.tenant, query)
        return [_chat_of(row) for row in found], has_more

    async def annotate(self, caller: Caller, stream_id: str, metadata: Mapping[str, str], /) -> StoredChat:
        """Replace the metadata."""
        row = await self._whole(caller, stream_id)
        columns = _columns(metadata)
        if not await orm.write(_ROWS.annotate_with, row.pk, **columns):
            raise no_completion(f"chatcmpl-{stream_id}")
        row.metadata = columns["metadata"]
        return _chat_of(row)

    async def delete(self, caller: Caller, stream_id: str, /) -> None:
        """Empty the row, and drop the events and the text of its stream. A message of a conversation keeps its own."""
        row = await self._whole(caller, stream_id)
        await self._messages.write(stream_id)
        log_id = await orm.write(_forget, row)
        await self._log.drop(log_id)

    async def _whole(self, caller: Caller, stream_id: str) -> StoredCompletion:
        row = await self._row(caller, stream_id)
        if row is None:
            raise no_completion(f"chatcmpl-{stream_id}")
        if not row.completion or row.stream.state != "finished":
            raise NotFinished(f"The answer is still being made. Ask again, or read /v1/streams/{stream_id}/events.")
        return row

    async def _row(self, caller: Caller, stream_id: str) -> StoredCompletion | None:
        """Return the row. Raises NotFound if it was deleted."""
        rows = _ROWS.filter(stream_id=stream_id, tenant=caller.tenant).select_related("stream")
        row = await orm.read(rows.first)
        if row is not None and row.deleted_at is not None:
            raise no_completion(f"chatcmpl-{stream_id}")
        if row is not None and not row.completion:
            await self.fill(stream_id)
            row = await orm.read(rows.first)
        return row


def _insert(stream_id: str, columns: Mapping[str, str]) -> bool:
    """Insert the row with the values of the stream's row; return whether it was new."""
    stream = StreamRow.objects.only("tenant", "model", "created_at").get(pk=stream_id)
    named = {"tenant": stream.tenant, "model": stream.model, "created_at": stream.created_at}
    return _ROWS.get_or_create(stream_id=stream_id, defaults={**named, **columns})[1]


def _page(tenant: str, query: ListQuery) -> tuple[list[StoredCompletion], bool]:
    """Return the rows of a page, and whether there are more."""
    rows, last, after = _ROWS.of(tenant), None, query.page.after
    if after:
        last = rows.filter(stream_id=stream_id_of(after)).only("created_at").first()
        if last is None:
            raise no_completion(after, "after")
    rows = rows.with_metadata(query.metadata)
    if query.model:
        rows = rows.filter(model=query.model)
    return part_of(rows.defer("messages"), query.page, last)


def _forget(row: StoredCompletion) -> str:
    """Empty the row and the stream's text; return the id of its log.

    The stream's row gets the id of no log: other processes that keep the stream find by it that its events are gone.
    """
    with transaction.atomic(using=_ROWS.db):
        log_id = StreamRow.objects.values_list("log_id", flat=True).get(pk=row.stream_id)
        if _ROWS.forget(row.pk):
            StreamRow.objects.filter(pk=row.stream_id).update(text="", log_id=new_log_id())
    return log_id


def _columns(metadata: Mapping[str, str]) -> dict[str, str]:
    return {"metadata": _text(metadata), "marks": " ".join(marks_of(metadata))}


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))  # ASCII: NUL is escaped


def _chat_of(row: StoredCompletion) -> StoredChat:
    """Return the row as a value; of a list's row without its messages, which are not read."""
    has_messages = "messages" not in row.get_deferred_fields()
    return StoredChat(
        stream_id=row.stream_id,
        completion=json.loads(row.completion),
        messages=json.loads(row.messages) if has_messages else (),
        metadata=json.loads(row.metadata),
    )
