"""Rows in the site's database: `ApiKey`, `Stream`, `Watch`, `StoredCompletion`, and durable work (rows/).

Events are in the log.
"""

from __future__ import annotations

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from streamserve.keys import digest_of, prefix_of
from streamserve.managers import ApiKeyQuerySet, StoredCompletionQuerySet, StreamQuerySet, WatchQuerySet
from streamserve.protocol.requests import LATENCY_CLASSES
from streamserve.rows.work import Batch, BatchRow, Job, JobStep, StoredFile, WebhookDelivery, Worker

__all__ = [
    "SCOPES",
    "ApiKey",
    "Batch",
    "BatchRow",
    "Job",
    "JobStep",
    "Live",
    "StoredCompletion",
    "StoredFile",
    "Stream",
    "Watch",
    "WebhookDelivery",
    "Worker",
    "default_scopes",
]

SCOPES = ("chat", "ops", "watch")


def default_scopes() -> list[str]:
    """Return the scopes of a key that is made without any."""
    return ["chat"]


def validate_scopes(value: object) -> None:
    """Raise ValidationError unless `value` is a list of known scopes."""
    if not isinstance(value, list) or not value or not set(map(str, value)) <= set(SCOPES):
        raise ValidationError(_("Scopes are a list of: %(scopes)s.") % {"scopes": ", ".join(SCOPES)})


class ApiKey(models.Model):
    """An API key of a program. The key is shown once, when it is made; the row has its prefix and its SHA-256."""

    name = models.CharField(_("name"), max_length=100, blank=True)
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        verbose_name=_("user"),
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        related_name="streamserve_keys",
        help_text=_("Whose streams it sees. Without a user, the key sees its own only."),
    )
    prefix = models.CharField(_("prefix"), max_length=8, db_index=True, editable=False)
    digest = models.CharField(max_length=64, unique=True, editable=False)
    scopes = models.JSONField(_("scopes"), default=default_scopes, validators=[validate_scopes])
    latency_class = models.CharField(
        _("latency class"),
        max_length=16,
        null=True,
        blank=True,
        choices=[(name, name) for name in LATENCY_CLASSES],
        help_text=_("Of its requests that name none. Empty: the route's or the model's."),
    )
    created_at = models.DateTimeField(_("created"), default=timezone.now, editable=False)
    last_used_at = models.DateTimeField(_("last used"), null=True, blank=True, editable=False)
    expires_at = models.DateTimeField(_("expires"), null=True, blank=True)
    revoked_at = models.DateTimeField(_("revoked"), null=True, blank=True, editable=False)

    objects = ApiKeyQuerySet.as_manager()

    class Meta:
        verbose_name = _("API key")
        verbose_name_plural = _("API keys")
        ordering = ("-created_at",)

    def __str__(self) -> str:
        return f"{self.name or _('key')} ({self.prefix}…)"

    def set_key(self, key: str) -> None:
        """Take prefix and digest of `key`, which itself is not stored."""
        self.prefix, self.digest = prefix_of(key), digest_of(key)

    @property
    def tenant(self) -> str:
        """The tenant whose objects this key reaches: its user's, or its own."""
        return f"user:{self.user_id}" if self.user_id is not None else f"key:{self.pk}"

    @property
    def state(self) -> str:
        """Return active, revoked or expired."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= timezone.now() else "active"


class Stream(models.Model):
    """One answer, running or finished. `id` is the stream id of the API: 128 random bits in hex."""

    STATES = (("running", _("running")), ("finished", _("finished")))
    ON_DISCONNECT = (("park", _("park")), ("abort", _("abort")), ("finish", _("finish")), ("job", _("job")))

    id = models.CharField(primary_key=True, max_length=32, editable=False)
    log_id = models.CharField(max_length=12, unique=True, editable=False)
    owner = models.CharField(_("owner"), max_length=64, editable=False)
    tenant = models.CharField(_("tenant"), max_length=64, db_index=True, editable=False)
    counted_as = models.CharField(
        max_length=64, null=True, editable=False, help_text=_("Whose place it takes, if not its owner's alone.")
    )
    model = models.CharField(_("model"), max_length=200, editable=False)
    state = models.CharField(_("state"), max_length=10, choices=STATES, default="running", editable=False)
    finish_reason = models.CharField(_("finish reason"), max_length=32, blank=True, editable=False)
    error_code = models.CharField(_("error"), max_length=64, blank=True, editable=False)
    prompt_tokens = models.PositiveIntegerField(_("prompt tokens"), default=0, editable=False)
    cached_tokens = models.PositiveIntegerField(_("cached tokens"), default=0, editable=False)
    completion_tokens = models.PositiveIntegerField(_("completion tokens"), default=0, editable=False)
    ttft_seconds = models.FloatField(_("TTFT (s)"), null=True, editable=False)
    phases = models.JSONField(null=True, editable=False, help_text=_("Seconds of each phase of its latency."))
    last_seq = models.PositiveIntegerField(default=0, editable=False)
    on_disconnect = models.CharField(
        _("on disconnect"), max_length=10, choices=ON_DISCONNECT, default="park", editable=False
    )
    fence = models.PositiveIntegerField(default=1, editable=False, help_text=_("Grows with each claim."))
    producer = models.CharField(
        _("producer"), max_length=32, blank=True, editable=False, help_text=_("The worker that writes its log.")
    )
    released_at = models.DateTimeField(
        null=True, editable=False, help_text=_("Since when no worker does: its reader's time to come back.")
    )
    request = models.JSONField(null=True, editable=False, help_text=_("What was asked; forgotten at the end."))
    request_key = models.CharField(
        max_length=64, null=True, unique=True, editable=False, help_text=_("SHA-256 of the caller and Idempotency-Key.")
    )
    request_digest = models.CharField(
        max_length=64, null=True, editable=False, help_text=_("SHA-256 of the body that came with the key.")
    )
    text = models.TextField(blank=True, editable=False, help_text=_("The answer, only if STORE is on."))
    created_at = models.DateTimeField(_("created"), default=timezone.now, editable=False)
    finished_at = models.DateTimeField(_("finished"), null=True, editable=False)

    objects = StreamQuerySet.as_manager()

    class Meta:
        verbose_name = _("stream")
        verbose_name_plural = _("streams")
        ordering = ("-created_at",)
        indexes = (
            models.Index(fields=["tenant", "-created_at"], name="streamserve_tenant_created"),
            models.Index(fields=["producer"], condition=models.Q(state="running"), name="streamserve_unfinished"),
            models.Index(fields=["owner"], condition=models.Q(state="running"), name="streamserve_running_of"),
            models.Index(fields=["counted_as"], condition=models.Q(state="running"), name="streamserve_counted_as"),
        )
        default_permissions = ("view",)
        permissions = (
            ("stop_stream", _("Can stop anybody's stream")),
            ("watch_stream", _("Can watch anybody's stream")),
        )

    def __str__(self) -> str:
        return self.id


class Live(Stream):
    """A proxy without a table, for the live page's address and permissions, `view_live` and `control_engine`."""

    class Meta:
        proxy = True
        verbose_name = _("live page")
        verbose_name_plural = _("live page")
        default_permissions = ("view",)
        permissions = (("control_engine", _("Can pause, resume and drain a model's engine")),)


