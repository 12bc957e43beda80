"""Rows of conversations: `Conversation`, `Message`, `Attachment`, `Share`, `Thread`. docs/conversations.md shows them.

    Conversation ──► Message ──► Message ──► Message      parent → a tree: a changed question, or another answer, is a
                        │           └──────► Message      sibling. `Conversation.leaf` is the end of the branch shown.
                        └──► Attachment

A question and its answer's message are inserted with the stream's row, in its transaction: the answer's message is
`running`, and empty. When the stream ends it is written from the log, once: only a `running` message is written, and a
stream has one message at most. Streams' rows and logs may be deleted later; a message has no foreign key to them.
Messages of the role `tool` are results of a client's own tools. A `Thread` is what a client's id names.

JSON is kept as text: PostgreSQL's own type refuses texts with a NUL, which models can write. Ids are 128 random bits in
hex. Deletes go through the querysets here, not through Django's collector: a branch may be thousands of messages long.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import models, transaction
from django.db.models import Count, F, Q, Sum
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from streamserve.protocol.requests import ThreadKey

MAX_TITLE_CHARS = 200
MAX_CLIENT_ID_CHARS = 200
UNSENT = timedelta(days=1)  # an attachment that no question has brought by then is dropped


def new_row_id() -> str:
    """Return 128 random bits in hex."""
    return secrets.token_hex(16)


class ConversationQuerySet(models.QuerySet["Conversation"]):
    """Conversations that are not deleted are `of` their tenant."""

    def of(self, tenant: str) -> ConversationQuerySet:
        """Return a tenant's conversations."""
        return self.filter(tenant=tenant, deleted_at=None)

    def deleted_before(self, when: datetime) -> ConversationQuerySet:
        """Return the conversations whose deletion can no longer be undone."""
        return self.filter(deleted_at__lt=when)

    def unused_since(self, when: datetime) -> ConversationQuerySet:
        """Return the conversations without a message since `when`; pinned conversations stay."""
        return self.filter(updated_at__lt=when, is_pinned=False)


class Conversation(models.Model):
    """A conversation of one tenant: a user, with the user's keys, or a key without a user."""

    TITLED_BY = (("words", _("first words")), ("model", _("model")), ("owner", _("owner")))

    id = models.CharField(primary_key=True, max_length=32, default=new_row_id, editable=False)
    owner = models.CharField(_("owner"), max_length=64, editable=False)
    tenant = models.CharField(_("tenant"), max_length=64, editable=False)
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        verbose_name=_("user"),
        on_delete=models.CASCADE,
        null=True,
        editable=False,
        related_name="streamserve_conversations",
    )
    title = models.CharField(_("title"), max_length=MAX_TITLE_CHARS, blank=True)
    titled_by = models.CharField(_("titled by"), max_length=8, choices=TITLED_BY, default="words", editable=False)
    model = models.CharField(_("model"), max_length=200, blank=True, editable=False)
    source = models.CharField(
        _("source"), max_length=32, default="chat", editable=False, help_text=_("What has begun it: chat, api, …")
    )
    is_pinned = models.BooleanField(_("pinned"), default=False)
    leaf = models.CharField(
        max_length=32, blank=True, editable=False, help_text=_("The last message of the branch that is shown.")
    )
    created_at = models.DateTimeField(_("created"), default=timezone.now, editable=False)
    updated_at = models.DateTimeField(
        _("updated"), default=timezone.now, editable=False, help_text=_("When its last message was begun or ended.")
    )
    deleted_at = models.DateTimeField(_("deleted"), null=True, editable=False)
    metadata = models.TextField(
        blank=True, default="", db_default="", editable=False, help_text=_("JSON: its caller's own notes.")
    )

    objects = ConversationQuerySet.as_manager()

    class Meta:
        verbose_name = _("conversation")
        verbose_name_plural = _("conversations")
        ordering = ("-updated_at", "-id")
        default_permissions = ("view", "delete")
        indexes = (
            models.Index(fields=["tenant", "-is_pinned", "-updated_at", "-id"], name="streamserve_conversations_of"),
            models.Index(fields=["updated_at"], name="streamserve_conversations_old"),
        )

    def __str__(self) -> str:
        return self.title or self.id


class MessageQuerySet(models.QuerySet["Message"]):
    """Messages: look-ups, and changes with their guard in the WHERE."""

    def running(self) -> MessageQuerySet:
        """Return the messages of answers whose end is not written yet."""
        return self.filter(state="running")

    def streams(self) -> models.QuerySet[Message, str | None]:
        """Return the ids of the streams of these messages."""
        return self.exclude(stream_id=None).order_by().values_list("stream_id", flat=True)

    def write_end(self, stream_id: str, **columns: Any) -> int:
        """Write the whole answer of a stream into its message; 0 if that has been done, or it has none."""
        return self.running().filter(stream_id=stream_id).update(finished_at=timezone.now(), **columns)


