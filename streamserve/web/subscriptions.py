"""`Subscriptions`: the streams that one WebSocket shows, each sent by its own task as fast as the socket takes it.

Tokens come from the log, never over the channel layer, which drops messages silently past 100. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import Context
from typing import Any

from streamserve.api.logs import get_logger
from streamserve.dialects.native import closing_message, websocket_message
from streamserve.dialects.pace import SITES_OWN, Pace
from streamserve.dialects.websocket import failure, going_away, internal_error
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.events import Done
from streamserve.streams.reader.follow import Follow, follow
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream

log = get_logger(__name__)

Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class SocketGone(Exception):
    """The client has closed the socket."""


class _Subscription:
    """One stream on its way to the socket."""

    def __init__(self, stream: Stream, events: Follow, pace: Pace) -> None:
        self.stream, self.events, self.pace = stream, events, pace
        self.task: asyncio.Task[None] | None = None

    def end(self) -> None:
        """Detach the reader and cancel the task. When this returns, the engine knows that the reader has left."""
        self.events.close()
        if self.task is not None:
            self.task.cancel()


class Subscriptions:
    """The subscriptions of one socket. Once `is_leaving`, `on_end` is called after each subscription that ends."""

    def __init__(self, send: Send, on_end: Callable[[], Awaitable[None]]) -> None:
        self.is_leaving = False
        self._send, self._on_end = send, on_end
        self._shown: dict[str, _Subscription] = {}

    def __len__(self) -> int:
        return len(self._shown)

    def __contains__(self, stream_id: str) -> bool:
        return stream_id in self._shown

    def pace_of(self, stream_id: str) -> Pace:
        """Return the pace at which a stream is shown; the site's own for a stream that is not."""
        one = self._shown.get(stream_id)
        return SITES_OWN if one is None else one.pace

    def show(self, streams: Streams, stream: Stream, after: int, credit: int | None, pace: Pace) -> None:
        """Send the events of `stream` after seq `after`; this replaces the subscription that the socket has to it.

        Raises Gone if `after` is past the last event, QuotaExceeded if the stream has too many readers.
        """
        before = self._shown.pop(stream.id, None)
        if before is not None:
            before.events.reader.dismiss()
            before.end()
        one = _Subscription(stream, follow(streams, stream, after, credit=credit, pace=pace), pace)
        self._shown[stream.id] = one
        # An empty context: the task outlives the message that started it.
        one.task = asyncio.get_running_loop().create_task(self._run(one), name="subscription", context=Context())

    def ack(self, stream_id: str, seq: int, *, is_away: bool) -> None:
        """Note the last event that the client has of a stream. Ignored for a stream that is not shown."""
        one = self._shown.get(stream_id)
        if one is not None:
            one.events.ack(seq, is_away=is_away)

    async def aclose(self) -> None:
        """End every subscription; its reader is detached from the stream."""
        shown = list(self._shown.values())
        for one in shown:
            one.end()
        await asyncio.gather(*(one.task for one in shown if one.task is not None), return_exceptions=True)

    async def _run(self, one: _Subscription) -> None:
        try:
            await self._send_all(one)
        except SocketGone:
            pass  # the consumer gets the disconnect, too
        finally:
            one.events.close()
            if self._shown.get(one.stream.id) is one:
                del self._shown[one.stream.id]
        if self.is_leaving:
            await self._on_end()

    async def _send_all(self, one: _Subscription) -> None:
        """Send every event; after the last event, the error that ended the stream's delivery or where to resume it."""
        stream = one.stream
        try:
            async with aclosing(one.events) as events:
                async for logged in events:
                    if isinstance(logged.event, Done):
                        await self._send(closing_message(stream, logged.event))
                    await self._send(websocket_message(stream.id, stream.log_id, logged))
            if one.events.reader.is_let_go:
                await self._send(going_away(stream, one.events.seq))
                self.is_leaving = True
        except SocketGone:
            raise
        except StreamserveError as error:
            await self._send(failure(error, {"id": stream.id}))
        except Exception:
            log.exception("websocket_subscription_failed", stream_id=stream.id)
            await self._send(failure(internal_error(), {"id": stream.id}))
