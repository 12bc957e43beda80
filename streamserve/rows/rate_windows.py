"""`RateWindow`: what is counted against limits over time. rates.py. What an answer holds is in its stream's row."""

from __future__ import annotations

from django.db import models


class RateWindow(models.Model):
    """A window of a subject ("owner:user:5", "site"): how much of it is used, or held by unfinished answers."""

    subject = models.CharField(max_length=100, editable=False)
    what = models.CharField(max_length=10, editable=False)
    seconds = models.PositiveIntegerField(editable=False)
    used = models.BigIntegerField(default=0, editable=False)
    ends_at_ms = models.BigIntegerField(db_index=True, editable=False)  # Unix time

    class Meta:
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["subject", "what", "seconds"], name="streamserve_window_once"),)

    def __str__(self) -> str:
        return f"{self.subject} {self.what} {self.seconds}"
