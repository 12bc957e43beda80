"""`HTTPSource`: the events of one request to a server elsewhere, read no faster than the answer's reader reads.

    wait for a place ─► Exchange.open ─► read ─► SSEDecoder ─► ChunkParser ─► put ─► wait for room ─► read ─► …
      ▲    at an upstream                  │
      └── it failed, and nothing was put ──┘  the next upstream

Not reading is the back-pressure: the server's socket fills, and TCP holds the server. It is not read while the queue is
full, or the reader is `lead_tokens` behind. Lives on the event loop, in a task of its own; to cancel that closes the
connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextvars import Context
from typing import Any

from streamserve.clients.base import Source
from streamserve.clients.remote.body import body_of, cut_after
from streamserve.clients.remote.chunks import ChunkParser
from streamserve.clients.remote.errors import UpstreamAway, UpstreamBroken, UpstreamError, UpstreamLost, unavailable
from streamserve.clients.remote.exchange import Exchange
from streamserve.clients.remote.server import RemoteServer
from streamserve.clients.remote.upstreams import FAILED_RETRY_SECONDS, Route, Upstreams
from streamserve.clients.timings import RequestTimes
from streamserve.protocol.engine import Accepted, Park
from streamserve.protocol.errors import EngineUnavailable, Refused, StreamserveError
from streamserve.protocol.events import Done, Error, Event, Status, Token
from streamserve.protocol.requests import Resume
from streamserve.protocol.sse import SSEDecoder, SSEError
from streamserve.protocol.trace import Trace
from streamserve.tracing.answers import Elsewhere, asked_elsewhere

logger = logging.getLogger("streamserve.remote")

MAX_QUEUED = 64  # events; the events of one read may come on top
# A server that has not answered by then may be computing the prompt: the answer begins, and waits where it is seen.
_ACCEPT_SECONDS = 1.0


class HTTPSource(Source):
    """See above. `continues`: an upstream takes up an answer that has only text so far."""

    def __init__(
        self,
        accepted: Accepted,
        upstreams: Upstreams,
        route: Route,
        resume: Resume,
        *,
        continues: bool,
        trace: Trace | None = None,
    ) -> None:
        super().__init__(accepted, max_queued=MAX_QUEUED)
        self.answer = ChunkParser(route.request.n, resume.shown)
        self._task: asyncio.Task[None] | None = None
        self._upstreams, self._config = upstreams, upstreams.config
        self._route, self._resume, self._continues = route, resume, continues
        self._times = RequestTimes(upstreams.clock())
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._was_queued = self._has_put = False
        self._reader_tokens = resume.reader_tokens
        self._has_moved = asyncio.Event()  # the reader
        self._trace = trace

    def start(self) -> asyncio.Task[None]:
        """Begin to send the request, and return the task that does; the client awaits it in the end."""
        self._was_queued = not self._upstreams.has_free
        self._task = asyncio.get_running_loop().create_task(self._run(), context=Context())
        return self._task

    async def opened(self) -> None:
        """Return when the server has accepted the request, or may take longer. Raises its refusal."""
        try:
            if not self._was_queued:
                await asyncio.wait([self._opened], timeout=_ACCEPT_SECONDS)
        except asyncio.CancelledError:
            self.generation.cancel()
            raise
        if not self._opened.done():
            self._opened.cancel()  # what happens from now on is an event
        elif (error := self._opened.exception()) is not None:
            raise error

    @property
    def can_park(self) -> bool:
        """Whether the server would continue the answer as it is now."""
        return self.answer.num_tokens == 0 or (self._continues and self.answer.is_text_only)

    @property
    def is_ahead(self) -> bool:
        """Whether a choice is as far ahead of its reader as it may be."""
        read = self._reader_tokens
        if read is None:
            return False
        pairs = zip(self.answer.tokens_of_choices, read, strict=False)
        return any(made - seen >= self._config.lead_tokens for made, seen in pairs)

    @property
    def has_room(self) -> bool:
        """Whether more is to be read from the server."""
        return not self.generation.is_full and not self.is_ahead

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool) -> None:
        """Note how far the furthest reader is: when it has read enough, the server is read from again."""
        self._reader_tokens = None if num_tokens is None else tuple(num_tokens)
        self._has_moved.set()

    def cancel(self) -> None:
        """Close the connection, in the loop's next turn."""
        if self._task is not None:
            self._task.cancel()

    def fail(self, code: str, message: str, *, retryable: bool = True) -> None:
        """End with an error, unless the answer has ended already."""
        self.generation.put([Error(code=code, message=message, retryable=retryable)])

    # The task

    async def _run(self) -> None:
        """Ask one upstream after the other until something was shown, and turn whatever goes wrong into an end."""
        upstreams = self._upstreams
        self._was_queued = not upstreams.has_free  # since `start` other requests may have taken the last
        try:
            if self._was_queued:
                step = upstreams.places.num_ahead(self._route.tenant) + 1
                self.generation.put([Status(status="queued", step=step)])
            while not await self._try():
                pass
        except UpstreamLost as reason:
            self._lose(is_counted=not (isinstance(reason, UpstreamAway) and self._upstreams.are_several))
        except StreamserveError as error:
            self._refuse(error)
        except (UpstreamBroken, UpstreamError) as error:
            if isinstance(error, UpstreamError) and self._has_put and self._upstreams.are_several and self.can_park:
                self._lose()
                return
            message = "the model's server could not finish this answer. Try again."
            self._refuse(EngineUnavailable(message, code="upstream_error"))
        except Exception:  # the edge of the task
            logger.exception("model %s: a request failed", self._config.alias)
            self._refuse(StreamserveError("the server failed while answering. It has been logged."))

    async def _try(self) -> bool:
        """Ask an upstream; return whether the answer has ended, so that no other is asked. Raises as `_exchange`."""
        server = await self._upstreams.take(self._route)
        for last in [*self._route.tried][-1:]:
            last.counts.moved += 1
        try:
            await self._exchange(server)
        except (UpstreamLost, UpstreamBroken, UpstreamError, Refused) as error:
            _note_failure(server, error)
            self._route.tried[server] = error
            if self._has_put or not self._upstreams.are_several:
                raise
            self.answer = ChunkParser(self._route.request.n, self._resume.shown)
            return False
        finally:
            self._upstreams.release(server)
        return True

    async def _exchange(self, server: RemoteServer) -> None:
        """Send the request and put its events. Raises StreamserveError, UpstreamLost, UpstreamBroken, UpstreamError."""
        config, dialect, resume = server.config, server.dialect, self._resume
        assert dialect is not None
        route, body = body_of(self._route.request, resume, config.model, server.kind, dialect)
        server.counts.continued += any(choice.num_tokens for choice in resume.shown)
        self._times.scheduled_at = server.clock()
        with asked_elsewhere(self._trace, model=config.model, url=config.url, provider=server.kind) as asked:
            await self._exchange_within(server, route, body, asked)

    async def _exchange_within(
        self, server: RemoteServer, route: str, body: dict[str, Any], asked: Elsewhere | None
    ) -> None:
        exchange = Exchange(server, {} if asked is None else asked.headers)
        try:
            await exchange.open(route, body)
            if not self._opened.done():
                self._opened.set_result(None)
            if await self._read(exchange, server):
                self._finish()
                if asked is not None:
                    asked.end(self.answer.total(), self.answer.finish_reason)
                await exchange.finish()
        finally:
            await exchange.aclose()

    async def _read(self, exchange: Exchange, server: RemoteServer) -> bool:
        """Put the events of the response; return False where the answer was parked in the middle of it."""
        decoder, has_begun = SSEDecoder(self._config.max_line_bytes), False
        while not self.answer.is_done:
            if not self.has_room and not await self._wait_for_room(server):
                return False
            try:
                part = await exchange.read()
            except UpstreamLost:
                if self.answer.is_finished:
                    break  # only the end mark is missing
                raise
            if part is None:
                break
            self._put(self._events_of(decoder, part))
            if self.answer.has_begun and not has_begun:
                has_begun = True
                exchange.note_token()
                server.note_token()
        if not self.answer.is_finished:
            raise UpstreamLost("the response ended in the middle of the answer")
        return True

    def _events_of(self, decoder: SSEDecoder, part: bytes) -> list[Event]:
        try:
            return [event for data in decoder.feed(part) for event in self.answer.feed(data)]
        except SSEError as error:
            raise UpstreamBroken(str(error)) from error

    def _put(self, events: list[Event]) -> None:
        num_tokens, now = sum(isinstance(event, Token) for event in events), self._upstreams.clock()
        self._has_put = self._has_put or bool(events)
        if num_tokens:
            if self._was_queued and self._times.first_token_at is None:
                events.insert(0, Status(status="generating"))
            for choice, count in Counter(event.choice for event in events if isinstance(event, Token)).items():
                self._times.note(now, count, choice=choice)
            self._upstreams.metrics.note_tokens(now, num_tokens)
        if self.answer.usage is not None:
            self.generation.num_cached_tokens = self.answer.usage.cached_tokens
        self.generation.put(events)

    async def _wait_for_room(self, server: RemoteServer) -> bool:
        """Wait until more is to be read; return False where the answer was parked instead, and the connection ends."""
        metrics, config = self._upstreams.metrics, self._config
        server.counts.holds += 1
        while not self.has_room:
            try:
                async with asyncio.timeout(config.hold_seconds):
                    await self._room()
            except TimeoutError:
                if self.can_park and self.is_ahead:
                    metrics.num_parks += 1
                    self.generation.end(parked=Park(reason="lead", resume_at_lead=config.lead_tokens // 2))
                    return False
        return True

    async def _room(self) -> None:
        while not self.has_room:
            if self.is_ahead:
                self._has_moved.clear()
                await self._has_moved.wait()
            else:
                await self.generation.room()

    def _finish(self) -> None:
        self._times.tell(self.answer.queue_seconds, self.answer.prefill_seconds)
        breakdown, usage = self._times.breakdown(), self.answer.total()
        self._upstreams.metrics.note_finished(breakdown, usage.prompt_tokens)
        self.generation.put(
            [
                Done(
                    finish_reason=self.answer.finish_reason,
                    usage=usage,
                    latency=self._times.latency,
                    breakdown=breakdown,
                    stop_string=self.answer.stop_string,
                )
            ]
        )

    def _lose(self, *, is_counted: bool = True) -> None:
        """End after the connection was lost: as parked, where a server can continue the answer.

        A loss is counted against the answer, unless no server could be reached: the probes tell when one can.
        """
        if not self._opened.done():
            self._opened.set_exception(unavailable(self._config.alias, retry_after=FAILED_RETRY_SECONDS))
        elif self.can_park:
            self.generation.end(parked=Park(reason="lost", is_counted=is_counted))
        else:
            self.fail("cannot_continue", cut_after(self.answer.num_tokens))

    def _refuse(self, error: StreamserveError) -> None:
        """Raise the error where the request was sent from, or end the answer with it."""
        if not self._opened.done():
            self._opened.set_exception(error)
        else:
            self.fail(error.code, error.message, retryable=isinstance(error, Refused))


def _note_failure(server: RemoteServer, error: Exception) -> None:
    """Count what became of a request, and tell the server's circuit. A refusal was noted when its head came."""
    if isinstance(error, UpstreamLost):
        server.counts.lost += 1
        server.note_loss(str(error))
    elif isinstance(error, UpstreamBroken | UpstreamError):
        server.report(logging.ERROR, f"its server sent {error}")
        server.note_fault(f"it sent {error}")
