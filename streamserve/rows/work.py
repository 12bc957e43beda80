"""Rows of durable work: `Worker`; `Job`, `JobStep`, `WebhookDelivery`; `StoredFile`, `Batch`, and `BatchRow`.

A job's events are in its stream's log. A batch's requests are in its input file, and contents of files in a Django
storage (work/files.py). A `BatchRow` is a request that has ended, until the batch's files are composed:

    validating ──► in_progress ──► finalizing ──► completed, expired
        └──────────────┴─► cancelling ──► cancelled                   and from each of them: failed

A batch's `status` is the API's; its `state`, `fence` and `producer` belong to the queue (leases.py), as a job's do.
JSON is kept as text: PostgreSQL's own type refuses texts with a NUL, which models can write.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

from django.db import models, transaction
from django.db.models import F, Q, Sum
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from streamserve.rows.leases import UNFINISHED, Work, WorkQuerySet
from streamserve.rows.queries import Keyed

# A worker of another host, which only its row can tell about, is dead after so long without a beat.
LEASE_SECONDS = 30.0
_KEEP_DEAD = timedelta(days=1)


class WorkerQuerySet(models.QuerySet["Worker"]):
    """Workers, by the database's clock: their hosts' clocks may differ."""

    def beat(self, worker_id: str, kinds: str, concurrency: int) -> None:
        """Note that the worker lives; insert its row the first time."""
        if not self.filter(pk=worker_id).update(beat_at=Now()):
            self.create(id=worker_id, kinds=kinds, concurrency=concurrency, beat_at=Now())
            self.filter(beat_at__lt=Now() - _KEEP_DEAD).delete()

    def alive(self) -> WorkerQuerySet:
        """Return the workers with a recent beat. A beat in the future is from before the clock was set back."""
        lately = timedelta(seconds=LEASE_SECONDS)
        return self.filter(beat_at__gte=Now() - lately, beat_at__lte=Now() + lately)


class Worker(models.Model):
    """A process that runs jobs or batch rows. It updates `beat_at` every few seconds; at its end it deletes its row."""

    id = models.CharField(primary_key=True, max_length=32, editable=False)
    kinds = models.CharField(_("kinds of work"), max_length=200, editable=False)
    concurrency = models.PositiveIntegerField(_("at once"), editable=False)
    started_at = models.DateTimeField(_("started"), default=timezone.now, editable=False)
    beat_at = models.DateTimeField(_("last beat"), editable=False)

    objects = WorkerQuerySet.as_manager()

    class Meta:
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        ordering = ("-started_at",)
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.id


class JobQuerySet(WorkQuerySet["Job"]):
    """Jobs: look-ups and counts; `WorkQuerySet` has the state changes."""

    def place_of(self, job: Job) -> int:
        """Return how many queued jobs are taken before this job."""
        earlier = models.Q(due_at=job.due_at, created_at__lt=job.created_at)
        same = models.Q(due_at=job.due_at, created_at=job.created_at, pk__lt=job.pk)
        return self.filter(models.Q(due_at__lt=job.due_at) | earlier | same, state="queued").count()

    def end(self, pk: str, state: str, *, fence: int, **columns: Any) -> int:
        """End an unfinished job and queue its webhook's message; 0 if a claim followed `fence`. One transaction."""
        with transaction.atomic(using=self.db):
            num_ended = self.unfinished().filter(pk=pk, fence=fence).finish(state, speaking="", **columns)
            webhook = self.values_list("webhook", flat=True).get(pk=pk) if num_ended else ""
            if webhook:
                message_id = f"msg_{secrets.token_hex(12)}"
                WebhookDelivery.objects.using(self.db).create(id=message_id, job_id=pk, webhook=webhook)
        return num_ended


def _traceparent() -> models.CharField[str, str]:
    """Return the column of the trace that a row belongs to."""
    text = _("The header traceparent of the request that has made it.")
    return models.CharField(blank=True, max_length=55, default="", db_default="", editable=False, help_text=text)


