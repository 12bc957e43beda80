"""Rows in the site's database: `ApiKey`, `Stream`, `Watch`, `StoredCompletion`, `StoredResponse`. Rows of durable
work are in rows/work.py, those of conversations in rows/conversations.py.

Each has a queryset of look-ups, and of changes with their guard in the WHERE. Callers and tenants are checked in `find`
of api/answers.py and web/audit.py, not here. Events are in the log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db import connections, models
from django.db.models import Q
from django.dispatch import Signal
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from streamserve.keys import digest_of, is_well_formed, new_key, prefix_of
from streamserve.protocol.requests import LATENCY_CLASSES
from streamserve.rows.conversations import Attachment, Conversation, Message, Share, Thread
from streamserve.rows.leases import LeasedQuerySet
from streamserve.rows.queries import Keyed
from streamserve.rows.rate_windows import RateWindow
from streamserve.rows.usage_days import UsageDay
from streamserve.rows.work import Batch, BatchRow, Job, JobStep, StoredFile, WebhookDelivery, Worker

__all__ = [
    "LAST_USED_EVERY",
    "SCOPES",
    "ApiKey",
    "Attachment",
    "Batch",
    "BatchRow",
    "Conversation",
    "Job",
    "JobStep",
    "Live",
    "Message",
    "RateWindow",
    "Share",
    "StoredCompletion",
    "StoredFile",
    "StoredResponse",
    "Stream",
    "Thread",
    "UsageDay",
    "Watch",
    "WebhookDelivery",
    "Worker",
    "default_scopes",
    "keys_revoked",
    "marks_of",
]

SCOPES = ("chat", "ops", "watch")
LAST_USED_EVERY = timedelta(minutes=1)  # one write a minute and key, not at each request
_DIGEST_CHARS = 24

keys_revoked = Signal()  # an UPDATE sends no post_save


def default_scopes() -> list[str]:
    """Return the scopes of a key that is made without any."""
    return ["chat"]


def validate_scopes(value: object) -> None:
    """Raise ValidationError unless `value` is a list of known scopes."""
    if not isinstance(value, list) or not value or not set(map(str, value)) <= set(SCOPES):
        raise ValidationError(_("Scopes are a list of: %(scopes)s.") % {"scopes": ", ".join(SCOPES)})


class ApiKeyQuerySet(models.QuerySet["ApiKey"]):
    """Keys: make, find, revoke."""

    def active(self, now: datetime | None = None) -> ApiKeyQuerySet:
        """Return the valid keys: not revoked, not expired, owner not deactivated."""
        now = now or timezone.now()
        unexpired = Q(expires_at__isnull=True) | Q(expires_at__gt=now)
        return self.filter(unexpired, Q(user__isnull=True) | Q(user__is_active=True), revoked_at__isnull=True)

    def make(self, key: str | None = None, **fields: Any) -> tuple[ApiKey, str]:
        """Store a new key and return (row, key). The key itself is not stored: show it now."""
        key = key or new_key()
        row = self.model(**fields)
        row.set_key(key)
        row.save(using=self.db, force_insert=True)
        return row, key

    def find_active(self, key: str) -> ApiKey | None:
        """Return the active row of `key`, or None.

        The look-up is by the SHA-256 of the key: what an index reveals of a digest by its timing does not reveal the
        key.
        """
        if not is_well_formed(key):
            return None
        return self.active().filter(digest=digest_of(key)).select_related("user").first()

    def owners_without_permission(self, owners: Iterable[str]) -> set[str]:
        """Return the `owners` ("key:3", "user:5") that are revoked, expired, deactivated or deleted."""
        keys = {owner.partition(":")[2]: owner for owner in owners if owner.startswith("key:")}
        users = {owner.partition(":")[2]: owner for owner in owners if owner.startswith("user:")}
        active_users = get_user_model()._default_manager.filter(is_active=True)
        return _missing(keys, self.active()) | _missing(users, active_users)

    def touch(self, now: datetime | None = None) -> int:
        """Note that these keys were used, at most once a minute each."""
        now = now or timezone.now()
        stale = Q(last_used_at__isnull=True) | Q(last_used_at__lt=now - LAST_USED_EVERY)
        return self.filter(stale).update(last_used_at=now)

    def revoke(self, now: datetime | None = None) -> int:
        """Revoke these keys permanently and return how many changed; a revoked key keeps its date."""
        num_revoked = self.filter(revoked_at__isnull=True).update(revoked_at=now or timezone.now())
        keys_revoked.send(self.model)
        return num_revoked


def _missing(owners: Mapping[str, str], active: models.QuerySet[Any]) -> set[str]:
    """Return the owners, by primary key, whose row is not among the active rows."""
    found = {str(pk) for pk in active.filter(pk__in=owners).values_list("pk", flat=True)} if owners else set()
    return {owner for pk, owner in owners.items() if pk not in found}


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
    allowed_models = models.JSONField(
        _("models"),
        default=list,
        blank=True,
        help_text=_("A list of the models and pipelines that it may use. Empty: all that its user may."),
    )
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


class StreamQuerySet(LeasedQuerySet["Stream"]):
    """Stream rows: running until the one terminal event."""

    def unfinished(self) -> StreamQuerySet:
        """Return the running streams, without request and text."""
        return self.filter(state="running").defer("request", "text")

    def running_of(self, owner: str, is_prefix: bool, worker_id: str = "") -> list[tuple[str, str]]:
        """Return (id, producer) of the running streams counted as `owner`, or of a prefix of owners; oldest first.

        Without jobs, and those that `worker_id` produces. Every start asks this, so it is written out: building the
        query takes ten times as long as running it. The state is no parameter: so SQLite uses its index.
        """
        select = (
            "SELECT id, producer, created_at FROM streamserve_stream "
            "WHERE state = 'running' AND on_disconnect <> 'job' AND "
        )
        sql, values = f"{select} (owner LIKE %s OR counted_as LIKE %s) ORDER BY 3", [f"{owner}%", f"{owner}%"]
        if not is_prefix:  # a union, as an OR of the two uses neither index
            sql = f"{select} counted_as = %s UNION ALL {select} owner = %s AND counted_as IS NULL ORDER BY 3"
            values = [owner, owner]
        with connections[self.db].cursor() as cursor:
            cursor.execute(sql, values)
            return [(id, producer) for id, producer, _ in cursor.fetchall() if not producer or producer != worker_id]

    def of_unfinished_jobs(self) -> models.QuerySet[Stream, tuple[str, int]]:
        """Return log id and fence of the streams of jobs that have not ended."""
        return self.filter(state="running", on_disconnect="job").values_list("log_id", "fence")

    def finished_before(self, when: datetime) -> StreamQuerySet:
        """Return the streams that ended before `when`."""
        return self.filter(state="finished", finished_at__lt=when)

    def times_since(self, when: datetime, model: str = "") -> models.QuerySet[Stream, tuple[Any, ...]]:
        """Return arrival, TTFT, phases and reader's times of the answers that ended well, the newest first."""
        found = self.filter(state="finished", created_at__gte=when, ttft_seconds__isnull=False)
        of_model = found.filter(model=model) if model else found
        columns = ("created_at", "ttft_seconds", "phases", "reader")
        return of_model.order_by("-created_at").values_list(*columns)

    def claim(self, stream_id: str, seen_fence: int, worker_id: str) -> int:
        """Make `worker_id` the producer, with the next fence; 0 if `seen_fence` is old or the stream finished."""
        return self.filter(state="running").lease(stream_id, seen_fence, worker_id, released_at=None)

    def release(self, stream_id: str, fence: int, worker_id: str) -> int:
        """Record that `worker_id` no longer produces the stream; 0 if it does not hold that fence."""
        held = self.leased(stream_id, fence, worker_id).filter(state="running")
        return held.update(producer="", released_at=timezone.now())

    def keep_reader(self, stream_id: str, times: Mapping[str, Any]) -> int:
        """Write what a reader measured; 0 if there is a report already."""
        return self.filter(pk=stream_id, reader__isnull=True).update(reader=times)

    def finish(self, stream_id: str, **columns: Any) -> int:
        """Write the terminal state and clear the request; 0 if the row is finished already."""
        running = self.filter(pk=stream_id, state="running")
        return running.update(state="finished", request=None, producer="", finished_at=timezone.now(), **columns)


