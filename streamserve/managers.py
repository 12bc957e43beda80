"""Querysets of keys, streams, watches and stored completions: look-ups, and changes with their guard in the WHERE.

Callers and tenants are checked in `find` of api/answers.py and web/audit.py, not here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.contrib.auth import get_user_model
from django.db import connections, models
from django.db.models import Q
from django.dispatch import Signal
from django.utils import timezone

from streamserve.keys import digest_of, is_well_formed, new_key
from streamserve.rows.leases import LeasedQuerySet

if TYPE_CHECKING:
    from streamserve.models import ApiKey, StoredCompletion, Stream, Watch  # noqa: F401  (a base class names it in quotes)

LAST_USED_EVERY = timedelta(minutes=1)  # one write a minute and key, not one a request
_DIGEST_CHARS = 24

keys_revoked = Signal()  # an UPDATE sends no post_save


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

        The look-up is by the SHA-256 of the key: what an index reveals of that by its timing says nothing of the key.
        """
        if not is_well_formed(key):
            return None
        return self.active().filter(digest=digest_of(key)).select_related("user").first()

    def owners_without_permission(self, owners: Iterable[str]) -> set[str]:
        """Return those of `owners` ("key:3", "user:5") that are revoked, expired, deactivated or deleted."""
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

    def claim(self, stream_id: str, seen_fence: int, worker_id: str) -> int:
        """Make `worker_id` the producer, with the next fence; 0 if `seen_fence` is old or the stream finished."""
        return self.filter(state="running").lease(stream_id, seen_fence, worker_id, released_at=None)

    def release(self, stream_id: str, fence: int, worker_id: str) -> int:
        """Record that `worker_id` no longer produces the stream; 0 if it does not hold that fence."""
        held = self.leased(stream_id, fence, worker_id).filter(state="running")
        return held.update(producer="", released_at=timezone.now())

    def finish(self, stream_id: str, **columns: Any) -> int:
        """Write the terminal state and clear the request; 0 if the row is finished already."""
        running = self.filter(pk=stream_id, state="running")
        return running.update(state="finished", request=None, producer="", finished_at=timezone.now(), **columns)


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


def marks_of(metadata: Mapping[str, str]) -> list[str]:
    """Return a digest of each pair. They are searched for: any characters, on any database."""
    pairs = (f"{len(name)}:{name}{value}" for name, value in metadata.items())
    return [hashlib.sha256(pair.encode()).hexdigest()[:_DIGEST_CHARS] for pair in pairs]
