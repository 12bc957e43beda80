"""`JobMemo`: what is kept of one job, in its rows and its log, for the attempt that runs here. See `Memo` in
clients/pipeline/journal.py. asyncio.

Each write holds only while this worker has the job: it is guarded by the claim's fence, in one short transaction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from django.db import transaction
from django.db.models import F

from streamserve.clients.pipeline.journal import Key
from streamserve.durable.leases import WorkQuerySet
from streamserve.models import Job, JobStep
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.events import Error, Event, Meta, Status
from streamserve.streams.stream import Stream
from streamserve.web.rows import orm
from streamserve.web.work.kinds import Claim, LeaseLost

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

        speaking, steps = await orm.call(rows)
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

        if not await orm.call(write):
            raise LeaseLost(f"job {self._claim.id}")
