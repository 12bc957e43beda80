"""`Interrupted`: all that a run which has ended in `interrupt` leaves for the run that continues it. Values; no I/O.

    run 1   answer ─ call ─ approval ─ done{interrupt}      keeps an `Interrupted`
    run 2                                 tool_result ─ answer ─ done      begins with it, and shows the rest

It holds the whole run so far, those before it too, so that it is enough by itself.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamserve.clients.pipeline.journal import Key, Memo, NotRepeatable
from streamserve.protocol.events import Approval, Error, Event, Status
from streamserve.protocol.frames import decode_event, encode_event
from streamserve.protocol.requests import NO_CALLER, GenerateRequest, decode_request, encode_request

NOT_IN_TIME = "The approval was not given in time. Ask the question again."
# A result that is larger, as JSON, is not kept: the run that continues calls its function again.
_MAX_ENTRY_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """`calls` wait for their user's answers. `kept` and `shown` as in a `Memo`; of `request` the answers given so far.

    `at` is wall time.
    """

    request: GenerateRequest
    calls: tuple[Approval, ...]
    at: float
    kept: Mapping[Key, Mapping[str, Any]] = field(default_factory=dict)
    shown: Sequence[Event] = ()

    def entries(self) -> Iterator[str]:
        """Yield it as JSON texts, which `interrupted_of` reads. The last is its head: without that it is not whole."""
        for key, value in self.kept.items():
            text = json.dumps({"key": key, "value": value}, ensure_ascii=True)
            if len(text) <= _MAX_ENTRY_BYTES:
                yield text
        for event in self.shown:
            yield json.dumps({"shown": _text(event)})
        head = {"request": encode_request(self.request, NO_CALLER), "calls": [_text(call) for call in self.calls]}
        yield json.dumps({**head, "at": self.at}, ensure_ascii=True)


class Interrupts(Protocol):
    """Where interrupted runs are kept. Both methods may raise LogUnavailable."""

    async def keep(self, stream_id: str, interrupted: Interrupted) -> None:
        """Keep what the run of a stream leaves, before the stream ends."""

    async def find(self, stream_id: str) -> Interrupted | None:
        """Return what a run has left; None where there is nothing, or nothing any more.

        Raises UnmetNeeds for what a newer release has left.
        """


class WholeMemo:
    """A run's memo, which holds all of the run: what an interrupted run before it has kept, and what is kept now."""

    def __init__(self, memo: Memo, before: Interrupted | None) -> None:
        self._memo, self._is_continued = memo, before is not None
        self.converts = memo.converts
        self.kept: dict[Key, Mapping[str, Any]] = {} if before is None else dict(before.kept)

    @property
    def shown(self) -> Sequence[Event]:
        return self._memo.shown

    @property
    def begun(self) -> Key | None:
        return self._memo.begun

    async def load(self) -> None:
        await self._memo.load()
        self.kept |= self._memo.kept

    async def until_begun(self) -> None:
        await self._memo.until_begun()

    async def keep(self, key: Key, value: Mapping[str, Any], seconds: float) -> None:
        await self._memo.keep(key, value, seconds)
        self.kept[key] = value

    async def begin(self, key: Key) -> None:
        await self._memo.begin(key)

    def note_step(self, status: Status) -> None:
        self._memo.note_step(status)

    def end_of(self, error: Error) -> Error | None:
        # Of a run that was interrupted no process was lost: its author is told what to mend.
        is_own = self._is_continued and error.code == NotRepeatable.code
        return error if is_own else self._memo.end_of(error)


class LoneMemo:
    """What a run keeps in a process that no other can follow: nothing but its memory, for an interrupt."""

    converts = False

    def __init__(self, has_begun: asyncio.Event) -> None:
        self.kept: dict[Key, Mapping[str, Any]] = {}
        self.shown: Sequence[Event] = ()
        self.begun: Key | None = None
        self._has_begun = has_begun

    async def load(self) -> None:
        pass

    async def until_begun(self) -> None:
        await self._has_begun.wait()

    async def keep(self, key: Key, value: Mapping[str, Any], seconds: float) -> None:
        pass

    async def begin(self, key: Key) -> None:
        pass

    def note_step(self, status: Status) -> None:
        pass

    def end_of(self, error: Error) -> Error | None:
        return error


def interrupted_of(entries: Iterable[str]) -> Interrupted | None:
    """Return what `entries` has given; None where that is not whole. Raises UnmetNeeds, ValueError."""
    kept: dict[Key, Mapping[str, Any]] = {}
    shown: list[Event] = []
    for entry in map(json.loads, entries):
        if "key" in entry:
            kept[entry["key"][0], entry["key"][1]] = entry["value"]
        elif "shown" in entry:
            shown.append(_event(entry["shown"]))
        else:
            request, _ = decode_request(entry["request"], NO_CALLER)
            calls = tuple(call for text in entry["calls"] if isinstance(call := _event(text), Approval))
            return Interrupted(request=request, calls=calls, at=entry["at"], kept=kept, shown=shown)
    return None


def _text(event: Event) -> str:
    return base64.b64encode(encode_event(event)).decode()


def _event(text: str) -> Event:
    return decode_event(base64.b64decode(text))
