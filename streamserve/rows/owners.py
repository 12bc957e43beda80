"""Who an owner is: the names behind "user:5", "key:3" and "anon:…", for the pages that staff reads.

Rows keep owners as text, so that they outlive users and keys; `names_of` asks for all names of a page at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db.models import Q

from streamserve.models import ApiKey

_ID_CHARS = 8  # of a visitor's id
MAX_FOUND = 100  # users, and keys, that a search finds


@dataclass(frozen=True, slots=True)
class Owner:
    """An owner's name, as people call it. `kind` and `pk` lead to its row while `is_there`."""

    name: str
    kind: str = ""
    pk: str = ""
    is_there: bool = False


def names_of(owners: Iterable[str]) -> dict[str, Owner]:
    """Return each owner by its text. One query for all users and one for all keys; a deleted owner has a name too."""
    asked = set(owners)
    users, keys = _users(_pks(asked, "user")), _keys(_pks(asked, "key"))
    return {owner: _owner(owner, users, keys) for owner in asked}


def _owner(owner: str, users: Mapping[str, str], keys: Mapping[str, str]) -> Owner:
    kind, _, pk = owner.partition(":")
    if kind in ("user", "key"):
        name = (users if kind == "user" else keys).get(pk)
        return Owner(name or f"{kind} {pk}, deleted", kind, pk, name is not None)
    if kind == "anon":
        return Owner(f"visitor {pk[:_ID_CHARS]}", kind, pk)
    return Owner(owner)


def _pks(owners: Iterable[str], kind: str) -> list[str]:
    return [pk for owner in owners for found, _, pk in [owner.partition(":")] if found == kind]


def _users(pks: list[str]) -> dict[str, str]:
    model = get_user_model()
    known = [pk for pk in pks if _is_pk(model, pk)]
    if not known:
        return {}
    rows = model._base_manager.filter(pk__in=known).only("pk", model.USERNAME_FIELD)
    return {str(row.pk): str(row.get_username()) for row in rows}


def _keys(pks: list[str]) -> dict[str, str]:
    known = [pk for pk in pks if _is_pk(ApiKey, pk)]
    rows = ApiKey.objects.filter(pk__in=known).only("pk", "name", "prefix") if known else ()
    return {str(row.pk): str(row) for row in rows}


def _is_pk(model: Any, pk: str) -> bool:
    """Return whether `pk` can be a key of the model, whose type may have changed since the row was written."""
    try:
        model._meta.pk.to_python(pk)
    except ValidationError:
        return False
    return True


def owned_by(term: str) -> Q:
    """Return the rows with `owner` and `tenant` of whoever is called `term`: a user, a key, or an owner's text.

    It asks for tenants, which have indexes; an owner's index is of running rows only.
    """
    users = get_user_model()
    named = users._default_manager.filter(**{f"{users.USERNAME_FIELD}__istartswith": term})
    found = Q(tenant__in=[term, *(f"user:{pk}" for pk in named.values_list("pk", flat=True)[:MAX_FOUND])])
    kind, _, pk = term.partition(":")
    is_key = Q(pk=pk) if kind == "key" and _is_pk(ApiKey, pk) else Q(prefix=term) | Q(name__istartswith=term)
    for key in ApiKey.objects.filter(is_key)[:MAX_FOUND]:
        found |= Q(tenant=key.tenant, owner=f"key:{key.pk}")
    return found
