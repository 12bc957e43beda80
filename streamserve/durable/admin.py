"""Batches and their files in the admin: read-only lists, and an action that cancels batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from streamserve.durable.batches import Batch
from streamserve.durable.files import StoredFile

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin  # generic in its stubs only


class _Record(ModelAdmin):
    """Rows that the API makes: they are looked at, and neither added, changed nor deleted here."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Batch)
class BatchAdmin(_Record):
    """The batches, newest first. Neither requests nor answers are shown."""

    list_display = (
        "id",
        "owner",
        "endpoint",
        "status",
        "num_rows",
        "num_completed",
        "num_failed",
        "producer",
        "attempts",
        "created_at",
        "finished_at",
    )
    list_filter = ("status", "endpoint", "created_at")
    search_fields = ("id", "owner", "input_file_id", "output_file_id", "error_file_id")
    date_hierarchy = "created_at"
    actions = ("cancel",)

    @admin.action(description=_("Cancel the selected batches"), permissions=["cancel"])
    def cancel(self, request: HttpRequest, batches: QuerySet[Batch]) -> None:
        """Have the batches run no more rows."""
        num = sum(Batch.objects.cancel(pk) for pk in batches.values_list("pk", flat=True))
        self.message_user(request, _("%(num)d batches are being cancelled.") % {"num": num})

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may cancel anybody's batch."""
        return request.user.has_perm("streamserve.cancel_batch")


@admin.register(StoredFile)
class StoredFileAdmin(_Record):
    """The files, newest first. Contents are not shown."""

    list_display = ("id", "filename", "owner", "purpose", "num_bytes", "is_ready", "created_at", "expires_at")
    list_filter = ("purpose", "created_at")
    search_fields = ("id", "filename", "owner")
    date_hierarchy = "created_at"
