"""`SharedRecords`: records in memory that several registries of one test share, as processes share a database."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

from streamserve.protocol.requests import Admission
from streamserve.streams.store import Group, KeyTaken, Record, StreamStore
from streamserve.streams.transcript import StreamSummary


class SharedRecords:
    """The data that the workers share: the records, and which workers are dead."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.dead: set[str] = set()

    def worker(self, own_id: str) -> RecordStore:
        return RecordStore(self, own_id)


class RecordStore:
    """A `StreamStore` whose calls raise `refusals` in turn, and `finish` also `finish_refusals`.

    If `hold` is set, inserts wait for it.
    """

    is_shared, keeps_text = True, False

    def __init__(self, shared: SharedRecords, own_id: str) -> None:
        self.own_id = own_id
        self.calls: Counter[str] = Counter()
        self.refusals: deque[Exception] = deque()
        self.finish_refusals: deque[Exception] = deque()
        self.hold: asyncio.Event | None = None
        self.texts: list[str] = []
        self._shared = shared
        _: StreamStore = self

    def refuse_early(self, admission: Admission) -> None:
        pass

    async def insert(self, record: Record) -> None:
        self._call("insert")
        if self.hold is not None:
            await self.hold.wait()
        assert record.id not in self._shared.records
        if record.once is not None and await self.find(request_key=record.once.key) is not None:
            raise KeyTaken
        self._shared.records[record.id] = record

    async def find(self, *, stream_id: str = "", log_id: str = "", request_key: str = "") -> Record | None:
        self._call("find")
        for one in self._shared.records.values():
            if stream_id == one.id or log_id == one.log_id or (one.once is not None and one.once.key == request_key):
                return one
        return None

    async def forget_key(self, stream_id: str) -> None:
        self._call("forget_key")
        self._shared.records[stream_id] = _without_key(self._shared.records[stream_id])

    async def claim(self, stream_id: str, seen_fence: int) -> bool:
        self._call("claim")
        record = self._shared.records[stream_id]
        if record.is_finished or record.fence != seen_fence:
            return False
        self._shared.records[stream_id] = replace(record, fence=seen_fence + 1, producer=self.own_id)
        return True

    async def release(self, stream_id: str, fence: int) -> None:
        self._call("release")
        record = self._shared.records[stream_id]
        if not record.is_finished and (record.fence, record.producer) == (fence, self.own_id):
            self._shared.records[stream_id] = replace(record, producer="")

    async def finish(self, summary: StreamSummary, *, last_seq: int, text: str) -> None:
        self._call("finish")
        if self.finish_refusals:
            raise self.finish_refusals.popleft()
        record = self._shared.records[summary.id]
        if not record.is_finished:
            self.texts.append(text)
            self._shared.records[summary.id] = replace(
                record,
                is_finished=True,
                producer="",
                request=None,
                finish_reason=summary.finish_reason or "",
                error_code=summary.error_code or "",
                last_seq=last_seq,
            )

    async def running(self, group: Group) -> Sequence[tuple[str, str]]:
        self._call("running")
        records = self._shared.records.values()
        others = (one for one in records if one.producer != self.own_id)
        return [(one.id, one.producer) for one in others if one.admission.place_of in group and not one.is_finished]

    def is_alive(self, producer: str) -> bool:
        return producer not in self._shared.dead

    def _call(self, name: str) -> None:
        self.calls[name] += 1
        if self.refusals:
            raise self.refusals.popleft()


def _without_key(record: Record) -> Record:
    return replace(record, admission=replace(record.admission, once=None))
