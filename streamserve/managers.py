"""Querysets: which rows a caller may see, and state changes with their guard in the WHERE.

Who may read a stream is decided by its row's tenant (web/site.py, `find`), who may watch one by `for_watcher`.
"""

from __future__ import annotations

import hmac
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from streamserve.keys import digest_of, is_well_formed, new_key, prefix_of

if TYPE_CHECKING:
    from streamserve.models import ApiKey, Stream, Watch  # noqa: F401  (a base class names it in quotes)

LAST_USED_EVERY = timedelta(minutes=1)  # one write a minute a key, not one a request
_NO_DIGEST = "0" * 64


class ApiKeyQuerySet(models.QuerySet["ApiKey"]):
    """Keys: make, find, revoke."""

    def active(self, now: datetime | None = None) -> ApiKeyQuerySet:
        """Return the valid keys: not revoked, not expired, owner not deactivated."""
        now = now or timezone.now()
        unexpired = Q(expires_at__isnull=True) | Q(expires_at__gt=now)
        return self.filter(unexpired, Q(user__isnull=True) | Q(user__is_active=True), revoked_at__isnull=True)

    def make(self, key: str | None = None, **fields: Any) -> tuple[ApiKey, str]:
        """Store a new key and return (row, key). The key itself is not kept: show it now."""
        key = key or new_key()
        row = self.create(prefix=prefix_of(key), digest=digest_of(key), **fields)
        return row, key

    def find_active(self, key: str) -> ApiKey | None:
        """Return the active row of `key`, or None. An unknown prefix costs the same comparison as a known one."""
        if not is_well_formed(key):
            return None
        digest = digest_of(key)
        found = None
        for row in self.active().filter(prefix=prefix_of(key)).select_related("user") or [None]:
            stored = row.digest if row is not None else _NO_DIGEST
            if hmac.compare_digest(stored, digest):
                found = row
        return found

    def touch(self, now: datetime | None = None) -> int:
        """Note that these keys were used, at most once a minute each."""
        now = now or timezone.now()
        stale = Q(last_used_at__isnull=True) | Q(last_used_at__lt=now - LAST_USED_EVERY)
        return self.filter(stale).update(last_used_at=now)

    def revoke(self, now: datetime | None = None) -> int:
        """Close these keys for good; those already revoked keep their date. Returns how many changed."""
        return self.filter(revoked_at__isnull=True).update(revoked_at=now or timezone.now())


class StreamQuerySet(models.QuerySet["Stream"]):
    """Stream rows: running until the one terminal event."""

    def for_watcher(self, user: Any) -> StreamQuerySet:
        """Return everybody's streams for a `user` who may watch (see permissions.watching_user); nothing for None."""
        return self.none() if user is None else self.all()

    def unfinished(self) -> StreamQuerySet:
        """Return the streams that are still to be ended, without request and text."""
        return self.filter(state="running").defer("request", "text")

    def producers(self) -> models.QuerySet[Stream, str]:
        """Return the workers that run streams now."""
        return (
            self.filter(state="running").exclude(producer="").order_by().values_list("producer", flat=True).distinct()
        )

    def running_of(self, owner: str, is_prefix: bool) -> models.QuerySet[Stream, tuple[str, str]]:
        """Return (id, producer) of the unfinished streams of `owner`, or of all that begin like it; oldest first."""
        whose = Q(owner__startswith=owner) if is_prefix else Q(owner=owner)
        return self.filter(whose, state="running").order_by("created_at").values_list("pk", "producer")

    def finished_before(self, when: datetime) -> StreamQuerySet:
        """Return the streams that ended before `when`."""
        return self.filter(state="finished", finished_at__lt=when)

    def claim(self, stream_id: str, seen_fence: int, worker_id: str) -> int:
        """Make `worker_id` the producer, with the next fence; 0 if `seen_fence` is old, or it is finished."""
        seen = self.filter(pk=stream_id, state="running", fence=seen_fence)
        return seen.update(fence=F("fence") + 1, producer=worker_id, released_at=None)

    def release(self, stream_id: str, fence: int, worker_id: str) -> int:
        """Note that `worker_id` no longer produces the stream; 0 if it did not with that fence."""
        held = self.filter(pk=stream_id, state="running", fence=fence, producer=worker_id)
        return held.update(producer="", released_at=timezone.now())

    def finish(self, stream_id: str, **figures: Any) -> int:
        """Write the terminal state once: a row that is finished stays as it is. The request is forgotten here."""
        running = self.filter(pk=stream_id, state="running")
        return running.update(state="finished", request=None, producer="", finished_at=timezone.now(), **figures)


class WatchQuerySet(models.QuerySet["Watch"]):
    """Watches: from their beginning to their end."""

    def note(self, pk: int, last_seq: int) -> int:
        """Note how far a watch that lasts has come."""
        return self.filter(pk=pk, ended_at__isnull=True).update(last_seq=last_seq)

    def end(self, pk: int, last_seq: int) -> int:
        """Write the end, once."""
        return self.filter(pk=pk, ended_at__isnull=True).update(last_seq=last_seq, ended_at=timezone.now())
