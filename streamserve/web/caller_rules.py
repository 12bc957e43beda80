"""`SiteRules`: what the site decides about its callers: PERMISSION of models and pipelines, keys' lists, TENANT.

Decided by owner and tenant, so it holds for requests, WebSockets, jobs, rows of batches and Python calls alike. Code of
the site that asks in its own name may use every model, and is in no team. What was decided is known for
`KNOWN_SECONDS`, as keys are; a change of keys, users or their permissions in this process forgets it at once.

Runs on the event loop; the database is read through the door, and functions of the site run on threads of theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from django.conf import settings as django_settings
from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db.models.signals import m2m_changed, post_delete, post_save
from django.utils.module_loading import import_string

from streamserve.api.call import Caller
from streamserve.api.logs import get_logger
from streamserve.clients.pipeline.client import PIPELINES
from streamserve.conf import SiteConfig
from streamserve.models import ApiKey, keys_revoked
from streamserve.protocol.errors import RuleFailed, StreamserveError
from streamserve.protocol.identity import KEY, SITE, USER, Identity
from streamserve.protocol.permissions import ANYONE, AUTHENTICATED, STAFF, Permission, is_path
from streamserve.rows import orm
from streamserve.web.auth import KNOWN_SECONDS

log = get_logger(__name__)

T = TypeVar("T")

MAX_TEAM_CHARS = 59  # what the column has after "team:"
_MAX_KNOWN = 10_000
_RETRY_AFTER = 5


class SiteRules:
    """See `CallerRules` in api/caller_rules.py. Changes nothing; knows what it has decided for some seconds."""

    def __init__(self, settings: SiteConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._names = (*settings.models, *settings.embedding_models, *PIPELINES)
        self._permissions = permissions_of(settings)
        self._team_of = settings.tenant
        self._hidden: _Known[frozenset[str]] = _Known(clock)
        self._teams: _Known[str] = _Known(clock)

    async def hidden_from(self, caller: Caller) -> frozenset[str]:
        identity = Identity.of(caller.owner, caller.tenant)
        if identity.kind == SITE or not (self._permissions or identity.kind == KEY):
            return frozenset()
        return await self._hidden.get(identity, partial(self._decide_hidden, identity))

    async def team_of(self, caller: Caller) -> str:
        identity = Identity.of(caller.owner, caller.tenant)
        if not self._team_of or identity.kind not in (USER, KEY):
            return ""
        return await self._teams.get(identity, partial(self._decide_team, identity))

    async def _decide_hidden(self, identity: Identity) -> frozenset[str]:
        user, key = await orm.read(people_of, identity)
        unlisted = {name for name in self._names if key and key.allowed_models and name not in key.allowed_models}
        if identity.kind == KEY and key is None:
            unlisted = set(self._names)
        asked = {name: one for name, one in self._permissions.items() if name not in unlisted}
        denied = await orm.of_site(denied_by, asked, user, identity) if asked else frozenset()
        return denied | unlisted

    async def _decide_team(self, identity: Identity) -> str:
        user, key = await orm.read(people_of, identity)
        return await orm.of_site(_team, self._team_of, user, key)


class _Known(Generic[T]):
    """What was decided for callers, until it is `KNOWN_SECONDS` old or forgotten."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[Identity, tuple[T, float]] = {}
        user_model = get_user_model()
        for signal, sender in ((post_save, ApiKey), (post_delete, ApiKey), (keys_revoked, ApiKey)):
            signal.connect(self.forget, sender=sender)
        for signal in (post_save, post_delete):
            signal.connect(self.forget, sender=django_settings.AUTH_USER_MODEL)
        for name in ("groups", "user_permissions"):
            if hasattr(user_model, name):
                m2m_changed.connect(self.forget, sender=getattr(user_model, name).through)

    def forget(self, **kwargs: Any) -> None:
        """Decide anew."""
        self._known = {}

    async def get(self, identity: Identity, decide: Callable[[], Any]) -> T:
        """Return what is known, or what `decide` returns."""
        known = self._known  # a later `forget` also forgets what is decided now
        value, until = known.get(identity, (None, 0.0))
        if value is not None and self._clock() < until:
            return value
        decided: T = await decide()
        if len(known) >= _MAX_KNOWN:
            known.clear()
        known[identity] = (decided, self._clock() + KNOWN_SECONDS)
        return decided


