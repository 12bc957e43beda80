"""Rows of stored files: `StoredFile`. Their contents are in a Django storage (web/batches/files.py), not here."""

from __future__ import annotations

from datetime import datetime

from django.db import models
from django.db.models import Q, Sum
from django.utils import timezone
from django.utils.translation import gettext_lazy as _


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
