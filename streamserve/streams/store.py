"""`StreamStore`: one `Record` for every stream, beside its log; and `answer_text`, which reads a log.

The Django side keeps records as rows of the site's database (web/rows/store.py). `NullStore` keeps none, for a process
that shares no streams. asyncio; knows no database.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from streamserve.dialects.base import TextBlocks
from streamserve.protocol.errors import Refused
from streamserve.protocol.events import BlockStart, Done, Token
from streamserve.protocol.requests import GenerateRequest
from streamserve.streams.log.base import EventLog
from streamserve.streams.transcript import StreamSummary

logger = logging.getLogger("streamserve.streams")


_MAX_KEYS = 10_000  # of a process without a database


class KeyTaken(Exception):
    """Another record has the key of this one's request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """What makes a request one that is answered once: digests of its caller and key, and of what it asks."""

    key: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The data of a stream that any process needs to resume and to show it.

    `request` is None once the stream is finished, or if it cannot be read. `producer` is the worker that holds the
    lease, "" if none does; `fence` grows with each claim. `created` is wall time. The fields from `finish_reason` on
    are written at the end.
    """

    id: str
    log_id: str
    owner: str
    tenant: str
    model: str
    created: float
    on_disconnect: str = "park"
    request: GenerateRequest | None = None
    fence: int = 1
    producer: str = ""
    is_finished: bool = False
    finish_reason: str = ""
    error_code: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    last_seq: int = 0
    text: str = ""
    once: Once | None = None  # of a request with an Idempotency-Key
    refusal: Refused | None = None  # why this worker cannot serve `request`, although a newer one can


@dataclass(frozen=True, slots=True)
class Group:
    """The owners that share a limit: one owner, or every owner whose name begins with `name`."""

    name: str
    is_prefix: bool = False

    def __contains__(self, owner: str) -> bool:
        return owner.startswith(self.name) if self.is_prefix else owner == self.name


ANONYMOUS = Group("anon:", is_prefix=True)  # visitors without a login


def groups_of(owner: str) -> tuple[Group, ...]:
    """Return every group with a limit that `owner` is in."""
    return (Group(owner), ANONYMOUS) if owner in ANONYMOUS else (Group(owner),)


class StreamStore(Protocol):
    """The records of all processes. Every call may raise a database error."""

    worker_id: str  # this process, as `Record.producer` names it; "" where streams are not shared
    is_shared: bool  # whether other processes read and resume the streams of this one
    keeps_text: bool  # whether `finish` wants the answer

    async def insert(self, record: Record) -> None:
        """Insert the record of a new stream. Raises KeyTaken if there is one with the same key."""

    async def find(self, *, stream_id: str = "", log_id: str = "", request_key: str = "") -> Record | None:
        """Return the record with that stream id, log id or key of a request."""

    async def forget_key(self, stream_id: str) -> None:
        """Free the key of the stream's request."""

    async def claim(self, stream_id: str, seen_fence: int) -> bool:
        """Make this worker the producer, with the next fence. False if `seen_fence` is old or the stream finished."""

    async def release(self, stream_id: str, fence: int) -> None:
        """Clear the stream's producer, if this worker is the producer with that fence."""

    async def finish(self, summary: StreamSummary, *, last_seq: int, text: str) -> None:
        """Write the end of a stream and delete its request. A finished record does not change."""

    async def running(self, group: Group) -> Sequence[tuple[str, str]]:
        """Return (id, producer) of the group's unfinished streams that this worker does not produce, oldest first."""

    def is_alive(self, worker_id: str) -> bool:
        """Return False if that worker is known to be dead. Never blocks."""


class NullStore:
    """A `StreamStore` without records, for a process that shares no streams. It has the newest keys of requests."""

    worker_id = ""
    is_shared = keeps_text = False

    def __init__(self) -> None:
        self._of_key: OrderedDict[str, Record] = OrderedDict()

    async def insert(self, record: Record) -> None:
        if record.once is not None:
            if record.once.key in self._of_key:
                raise KeyTaken
            self._of_key[record.once.key] = replace(record, request=None)
            if len(self._of_key) > _MAX_KEYS:
                self._of_key.popitem(last=False)

    async def find(self, *, stream_id: str = "", log_id: str = "", request_key: str = "") -> Record | None:
        return self._of_key.get(request_key)

    async def forget_key(self, stream_id: str) -> None:
        for key, record in list(self._of_key.items()):
            if record.id == stream_id:
                del self._of_key[key]

    async def claim(self, stream_id: str, seen_fence: int) -> bool:
        return False

    async def release(self, stream_id: str, fence: int) -> None:
        pass

    async def finish(self, summary: StreamSummary, *, last_seq: int, text: str) -> None:
        pass

    async def running(self, group: Group) -> Sequence[tuple[str, str]]:
        return ()

    def is_alive(self, worker_id: str) -> bool:
        return False


async def answer_text(log: EventLog, log_id: str, choice: int = 0) -> str:
    """Return the text of one choice from the log, up to where the user stopped reading."""
    blocks, pieces = TextBlocks(), list[tuple[int, str]]()
    after, kept_seq = 0, None
    while page := await log.read(log_id, after):
        after = page[-1].seq
        for logged in page:
            if isinstance(logged.event, BlockStart):
                blocks.note(logged.event)
            elif isinstance(logged.event, Token) and logged.event.choice == choice and logged.event in blocks:
                pieces.append((logged.seq, logged.event.text))
            elif isinstance(logged.event, Done):
                kept_seq = logged.event.kept_seq
    return "".join(text for seq, text in pieces if kept_seq is None or seq <= kept_seq)
