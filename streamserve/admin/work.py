"""Durable work in the admin: jobs, webhook messages, workers, batches and files. Read only, but for cancelling."""

from __future__ import annotations

from functools import partial

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from streamserve.admin.records import ReadOnly, RecordAdmin, TabularInline
from streamserve.models import Batch, Job, JobStep, StoredFile, WebhookDelivery, Worker
from streamserve.protocol.errors import StreamserveError
from streamserve.web.calls import background
from streamserve.web.site import get_site
from streamserve.web.words import in_words


class StepInline(ReadOnly, TabularInline):
    """The finished steps and answers of a job, without their results."""

    model = JobStep
    fields = readonly_fields = ("name", "ordinal", "took", "created_at")
    extra = 0

    @admin.display(description=_("took"))
    def took(self, step: JobStep) -> str:
        """Return the time that it took."""
        return in_words(step.seconds)


@admin.register(Job)
class JobAdmin(RecordAdmin):
    """Every job, newest first; the failed jobs are the dead letters. Results are their owners' and are not shown."""

    list_display = ("short_id", "created", "pipeline", "short_owner", "state", "attempts", "error_code")
    list_filter = ("state", "pipeline", "error_code", "created_at")
    search_fields = ("id", "stream_id", "owner", "tenant")
    date_hierarchy = "created_at"
    inlines = (StepInline,)
    actions = ("cancel",)
    fieldsets = (
        (None, {"fields": ("id", "pipeline", "owner", "tenant", "state", "error_code", "error_message")}),
        (_("Times"), {"fields": ("created_at", "due_at", "started_at", "finished_at")}),
        (_("Where it runs"), {"fields": ("stream_id", "producer", "fence", "attempts", "progress", "webhook")}),
    )

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may cancel anybody's job."""
        return request.user.has_perm("streamserve.cancel_job")

    @admin.action(description=_("Cancel the selected jobs"), permissions=["cancel"])
    def cancel(self, request: HttpRequest, jobs: QuerySet[Job]) -> None:
        """End what has not ended."""
        num = 0
        for job in jobs.filter(state__in=("queued", "running")):
            try:
                background.run(partial(_stop, job), "the API")
                num += 1
            except StreamserveError as error:
                self.message_user(request, f"{job.pk[:8]}: {error.message}", messages.ERROR)
        text = ngettext("%(num)d job was cancelled.", "%(num)d jobs were cancelled.", num) % {"num": num}
        self.message_user(request, text)


async def _stop(job: Job) -> None:
    await get_site().work.jobs.stop(job)


@admin.register(WebhookDelivery)
class WebhookDeliveryAdmin(RecordAdmin):
    """Every message, newest first; the failed messages are the dead letters."""

    list_display = ("short_id", "created", "webhook", "job_id", "state", "attempts", "error_code", "due_at")
    list_filter = ("state", "webhook", "error_code")
    search_fields = ("id", "job__id")
    fieldsets = (
        (None, {"fields": ("id", "webhook", "job", "state", "error_code", "error_message")}),
        (_("Times"), {"fields": ("created_at", "due_at", "started_at", "finished_at")}),
        (_("Where it runs"), {"fields": ("producer", "fence", "attempts")}),
    )


@admin.register(Worker)
class WorkerAdmin(RecordAdmin):
    """The processes that run jobs and other durable work."""

    list_display = fields = ("id", "kinds", "concurrency", "started_at", "beat_at")


@admin.register(Batch)
class BatchAdmin(RecordAdmin):
    """The batches, newest first. Neither requests nor answers are shown."""

    list_display = ("short_id", "created", "endpoint", "short_owner", "status", "rows")
    list_filter = ("status", "endpoint", "created_at")
    search_fields = ("id", "owner", "input_file_id", "output_file_id", "error_file_id")
    date_hierarchy = "created_at"
    actions = ("cancel",)
    fieldsets = (
        (None, {"fields": ("id", "api", "endpoint", "owner", "tenant", "status", "errors", "metadata")}),
        (_("Rows"), {"fields": ("num_rows", "num_completed", "num_failed")}),
        (_("Files"), {"fields": ("input_file_id", "output_file_id", "error_file_id")}),
        (_("Times"), {"fields": ("created_at", "started_at", "finished_at", "expires_at")}),
        (_("Where it runs"), {"fields": ("producer", "fence", "attempts", "due_at", "error_code", "error_message")}),
    )

    @admin.display(description=_("rows"))
    def rows(self, batch: Batch) -> str:
        """Return "3 of 5", and how many of the three have failed."""
        failed = f", {batch.num_failed:,} failed" if batch.num_failed else ""
        return f"{batch.num_completed + batch.num_failed:,} of {batch.num_rows:,}{failed}"

    @admin.action(description=_("Cancel the selected batches"), permissions=["cancel"])
    def cancel(self, request: HttpRequest, batches: QuerySet[Batch]) -> None:
        """Have the batches run no more rows."""
        num = sum(Batch.objects.cancel(pk) for pk in batches.values_list("pk", flat=True))
        self.message_user(request, _("%(num)d batches are being cancelled.") % {"num": num})

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may cancel anybody's batch."""
        return request.user.has_perm("streamserve.cancel_batch")


@admin.register(StoredFile)
class StoredFileAdmin(RecordAdmin):
    """The files, newest first. Contents are not shown."""

    list_display = ("short_id", "created", "filename", "short_owner", "purpose", "num_bytes", "is_ready")
    list_filter = ("purpose", "created_at")
    search_fields = ("id", "filename", "owner")
    fields = ("id", "filename", "purpose", "owner", "tenant", "num_bytes", "is_ready", "created_at", "expires_at")
    date_hierarchy = "created_at"
