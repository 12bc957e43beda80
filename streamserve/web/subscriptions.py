"""`Subscriptions`: the streams that one WebSocket shows, each sent by a task of its own, at the pace the socket takes.

Tokens come from the log, never over the channel layer (which drops silently past 100 messages). Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import Context
from typing import Any

import structlog

from streamserve.dialects.native import websocket_message
from streamserve.dialects.websocket import failure, going_away, internal_error
from streamserve.protocol.errors import StreamserveError
from streamserve.streams.reader.follow import Follow, follow
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream

log = structlog.get_logger("streamserve")

Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class SocketGone(Exception):
    """Nobody is at the other end of the socket."""


class _Subscription:
    """One stream on its way to the socket."""

    def __init__(self, stream: Stream, events: Follow) -> None:
        self.stream, self.events = stream, events
        self.task: asyncio.Task[None] | None = None

    def end(self) -> None:
        """The reader has left: when this returns, the engine knows."""
        self.events.close()
        if self.task is not None:
            self.task.cancel()


class Subscriptions:
    """See above. `is_leaving`: the socket is to be closed; then `on_end` is called after the end of each relay."""

    def __init__(self, send: Send, on_end: Callable[[], Awaitable[None]]) -> None:
        self.is_leaving = False
        self._send, self._on_end = send, on_end
        self._shown: dict[str, _Subscription] = {}

    def __len__(self) -> int:
        return len(self._shown)

    def __contains__(self, stream_id: str) -> bool:
        return stream_id in self._shown

    def show(self, streams: Streams, stream: Stream, after: int, credit: int | None) -> None:
        """Send the events of `stream` from `after` on, instead of what is being sent of it.

        Raises BadRequest for an `after` past the last event, QuotaExceeded for one reader too many.
        """
        before = self._shown.pop(stream.id, None)
        if before is not None:
            before.end()
        relay = self._shown[stream.id] = _Subscription(stream, follow(streams, stream, after, credit=credit))
        # An empty context: what it sends outlives the message that asked for it.
        relay.task = asyncio.get_running_loop().create_task(self._run(relay), name="relay", context=Context())

    def ack(self, stream_id: str, seq: int) -> None:
        """Note what the client has of a stream. Of one that is not shown, or not any more, it is no news."""
        relay = self._shown.get(stream_id)
        if relay is not None:
            relay.events.ack(seq)

    async def aclose(self) -> None:
        """End every relay, which counts the reader out of its streams."""
        relays = list(self._shown.values())
        for relay in relays:
            relay.end()
        await asyncio.gather(*(relay.task for relay in relays if relay.task is not None), return_exceptions=True)

    async def _run(self, relay: _Subscription) -> None:
        try:
            await self._send_all(relay)
        except SocketGone:
            pass  # the consumer hears of it, too
        finally:
            relay.events.close()
            if self._shown.get(relay.stream.id) is relay:
                del self._shown[relay.stream.id]
        if self.is_leaving:
            await self._on_end()

    async def _send_all(self, relay: _Subscription) -> None:
        """Send every event as far as the socket takes them, or say why not, or where to go on."""
        stream = relay.stream
        try:
            async with aclosing(relay.events) as events:
                async for logged in events:
                    await self._send(websocket_message(stream.id, stream.log_id, logged))
            if relay.events.reader.is_let_go:
                await self._send(going_away(stream, relay.events.seq))
                self.is_leaving = True
        except SocketGone:
            raise
        except StreamserveError as error:
            await self._send(failure(error, {"id": stream.id}))
        except Exception:
            log.exception("websocket_relay_failed", stream_id=stream.id)
            await self._send(failure(internal_error(), {"id": stream.id}))