class Message(models.Model):
    """A question, an answer, or a tool's result. `content` is JSON: {"blocks", "citations", "steps"}
    (docs/conversations.md).
    """

    ROLES = (("user", _("user")), ("assistant", _("assistant")), ("tool", _("tool")))
    STATES = (("running", _("running")), ("done", _("done")), ("failed", _("failed")))
    RATINGS = ((1, _("good")), (-1, _("bad")))

    id = models.CharField(primary_key=True, max_length=32, default=new_row_id, editable=False)
    conversation = models.ForeignKey(
        Conversation,
        verbose_name=_("conversation"),
        on_delete=models.CASCADE,
        related_name="messages",
        db_index=False,  # the index with the times begins with it
        editable=False,
    )
    parent = models.ForeignKey(
        "self", on_delete=models.DO_NOTHING, db_constraint=False, null=True, related_name="children", editable=False
    )
    role = models.CharField(_("role"), max_length=16, choices=ROLES, editable=False)
    state = models.CharField(_("state"), max_length=8, choices=STATES, default="done", editable=False)
    content = models.TextField(blank=True, editable=False)
    text = models.TextField(_("text"), blank=True, editable=False, help_text=_("What is searched: its text alone."))
    stream_id = models.CharField(_("stream"), max_length=32, null=True, unique=True, editable=False)
    client_id = models.CharField(
        max_length=MAX_CLIENT_ID_CHARS,
        blank=True,
        default="",
        db_default="",
        editable=False,
        help_text=_("The id that its client has given it."),
    )
    model = models.CharField(_("model"), max_length=200, blank=True, editable=False)
    finish_reason = models.CharField(_("finish reason"), max_length=32, blank=True, editable=False)
    error_code = models.CharField(_("error"), max_length=64, blank=True, editable=False)
    prompt_tokens = models.PositiveIntegerField(_("prompt tokens"), default=0, editable=False)
    cached_tokens = models.PositiveIntegerField(_("cached tokens"), default=0, editable=False)
    completion_tokens = models.PositiveIntegerField(_("completion tokens"), default=0, editable=False)
    rating = models.SmallIntegerField(_("rating"), null=True, choices=RATINGS, editable=False)
    comment = models.TextField(_("comment"), blank=True, editable=False)
    rated_at = models.DateTimeField(_("rated"), null=True, editable=False)
    created_at = models.DateTimeField(_("created"), default=timezone.now, editable=False)
    finished_at = models.DateTimeField(_("finished"), null=True, editable=False)

    objects = MessageQuerySet.as_manager()

    class Meta:
        verbose_name = _("message")
        verbose_name_plural = _("messages")
        ordering = ("created_at", "id")
        default_permissions = ("view",)
        indexes = (
            models.Index(fields=["conversation", "created_at", "id"], name="streamserve_messages_of"),
            models.Index(fields=["state"], condition=models.Q(state="running"), name="streamserve_messages_running"),
            models.Index(
                fields=["-rated_at"], condition=models.Q(rating__isnull=False), name="streamserve_messages_rated"
            ),
            models.Index(fields=["created_at"], name="streamserve_messages_by_time"),  # of the admin's list
        )

    def __str__(self) -> str:
        return self.id


class AttachmentQuerySet(models.QuerySet["Attachment"]):
    """Attachments. A row is there before its content and until after it, so that no content is ever without a row."""

    def of(self, tenant: str) -> AttachmentQuerySet:
        """Return the attachments of a tenant whose content is stored."""
        return self.filter(tenant=tenant, is_ready=True)

    def room_of(self, tenant: str) -> tuple[int, int]:
        """Return how many attachments a tenant has, and their bytes, those that are being stored included."""
        found = self.filter(tenant=tenant).aggregate(num=Count("pk"), num_bytes=Sum("num_bytes"))
        return found["num"], found["num_bytes"] or 0

    def attach(self, message_id: str, attachment_ids: Sequence[str], tenant: str) -> None:
        """Add them to a message that is being inserted, in its transaction. Raises DoesNotExist if one is gone."""
        wanted = list(dict.fromkeys(attachment_ids))
        if self.of(tenant).filter(pk__in=wanted).update(is_sent=True) != len(wanted):
            raise self.model.DoesNotExist("an attachment was deleted meanwhile")
        through = self.model.messages.through
        through.objects.using(self.db).bulk_create(through(attachment_id=one, message_id=message_id) for one in wanted)

    def unused(self) -> AttachmentQuerySet:
        """Return the attachments to drop: of no message any more, never sent, never stored whole, of a deleted user."""
        is_over = Q(is_sent=True) | Q(created_at__lt=timezone.now() - UNSENT)
        return self.filter(Q(is_over, messages=None) | Q(user=None, tenant__startswith="user:"))

    def take_away(self, pk: str, *, if_unused: bool = False) -> bool:
        """Show it no more, unless a message has it; `if_unused`: or it may still be sent. One transaction."""
        with transaction.atomic(using=self.db):
            self.filter(pk=pk).update(created_at=F("created_at"))  # locks the row: `attach` waits, or is over
            row = self.filter(pk=pk).first()
            if row is None or (if_unused and not self.unused().filter(pk=pk).exists()):
                return False
            if not if_unused and row.messages.exists():
                return False
            # From now on it is unused, and has no text: its content may be dropped at any time.
            return bool(self.filter(pk=pk).update(is_ready=False, is_sent=True, text=""))


