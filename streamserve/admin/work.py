"""Durable work in the admin: jobs, webhook messages, workers, batches and files. Read only, but for cancelling."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib import admin, messages
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.utils import timezone
from django.utils.html import format_html_join
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from streamserve.admin.records import (
    NOTHING,
    ReadOnly,
    RecentValues,
    RecordAdmin,
    TabularInline,
    moment,
    short,
)
from streamserve.models import Batch, Job, JobStep, StoredFile, WebhookDelivery, Worker
from streamserve.protocol.errors import StreamserveError
from streamserve.web.calls import background
from streamserve.web.site import get_site
from streamserve.web.words import in_words

_MAX_LINKS = 20


def took(work: Any) -> str:
    """Return the time from the first start to the end, or until now."""
    if work.started_at is None:
        return NOTHING
    return in_words(((work.finished_at or timezone.now()) - work.started_at).total_seconds())


class StepInline(ReadOnly, TabularInline):
    """The finished steps and answers of a job, without their results."""

    model = JobStep
    fields = readonly_fields = ("name", "ordinal", "took", "finished")
    extra = 0

    finished = moment("created_at", _("finished"))

    @admin.display(description=_("took"))
    def took(self, step: JobStep) -> str:
        """Return the time that it took."""
        return in_words(step.seconds)


@admin.register(Job)
class JobAdmin(RecordAdmin):
    """Every job, newest first; the failed jobs are the dead letters. Results are their owners' and are not shown."""

    list_display = ("short_id", "created", "short_pipeline", "short_owner", "state", "took", "stream", "error_code")
    list_filter = ("state", ("pipeline", RecentValues), ("error_code", RecentValues), "created_at")
    search_fields = ("id", "stream_id")
    search_help_text = _("The beginning of a job's or stream's id, or the name of a user or key")
    sortable_by = ("created",)
    inlines = (StepInline,)
    actions = ("cancel",)
    fieldsets = (
        (None, {"fields": ("id", "pipeline", "who", "whose", "state", "error_code", "error_message")}),
        (_("Belongs to it"), {"fields": ("stream_in_full", "messages", "webhook")}),
        (_("Times"), {"fields": ("created", "due", "started", "finished", "took")}),
        (_("Where it runs"), {"fields": ("producer", "fence", "attempts", "progress"), "classes": ("collapse",)}),
    )
    empty_words = _(
        "No job yet. A job is a run of a pipeline that goes on without a reader: POST /jobs makes it, and "
        "manage.py streamserve_worker runs it."
    )

    @admin.display(description=_("pipeline"))
    def short_pipeline(self, job: Job) -> str:
        """Return the pipeline, shortened."""
        return short(job.pipeline)

    @admin.display(description=_("took"))
    def took(self, job: Job) -> str:
        """Return the time from its first start to its end."""
        return took(job)

    @admin.display(description=_("stream"))
    def stream(self, job: Job) -> str:
        """Return its stream as the lists show it, linked."""
        return self.linked("streamserve_stream", job.stream_id, job.stream_id[:8])

    @admin.display(description=_("stream"))
    def stream_in_full(self, job: Job) -> str:
        """Return its stream, which has its events, linked."""
        return self.linked("streamserve_stream", job.stream_id, job.stream_id)

    @admin.display(description=_("webhook messages"))
    def messages(self, job: Job) -> str:
        """Return a link to the messages about its end."""
        if not job.webhook:
            return NOTHING
        return self.listed("streamserve_webhookdelivery", _("its messages"), job__id__exact=job.pk)

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

    list_display = ("short_id", "created", "short_webhook", "of_job", "state", "attempts", "error_code", "due")
    list_filter = ("state", ("webhook", RecentValues), ("error_code", RecentValues))
    search_fields = ("id", "job__id")
    search_help_text = _("The beginning of a message's or job's id")
    sortable_by = ("created",)
    owner_columns = ()
    fieldsets = (
        (None, {"fields": ("id", "webhook", "of_job", "state", "error_code", "error_message")}),
        (_("Times"), {"fields": ("created", "due", "started", "finished")}),
        (_("Where it runs"), {"fields": ("producer", "fence", "attempts"), "classes": ("collapse",)}),
    )
    empty_words = _("No message yet. A job that was made with a webhook leaves one here when it ends.")

    @admin.display(description=_("webhook"))
    def short_webhook(self, message: WebhookDelivery) -> str:
        """Return the webhook's name, shortened."""
        return short(message.webhook)

    @admin.display(description=_("job"))
    def of_job(self, message: WebhookDelivery) -> str:
        """Return the job that has ended, linked."""
        return self.linked("streamserve_job", message.job_id, message.job_id[:8])


