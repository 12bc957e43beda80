"""`PermissionChecks`: check the permissions of running streams, of readers, sockets and watchers every 30 s.

Streams of a revoked key, a deactivated user or an ended login are stopped, their readers and sockets disconnected; so
is a watcher without the permission. A check costs one query for all keys, two for all users, one for all sessions, and
a few for each watcher. One task of a process, on the serving loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Set
from contextvars import Context
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from django.conf import settings as django_settings
from django.contrib.auth import HASH_SESSION_KEY, SESSION_KEY, get_user_model
from django.utils import timezone
from django.utils.crypto import constant_time_compare

from streamserve.api.call import Caller
from streamserve.api.logs import get_logger
from streamserve.models import ApiKey
from streamserve.protocol.errors import Unauthorized
from streamserve.rows import orm
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from streamserve.web.audit import WatchAudit, watchers_without_permission
from streamserve.web.auth import KnownCaller

log = get_logger(__name__)

RECHECK_SECONDS = 30.0
_STOP_SECONDS = 5.0  # a stop is committed to the log; a check does not wait longer for a log that is down


class PermissionChecks:
    """Stops and disconnects what has lost its permission. `aclose()` ends its task."""

    def __init__(
        self, streams: Streams, audit: WatchAudit | None = None, every_seconds: float = RECHECK_SECONDS
    ) -> None:
        self._streams = streams
        self._audit = audit or WatchAudit(streams)
        self._every_seconds = every_seconds
        self._task: asyncio.Task[None] | None = None
        self._stops: dict[str, asyncio.Task[None]] = {}  # by stream id
        self._logins: WeakKeyDictionary[Stream, Login] = WeakKeyDictionary()  # that started the streams
        self._readers: WeakKeyDictionary[Any, tuple[Caller, Callable[[Any], None]]] = WeakKeyDictionary()

    def note_start(self, stream: Stream, caller: Caller) -> None:
        """Stop `stream` when the login that started it ends."""
        login = login_of(caller)
        if login is not None:
            self._logins[stream] = login
        self.ensure_running()

    def hold(self, reader: Any, caller: Caller, end: Callable[[Any], None]) -> None:
        """Call `end(reader)` once `caller` has lost the permission, unless `release` is called before."""
        self._readers[reader] = caller, end
        self.ensure_running()

    def release(self, reader: Any) -> None:
        """Undo `hold`."""
        self._readers.pop(reader, None)

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
        while self._live_streams() or self._readers or self._audit.watchers:
            await asyncio.sleep(self._every_seconds)
            try:
                await self.check()
            except Exception:
                # The database may be down for a while: streams continue, and the next round checks again.
                log.exception("permission_check_failed")

    async def check(self) -> None:
        """Check once: disconnect watchers, readers and sockets, and stop streams, that have lost their permission."""
        if watchers := self._audit.watchers:
            self._audit.cut(await orm.of_site(watchers_without_permission, watchers))
            await self._audit.note()
        streams, readers = self._live_streams(), list(self._readers.items())
        owners = {stream.owner for stream in streams} | {caller.owner for _, (caller, _) in readers}
        logins = {self._logins.get(stream) for stream in streams} | {login_of(caller) for _, (caller, _) in readers}
        lost_owners, lost_logins = await _lost_permissions(owners, logins)
        for stream in streams:
            if stream.owner in lost_owners or self._logins.get(stream) in lost_logins:
                self._stop(stream)
        is_stopped = set(
            self._stops
        )  # their readers get the end of the answer; the next check ends those that are left
        for reader, (caller, end) in readers:
            is_lost = caller.owner in lost_owners or login_of(caller) in lost_logins
            if is_lost and reader in self._readers and _stream_id_of(reader) not in is_stopped:
                self.release(reader)
                end(reader)
        if self._stops:
            await asyncio.wait(self._stops.values(), timeout=_STOP_SECONDS)

    def _stop(self, stream: Stream) -> None:
        """Start to stop a stream, unless that is under way."""
        if stream.id in self._stops or stream.state == "finished":
            return
        log.info("stream_permission_lost", stream_id=stream.id, owner=stream.owner)
        task = asyncio.get_running_loop().create_task(stream.stop(None), context=Context())
        self._stops[stream.id] = task
        task.add_done_callback(partial(self._forget_stop, stream.id))

    def _forget_stop(self, stream_id: str, task: asyncio.Task[None]) -> None:
        del self._stops[stream_id]
        if not task.cancelled() and task.exception() is not None:
            log.error("stream_not_stopped", stream_id=stream_id, exc_info=task.exception())

    def _live_streams(self) -> list[Stream]:
        return [stream for stream in self._streams.all() if stream.state != "finished"]


def _stream_id_of(reader: Any) -> str | None:
    """Return the id of the one stream that `reader` reads; None for a socket."""
    stream = getattr(reader, "stream", None)
    return None if stream is None else stream.id


def login_of(caller: Caller) -> Login | None:
    """Return the login of a caller with a session."""
    if isinstance(caller, KnownCaller) and caller.kind == "session" and caller.session_key:
        return Login(caller.session_key, str(caller.user_id))
    return None


def permission_lost() -> Unauthorized:
    """Return the error for readers and sockets of a caller that has lost the permission."""
    return Unauthorized("Your key, account or login is no longer active.", code="rights_lost")


async def has_lost_permission(caller: Caller) -> bool:
    """Return whether the caller's key or account is no longer active, or its login has ended."""
    return any(await _lost_permissions({caller.owner}, {login_of(caller)}))


