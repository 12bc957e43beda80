"""`JobKind`: jobs as a kind of work: a run of a pipeline that this worker makes, on the stream that the job was given.

    claim ──► the stream, from its log ──► produced here ──► its terminal event ──► the job's end in its row
                                                  └─ the attempt fails: queued again, the next one continues the stream

The stream's log decides how a job ended: an end that is there is only written down.

`JobMemo`: what is kept of one job, in its rows and its log, for the attempt that runs here. See `Memo` in
clients/pipeline/journal.py. Each write holds only while this worker has the job: it is guarded by the claim's fence, in
one short transaction. asyncio.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from django.db import transaction
from django.db.models import F

from streamserve.clients.pipeline.journal import Key, Memo
from streamserve.dialects.fold import Answer
from streamserve.dialects.native import run_json
from streamserve.models import ApiKey, Job, JobStep
from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.events import Done, Error, Event, Meta, Status, is_success
from streamserve.rows import orm
from streamserve.rows.leases import WorkQuerySet
from streamserve.streams.log.base import LogUnavailable
from streamserve.streams.reader.follow import collect
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from streamserve.work.queue import Claim, Failed, LeaseLost, RetryPolicy, RowKind
from streamserve.work.webhooks import queue_message

MAX_STEP_BYTES = 4 * 1024 * 1024
_AUTHORS = "pipeline_failed"  # an exception of the author's code, which another attempt may not meet


class JobMemo:
    """Of one claim. `stream` is the job's, which this process produces."""

    def __init__(self, claim: Claim, stream: Stream, *, is_last: bool) -> None:
        self._claim, self._stream, self._is_last = claim, stream, is_last
        self.kept: dict[Key, Mapping[str, Any]] = {}
        self.shown: list[Event] = []
        self.begun: Key | None = None

    async def load(self) -> None:
        def rows() -> tuple[str, list[tuple[str, int, str]]]:
            steps = JobStep.objects.filter(job_id=self._claim.id).order_by("pk")
            speaking = Job.objects.values_list("speaking", flat=True).get(pk=self._claim.id)
            return speaking, list(steps.values_list("name", "ordinal", "result"))

        speaking, steps = await orm.insist(orm.read, rows)
        self.kept = {(name, ordinal): json.loads(result) for name, ordinal, result in steps}
        self.begun = None if not speaking else (json.loads(speaking)[0], json.loads(speaking)[1])
        self.shown, after = [], 0
        while page := await self._stream.log.read(self._stream.log_id, after):
            after = page[-1].seq
            self.shown += [logged.event for logged in page if not isinstance(logged.event, Meta)]

    async def keep(self, key: Key, value: Mapping[str, Any], seconds: float) -> None:
        text = json.dumps(value)
        if len(text) > MAX_STEP_BYTES:
            message = (
                f"The result of the step {key[0][:64]!r} is {len(text):,} bytes of JSON; a job keeps "
                f"{MAX_STEP_BYTES:,} at most. Return less, for example ids."
            )
            raise StreamserveError(message, code="step_result_too_large")

        def insert(held: WorkQuerySet[Job]) -> None:
            JobStep.objects.bulk_create(
                [JobStep(job_id=self._claim.id, name=key[0], ordinal=key[1], result=text, seconds=seconds)],
                ignore_conflicts=True,
            )

        await self._write(insert)

    async def begin(self, key: Key) -> None:
        await self._write(lambda held: held.update(speaking=json.dumps(key)))

    def note_step(self, status: Status) -> None:
        held, text = self._held, json.dumps(status.payload())
        orm.post(lambda: held().update(progress=text))

    def retry(self, error: Error) -> bool:
        if self._is_last or not (error.retryable or error.code == _AUTHORS):
            return False
        self._stream.fail_attempt(error)
        return True

    def _held(self) -> WorkQuerySet[Job]:
        return Job.objects.held(self._claim.id, self._claim.fence, self._claim.worker_id)

    async def _write(self, change: Callable[[WorkQuerySet[Job]], Any]) -> None:
        """Make a change while this worker holds the job, whose row is locked for no longer than that."""

        def write() -> bool:
            with transaction.atomic(using=Job.objects.db):
                is_held = self._held().update(fence=F("fence")) > 0
                if is_held:
                    change(self._held())
                return is_held

        if not await orm.insist(orm.call, write):
            raise LeaseLost(f"job {self._claim.id}")