@admin.register(Worker)
class WorkerAdmin(RecordAdmin):
    """The processes that run jobs and other durable work."""

    list_display = fields = ("id", "kinds", "concurrency", "started", "beat")
    owner_columns = ()
    empty_words = _(
        "No worker runs. manage.py streamserve_worker starts one; it runs jobs, batches and webhook messages."
    )
    beat = moment("beat_at", _("last beat"))


@admin.register(Batch)
class BatchAdmin(RecordAdmin):
    """The batches, newest first. Neither requests nor answers are shown."""

    list_display = ("short_id", "created", "endpoint", "short_owner", "status", "rows", "took")
    list_filter = ("status", ("endpoint", RecentValues), "created_at")
    search_fields = ("id", "input_file_id", "output_file_id", "error_file_id")
    search_help_text = _("The beginning of a batch's or file's id, or the name of a user or key")
    sortable_by = ("created",)
    actions = ("cancel",)
    fieldsets = (
        (None, {"fields": ("id", "api", "endpoint", "who", "whose", "status", "errors", "metadata")}),
        (_("Rows"), {"fields": ("rows", "streams"), "description": _("A row's answer is a line of a file.")}),
        (_("Files"), {"fields": ("input_file", "output_file", "error_file")}),
        (_("Times"), {"fields": ("created", "started", "finished", "took", "expires")}),
        (
            _("Where it runs"),
            {
                "fields": ("producer", "fence", "attempts", "due", "error_code", "error_message"),
                "classes": ("collapse",),
            },
        ),
    )
    empty_words = _(
        "No batch yet. POST /v1/batches, or /v1/messages/batches, makes a batch of a file of requests; "
        "manage.py streamserve_worker runs its rows."
    )

    @admin.display(description=_("took"))
    def took(self, batch: Batch) -> str:
        """Return the time from its start to its end."""
        return took(batch)

    @admin.display(description=_("input file"))
    def input_file(self, batch: Batch) -> str:
        """Return the file of its requests, linked."""
        return self._file(batch.input_file_id)

    @admin.display(description=_("output file"))
    def output_file(self, batch: Batch) -> str:
        """Return the file of its answers, linked."""
        return self._file(batch.output_file_id)

    @admin.display(description=_("error file"))
    def error_file(self, batch: Batch) -> str:
        """Return the file of its rows that failed, linked."""
        return self._file(batch.error_file_id)

    def _file(self, pk: str) -> str:
        return self.linked("streamserve_storedfile", pk, pk) if pk else NOTHING

    @admin.display(description=_("streams"))
    def streams(self, batch: Batch) -> str:
        """Return a link to the streams of its owner: its rows have none of their own."""
        return self.listed("streamserve_stream", _("those of its owner"), tenant=batch.tenant)

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

    list_display = ("short_id", "created", "short_filename", "short_owner", "purpose", "size", "is_ready")
    list_filter = (("purpose", RecentValues), "created_at")
    search_fields = ("id", "filename")
    search_help_text = _("The beginning of a file's id or name, or the name of a user or key")
    sortable_by = ("created",)
    fields = ("id", "filename", "purpose", "who", "whose", "size", "is_ready", "batches", "created", "expires")
    empty_words = _("No file yet. Clients send files of requests by POST /v1/files, and batches write theirs.")

    @admin.display(description=_("file name"))
    def short_filename(self, file: StoredFile) -> str:
        """Return the name, shortened."""
        return short(file.filename)

    @admin.display(description=_("size"))
    def size(self, file: StoredFile) -> str:
        """Return the size with its unit."""
        return filesizeformat(file.num_bytes)

    @admin.display(description=_("batches"))
    def batches(self, file: StoredFile) -> str:
        """Return links to the batches that read or wrote the file."""
        of_file = Q(input_file_id=file.pk) | Q(output_file_id=file.pk) | Q(error_file_id=file.pk)
        found = Batch.objects.filter(of_file, tenant=file.tenant).values_list("pk", flat=True)[:_MAX_LINKS]
        links = [self.linked("streamserve_batch", pk, pk) for pk in found]
        return format_html_join(", ", "{}", ((link,) for link in links)) or NOTHING