class Job(Work, Keyed):
    """A run of a pipeline that a worker makes. `id` is the job id of the API; its stream has its events and request."""

    id = models.CharField(primary_key=True, max_length=32, editable=False)
    stream_id = models.CharField(_("stream"), max_length=32, unique=True, editable=False)
    pipeline = models.CharField(_("pipeline"), max_length=200, editable=False)
    owner = models.CharField(_("owner"), max_length=64, editable=False)
    tenant = models.CharField(_("tenant"), max_length=64, editable=False)
    progress = models.TextField(blank=True, editable=False, help_text=_("JSON of the newest step that was shown."))
    speaking = models.TextField(blank=True, editable=False, help_text=_("JSON of the key of the answer shown last."))
    result = models.TextField(
        blank=True, editable=False, help_text=_("JSON of the whole answer of a job that is done.")
    )
    webhook = models.CharField(_("webhook"), max_length=64, blank=True, editable=False)
    traceparent = _traceparent()

    objects = JobQuerySet.as_manager()

    class Meta(Work.Meta):
        abstract = False
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        ordering = ("-created_at",)
        indexes = (  # type: ignore[assignment]
            *Work.Meta.indexes,
            models.Index(fields=["tenant", "-created_at"], name="streamserve_job_tenant"),
            models.Index(fields=["created_at"], name="streamserve_jobs_by_time"),  # of the admin's list
            models.Index(
                fields=["owner"],
                condition=models.Q(state__in=UNFINISHED),
                name="streamserve_job_unfinished",
            ),
        )
        default_permissions = ("view",)
        permissions = (("cancel_job", _("Can cancel anybody's job")),)

    def __str__(self) -> str:
        return self.id


class JobStep(models.Model):
    """The result of a step that a job has finished, by the step's name and how often that name came before it."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="steps", editable=False)
    name = models.CharField(_("step"), max_length=200, editable=False)
    ordinal = models.PositiveIntegerField(editable=False)
    result = models.TextField(editable=False, help_text=_("JSON: of its result, and of what it has shown."))
    seconds = models.FloatField(_("seconds"), editable=False)
    created_at = models.DateTimeField(_("finished"), default=timezone.now, editable=False)

    class Meta:
        verbose_name = _("step of a job")
        verbose_name_plural = _("steps of jobs")
        ordering = ("created_at",)
        default_permissions = ("view",)
        constraints = (models.UniqueConstraint(fields=["job", "name", "ordinal"], name="streamserve_step_once"),)

    def __str__(self) -> str:
        return f"{self.name} {self.ordinal + 1}"


class WebhookDelivery(Work):
    """A message to a webhook: a job has ended. `id` is the message's; its content is made from the job's row."""

    id = models.CharField(primary_key=True, max_length=32, editable=False)
    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="deliveries", editable=False)
    webhook = models.CharField(_("webhook"), max_length=64, editable=False)

    objects = WorkQuerySet.as_manager()

    class Meta(Work.Meta):
        abstract = False
        verbose_name = _("webhook message")
        verbose_name_plural = _("webhook messages")
        ordering = ("-created_at",)
        default_permissions = ("view",)
        indexes = (
            models.Index(
                fields=["due_at", "created_at"], condition=models.Q(state="queued"), name="streamserve_hook_due"
            ),
            models.Index(fields=["producer"], condition=models.Q(state="running"), name="streamserve_hook_held"),
        )

    def __str__(self) -> str:
        return self.id


class StoredFileQuerySet(models.QuerySet["StoredFile"]):
    """Files. A row is there before its content and until after it, so that no content is ever without a row."""

    def ready(self, now: datetime | None = None) -> StoredFileQuerySet:
        """Return the files whose content is stored, and has not expired."""
        unexpired = Q(expires_at__isnull=True) | Q(expires_at__gt=now or timezone.now())
        return self.filter(unexpired, is_ready=True)

    def of(self, tenant: str) -> StoredFileQuerySet:
        """Return the files of a tenant that its callers may see."""
        return self.ready().filter(tenant=tenant)

    def num_bytes_of(self, tenant: str) -> int:
        """Return how much room the tenant's files take, those that are being stored included."""
        return self.filter(tenant=tenant).aggregate(sum=Sum("num_bytes"))["sum"] or 0

    def expired(self, now: datetime, unfinished_before: datetime) -> StoredFileQuerySet:
        """Return the files to drop: past their time, or never stored whole."""
        return self.filter(Q(expires_at__lte=now) | Q(is_ready=False, created_at__lt=unfinished_before))


