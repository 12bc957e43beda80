"""`Jobs`: jobs as a kind of work: a run of a pipeline that this worker makes, on the stream that the job was given.

    claim ──► the stream, from its log ──► produced here ──► its terminal event ──► the job's end in its row
                                                  └─ the attempt fails: queued again, the next one continues the stream

The stream's log decides how a job ended: an end that is there is only written down. asyncio.
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

from django.db import transaction

from streamserve.clients.pipeline.journal import Memo
from streamserve.dialects.base import run_json
from streamserve.models import Job
from streamserve.models import Stream as StreamRow
from streamserve.protocol.events import Done, Error, is_success
from streamserve.streams.log.base import LogUnavailable
from streamserve.streams.reader.follow import collect
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from streamserve.web.permissions import PermissionChecks, owners_without_permission
from streamserve.web.rows import orm
from streamserve.web.work.kinds import Claim, Failed, LeaseLost, RetryPolicy, RowKind
from streamserve.web.work.memo import JobMemo
from streamserve.web.work.webhooks import queue_message

_LOG_LOST = "The events of this job are gone, and it cannot be continued. Send it again."


class Jobs(RowKind[Job]):
    """See above. `memos` are the running jobs' by their streams' ids: the pipelines' clients read them."""

    name, model = "jobs", Job

    def __init__(
        self,
        streams: Streams,
        memos: MutableMapping[str, Memo],
        permissions: PermissionChecks,
        *,
        concurrency: int,
        retry: RetryPolicy,
    ) -> None:
        super().__init__(concurrency=concurrency, retry=retry)
        self._streams, self._memos, self._permissions = streams, memos, permissions

    async def run(self, claim: Claim) -> None:
        stream = await self._reach(claim)
        if stream is None:
            raise Failed(_LOG_LOST, code="log_lost", is_retryable=False)
        lost = await orm.call(owners_without_permission, [claim.row.owner])
        if stream.terminal is None and lost:
            await stream.stop()
        if stream.terminal is None:
            self._permissions.ensure_running()  # it stops the stream when its owner loses the permission
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
            await orm.call(StreamRow.objects.finish, claim.row.stream_id, error_code=failure.code[:64])
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
        whole = run_json(events, stream_id=stream.id, pipeline=stream.model, created=stream.created)
        return {name: value for name, value in whole.items() if name not in ("id", "pipeline", "created")}

    async def _end(self, claim: Claim, state: str, **columns: Any) -> None:
        """Write the job's end. Raises LeaseLost."""
        if not await orm.call(end_job, claim.id, state, fence=claim.fence, **columns):
            raise LeaseLost(f"job {claim.id}")


def end_job(job_id: str, state: str, *, fence: int, **columns: Any) -> bool:
    """End an unfinished job, if no claim followed `fence`."""
    with transaction.atomic(using=Job.objects.db):
        unfinished = Job.objects.filter(pk=job_id, fence=fence, state__in=("queued", "running"))
        is_ended = unfinished.finish(state, speaking="", **columns) > 0
        if is_ended:
            queue_message(job_id)
        return is_ended
