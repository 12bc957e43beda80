"""`RateWindow` and `RateHold`: what is counted against limits over time, and what unfinished answers hold. rates.py."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


class RateWindow(models.Model):
    """A window of a subject ("owner:user:5", "site"): how much of it is used, or held by unfinished answers."""

    subject = models.CharField(max_length=100, editable=False)
    what = models.CharField(max_length=10, editable=False)
    seconds = models.PositiveIntegerField(editable=False)
    used = models.BigIntegerField(default=0, editable=False)
    started_at = models.DateTimeField(default=timezone.now, db_index=True, editable=False)

    class Meta:
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["subject", "what", "seconds"], name="streamserve_window_once"),)

    def __str__(self) -> str:
        return f"{self.subject} {self.what} {self.seconds}"


class RateHold(models.Model):
    """The tokens that an unfinished answer holds. `windows` is JSON: [[window, its start, weight, tokens], …]."""

    stream_id = models.CharField(primary_key=True, max_length=32, editable=False)
    windows = models.TextField(editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.stream_id