class Watch(models.Model):
    """One watch of another owner's stream, inserted before the first byte is sent.

    Users, keys and streams are stored as text, not as foreign keys: the row stays when they are deleted.
    """

    stream_id = models.CharField(_("stream"), max_length=32, db_index=True, editable=False)
    stream_owner = models.CharField(_("stream's owner"), max_length=64, editable=False)
    watcher = models.CharField(
        _("watcher"), max_length=64, db_index=True, editable=False, help_text=_("The user, or the key.")
    )
    username = models.CharField(_("user name"), max_length=254, editable=False)
    address = models.CharField(
        _("address"), max_length=45, blank=True, editable=False, help_text=_("Of the client, as the server knows it.")
    )
    after_seq = models.PositiveIntegerField(_("after"), default=0, editable=False)
    last_seq = models.PositiveIntegerField(
        _("up to"), default=0, editable=False, help_text=_("The last event that was sent, noted every 30 s.")
    )
    began_at = models.DateTimeField(_("began"), default=timezone.now, editable=False)
    ended_at = models.DateTimeField(
        _("ended"), null=True, editable=False, help_text=_("Empty while it lasts, or if the web process was killed.")
    )

    objects = WatchQuerySet.as_manager()

    class Meta:
        verbose_name = _("watch")
        verbose_name_plural = _("watches")
        ordering = ("-began_at",)
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.username}: {self.stream_id}"


class StoredCompletion(models.Model):
    """A chat completion that its caller asked to store (`store: true`), where the site has STORE on.

    Its messages, metadata and whole answer are JSON texts: a JSON column refuses NUL on PostgreSQL. `completion` is
    empty until the answer has ended. The row goes with the stream's, by KEEP_STREAMS_DAYS. A deleted one leaves a row
    without content, so that its id stays unknown.
    """

    stream = models.OneToOneField(Stream, on_delete=models.CASCADE, related_name="stored_completion", editable=False)
    tenant = models.CharField(_("tenant"), max_length=64, editable=False)
    model = models.CharField(_("model"), max_length=200, editable=False)
    messages = models.TextField(blank=True, editable=False, help_text=_("JSON: the messages of the request."))
    metadata = models.TextField(blank=True, editable=False, help_text=_("JSON."))
    marks = models.TextField(blank=True, editable=False, help_text=_("Digests of the metadata's pairs."))
    completion = models.TextField(blank=True, editable=False, help_text=_("JSON: the whole answer."))
    created_at = models.DateTimeField(_("created"), editable=False)
    deleted_at = models.DateTimeField(_("deleted"), null=True, editable=False)

    objects = StoredCompletionQuerySet.as_manager()

    class Meta:
        default_permissions = ()
        indexes = (models.Index(fields=["tenant", "-created_at", "-id"], name="streamserve_stored_of_tenant"),)

    def __str__(self) -> str:
        return self.stream_id
