"""`JobRuns`: jobs as a kind of work: a run of a pipeline that this worker makes, on the stream that the job was given.

    claim ──► the stream, from its log ──► produced here ──► its terminal event ──► the job's end in its row
                                                  └─ the attempt fails: queued again, the next attempt continues the
                                                  stream

The stream's log decides how a job ended: an end that is there is only written down.

`JobMemo`: what is kept of one job, in its rows and its log, for the attempt that runs here. See `Memo` in
clients/pipeline/journal.py. Each write holds only while this worker has the job. asyncio.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from streamserve.api.answers import Answers
from streamserve.api.call import Caller
from streamserve.api.pipelines import no_pipeline
from streamserve.clients.pipeline.journal import Key, Memo
from streamserve.dialects.fold import Answer
from streamserve.dialects.native import run_json
from streamserve.models import ApiKey, Job, JobStep
from streamserve.protocol.errors import Refused, StreamserveError
from streamserve.protocol.events import Error, Event, Meta, Status, is_success
from streamserve.rows import orm
from streamserve.rows.receivers import end_job, finish_stream
from streamserve.streams.config import JobConfig
from streamserve.streams.log.base import LogUnavailable
from streamserve.streams.reader.follow import collect
from streamserve.streams.stream import Stream
from streamserve.work.queue import JOBS, Claim, Failed, Kind, LeaseLost, RetryPolicy

MAX_STEP_BYTES = 4 * 1024 * 1024
_AUTHORS = "pipeline_failed"  # an exception of the author's code, which another attempt may not meet


class JobMemo:
    """Of one claim. `stream` is the job's, which this process produces."""

    def __init__(self, claim: Claim[Job], stream: Stream, *, is_last: bool) -> None:
        self._claim, self._stream, self._is_last = claim, stream, is_last
        self.converts = True
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
        while page := await self._stream.follower.log.read(self._stream.log_id, after):
            after = page[-1].seq
            self.shown += [logged.event for logged in page if not isinstance(logged.event, Meta)]

    async def until_begun(self) -> None:
        pass

    async def keep(self, key: Key, value: Mapping[str, Any], seconds: float) -> None:
        text = json.dumps(value)
        if len(text) > MAX_STEP_BYTES:
            message = (
                f"The result of the step {key[0][:64]!r} is {len(text):,} bytes of JSON; a job keeps "
                f"{MAX_STEP_BYTES:,} at most. Return less, for example ids."
            )
            raise StreamserveError(message, code="step_result_too_large")

        step = JobStep(job_id=self._claim.id, name=key[0], ordinal=key[1], result=text, seconds=seconds)
        await self._claim.transact(lambda held: JobStep.objects.bulk_create([step], ignore_conflicts=True))

    async def begin(self, key: Key) -> None:
        await self._claim.write(lambda held: held.update(speaking=json.dumps(key)))

    def note_step(self, status: Status) -> None:
        text = json.dumps(status.payload())
        orm.post(lambda: self._claim.held().update(progress=text))

    def end_of(self, error: Error) -> Error | None:
        if self._is_last or not (error.retryable or error.code == _AUTHORS):
            return error
        self._stream.end_attempt(error)
        return None


_LOG_LOST = "The events of this job are gone, and it cannot be continued. Send it again."


class JobRuns:
    """See above. `memos` holds the running jobs' memos by their streams' ids: the pipelines' clients read them.

    `watch` begins to check that the owners of the streams that run here still have their permission.
    """

    def __init__(
        self, answers: Answers, memos: MutableMapping[str, Memo], watch: Callable[[], None], *, max_attempts: int
    ) -> None:
        self._answers, self._streams = answers, answers.streams
        self._memos, self._watch, self._max_attempts = memos, watch, max_attempts

    async def run(self, claim: Claim[Job]) -> None:
        """Make the run, or continue it, to its end."""
        stream = await self._reach(claim)
        if stream is None:
            raise Failed(_LOG_LOST, code="log_lost", is_retryable=False)
        lost = await orm.insist(orm.read, ApiKey.objects.owners_without_permission, [claim.row.owner])
        if stream.terminal is None and lost:
            await stream.stop()
        if stream.terminal is None:
            await self._check_pipeline(claim.row)
            self._watch()  # it stops the stream when its owner loses the permission
            self._memos[stream.id] = JobMemo(claim, stream, is_last=claim.attempt >= self._max_attempts)
            try:
                error = await stream.work()
            finally:
                self._memos.pop(stream.id, None)
            if error is not None:
                raise Failed(error.message, code=error.code)
        await self._settle(claim, stream)

    async def bury(self, claim: Claim[Job], failure: Failed) -> None:
        """End the job and its stream as failed."""
        stream = await self._reach(claim)
        if stream is None:
            code = failure.columns["error_code"]
            await orm.insist(finish_stream, claim.row.stream_id, error_code=code)
            await self._end(claim, "failed", **failure.columns)
            return
        if stream.terminal is None:
            await stream.bury(Error(code=failure.code, message=failure.message))
        await self._settle(claim, stream)

    async def _check_pipeline(self, job: Job) -> None:
        """Raise Failed where the job's owner may no longer use its pipeline: for this owner there is none."""
        try:
            pipelines = await self._answers.pipelines_of(Caller(job.owner, job.tenant))
        except Refused as error:
            raise Failed(error.message, code=error.code) from error
        if job.pipeline not in pipelines:
            unknown = no_pipeline(job.pipeline, pipelines, "pipeline")
            raise Failed(unknown.message, code=unknown.code, is_retryable=False)

    async def _reach(self, claim: Claim[Job]) -> Stream | None:
        try:
            return await self._streams.reach(claim.row.stream_id)
        except LogUnavailable as error:
            raise Failed(error.message, code=error.code) from error

    async def _settle(self, claim: Claim[Job], stream: Stream) -> None:
        """Write down how the stream has ended. Raises LeaseLost if it has not: another process has it."""
        end = stream.terminal
        if end is None or stream.is_lost:
            raise LeaseLost(f"job {claim.id}")
        if isinstance(end, Error):
            await self._end(claim, "failed", **Failed(end.message, code=end.code).columns)
        elif is_success(end):
            await self._end(claim, "done", result=json.dumps(await self._result(stream)))
        else:
            await self._end(claim, "cancelled")

    async def _result(self, stream: Stream) -> dict[str, Any]:
        events = await collect(self._streams, stream)
        whole = run_json(Answer.of(events), stream_id=stream.id, pipeline=stream.model, created=stream.created)
        return {name: value for name, value in whole.items() if name not in ("id", "pipeline", "created")}

    async def _end(self, claim: Claim[Job], state: str, **columns: Any) -> None:
        """Write the job's end. Raises LeaseLost if another worker has claimed it."""
        if not await orm.insist(end_job, claim.id, state, fence=claim.row.fence, **columns):
            raise LeaseLost(f"job {claim.id}")


def job_kind(
    answers: Answers, memos: MutableMapping[str, Memo], watch: Callable[[], None], config: JobConfig
) -> Kind[Job]:
    """Return jobs as a kind of work."""
    runs = JobRuns(answers, memos, watch, max_attempts=config.max_attempts)
    retry = RetryPolicy(
        max_attempts=config.max_attempts, first_seconds=config.retry_seconds, max_seconds=config.max_retry_seconds
    )
    return Kind(name=JOBS, model=Job, run=runs.run, bury=runs.bury, concurrency=config.concurrency, retry=retry)
