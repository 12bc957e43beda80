"""`StreamStore`: one `Record` for every stream, beside its log; and `answer_text`, which reads a log.

The Django side keeps records as rows of the site's database (rows/store.py). `NullStore` keeps none, for a process
that shares no streams. asyncio; knows no database.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from streamserve.dialects.fold import TOOL_USE, Answer, AnswerBlock
from streamserve.protocol.errors import Refused
from streamserve.protocol.events import Done, LoggedEvent
from streamserve.protocol.glass import ReaderTimes
from streamserve.protocol.rates import Rates
from streamserve.protocol.requests import Admission, GenerateRequest, Message, Once, ThreadKey
from streamserve.streams.log.base import EventLog
from streamserve.streams.transcript import StreamSummary

logger = logging.getLogger("streamserve.streams")


_MAX_KEYS = 10_000  # of a process without a database


class KeyTaken(Exception):
    """Another record has the key of this record's request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The data of a stream that any process needs to resume and to show it.

    `request` is None once the stream is finished, or if it cannot be read. `producer` is the process that holds the
    lease, "" if none does; `fence` grows with each claim. `created` is wall time.
    `num_prompt_tokens` of a new stream: 0 where they are not known yet. The fields from `finish_reason` on
    are written at the end; `reader` is what its reader reported, whenever that came.
    """

    admission: Admission
    log_id: str
    model: str
    created: float
    request: GenerateRequest | None = None
    fence: int = 1
    producer: str = ""
    num_prompt_tokens: int = 0
    is_finished: bool = False
    finish_reason: str = ""
    error_code: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    phases: Mapping[str, float] | None = None
    ttft: float | None = None
    latency_class: str = ""
    reader: ReaderTimes | None = None
    last_seq: int = 0
    text: str = ""
    refusal: Refused | None = None  # why this process cannot serve `request`, although a newer release can

    @property
    def id(self) -> str:
        """The stream's id."""
        return self.admission.stream_id

    @property
    def once(self) -> Once | None:
        """The key of a request with an Idempotency-Key."""
        return self.admission.once


@dataclass(frozen=True, slots=True)
class Group:
    """The owners that share a limit: one owner, or every owner whose name begins with `name`."""

    name: str
    is_prefix: bool = False

    def __contains__(self, owner: str) -> bool:
        return owner.startswith(self.name) if self.is_prefix else owner == self.name


ANONYMOUS = Group("anon:", is_prefix=True)  # visitors without a login


def counted_at(client: str, name: str = "") -> str:
    """Return what a visitor at a client's address is counted as; "": where all visitors may come from, as a proxy.

    Callers without a name of their own yet count as one there.
    """
    return f"{ANONYMOUS.name}@{client}/{name}" if client else f"{ANONYMOUS.name}{name or '*'}"


def groups_of(owner: str) -> tuple[Group, ...]:
    """Return every group with a limit that `owner` is in: a visitor is in its address's group, too."""
    if owner not in ANONYMOUS:
        return (Group(owner),)
    address, slash, _ = owner.partition("/")
    has_address = slash and owner.startswith(f"{ANONYMOUS.name}@")
    return (Group(owner), *([Group(f"{address}/", is_prefix=True)] if has_address else []), ANONYMOUS)