async def _lost_permissions(owners: set[str], logins: Set[Login | None]) -> tuple[set[str], set[Login]]:
    lost = await orm.read(ApiKey.objects.owners_without_permission, owners)
    signed_in = {login for login in logins if login is not None}
    if not signed_in:
        return lost, set()
    are_rows = hasattr(_session_store(), "get_model_class")  # any other store is the site's to bound
    return lost, await (orm.read if are_rows else orm.of_site)(ended_logins, signed_in)


class Login(NamedTuple):
    """A session's key and its user's primary key as text.

    A login ends by logout, by expiry, when another user signs in, and when the user's password changes. With the
    session engine `signed_cookies`, which keeps nothing on the server, a logout is not noticed; a new password is.
    """

    session_key: str
    user_pk: str


def ended_logins(logins: Iterable[Login]) -> set[Login]:
    """Return the `logins` that have ended. One query for all sessions in the database, one for all users."""
    logins = set(logins)
    if not logins:
        return set()
    sessions = _sessions({login.session_key for login in logins})
    model = get_user_model()
    pks = [model._meta.pk.to_python(login.user_pk) for login in logins]
    users = {str(user.pk): user for user in model._default_manager.filter(pk__in=pks, is_active=True)}
    return {login for login in logins if not _holds(sessions.get(login.session_key, {}), users.get(login.user_pk))}


def _sessions(keys: set[str]) -> Mapping[str, Mapping[str, Any]]:
    """Return the sessions of these keys that have not expired."""
    store = _session_store()
    if not hasattr(store, "get_model_class"):
        return {key: store(key).load() for key in keys}
    rows = store.get_model_class()._default_manager.filter(session_key__in=keys, expire_date__gt=timezone.now())
    return {row.session_key: store().decode(row.session_data) for row in rows}


def _session_store() -> Any:
    return import_module(django_settings.SESSION_ENGINE).SessionStore


def _holds(session: Mapping[str, Any], user: Any) -> bool:
    """Return whether `user` is signed in by `session`, with the password that the session was made with."""
    if user is None or session.get(SESSION_KEY) != str(user.pk):
        return False
    made_with = session.get(HASH_SESSION_KEY) or ""
    hashes = [user.get_session_auth_hash(), *user.get_session_auth_fallback_hash()]
    return any(constant_time_compare(made_with, current) for current in hashes)
