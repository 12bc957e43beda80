"""`StoredCompletion`: a chat completion that its caller asked to store (`store: true`), where the site has STORE on.

Its messages, metadata and whole answer are JSON texts: a JSON column refuses NUL on PostgreSQL. It goes with the
stream's row, by KEEP_STREAMS_DAYS. A deleted one leaves a row without content, so that its id stays unknown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

_DIGEST_CHARS = 24


def marks_of(metadata: Mapping[str, str]) -> list[str]:
    """Return a digest of each pair. They are searched for: any characters, on any database."""
    pairs = (f"{len(name)}:{name}{value}" for name, value in metadata.items())
    return [hashlib.sha256(pair.encode()).hexdigest()[:_DIGEST_CHARS] for pair in pairs]


class StoredCompletionQuerySet(models.QuerySet["StoredCompletion"]):
    """Stored completions: look-ups, and changes with their guard in the WHERE."""

    def of(self, tenant: str) -> StoredCompletionQuerySet:
        """Return those of a tenant that are whole."""
        return self.filter(tenant=tenant, deleted_at=None).exclude(completion="")

    def with_metadata(self, pairs: Mapping[str, str]) -> StoredCompletionQuerySet:
        """Return those that have all these pairs."""
        found = self
        for mark in marks_of(pairs):
            found = found.filter(marks__contains=mark)
        return found

    def annotate_with(self, pk: int, metadata: str, marks: str) -> int:
        """Replace the metadata of one that is not deleted."""
        return self.filter(pk=pk, deleted_at=None).update(metadata=metadata, marks=marks)

    def forget(self, pk: int) -> int:
        """Empty the row; 0 if it is empty already."""
        empty = {"messages": "", "metadata": "", "marks": "", "completion": ""}
        return self.filter(pk=pk, deleted_at=None).update(deleted_at=timezone.now(), **empty)


class StoredCompletion(models.Model):
    """One completion. `completion` is empty until the answer has ended."""

    stream = models.OneToOneField(
        "streamserve.Stream", on_delete=models.CASCADE, related_name="stored_completion", editable=False
    )
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