class Stream(Keyed):
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
    latency_class = models.CharField(_("latency class"), max_length=16, null=True, editable=False)
    reader = models.JSONField(
        null=True, editable=False, help_text=_("What its reader measured, in seconds from its own sending.")
    )
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
    text = models.TextField(blank=True, editable=False, help_text=_("The answer, only if STORE is on."))
    held = models.TextField(
        null=True, editable=False, help_text=_("The tokens that it held of limits over time while it ran.")
    )
    created_at = models.DateTimeField(_("created"), default=timezone.now, editable=False)
    finished_at = models.DateTimeField(_("finished"), null=True, editable=False)

    objects = StreamQuerySet.as_manager()

    class Meta:
        verbose_name = _("stream")
        verbose_name_plural = _("streams")
        ordering = ("-created_at",)
        indexes = (
            models.Index(fields=["tenant", "-created_at"], name="streamserve_tenant_created"),
            models.Index(fields=["created_at"], name="streamserve_streams_by_time"),  # of the admin's list
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


class WatchQuerySet(models.QuerySet["Watch"]):
    """Watches, from beginning to end."""

    def ended_before(self, when: datetime) -> WatchQuerySet:
        """Return the watches that began, and if known ended, before `when`."""
        return self.filter(Q(ended_at__isnull=True) | Q(ended_at__lt=when), began_at__lt=when)

    def note(self, pk: int, last_seq: int) -> int:
        """Write the last event sent by a running watch."""
        return self.filter(pk=pk, ended_at__isnull=True).update(last_seq=last_seq)

    def end(self, pk: int, last_seq: int) -> int:
        """Write the end; 0 if it is written already."""
        return self.filter(pk=pk, ended_at__isnull=True).update(last_seq=last_seq, ended_at=timezone.now())


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


class StoredCompletionQuerySet(models.QuerySet["StoredCompletion"]):
    """Stored completions: look-ups, and changes with their guard in the WHERE."""

    def of(self, tenant: str) -> StoredCompletionQuerySet:
        """Return a tenant's whole completions."""
        return self.filter(tenant=tenant, deleted_at=None).exclude(completion="")

    def with_metadata(self, pairs: Mapping[str, str]) -> StoredCompletionQuerySet:
        """Return those that have all these pairs."""
        found = self
        for mark in marks_of(pairs):
            found = found.filter(marks__contains=mark)
        return found

    def annotate_with(self, pk: int, metadata: str, marks: str) -> int:
        """Replace the metadata of a completion that is not deleted."""
        return self.filter(pk=pk, deleted_at=None).update(metadata=metadata, marks=marks)

    def forget(self, pk: int) -> int:
        """Empty the row; 0 if it is empty already."""
        empty = {"messages": "", "metadata": "", "marks": "", "completion": ""}
        return self.filter(pk=pk, deleted_at=None).update(deleted_at=timezone.now(), **empty)


def marks_of(metadata: Mapping[str, str]) -> list[str]:
    """Return a digest of each pair. They are searched for: any characters, on any database."""
    pairs = (f"{len(name)}:{name}{value}" for name, value in metadata.items())
    return [hashlib.sha256(pair.encode()).hexdigest()[:_DIGEST_CHARS] for pair in pairs]


class StoredCompletion(models.Model):
    """A chat completion that its caller asked to store (`store: true`), where the site has STORE on.

    Its messages, metadata and whole answer are JSON texts: a JSON column refuses NUL on PostgreSQL. `completion` is
    empty until the answer has ended. The row goes with the stream's, by KEEP_STREAMS_DAYS. A deleted completion leaves
    a row without content, so that its id stays unknown.
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


class StoredResponse(models.Model):
    """What a response (`/v1/responses`) repeats of its request, and the items that it sent: JSON texts.

    They are in no event, and are kept as long as the events; where the site has STORE on, the row has the `whole`
    response too, and goes with the stream's. A deleted response leaves a row without content, so that its id stays
    unknown.
    """

    stream = models.OneToOneField(Stream, on_delete=models.CASCADE, related_name="stored_response", editable=False)
    tenant = models.CharField(_("tenant"), max_length=64, editable=False)
    head = models.TextField(blank=True, editable=False, help_text=_("JSON: what it repeats of its request."))
    items = models.TextField(blank=True, editable=False, help_text=_("JSON: the items of its request."))
    whole = models.TextField(blank=True, editable=False, help_text=_("JSON: the whole response."))
    deleted_at = models.DateTimeField(_("deleted"), null=True, editable=False)

    objects = models.Manager["StoredResponse"]()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.stream_id
