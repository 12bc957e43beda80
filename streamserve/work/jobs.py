"""`Jobs`: the jobs of a site as its routes and Python code see them: enqueue, find, list, cancel. asyncio.

A job and its stream are inserted in one transaction, after the stream's first event is in the log: so readers find its
events at once, and a worker a request that is whole.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from django.db import IntegrityError, transaction
from django.utils import timezone

from streamserve.api.answers import Answers
from streamserve.api.call import Caller
from streamserve.api.idempotency import continuation_of
from streamserve.api.interrupts import answered
from streamserve.api.jobs import JobView, no_job
from streamserve.api.pipelines import no_pipeline
from streamserve.conf import SiteConfig
from streamserve.dialects.batches import Page
from streamserve.models import Job, Worker
from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import BadRequest, Overloaded, QuotaExceeded
from streamserve.protocol.events import Done, Meta
from streamserve.protocol.ids import is_stream_id
from streamserve.protocol.requests import Admission, GenerateRequest, Once, check_needs, check_sampling
from streamserve.protocol.trace import Trace
from streamserve.rows import orm, rates
from streamserve.rows.queries import hold_limit, made_once, part_of, sent_before
from streamserve.rows.receivers import end_job, tell_started, written
from streamserve.rows.store import needs_of, row_of
from streamserve.signals import answer_started
from streamserve.streams.config import JOB
from streamserve.streams.log.base import append, new_log_id
from streamserve.streams.store import ANONYMOUS, Record
from streamserve.work.queue import JOBS

_RETRY_AFTER = 30


class Jobs:
    """See `Jobs` in api/jobs.py. `wake` is called when there is work."""

    def __init__(self, answers: Answers, settings: SiteConfig, wake: Callable[[], None]) -> None:
        self._answers, self._streams = answers, answers.streams
        self._settings, self._wake = settings, wake

    async def enqueue(
        self,
        caller: Caller,
        request: GenerateRequest,
        *,
        webhook: str = "",
        once: Once | None = None,
        trace: Trace | None = None,
    ) -> JobView:
        """Queue a run of a pipeline; with `once`, return the job that its key has queued before.

        Raises NotFound for an unknown pipeline, BadRequest, QuotaExceeded, Overloaded, LogUnavailable, KeyReused.
        """

        async def make() -> JobView:
            await self._check(caller, request, webhook)
            admission = await self._answers.admission(
                caller,
                on_disconnect=JOB,
                stream_id=secrets.token_hex(16),
                arrived_at=time.monotonic(),
                once=continuation_of(request.continues, once) if request.continues else None,
                trace=trace,
            )
            record = self._record(admission, request)
            job = _row_of(record, webhook, once)
            await self._queue(job, record)
            if not self._streams.store.is_shared:
                await self._streams.adopt(record)
            self._wake()
            return await self._view(job)

        return await made_once(lambda: self._earlier(once), make)

    async def _queue(self, job: Job, record: Record) -> None:
        """Write the first event of the job's stream, and insert both."""
        # Before anything is written; and again at the insert, under a lock.
        await orm.read(self._check_room, record.admission)
        self._streams.writer.refuse_if_down()
        meta = Meta(model=record.model, stream_id=record.id, created=int(record.created))
        await append(self._streams.log, record.log_id, record.fence, [meta])
        try:
            row = row_of(record)
            insert = partial(self._insert, record.admission, job, row, needs_of(record))
            await written(answer_started, StreamRow, insert, partial(tell_started, row), alone=orm.call)
        except (IntegrityError, Overloaded, QuotaExceeded) as error:
            await self._streams.log.drop(record.log_id)
            if isinstance(error, IntegrityError) and record.once is not None:
                await self._check_unanswered(record.once)
            raise

    async def _check_unanswered(self, once: Once) -> None:
        """Raise Answered where another stream has the key of a continuation meanwhile, by another request."""
        other = await self._streams.store.find(request_key=once.key)
        if other is not None and other.once != once:
            raise answered(other.id)

    async def find(self, caller: Caller, job_id: str) -> JobView:
        """Return a job of the caller's tenant. Raises NotFound."""
        return await self._view(await self._row(caller, job_id))

    async def page(self, caller: Caller, page: Page, *, status: str = "") -> tuple[Sequence[JobView], bool]:
        """Return a part of the tenant's jobs, and whether there are more. Raises NotFound for `page.after`."""
        last = await self._row(caller, page.after) if page.after else None
        jobs = Job.objects.filter(tenant=caller.tenant).defer("result")
        if status:
            jobs = jobs.filter(state=status)
        found, has_more = await orm.read(part_of, jobs, page, last)
        return [view_of(job, has_result=False) for job in found], has_more

    async def cancel(self, caller: Caller, job_id: str) -> JobView:
        """End a job as cancelled, queued or running; a job that has ended stays as it is. Raises as `Stream.stop`."""
        job = await self._row(caller, job_id)
        if not job.is_finished:
            await self.stop(job)
            job = await self._row(caller, job_id)
        return await self._view(job)

    async def stop(self, job: Job) -> None:
        """Cancel a job, whose owner was checked: the log decides whether it had ended before."""
        stream = await self._streams.reach(job.stream_id)
        if stream is not None:
            await stream.stop()
        end = None if stream is None else stream.terminal
        if stream is None or (isinstance(end, Done) and end.finish_reason == "cancelled"):
            fence = await orm.read(lambda: Job.objects.values_list("fence", flat=True).get(pk=job.pk))
            await end_job(job.pk, "cancelled", fence=fence)

    async def _row(self, caller: Caller, job_id: str) -> Job:
        is_id = is_stream_id(job_id)  # PostgreSQL refuses a query with NUL
        job = await orm.read(Job.objects.filter(pk=job_id, tenant=caller.tenant).first) if is_id else None
        if job is None:
            raise no_job()
        return job

    async def _view(self, job: Job) -> JobView:
        if job.state != "queued":
            return view_of(job)

        def find() -> tuple[int, str]:
            is_served = Worker.objects.alive().filter(kinds__contains=JOBS).exists()
            is_retry = job.due_at > max(timezone.now(), job.created_at)
            waits_for = "worker" if not is_served else "retry" if is_retry else "turn"
            return Job.objects.place_of(job), waits_for

        place, waits_for = await orm.read(find)
        return view_of(job, place=place, waits_for=waits_for)

    async def _earlier(self, once: Once | None) -> JobView | None:
        job = None if once is None else await orm.read(sent_before, Job.objects.all(), once)
        return None if job is None else await self._view(job)

    async def _check(self, caller: Caller, request: GenerateRequest, webhook: str) -> None:
        pipelines = await self._answers.pipelines_of(caller)
        if request.model not in pipelines:
            raise no_pipeline(request.model, pipelines, "pipeline")
        if webhook and webhook not in self._settings.webhooks:
            known = ", ".join(self._settings.webhooks) or "none"
            message = f"There is no webhook {webhook[:64]!r} here; the site's settings have: {known}."
            raise BadRequest(message, code="webhook_not_found", param="webhook")
        if request.n != 1:
            raise BadRequest("A pipeline gives one answer: leave n out.", code="invalid_value", param="n")
        check_needs(request.needs)
        check_sampling(request.sampling)

    def _insert(self, caller: Admission, job: Job, row: StreamRow, needs: rates.Needs) -> bool:
        with transaction.atomic(using=Job.objects.db):
            hold_limit(Job.objects.all(), ANONYMOUS.name if caller.owner in ANONYMOUS else caller.place_of)
            self._check_room(caller)
            row.held = rates.reserve(caller, needs, is_work=True).held
            row.save(force_insert=True)
            job.save(force_insert=True)
        return True

    def _check_room(self, caller: Admission) -> None:
        """Raise where the caller has as many unfinished jobs as it may; visitors without a login share a bound, too."""
        is_visitor, limits = caller.owner in ANONYMOUS, self._settings.limits
        most = limits.max_jobs_per_visitor if is_visitor else limits.max_jobs_per_principal
        unfinished = Job.objects.unfinished()
        own = unfinished.filter(owner=caller.owner)
        if caller.counted_as:
            streams = StreamRow.objects.filter(state="running", counted_as=caller.counted_as)
            own = unfinished.filter(stream_id__in=streams.values("pk"))
        if own.count() >= most:
            message = (
                f"You have {most} jobs that have not ended, which is the limit. Cancel a job, or wait until one ends."
            )
            raise QuotaExceeded(message, code="too_many_jobs", retry_after=_RETRY_AFTER)
        of_all = unfinished.filter(owner__startswith=ANONYMOUS.name)
        if is_visitor and of_all.count() >= limits.max_jobs_anonymous:
            message = "Visitors without a login have as many jobs as they may. Sign in, or try again later."
            raise Overloaded(message, code="anonymous_places_taken", retry_after=_RETRY_AFTER)

    def _record(self, admission: Admission, request: GenerateRequest) -> Record:
        """Return the record of the job's stream: no process produces it yet."""
        sampling, config = request.sampling, self._settings.jobs
        if sampling.seed is None:  # every attempt draws the same tokens
            sampling = replace(sampling, seed=secrets.randbits(63))
        request = replace(
            request,
            sampling=sampling,
            timeout_seconds=request.timeout_seconds or config.timeout_seconds,
        )
        return Record(
            admission=admission, log_id=new_log_id(), model=request.model, created=time.time(), request=request
        )


def _row_of(record: Record, webhook: str, once: Once | None) -> Job:
    """Return the row of a new job."""
    return Job(
        id=secrets.token_hex(16),
        stream_id=record.id,
        pipeline=record.model,
        owner=record.admission.owner,
        tenant=record.admission.tenant,
        webhook=webhook,
        traceparent="" if record.admission.trace is None else record.admission.trace.header,
        request_key=None if once is None else once.key,
        request_digest=None if once is None else once.digest,
    )


def view_of(job: Job, *, place: int | None = None, waits_for: str | None = None, has_result: bool = True) -> JobView:
    """Return a row as its owner sees it."""
    return JobView(
        id=job.pk,
        stream_id=job.stream_id,
        pipeline=job.pipeline,
        status=job.state,
        attempts=job.attempts,
        place=place,
        waits_for=waits_for,
        progress=json.loads(job.progress) if job.progress else None,
        result=json.loads(job.result) if has_result and job.result else None,
        error=(job.error_code, job.error_message) if job.error_code else None,
        webhook=job.webhook,
        created_at=job.created_at,
        due_at=job.due_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
    )