class Attachment(models.Model):
    """A file of text that a question brings, in Django's storage, with the text that was read from it.

    A deleted user's are left for the purge, which drops their contents too (work/attachments.py).
    """

    id = models.CharField(primary_key=True, max_length=32, default=new_row_id, editable=False)
    owner = models.CharField(_("owner"), max_length=64, editable=False)
    tenant = models.CharField(_("tenant"), max_length=64, db_index=True, editable=False)
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        verbose_name=_("user"),
        on_delete=models.SET_NULL,
        null=True,
        editable=False,
        related_name="streamserve_attachments",
    )
    messages = models.ManyToManyField(Message, related_name="attachments", editable=False)
    name = models.CharField(_("name"), max_length=255, editable=False)
    content_type = models.CharField(_("type"), max_length=100, editable=False)
    num_bytes = models.PositiveBigIntegerField(_("bytes"), editable=False)
    stored_as = models.CharField(max_length=255, editable=False, help_text=_("Its name in the storage."))
    num_chars = models.PositiveIntegerField(_("characters"), default=0, editable=False)
    text = models.TextField(blank=True, editable=False)
    is_ready = models.BooleanField(default=False, editable=False, help_text=_("Its content is stored."))
    is_sent = models.BooleanField(_("sent"), default=False, editable=False, help_text=_("A question has brought it."))
    created_at = models.DateTimeField(_("created"), default=timezone.now, editable=False)

    objects = AttachmentQuerySet.as_manager()

    class Meta:
        verbose_name = _("attachment")
        verbose_name_plural = _("attachments")
        ordering = ("-created_at", "-id")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.name


class ShareQuerySet(models.QuerySet["Share"]):
    """Share links."""

    def revoke(self) -> int:
        """End the links for good, and return how many changed."""
        return self.filter(revoked_at=None).update(revoked_at=timezone.now())


class Share(models.Model):
    """A link by which anyone reads one branch of a conversation, as it was then. The link's token is not stored."""

    id = models.CharField(primary_key=True, max_length=32, default=new_row_id, editable=False)
    conversation = models.ForeignKey(
        Conversation, verbose_name=_("conversation"), on_delete=models.CASCADE, related_name="shares", editable=False
    )
    leaf = models.CharField(max_length=32, editable=False)
    digest = models.CharField(max_length=64, unique=True, editable=False)
    created_at = models.DateTimeField(_("created"), default=timezone.now, editable=False)
    expires_at = models.DateTimeField(_("expires"), null=True, editable=False)
    revoked_at = models.DateTimeField(_("revoked"), null=True, editable=False)

    objects = ShareQuerySet.as_manager()

    class Meta:
        verbose_name = _("share link")
        verbose_name_plural = _("share links")
        ordering = ("-created_at",)
        default_permissions = ("view",)
        permissions = (("revoke_share", _("Can revoke anybody's share link")),)

    @property
    def state(self) -> str:
        """Return active, revoked or expired."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= timezone.now() else "active"

    def __str__(self) -> str:
        return self.id


class ThreadQuerySet(models.QuerySet["Thread"]):
    """Threads."""

    def named(self, tenant: str, key: ThreadKey) -> ThreadQuerySet:
        """Return the thread that a tenant's client names so, if there is one."""
        return self.filter(tenant=tenant, dialect=key.dialect, client_id=key.client_id)

    def unused_since(self, when: datetime) -> ThreadQuerySet:
        """Return the threads without an answer since `when`, whose conversation, if they had one, is gone."""
        return self.filter(updated_at__lt=when).exclude(conversation_id__in=Conversation.objects.values("pk"))


class Thread(models.Model):
    """What a client's own id names: its tenant's last stream under that id, and the conversation, where one is kept.

    No foreign keys: a thread whose conversation was deleted begins another with its next question.
    """

    tenant = models.CharField(max_length=64, editable=False)
    dialect = models.CharField(max_length=16, editable=False)
    client_id = models.CharField(max_length=MAX_CLIENT_ID_CHARS, editable=False)
    stream_id = models.CharField(max_length=32, editable=False)
    conversation_id = models.CharField(max_length=32, blank=True, editable=False)
    updated_at = models.DateTimeField(default=timezone.now, db_index=True, editable=False)

    objects = ThreadQuerySet.as_manager()

    class Meta:
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(fields=["tenant", "dialect", "client_id"], name="streamserve_thread_once"),
        )

    def __str__(self) -> str:
        return self.client_id
