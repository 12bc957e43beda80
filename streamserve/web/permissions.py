"""`PermissionChecks`: check the permissions of running streams and of watchers every 30 s.

Streams of a revoked key or a deactivated user are stopped; a watcher without the permission is disconnected. A check
costs one query for all keys, one for all users, and a few for each watcher. One task of a process, on the serving loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextvars import Context
from functools import partial
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
_STOP_SECONDS = 5.0  # a stop is committed to the log; a check does not wait longer for a log that is down
WATCH_PERMISSION = "streamserve.watch_stream"


class PermissionChecks:
    """Stops the streams of owners who lost their permission, disconnects such watchers. `aclose()` ends its task."""

    def __init__(
        self, streams: Streams, audit: WatchAudit | None = None, every_seconds: float = RECHECK_SECONDS
    ) -> None:
        self._streams = streams
        self._audit = audit or WatchAudit(streams)
        self._every_seconds = every_seconds
        self._task: asyncio.Task[None] | None = None
        self._stops: dict[str, asyncio.Task[None]] = {}  # by stream id

    def ensure_running(self) -> None:
        """Start the task unless it runs. It ends when no stream and no watcher is live."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), context=Context())

    async def aclose(self) -> None:
        """Cancel the task and the stops that it waits for."""
        tasks = [*self._stops.values(), *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while self._live_owners() or self._audit.watchers:
            await asyncio.sleep(self._every_seconds)
            try:
                await self.check()
            except Exception:
                # The database may be down for a while: streams continue, and the next round checks again.
                log.exception("permission_check_failed")

    async def check(self) -> None:
        """Check once: disconnect watchers and stop streams that have lost their permission."""
        if watchers := self._audit.watchers:
            self._audit.cut(await database_sync_to_async(watchers_without_permission)(watchers))
            await self._audit.note()
        owners = self._live_owners()
        if not owners:
            return
        lost = await database_sync_to_async(owners_without_permission)(owners)
        for stream in self._streams.all():
            if stream.owner in lost and stream.state != "finished" and stream.id not in self._stops:
                log.info("stream_permission_lost", stream_id=stream.id, owner=stream.owner)
                task = asyncio.get_running_loop().create_task(stream.stop(None), context=Context())
                self._stops[stream.id] = task
                task.add_done_callback(partial(self._forget_stop, stream.id))
        if self._stops:
            await asyncio.wait(self._stops.values(), timeout=_STOP_SECONDS)

    def _forget_stop(self, stream_id: str, task: asyncio.Task[None]) -> None:
        del self._stops[stream_id]
        if not task.cancelled() and task.exception() is not None:
            log.error("stream_not_stopped", stream_id=stream_id, exc_info=task.exception())

    def _live_owners(self) -> set[str]:
        return {stream.owner for stream in self._streams.all() if stream.state != "finished"}


def owners_without_permission(owners: Iterable[str]) -> set[str]:
    """Return those of `owners` ("key:3", "user:5") that are revoked, expired, deactivated or deleted."""
    keys = {owner.partition(":")[2]: owner for owner in owners if owner.startswith("key:")}
    users = {owner.partition(":")[2]: owner for owner in owners if owner.startswith("user:")}
    active_users = get_user_model()._default_manager.filter(is_active=True)
    return _lost(keys, ApiKey.objects.active()) | _lost(users, active_users)


def _lost(owners: Mapping[str, str], active: QuerySet[Any]) -> set[str]:
    """Return the owners (by primary key) whose row is not among the active ones."""
    found = {str(pk) for pk in active.filter(pk__in=owners).values_list("pk", flat=True)} if owners else set()
    return {owner for pk, owner in owners.items() if pk not in found}


def watchers_without_permission(watchers: Iterable[str]) -> set[str]:
    """Return those of `watchers` (as "user:5", "key:3") that have lost the permission to watch."""
    return {watcher for watcher in watchers if watching_user(watcher) is None}


def watching_user(watcher: str) -> Any:
    """Return the user whose permission lets `watcher` watch streams of any owner, or None.

    A key also needs the scope "watch".
    """
    kind, _, pk = watcher.partition(":")
    user: Any = None
    if kind == "key":
        key = ApiKey.objects.active().filter(pk=pk).select_related("user").first()
        user = None if key is None or "watch" not in key.scopes else key.user
    elif kind == "user":
        user = get_user_model()._default_manager.filter(pk=pk, is_active=True).first()
    return user if user is not None and user.has_perm(WATCH_PERMISSION) else None
