"""Rows of batches and of files: `StoredFile`, `Batch`, and `BatchRow`, one for each row that has ended.

Requests are in the input file, not here; contents of files are in a Django storage (work/files.py).

    validating ──► in_progress ──► finalizing ──► completed, expired
        │ └────────────┴─► cancelling ──► cancelled
        └──► failed

`status` is the API's; `state`, `fence` and `producer` are those of the queue (leases.py). Every write of a worker names
its fence, so that a worker that lost its claim stores no row.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from django.db import models, transaction
from django.db.models import F, Q, Sum
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from streamserve.rows.leases import Work, WorkQuerySet


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


class StoredFile(models.Model):
    """One file. `id` is that of the API; `name` is where the storage has it, which no client is shown."""

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
    request_key = models.CharField(
        max_length=64, null=True, unique=True, editable=False, help_text=_("SHA-256 of the caller and Idempotency-Key.")
    )
    request_digest = models.CharField(
        max_length=64, null=True, editable=False, help_text=_("SHA-256 of the upload that came with the key.")
    )

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
_CANCELLABLE = ("validating", "in_progress")
_ROWS_AT_ONCE = 1000


class BatchQuerySet(WorkQuerySet["Batch"]):
    """Batches: look-ups, and changes of the status with their guard in the WHERE."""

    def of(self, tenant: str) -> BatchQuerySet:
        """Return the batches of a tenant."""
        return self.filter(tenant=tenant)

    def unfinished(self) -> BatchQuerySet:
        """Return the batches that have not ended."""
        return self.filter(status__in=RUNNING)

    def finished_before(self, when: datetime) -> BatchQuerySet:
        """Return the batches that ended before `when`."""
        return self.filter(finished_at__lt=when).exclude(status__in=RUNNING)

    def cancel(self, pk: str) -> int:
        """Ask for the batch to be cancelled; 0 if it is too late for that. A batch that waits is due at once."""
        now = timezone.now()
        return self.filter(pk=pk, status__in=_CANCELLABLE).update(
            status="cancelling", cancelling_at=now, due_at=F("created_at")
        )

    def move(self, pk: str, fence: int, worker_id: str, before: Iterable[str], status: str, **columns: Any) -> int:
        """Change the status from one of `before`; 0 if the worker has lost its claim, or the status was another."""
        held = self.held(pk, fence, worker_id).filter(status__in=tuple(before))
        return held.update(status=status, **{f"{status}_at": timezone.now()}, **columns)

    def store(self, pk: str, fence: int, worker_id: str, rows: Iterable[BatchRow]) -> bool:
        """Store rows that have ended, and count them; False if the worker has lost its claim. One transaction.

        A worker that gets on has used no attempt.
        """
        rows = list(rows)
        num_completed = sum(row.status_code < 400 for row in rows)
        counts = {
            "num_completed": F("num_completed") + num_completed,
            "num_failed": F("num_failed") + len(rows) - num_completed,
        }
        with transaction.atomic(using=self.db):
            held = self.held(pk, fence, worker_id).filter(status__in=("in_progress", "cancelling"))
            if not held.update(attempts=1, **counts):
                return False
            BatchRow.objects.using(self.db).bulk_create(rows)
        return True


class Batch(Work):
    """One batch. `id` is that of the API."""

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
    request_key = models.CharField(
        max_length=64, null=True, unique=True, editable=False, help_text=_("SHA-256 of the caller and Idempotency-Key.")
    )
    request_digest = models.CharField(
        max_length=64, null=True, editable=False, help_text=_("SHA-256 of the body that came with the key.")
    )
    in_progress_at = models.DateTimeField(null=True, editable=False)
    finalizing_at = models.DateTimeField(null=True, editable=False)
    completed_at = models.DateTimeField(null=True, editable=False)
    failed_at = models.DateTimeField(null=True, editable=False)
    expired_at = models.DateTimeField(null=True, editable=False)
    cancelling_at = models.DateTimeField(null=True, editable=False)
    cancelled_at = models.DateTimeField(null=True, editable=False)

    objects = BatchQuerySet.as_manager()

    class Meta(Work.Meta):
        abstract = False
        verbose_name = _("batch")
        verbose_name_plural = _("batches")
        ordering = ("-created_at", "-id")
        default_permissions = ("view",)
        permissions = (("cancel_batch", _("Can cancel anybody's batch")),)
        indexes = (  # type: ignore[assignment]  # one more than the base has
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

    def drop(self, batch_id: str) -> int:
        """Delete the rows of a batch whose files are composed, some at a time."""
        num = 0
        while keys := list(self.filter(batch_id=batch_id).order_by().values_list("pk", flat=True)[:_ROWS_AT_ONCE]):
            num += self.model._default_manager.filter(pk__in=keys).delete()[0]
        return num


class BatchRow(models.Model):
    """How one row ended. Kept until the batch's files are composed. No second end of a line can be stored."""

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
