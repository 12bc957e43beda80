"""`LogWriter`: the one writer of a process's streams into their log, and what happens while the log is away.

    mark(stream) ──► take_batch of every marked stream ──► one commit for all ──► on_result of each

Group commit without a timer: what becomes pending during a commit is the next commit. One task on the event loop.

    UP    commit fails ───────────────► DOWN: commit the same batches again, after 0.1 … 2 s, jittered
    DOWN  committed ──────────────────► UP; a batch that was in doubt is found committed (see EventLog.commit)
    DOWN  for `outage_seconds` ───────► CUT: the streams stop generating and their connections end; readers return later

Only committed events are shown, so an outage looks like a slow reader: its streams stand still, and the engine parks
those that run ahead.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import time
from collections.abc import Awaitable, Sequence
from contextvars import Context
from typing import Protocol

from streamserve.streams.log.base import Batch, Committed, EventLog, LogUnavailable, Result

logger = logging.getLogger("streamserve.streams")

# Events of one batch: while a batch is written it is in memory several times over, with all its log-probabilities.
MAX_BATCH_EVENTS = 16
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 2.0


class Source(Protocol):
    """A stream, as far as the writer knows it. No method may raise or wait, but `take_batch` may raise."""

    def take_batch(self) -> Batch | None:
        """Return what is to be committed next, None if nothing is. Its result follows before it is asked again."""

    def on_result(self, batch: Batch | None, result: Result | Exception) -> None:
        """Take the result of a batch; None: `take_batch` raised that."""

    def on_outage(self, reason: LogUnavailable) -> bool:
        """The log does not commit now. Return whether the stream waits; a stream that has shown no event is refused."""

    def on_recovery(self) -> None:
        """The log commits again."""

    def cut(self) -> None:
        """The outage lasts: stop generating, end the connections. Called once in an outage."""


Group = list[tuple[Source, Batch]]
Committing = Awaitable[Sequence[Result]]


class LogWriter:
    """See above. `outage` is why the log does not commit, None while it does."""

    def __init__(self, log: EventLog, *, outage_seconds: float = 30.0) -> None:
        self.outage: LogUnavailable | None = None
        self.log, self._outage_seconds = log, outage_seconds
        self._marked: dict[Source, None] = {}
        self._waiting: dict[Source, bool] = {}  # streams that know of the outage, and whether they were cut
        self._refused: list[str] = []  # logs of streams that were refused with a commit in doubt
        self._down_since = 0.0
        self._is_closed = False
        self._due: asyncio.Handle | None = None  # of `_begin`, in the loop's next turn
        self._task: asyncio.Task[None] | None = None  # while a commit waits

    @property
    def can_commit(self) -> bool:
        """Whether what is marked now is committed soon: the log works, and the writer has not been ended."""
        return self.outage is None and not self._is_closed

    def refuse_if_down(self) -> None:
        """Raise LogUnavailable or LogFull while the log does not commit: a new answer could not begin."""
        if self.outage is not None:
            raise copy.copy(self.outage)

    def mark(self, source: Source) -> None:
        """Have `source` asked for a batch."""
        self._marked[source] = None
        if self._due is None and self._task is None and not self._is_closed:
            # An empty context: a commit must not keep alive the request that came first.
            self._due = asyncio.get_running_loop().call_soon(self._begin, context=Context())

    async def aclose(self) -> None:
        """Commit nothing more. A commit under way is in the log or not."""
        self._is_closed = True
        if self._due is not None:
            self._due.cancel()
        if (task := self._task) is not None:
            await asyncio.sleep(0)  # it has begun: a commit that is not awaited would be warned of
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _begin(self) -> None:
        """Commit what is pending: here if the log waits for nothing, else in a task."""
        self._due = None
        marked, self._marked = self._marked, {}
        group: list[tuple[Source, Batch]] = []
        for source in marked:
            try:
                if (batch := source.take_batch()) is not None:
                    group.append((source, batch))
            except Exception as error:
                source.on_result(None, error)
        if not group:
            return
        committing = self.log.commit([batch for _, batch in group])
        if isinstance(committing, Committed):
            self._show(group, committing.results)
        else:
            waiting = self._commit_and_show(group, committing)
            self._task = asyncio.get_running_loop().create_task(waiting, name="log writer", context=Context())

    async def _commit_and_show(self, group: Group, committing: Committing) -> None:
        results = await self._commit(group, committing)
        self._task = None
        self._show(group, results)
        if self._marked and self._due is None:  # meanwhile
            self._due = asyncio.get_running_loop().call_soon(self._begin, context=Context())

    @staticmethod
    def _show(group: Group, results: Sequence[Result | Exception]) -> None:
        for (source, batch), result in zip(group, results, strict=True):
            source.on_result(batch, result)

    async def _commit(self, group: Group, committing: Committing) -> Sequence[Result | Exception]:
        """Wait for a commit, and commit these batches again while the log is away."""
        batches, seconds = [batch for _, batch in group], _FIRST_RETRY_SECONDS
        while True:
            try:
                results: Sequence[Result | Exception] = await committing
                break
            except LogUnavailable as reason:
                self._note_outage(reason, group)
            except Exception as error:
                logger.exception("stream log: a commit failed")
                results = [error] * len(batches)
                break
            await asyncio.sleep(seconds * random.uniform(0.5, 1.0))
            seconds = min(2 * seconds, _MAX_RETRY_SECONDS)
            committing = self.log.commit(batches)
        if self.outage is not None:  # also after a failure: without a retry nothing else would end it
            await self._note_recovery()
        return results

    def _note_outage(self, reason: LogUnavailable, group: Group) -> None:
        """Inform the streams that have something to commit; cut them when it lasts too long."""
        if self.outage is None:
            logger.error("stream log %s: %s Streams wait for it.", self.log.place, reason)
            self._down_since = time.monotonic()
        self.outage = reason
        batches = dict(group)
        for source in [*batches, *self._marked]:
            if source not in self._waiting:
                self._waiting[source] = False
                if not source.on_outage(reason) and source in batches:
                    self._refused.append(batches[source].log_id)
        if time.monotonic() - self._down_since >= self._outage_seconds:
            for source, is_cut in self._waiting.items():
                if not is_cut:
                    self._waiting[source] = True
                    source.cut()

    async def _note_recovery(self) -> None:
        logger.warning("stream log: the outage ends after %.1f s", time.monotonic() - self._down_since)
        self.outage = None
        waiting, self._waiting = self._waiting, {}
        refused, self._refused = self._refused, []
        for source in waiting:
            source.on_recovery()
        for log_id in refused:
            try:
                await self.log.drop(log_id)
            except Exception:
                logger.warning("stream log: log %s of a refused answer is left to the purge", log_id)
