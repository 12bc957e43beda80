"""`Run`: let every reader come at its time, read at its pace and acknowledge what it has read, as the chat page does.

The load is open: a reader comes whether or not the readers before it have been served, which is how visitors come.
Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamserve.loadtest.reading import Reading
from streamserve.loadtest.site_http import Broken, Refused, SiteHTTP
from streamserve.loadtest.visits import Visit

ACK_SECONDS = 1.0
# Common words: for most vocabularies a token each. Every prompt is drawn anew, so that no prefix cache knows it.
_TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this have from or had by word but what "
    "some we can out other were all there when up use your how said an each she which do their time if will way about "
    "many then them write would like so these her long make thing see him two has look more day could go come did "
    "number sound no most people my over know water than call first who may down side been now find any new work part "
    "take get place made live where after back little only round man year came show every good me give our under"
)
_WORDS = _TEXT.split()


@dataclass(slots=True)
class Outcome:
    """One reader's reading, and how its request ended: `code` is "" while it runs, "whole", or an error's code."""

    reading: Reading
    code: str = ""
    message: str = ""
    ended_at: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the answer came to its end."""
        return self.code == WHOLE


WHOLE, UNFINISHED, BROKEN = "whole", "unfinished", "connection_lost"


@dataclass(slots=True)
class Run:
    """A load under way. `key_of(number)` is the API key of a reader; `fields` go into every request.

    Times in outcomes are seconds after `started_at`, of `time.monotonic()`.
    """

    site: SiteHTTP
    key_of: Callable[[int], str]
    fields: dict[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)
    started_at: float = 0.0

    @property
    def now(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self.started_at

    @property
    def counts(self) -> Counter[str]:
        """How many readers have come, read ("reading"), and ended, by their code."""
        now = self.now
        come = [one for one in self.outcomes if one.reading.visit.arrives_at <= now]
        return Counter(one.code or "reading" for one in come)

    async def warm_up(self, key: str) -> None:
        """Ask for one token, which waits for a model that is loading. Raises Refused and Broken."""
        async with self.site.open("POST", "/streams", key, {"prompt": "the", "max_tokens": 1, **self.fields}) as answer:
            async for frame in answer.frames():
                if frame.event == "error":
                    raise Refused(200, frame.data["code"], frame.data["message"])

    async def read_all(self, visits: Sequence[Visit], grace_seconds: float) -> None:
        """Let the readers come; after the last one, wait so long for answers that are not whole. Ctrl-C ends it."""
        self.started_at = time.monotonic() + 0.2
        self.outcomes = [Outcome(Reading(visit)) for visit in visits]
        tasks = [asyncio.create_task(self._read(one)) for one in self.outcomes]
        try:
            await asyncio.wait(tasks, timeout=visits[-1].arrives_at + 0.2 + grace_seconds)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _read(self, outcome: Outcome) -> None:
        visit = outcome.reading.visit
        try:
            await asyncio.sleep(visit.arrives_at - self.now)
            await self._read_answer(outcome)
        except Refused as refused:
            outcome.code, outcome.message = refused.code, str(refused)
        except Broken as broken:
            outcome.code, outcome.message = BROKEN, str(broken)
        finally:
            outcome.code = outcome.code or UNFINISHED
            outcome.ended_at = self.now
            outcome.reading.is_whole = outcome.is_whole

    async def _read_answer(self, outcome: Outcome) -> None:
        reading = outcome.reading
        key = self.key_of(reading.visit.number)
        body = self._body(reading.visit)
        async with self.site.open("POST", "/streams", key, body) as answer:
            acks = Acks(self, reading, key, answer.headers)
            async with acks.under_way():
                async for frame in answer.frames():
                    if frame.event == "token":
                        reading.take(self.now, len(frame.data["token_ids"]) or 1)
                        acks.came(frame.seq)
                    elif frame.event == "done":
                        outcome.code = WHOLE
                    elif frame.event == "error":
                        outcome.code, outcome.message = frame.data["code"], frame.data["message"]
        if not outcome.code:
            raise Broken("the connection ended before the answer did")

    def _body(self, visit: Visit) -> dict[str, Any]:
        words = random.Random(f"{self.started_at} {visit.number}").choices(_WORDS, k=visit.prompt_len)
        return {
            "prompt": " ".join(words),
            "max_tokens": visit.answer_len,
            "latency_class": visit.latency_class,
            "ignore_eos": True,
            "on_disconnect": "abort",
            **self.fields,
        }


class Acks:
    """Tells the server once a second up to which event the reader has read, until it no longer counts that."""

    def __init__(self, run: Run, reading: Reading, key: str, headers: Any) -> None:
        self._run, self._reading, self._key = run, reading, key
        self._stream_id, self._reader = headers.get("x-stream-id"), headers.get("streamserve-reader")
        self._came: list[tuple[int, int]] = []  # (event, tokens up to its end)

    def came(self, seq: int | None) -> None:
        """Note that the event has come, with all tokens that the reading has."""
        if seq is not None:
            self._came.append((seq, len(self._reading.came_at)))

    @contextlib.asynccontextmanager
    async def under_way(self) -> Any:
        """Acknowledge while the block runs."""
        task = asyncio.create_task(self._acknowledge())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _acknowledge(self) -> None:
        index = 0
        while self._stream_id and self._reader:
            await asyncio.sleep(ACK_SECONDS)
            num_read, before = self._reading.num_read(self._run.now), index
            while index < len(self._came) and self._came[index][1] <= num_read:
                index += 1
            if index > before and not await self._send(self._came[index - 1][0]):
                return

    async def _send(self, seq: int) -> bool:
        """Return whether it counted; a request that was lost is made up for by the next."""
        body, path = {"reader": self._reader, "seq": seq}, f"/streams/{self._stream_id}/ack"
        try:
            async with self._run.site.open("POST", path, self._key, body) as answer:
                return b"true" in b"".join([chunk async for chunk in answer.chunks()])
        except (Refused, Broken):
            return True
