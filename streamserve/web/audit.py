"""`WatchAudit`: the watchers of this process, each with a row that is inserted before the first byte is sent.

A watch whose row cannot be inserted does not begin. A watch ends with its connection; then the row and one log line get
the last event that was sent. Runs on the event loop; knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable
from contextvars import Context
from functools import partial
from typing import Any

from django.contrib.auth import get_user_model

from streamserve.api.answers import Found
from streamserve.api.call import Call, Caller
from streamserve.api.logs import get_logger
from streamserve.dialects.native import NativeEncoder
from streamserve.dialects.pace import Pace, pace_of_query
from streamserve.dialects.query import query_values
from streamserve.models import ApiKey, Watch
from streamserve.protocol.errors import DatabaseUnavailable, no_stream
from streamserve.rows import orm
from streamserve.streams.reader.channel import nothing
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream

log = get_logger(__name__)

WATCH_PERMISSION = "streamserve.watch_stream"
_MAX_ADDRESS_CHARS = 45  # of an IPv6 address


class WatchDelivery(Delivery):
    """A delivery to a watcher."""

    def __init__(self, streams: Streams, stream: Stream, after: int, pace: Pace) -> None:
        self._task: asyncio.Task[Any] | None = None
        super().__init__(streams, stream, NativeEncoder(stream.log_id, stream), after=after, watcher=True, pace=pace)

    @property
    def sent_seq(self) -> int:
        """The last event that the reader may have received."""
        return self.reader.sent_seq

    async def run(self, send: Callable[[bytes], Awaitable[None]], num_untaken: Callable[[], int] = nothing) -> None:
        self._task = asyncio.current_task()
        await super().run(send, num_untaken)

    def cut(self) -> None:
        """Stop sending and end the connection."""
        self.close()
        if self._task is not None:
            self._task.cancel()


class WatchAudit:
    """See `Watches` in api/native.py. Each process has one; each watch has a task, which writes its row."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._live: dict[WatchDelivery, Watch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def watchers(self) -> set[str]:
        """The owners (`Caller.owner`) of the running watches."""
        return {row.watcher for row in self._live.values()}

    async def find(self, caller: Caller, stream_id: str) -> tuple[str, Found]:
        """Return the caller's user name and the stream, of any tenant. Raises NotFound unless the user may watch."""
        user = await orm.of_site(watching_user, caller.owner)
        record = None if user is None else await self._streams.store.find(stream_id=stream_id)
        if record is None:
            raise no_stream()
        return user.get_username(), Found(stream=await self._streams.reach(record.id, record), record=record)

    async def begin(self, call: Call, username: str, stream: Stream, after: int) -> WatchDelivery:
        """Insert the row of a watch and return its delivery. Raises what `Delivery` or the database raises."""
        pace = pace_of_query(query_values(call.query()))
        delivery = WatchDelivery(self._streams, stream, after, pace)
        row = self._live[delivery] = Watch(
            stream_id=stream.id,
            stream_owner=stream.owner,
            watcher=call.caller.owner,
            username=username,
            address=call.address[:_MAX_ADDRESS_CHARS],
            after_seq=after,
            last_seq=after,
        )
        loop = asyncio.get_running_loop()
        is_written: asyncio.Future[None] = loop.create_future()
        # Its own task, in an empty context: a client that leaves during the insert does not leave the row open.
        task = loop.create_task(self._audit(row, delivery, is_written), name="watch", context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await is_written
        except BaseException:
            delivery.close()
            raise
        return delivery

    def cut(self, watchers: Container[str]) -> None:
        """Disconnect these watchers."""
        for delivery, row in list(self._live.items()):
            if row.watcher in watchers:
                log.info("watch_permission_lost", stream_id=row.stream_id, watcher=row.watcher)
                delivery.cut()

    async def note(self) -> None:
        """Write the last event of each watch to its row, so that a killed process leaves it there."""
        for delivery, row in list(self._live.items()):
            await orm.write(Watch.objects.note, row.pk, delivery.sent_seq)

    async def aclose(self) -> None:
        """Disconnect all watchers; return when their rows have their ends."""
        for delivery in list(self._live):
            delivery.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _audit(self, row: Watch, delivery: WatchDelivery, is_written: asyncio.Future[None]) -> None:
        """Insert the row, set `is_written`, wait for the end and write it."""
        try:
            await orm.write(row.save, force_insert=True)
        except Exception as error:
            if not is_written.done():
                is_written.set_exception(error)
        else:
            if not is_written.done():
                is_written.set_result(None)
            closed = asyncio.Event()
            delivery.on_close(closed.set)
            await closed.wait()
            await _record_end(row, delivery.sent_seq)
        finally:
            del self._live[delivery]


async def _record_end(row: Watch, last_seq: int) -> None:
    log.info(
        "stream_watched",
        stream_id=row.stream_id,
        watcher=row.watcher,
        username=row.username,
        address=row.address,
        after_seq=row.after_seq,
        last_seq=last_seq,
        began_at=row.began_at.isoformat(),
    )
    try:
        await orm.write(Watch.objects.end, row.pk, last_seq)
    except DatabaseUnavailable:
        orm.post(partial(Watch.objects.end, row.pk, last_seq))
    except Exception:
        # The log line above is complete; the row keeps the beginning.
        log.exception("watch_end_not_written", stream_id=row.stream_id)


def watchers_without_permission(watchers: Iterable[str]) -> set[str]:
    """Return the `watchers` (as "user:5", "key:3") that have lost the permission to watch."""
    return {watcher for watcher in watchers if watching_user(watcher) is None}


def watching_user(watcher: str) -> Any:
    """Return the user whose permission lets `watcher` watch streams of any owner, or None.

    A key also needs the scope "watch".
    """
    kind, _, pk = watcher.partition(":")
    user: Any = None
    if kind == "key":
        key = ApiKey.objects.active().filter(pk=pk).select_related("user").first()
        user = None if key is None or "watch" not in key.scopes else key.user
    elif kind == "user":
        user = get_user_model()._default_manager.filter(pk=pk, is_active=True).first()
    return user if user is not None and user.has_perm(WATCH_PERMISSION) else None
