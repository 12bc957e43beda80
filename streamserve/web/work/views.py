"""`view_of`: a job's row as its owner sees it, in the API and in webhooks."""

from __future__ import annotations

import json

from streamserve.api.jobs import JobView
from streamserve.models import Job


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
