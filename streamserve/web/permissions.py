"""Rights of running streams, looked at again every 30 s: a revoked key's or deactivated user's answers end, and who may
watch no more is cut off.

One query a kind and process, whatever the number of streams, and a few for each watcher. Runs as one task on the
serving loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextvars import Context
from typing import Any

import structlog
from channels.db import database_sync_to_async
from django.contrib.auth import get_user_model
from django.db.models import QuerySet

from streamserve.models import ApiKey
from streamserve.streams.registry import Streams
from streamserve.web.audit import WatchAudit

log = structlog.get_logger("streamserve")

RECHECK_SECONDS = 30.0
WATCH_PERMISSION = "streamserve.watch_stream"


class PermissionChecks:
    """Stops the streams of owners who lost their rights, and cuts off such watchers. `aclose()` ends its task."""

    def __init__(
        self, streams: Streams, watches: WatchAudit | None = None, every_seconds: float = RECHECK_SECONDS
    ) -> None:
        self._streams = streams
        self._watches = watches or WatchAudit(streams)
        self._every_seconds = every_seconds
        self._task: asyncio.Task[None] | None = None

    def ensure_running(self) -> None:
        """Begin to watch, unless that has begun. The task ends by itself when nothing is live."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._watch(), context=Context())

    async def aclose(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while self._live_owners() or self._watches.watchers:
            await asyncio.sleep(self._every_seconds)
            try:
                await self.check()
            except Exception:
                # The database may be away for a while; streams go on, and the next round asks again.
                log.exception("rights_check_failed")

    async def check(self) -> None:
        """Look once: stop what its owner may no longer have, and cut off who may not watch."""
        if watchers := self._watches.watchers:
            self._watches.cut(await database_sync_to_async(watchers_without_rights)(watchers))
            await self._watches.note()
        owners = self._live_owners()
        if not owners:
            return
        lost = await database_sync_to_async(owners_without_rights)(owners)
        for stream in self._streams.all():
            if stream.owner in lost and stream.state != "finished":
                log.info("stream_rights_lost", stream_id=stream.id, owner=stream.owner)
                await stream.stop(None)

    def _live_owners(self) -> set[str]:
        return {stream.owner for stream in self._streams.all() if stream.state != "finished"}


def owners_without_rights(owners: Iterable[str]) -> set[str]:
    """Return those of `owners` ("key:3", "user:5") that are revoked, expired, deactivated or deleted."""
    keys = {owner.partition(":")[2]: owner for owner in owners if owner.startswith("key:")}
    users = {owner.partition(":")[2]: owner for owner in owners if owner.startswith("user:")}
    active_users = get_user_model()._default_manager.filter(is_active=True)
    return _lost(keys, ApiKey.objects.active()) | _lost(users, active_users)


def _lost(owners: Mapping[str, str], active: QuerySet[Any]) -> set[str]:
    """Return the owners (by primary key) whose row is not among the active ones."""
    found = {str(pk) for pk in active.filter(pk__in=owners).values_list("pk", flat=True)} if owners else set()
    return {owner for pk, owner in owners.items() if pk not in found}


def watchers_without_rights(watchers: Iterable[str]) -> set[str]:
    """Return those of `watchers` (as "user:5", "key:3") that may watch no more."""
    return {watcher for watcher in watchers if watching_user(watcher) is None}


def watching_user(watcher: str) -> Any:
    """Return the user by whose permission `watcher` may watch others' streams, or None.

    A key needs the scope "watch", and a user who has the permission.
    """
    kind, _, pk = watcher.partition(":")
    user: Any = None
    if kind == "key":
        key = ApiKey.objects.active().filter(pk=pk).select_related("user").first()
        user = None if key is None or "watch" not in key.scopes else key.user
    elif kind == "user":
        user = get_user_model()._default_manager.filter(pk=pk, is_active=True).first()
    return user if user is not None and user.has_perm(WATCH_PERMISSION) else None
