"""`UsageDay`: rows of what each owner has used of a model on a day. usage.py writes them."""

from __future__ import annotations

from decimal import Decimal

from django.db import models
from django.utils.translation import gettext_lazy as _

ANSWER, JOB, BATCH, TITLE, EMBEDDING = "answer", "job", "batch", "title", "embedding"


class UsageDay(models.Model):
    """What an owner used of a model on a day, by kind. Times are of the site's time zone."""

    KINDS = (
        (ANSWER, _("answer")),
        (JOB, _("job")),
        (BATCH, _("batch")),
        (TITLE, _("title")),
        (EMBEDDING, _("embedding")),
    )

    day = models.DateField(_("day"), editable=False)
    owner = models.CharField(_("owner"), max_length=64, editable=False)
    tenant = models.CharField(_("tenant"), max_length=64, editable=False)
    team = models.CharField(_("team"), max_length=64, blank=True, editable=False)
    model = models.CharField(_("model"), max_length=200, editable=False)
    kind = models.CharField(_("kind"), max_length=10, choices=KINDS, editable=False)
    requests = models.PositiveBigIntegerField(_("requests"), default=0, editable=False)
    prompt_tokens = models.PositiveBigIntegerField(_("prompt tokens"), default=0, editable=False)
    cached_tokens = models.PositiveBigIntegerField(_("cached tokens"), default=0, editable=False)
    completion_tokens = models.PositiveBigIntegerField(_("completion tokens"), default=0, editable=False)
    reasoning_tokens = models.PositiveBigIntegerField(_("reasoning tokens"), default=0, editable=False)
    accepted_tokens = models.PositiveBigIntegerField(_("accepted tokens"), default=0, editable=False)
    errors = models.PositiveBigIntegerField(_("errors"), default=0, editable=False)
    refused = models.PositiveBigIntegerField(_("refused"), default=0, editable=False)
    engine_seconds = models.FloatField(_("engine seconds"), default=0.0, editable=False)
    cost = models.DecimalField(_("cost"), max_digits=20, decimal_places=9, default=Decimal(0), editable=False)

    class Meta:
        verbose_name = _("usage")
        verbose_name_plural = _("usage")
        ordering = ("-day", "owner", "model", "kind")
        default_permissions = ("view",)
        constraints = (
            models.UniqueConstraint(fields=["day", "owner", "model", "kind", "team"], name="streamserve_usage_once"),
        )
        indexes = (models.Index(fields=["tenant", "-day"], name="streamserve_usage_of"),)

    def __str__(self) -> str:
        return f"{self.day} {self.owner} {self.model}"