class StoredFile(Keyed):
    """A file. `id` is the API's; `name` is where the storage has it, which no client is shown."""

    id = models.CharField(primary_key=True, max_length=64, editable=False)
    name = models.CharField(max_length=200, editable=False)
    filename = models.CharField(_("file name"), max_length=255, editable=False)
    owner = models.CharField(_("owner"), max_length=64, editable=False)
    tenant = models.CharField(_("tenant"), max_length=64, editable=False)
    purpose = models.CharField(_("purpose"), max_length=32, editable=False)
    num_bytes = models.BigIntegerField(_("bytes"), editable=False)
    is_ready = models.BooleanField(default=False, editable=False, help_text=_("Its content is stored."))
    created_at = models.DateTimeField(_("created"), default=timezone.now, editable=False)
    expires_at = models.DateTimeField(_("expires"), null=True, editable=False, db_index=True)

    objects = StoredFileQuerySet.as_manager()

    class Meta:
        verbose_name = _("file")
        verbose_name_plural = _("files")
        ordering = ("-created_at", "-id")
        default_permissions = ("view",)
        indexes = (models.Index(fields=["tenant", "-created_at", "-id"], name="streamserve_file_tenant"),)

    def __str__(self) -> str:
        return self.filename


RUNNING = ("validating", "in_progress", "finalizing", "cancelling")
# The statuses from which each status is reached.
BEFORE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "in_progress": ("validating",),
        "finalizing": ("in_progress",),
        "cancelling": ("validating", "in_progress"),
        "completed": ("finalizing",),
        "expired": ("finalizing",),
        "cancelled": ("cancelling",),
        "failed": RUNNING,
    }
)


class BatchQuerySet(WorkQuerySet["Batch"]):
    """Batches: look-ups, and changes of the status with their guard in the WHERE."""

    def of(self, tenant: str) -> BatchQuerySet:
        """Return the batches of a tenant."""
        return self.filter(tenant=tenant)

    def cancel(self, pk: str) -> int:
        """Ask for the batch to be cancelled; 0 if it is too late for that. A batch that waits is due at once."""
        return self.filter(pk=pk).move("cancelling", due_at=F("created_at"))

    def move(self, status: str, **columns: Any) -> int:
        """Change the status; 0 if `BEFORE` has no such change."""
        now = {f"{status}_at": timezone.now()}
        return self.filter(status__in=BEFORE[status]).update(status=status, **now, **columns)

    def end(self, status: str, **columns: Any) -> int:
        """End the batch; 0 if `BEFORE` has no such change."""
        state = status if status in ("cancelled", "failed") else "done"
        now = {f"{status}_at": timezone.now()}
        return self.filter(status__in=BEFORE[status]).finish(state, status=status, **now, **columns)

    def store(self, rows: Sequence[BatchRow]) -> int:
        """Store rows of a held batch that have ended, and count them; 0 if the batch is not held. One transaction.

        A worker that gets on has used no attempt.
        """
        num_completed = sum(row.status_code < 400 for row in rows)
        counts = {
            "num_completed": F("num_completed") + num_completed,
            "num_failed": F("num_failed") + len(rows) - num_completed,
        }
        with transaction.atomic(using=self.db):
            num_held = self.filter(status__in=("in_progress", "cancelling")).update(attempts=1, **counts)
            if num_held:
                BatchRow.objects.using(self.db).bulk_create(rows)
        return num_held


