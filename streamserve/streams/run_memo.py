"""`RunMemo`: what a pipeline's run keeps beside its stream, so that another process continues it. See `Memo`.

    the stream's log    what readers were shown         fence 1 ──► 2 ──► …
    the run's log       finished steps and answers, and the answer that began to be shown last

The run's log is an event log too, in the same place: it is there for every process that can continue the stream, while
the site's database may be away, and refuses a process that has lost the stream. Its entries are statuses `kept`, whose
message is JSON. No reader's log has them. It goes when the stream ends (registry.py), or by its age.

An outage of the log is waited for, as the stream itself waits, but not to begin: then the stream asks again, and may be
given up meanwhile. asyncio; knows no engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from streamserve.clients.pipeline.journal import LOST, Key, NotRepeatable
from streamserve.protocol.errors import ProducerLost
from streamserve.protocol.events import Error, Event, Meta, Status
from streamserve.streams.log.base import EventLog, Fenced, LogUnavailable, Refusal, append, commit_one, make_batch

logger = logging.getLogger("streamserve.pipelines")

_KEPT = "kept"
# Of one entry, as JSON. A larger result is not kept: another process calls its function again.
_MAX_ENTRY_BYTES = 1024 * 1024
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 2.0
_TAKEN = "Another process continues this run."


def run_log(stream_id: str) -> str:
    """Return the name of the log of a stream's run."""
    return f"run-{stream_id}"


def _entry(text: str) -> Status:
    return Status(status=_KEPT, message=text)


class RunMemo:
    """Of one run in this process. `log_id` None: the stream is new, and no process has kept anything of it."""

    converts = False

    def __init__(
        self,
        log: EventLog,
        stream_id: str,
        *,
        log_id: str | None = None,
        fence: int = 1,
        begun: asyncio.Event | None = None,
    ) -> None:
        self.kept: dict[Key, Mapping[str, Any]] = {}
        self.shown: list[Event] = []
        self.begun: Key | None = None
        self._log, self._stream_log_id, self._run_log_id, self._fence = log, log_id, run_log(stream_id), fence
        self._last_seq: int | None = 0  # of the run's log; None: not known
        self._is_lost = False  # the run's log takes nothing more: another process could not continue the run
        self._writing = asyncio.Lock()
        self._has_begun = begun  # set once the stream is recorded; None: it was before

    async def load(self) -> None:
        if self._stream_log_id is None:
            return
        try:
            self._last_seq = await self._claimed()
            if self._last_seq == 0:  # nothing was kept; from now on the process before cannot keep anything either
                batch = make_batch(self._run_log_id, self._fence, 0, [_entry("{}")])
                self._last_seq = await commit_one(self._log, batch)
        except Fenced as fenced:
            raise ProducerLost(_TAKEN) from fenced
        except Refusal:
            self._is_lost = True
        for event in await self._events(self._run_log_id):
            if isinstance(event, Status) and event.message:
                self._note(json.loads(event.message))
        self.shown = [event for event in await self._events(self._stream_log_id) if not isinstance(event, Meta)]

    async def until_begun(self) -> None:
        if self._has_begun is not None:
            await self._has_begun.wait()

    async def keep(self, key: Key, value: Mapping[str, Any], seconds: float) -> None:
        await self._write({"key": key, "value": value})

    async def begin(self, key: Key) -> None:
        await self._write({"begun": key})

    def note_step(self, status: Status) -> None:
        pass

    def end_of(self, error: Error) -> Error | None:
        if error.code != NotRepeatable.code:
            return error
        logger.warning("run %s: %s", self._run_log_id, error.message)
        return Error(code=ProducerLost.code, message=LOST, retryable=True, phases=error.phases)

    def _note(self, entry: Mapping[str, Any]) -> None:
        if "begun" in entry:
            self.begun = (entry["begun"][0], entry["begun"][1])
        elif "key" in entry:
            self.kept[entry["key"][0], entry["key"][1]] = entry["value"]

    async def _events(self, log_id: str) -> Sequence[Event]:
        events: list[Event] = []
        while page := await self._log.read(log_id, len(events)):
            events += [logged.event for logged in page]
        return events

    async def _write(self, entry: Mapping[str, Any]) -> None:
        """Commit an entry, however long that takes. Raises ProducerLost where another process has the run."""
        text = json.dumps(entry, ensure_ascii=True)
        if len(text) > _MAX_ENTRY_BYTES:
            return
        async with self._writing:
            if self._is_lost:
                return
            try:
                last_seq = await self._asked(self._claimed) if self._last_seq is None else self._last_seq
                self._last_seq = None  # not known if this is cancelled, as by a time limit of the author
                batch = make_batch(self._run_log_id, self._fence, last_seq, [_entry(text)])
                self._last_seq = await self._asked(partial(commit_one, self._log, batch))
            except Fenced as fenced:
                raise ProducerLost(_TAKEN) from fenced
            except Refusal as refusal:
                logger.warning("run %s: it cannot be continued elsewhere: %s", self._run_log_id, refusal)
                self._is_lost = True

    async def _claimed(self) -> int:
        """Have the run's log refuse earlier processes; return its last seq, 0 if there is no log."""
        try:
            return await append(self._log, self._run_log_id, self._fence, [])
        except KeyError:
            return 0

    async def _asked(self, ask: Callable[[], Awaitable[int]]) -> int:
        """Ask the log, again while it is away."""
        seconds = _FIRST_RETRY_SECONDS
        while True:
            try:
                return await ask()
            except LogUnavailable:
                await asyncio.sleep(seconds * random.uniform(0.5, 1.0))
                seconds = min(2 * seconds, _MAX_RETRY_SECONDS)