_LOG_LOST = "The events of this job are gone, and it cannot be continued. Send it again."


class JobKind(RowKind[Job]):
    """See above. `memos` are the running jobs' by their streams' ids: the pipelines' clients read them.

    `watch` begins to check that the owners of the streams that run still have their permission.
    """

    name, model = "jobs", Job

    def __init__(
        self,
        streams: Streams,
        memos: MutableMapping[str, Memo],
        watch: Callable[[], None],
        *,
        concurrency: int,
        retry: RetryPolicy,
    ) -> None:
        super().__init__(concurrency=concurrency, retry=retry)
        self._streams, self._memos, self._watch = streams, memos, watch

    async def run(self, claim: Claim) -> None:
        stream = await self._reach(claim)
        if stream is None:
            raise Failed(_LOG_LOST, code="log_lost", is_retryable=False)
        lost = await orm.insist(orm.read, ApiKey.objects.owners_without_permission, [claim.row.owner])
        if stream.terminal is None and lost:
            await stream.stop()
        if stream.terminal is None:
            self._watch()  # it stops the stream when its owner loses the permission
            self._memos[stream.id] = JobMemo(claim, stream, is_last=claim.attempt >= self.retry.max_attempts)
            try:
                error = await stream.work()
            finally:
                self._memos.pop(stream.id, None)
            if error is not None:
                raise Failed(error.message, code=error.code)
        await self._settle(claim, stream)

    async def bury(self, claim: Claim, failure: Failed) -> None:
        stream = await self._reach(claim)
        if stream is None:
            columns = {"error_code": failure.code[:64], "error_message": failure.message}
            await orm.insist(orm.write, StreamRow.objects.finish, claim.row.stream_id, error_code=failure.code[:64])
            await self._end(claim, "failed", **columns)
            return
        if stream.terminal is None:
            await stream.bury(Error(code=failure.code, message=failure.message))
        await self._settle(claim, stream)

    async def _reach(self, claim: Claim) -> Stream | None:
        try:
            return await self._streams.reach(claim.row.stream_id)
        except LogUnavailable as error:
            raise Failed(error.message, code=error.code) from error

    async def _settle(self, claim: Claim, stream: Stream) -> None:
        """Write down how the stream has ended. Raises LeaseLost for one that has not: another process has it."""
        end = stream.terminal
        if end is None or stream.is_lost:
            raise LeaseLost(f"job {claim.id}")
        if isinstance(end, Error):
            await self._end(claim, "failed", error_code=end.code[:64], error_message=end.message)
        elif is_success(end):
            await self._end(claim, "done", result=json.dumps(await self._result(stream, end)))
        else:
            await self._end(claim, "cancelled")

    async def _result(self, stream: Stream, end: Done) -> dict[str, Any]:
        events = await collect(self._streams, stream)
        whole = run_json(Answer.of(events), stream_id=stream.id, pipeline=stream.model, created=stream.created)
        return {name: value for name, value in whole.items() if name not in ("id", "pipeline", "created")}

    async def _end(self, claim: Claim, state: str, **columns: Any) -> None:
        """Write the job's end. Raises LeaseLost."""
        if not await orm.insist(orm.call, end_job, claim.id, state, fence=claim.fence, **columns):
            raise LeaseLost(f"job {claim.id}")


def end_job(job_id: str, state: str, *, fence: int, **columns: Any) -> bool:
    """End an unfinished job, if no claim followed `fence`."""
    with transaction.atomic(using=Job.objects.db):
        unfinished = Job.objects.filter(pk=job_id, fence=fence, state__in=("queued", "running"))
        is_ended = unfinished.finish(state, speaking="", **columns) > 0
        if is_ended:
            queue_message(job_id)
        return is_ended