class Batch(Work, Keyed):
    """A batch. `id` is the API's."""

    STATUSES = tuple((name, _(name)) for name in (*RUNNING, "completed", "failed", "expired", "cancelled"))

    id = models.CharField(primary_key=True, max_length=64, editable=False)
    api = models.CharField(max_length=16, default="openai", editable=False, help_text=_("Whose shapes its files have."))
    owner = models.CharField(_("owner"), max_length=64, editable=False)
    tenant = models.CharField(_("tenant"), max_length=64, editable=False)
    endpoint = models.CharField(_("endpoint"), max_length=128, editable=False)
    status = models.CharField(_("status"), max_length=16, choices=STATUSES, default="validating", editable=False)
    input_file_id = models.CharField(_("input file"), max_length=64, db_index=True, editable=False)
    output_file_id = models.CharField(_("output file"), max_length=64, blank=True, editable=False)
    error_file_id = models.CharField(_("error file"), max_length=64, blank=True, editable=False)
    num_rows = models.PositiveIntegerField(_("rows"), default=0, editable=False)
    num_completed = models.PositiveIntegerField(_("completed"), default=0, editable=False)
    num_failed = models.PositiveIntegerField(_("failed"), default=0, editable=False)
    metadata = models.JSONField(null=True, editable=False)
    errors = models.JSONField(null=True, editable=False, help_text=_("What is wrong with the input file."))
    output_expires_seconds = models.PositiveIntegerField(null=True, editable=False)
    expires_at = models.DateTimeField(_("expires"), editable=False, help_text=_("Rows that have not run by then end."))
    in_progress_at = models.DateTimeField(null=True, editable=False)
    finalizing_at = models.DateTimeField(null=True, editable=False)
    completed_at = models.DateTimeField(null=True, editable=False)
    failed_at = models.DateTimeField(null=True, editable=False)
    expired_at = models.DateTimeField(null=True, editable=False)
    cancelling_at = models.DateTimeField(null=True, editable=False)
    cancelled_at = models.DateTimeField(null=True, editable=False)
    traceparent = _traceparent()

    objects = BatchQuerySet.as_manager()

    class Meta(Work.Meta):
        abstract = False
        verbose_name = _("batch")
        verbose_name_plural = _("batches")
        ordering = ("-created_at", "-id")
        default_permissions = ("view",)
        permissions = (("cancel_batch", _("Can cancel anybody's batch")),)
        indexes = (  # type: ignore[assignment]  # one index more than the base has
            *Work.Meta.indexes,
            models.Index(fields=["tenant", "-created_at", "-id"], name="streamserve_batch_tenant"),
        )

    def __str__(self) -> str:
        return self.id


class BatchRowQuerySet(models.QuerySet["BatchRow"]):
    """Rows that have ended."""

    def lines_of(self, batch_id: str) -> set[int]:
        """Return the lines whose rows have ended."""
        return set(self.filter(batch_id=batch_id).order_by().values_list("line", flat=True))

    def after(self, batch_id: str, line: int, most: int) -> list[BatchRow]:
        """Return the next rows in the order of the input."""
        return list(self.filter(batch_id=batch_id, line__gt=line).order_by("line")[:most])


class BatchRow(models.Model):
    """How a row ended. Kept until the batch's files are composed. No second end of a line can be stored."""

    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, related_name="rows", editable=False)
    line = models.PositiveIntegerField(editable=False)
    custom_id = models.CharField(max_length=256, editable=False)
    request_id = models.CharField(max_length=64, editable=False)
    status_code = models.PositiveSmallIntegerField(editable=False)
    body = models.TextField(editable=False, help_text=_("The JSON of its response."))

    objects = BatchRowQuerySet.as_manager()

    class Meta:
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["batch", "line"], name="streamserve_batch_line_once"),)

    def __str__(self) -> str:
        return f"{self.batch_id} {self.line}"
