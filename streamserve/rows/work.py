"""Rows of durable work: `Worker`, `Job` and `JobStep`. What a job shows is in its stream's event log, not here.

JSON is kept as text: PostgreSQL's own type refuses texts with a NUL, which models can write.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import models
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from streamserve.rows.leases import Work, WorkQuerySet

# A worker of another host, which only its row can tell about, is dead after so long without a beat.
LEASE_SECONDS = 30.0
_KEEP_DEAD = timedelta(days=1)


class WorkerQuerySet(models.QuerySet["Worker"]):
    """Workers, by the database's clock: those of their hosts may differ."""

    def beat(self, worker_id: str, kinds: str, concurrency: int) -> None:
        """Note that the worker lives; insert its row the first time."""
        if not self.filter(pk=worker_id).update(beat_at=Now()):
            self.create(id=worker_id, kinds=kinds, concurrency=concurrency, beat_at=Now())
            self.filter(beat_at__lt=Now() - _KEEP_DEAD).delete()

    def alive(self) -> WorkerQuerySet:
        """Return the workers that have given a beat lately. One in the future is from before the clock was set back."""
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
    """Jobs: look-ups and counts; state changes are those of `WorkQuerySet`."""

    def place_of(self, job: Job) -> int:
        """Return how many queued jobs are taken before this one."""
        earlier = models.Q(due_at=job.due_at, created_at__lt=job.created_at)
        same = models.Q(due_at=job.due_at, created_at=job.created_at, pk__lt=job.pk)
        return self.filter(models.Q(due_at__lt=job.due_at) | earlier | same, state="queued").count()

    def unfinished_of(self, owner: str) -> JobQuerySet:
        """Return the jobs of `owner` that have not ended."""
        return self.filter(owner=owner, state__in=("queued", "running"))

    def finished_before(self, when: datetime) -> JobQuerySet:
        """Return the jobs that ended before `when`."""
        return self.filter(finished_at__lt=when).exclude(state__in=("queued", "running"))


class Job(Work):
    """A run of a pipeline that a worker makes. `id` is the job id of the API; its stream has its events and request."""

    id = models.CharField(primary_key=True, max_length=32, editable=False)
    stream_id = models.CharField(_("stream"), max_length=32, unique=True, editable=False)
    pipeline = models.CharField(_("pipeline"), max_length=200, editable=False)
    owner = models.CharField(_("owner"), max_length=64, editable=False)
    tenant = models.CharField(_("tenant"), max_length=64, editable=False)
    progress = models.TextField(blank=True, editable=False, help_text=_("JSON of the newest step that was shown."))
    speaking = models.TextField(blank=True, editable=False, help_text=_("JSON of the key of the answer shown last."))
    result = models.TextField(blank=True, editable=False, help_text=_("JSON of the whole answer of one that is done."))
    webhook = models.CharField(_("webhook"), max_length=64, blank=True, editable=False)
    request_key = models.CharField(
        max_length=64, null=True, unique=True, editable=False, help_text=_("SHA-256 of the caller and Idempotency-Key.")
    )
    request_digest = models.CharField(
        max_length=64, null=True, editable=False, help_text=_("SHA-256 of the body that came with the key.")
    )

    objects = JobQuerySet.as_manager()

    class Meta(Work.Meta):
        abstract = False
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        ordering = ("-created_at",)
        indexes = (  # type: ignore[assignment]
            *Work.Meta.indexes,
            models.Index(fields=["tenant", "-created_at"], name="streamserve_job_tenant"),
            models.Index(
                fields=["owner"],
                condition=models.Q(state__in=("queued", "running")),
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
    """One message to a webhook: a job has ended. `id` is the message's; what it says is made from the job's row."""

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