class StreamStore(Protocol):
    """The records of all processes. Every call may raise a database error."""

    own_id: str  # this process, as `Record.producer` names it; "" where streams are not shared
    is_shared: bool  # whether other processes read and resume the streams of this process
    has_records: bool  # whether `find` knows every stream; else only this process knows its streams
    keeps_text: bool  # whether `finish` wants the answer

    def refuse_early(self, admission: Admission) -> None:
        """Raise RateLimited where this process knows that the caller has no request left. Never blocks."""

    async def insert(self, record: Record) -> Rates | None:
        """Insert the record of a new stream; return what is left of its caller's limits over time, None without limits.

        Raises KeyTaken if another record has its key, RateLimited.
        """

    async def find(self, *, stream_id: str = "", log_id: str = "", request_key: str = "") -> Record | None:
        """Return the record with that stream id, log id or key of a request."""

    async def forget_key(self, stream_id: str) -> None:
        """Free the key of the stream's request."""

    async def claim(self, stream_id: str, seen_fence: int) -> bool:
        """Make this process the producer, with the next fence. False if `seen_fence` is old or the stream finished."""

    async def release(self, stream_id: str, fence: int) -> None:
        """Clear the stream's producer, if this process is the producer with that fence."""

    async def finish(self, summary: StreamSummary, *, last_seq: int, text: str) -> None:
        """Write the end of a stream and delete its request. A finished record does not change."""

    async def keep_reader(self, stream_id: str, times: ReaderTimes) -> bool:
        """Keep what a reader measured, once: False if there is a report already, or no such record."""

    async def running(self, group: Group) -> Sequence[tuple[str, str]]:
        """Return (id, producer) of the group's unfinished streams that this process does not produce, oldest first."""

    def is_alive(self, producer: str) -> bool:
        """Return False if that process is known to be dead. Never blocks."""


class NullStore:
    """A `StreamStore` without records, for a process that shares no streams. It has the newest keys of requests,
    and the last streams of the newest threads.
    """

    own_id = ""
    is_shared = has_records = keeps_text = False

    def __init__(self) -> None:
        self._of_key: OrderedDict[str, Record] = OrderedDict()
        self._of_thread: OrderedDict[tuple[str, ThreadKey], str] = OrderedDict()

    def last_of(self, tenant: str, key: ThreadKey) -> str:
        """Return the id of the last stream of a tenant's thread; "" for none."""
        return self._of_thread.get((tenant, key), "")

    def refuse_early(self, admission: Admission) -> None:
        pass

    async def insert(self, record: Record) -> Rates | None:
        if record.once is not None:
            if record.once.key in self._of_key:
                raise KeyTaken
            self._of_key[record.once.key] = replace(record, request=None)
            if len(self._of_key) > _MAX_KEYS:
                self._of_key.popitem(last=False)
        if record.admission.thread is not None:
            thread = (record.admission.tenant, record.admission.thread)
            self._of_thread[thread] = record.id
            self._of_thread.move_to_end(thread)
            if len(self._of_thread) > _MAX_KEYS:
                self._of_thread.popitem(last=False)
        return None

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

    async def keep_reader(self, stream_id: str, times: ReaderTimes) -> bool:
        return False

    async def running(self, group: Group) -> Sequence[tuple[str, str]]:
        return ()

    def is_alive(self, producer: str) -> bool:
        return False


async def answer_text(log: EventLog, log_id: str, choice: int = 0) -> str:
    """Return the text of one choice from the log, up to where the user stopped reading."""
    return (await answer_turn(log, log_id, choice)).content


async def answer_turn(log: EventLog, log_id: str, choice: int = 0) -> Message:
    """Return one choice as a turn of the conversation, up to where the user stopped reading: its text and whole calls.

    A chat template is shown no thoughts of earlier turns.
    """
    events: list[LoggedEvent] = []
    while page := await log.read(log_id, events[-1].seq if events else 0):
        events += page
    end = events[-1].event if events else None
    kept_seq = end.kept_seq if isinstance(end, Done) else None
    kept = (logged for logged in events if kept_seq is None or logged.seq <= kept_seq)
    told = Answer.of(kept, choice + 1).choices[choice]
    calls = [call for block in told.blocks if block.kind == TOOL_USE and (call := _call_json(block)) is not None]
    return Message(role="assistant", content=told.text, extra={"tool_calls": calls} if calls else {})


def _call_json(call: AnswerBlock) -> dict[str, Any] | None:
    """Return a call in OpenAI's shape; None for a call that was not whole."""
    arguments = call.text
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return {"id": call.block.id, "type": "function", "function": {"name": call.block.name, "arguments": arguments}}