def permissions_of(settings: SiteConfig) -> dict[str, Permission]:
    """Return the permission of each model, embedding model and pipeline that not everybody may use."""
    given = {alias: entry.permission for alias, entry in settings.models.items()}
    given |= {alias: entry.permission for alias, entry in settings.embedding_models.items()}
    given |= {name: pipeline.permission for name, pipeline in PIPELINES.items()}
    return {name: permission for name, permission in given.items() if permission != ANYONE}


def people_of(identity: Identity) -> tuple[Any, ApiKey | None]:
    """Return the active user, if it is one or belongs to one, and the key's row, if it is one. Two queries at most."""
    key = None if identity.key_id is None else ApiKey.objects.filter(pk=identity.key_id).first()
    return active_user(identity), key


def active_user(identity: Identity) -> Any:
    """Return the user who asks, of a session or of a key; None without an active user."""
    if identity.user_id is None:
        return None
    try:
        return get_user_model()._default_manager.filter(pk=identity.user_id, is_active=True).first()
    except (ValueError, ValidationError):  # an owner that an application has named "user:..."
        return None


def denied_by(permissions: Mapping[str, Permission], user: Any, identity: Identity) -> frozenset[str]:
    """Return the names that the caller may not use. Raises RuleFailed where a function of the site does."""
    return frozenset(name for name, one in permissions.items() if not _may_use(name, one, user, identity))


def hidden_on_page(settings: SiteConfig, user: Any) -> frozenset[str]:
    """Return what a page does not offer its visitor, for templates: where a rule fails, all that is not for anyone.

    Synchronous; `user` is the request's, or None.
    """
    permissions = permissions_of(settings)
    is_user = user is not None and user.is_authenticated and user.is_active
    owner = f"user:{user.pk}" if is_user else "anon:page"
    try:
        return denied_by(permissions, user if is_user else None, Identity.of(owner, owner))
    except RuleFailed:
        return frozenset(permissions)


def _may_use(name: str, permission: Permission, user: Any, identity: Identity) -> bool:
    if permission == ANYONE:
        return True
    if permission == AUTHENTICATED:
        return user is not None or identity.kind == KEY
    if permission == STAFF:
        return user is not None and bool(user.is_staff)
    if isinstance(permission, str) and not is_path(permission):
        return user is not None and bool(user.has_perm(permission))
    try:
        function = import_string(permission) if isinstance(permission, str) else permission
        return bool(function(user, identity))
    except StreamserveError:
        raise
    except Exception as error:
        log.exception("permission_failed", model=name, owner=identity.owner)
        message = "The site cannot say which models you may use: its log has the cause. Nothing was begun."
        raise RuleFailed(message, retry_after=_RETRY_AFTER) from error


def _team(path: str, user: Any, key: ApiKey | None) -> str:
    """Return the team that the site's function names. Raises RuleFailed where it fails, or names none."""
    try:
        team = import_string(path)(user, key)
        if not isinstance(team, str) or len(team) > MAX_TEAM_CHARS or "\0" in team:
            raise TypeError(f"{path} returned {team!r:.200}: a team is a text of {MAX_TEAM_CHARS} characters at most")
    except Exception as error:
        owner = key or user
        log.exception("tenant_failed", function=path, caller=str(owner))
        message = "The site cannot say which team you are in: its log has the cause. Nothing was begun."
        raise RuleFailed(message, retry_after=_RETRY_AFTER) from error
    return team
