"""`Identity`: who asks, by owner and tenant of an answer: a user, an API key, a visitor, or the site's own code.

Rows keep owner and tenant, so a run that another process continues, a job and a row of a batch have the same identity
as the request that began them. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

USER, KEY, ANONYMOUS, SITE, OTHER = "user", "key", "anonymous", "site", "other"
_KINDS = {"user": USER, "key": KEY, "anon": ANONYMOUS, "site": SITE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose answer it is: `owner` is counted, and every caller of `tenant` may read it.

    `kind`: "user" (a session, or `user=` in Python), "key", "anonymous" (a visitor without a login), "site" (code of
    the site that asks in its own name) or "other" (an owner that an ASGI application has named).
    `user_id`: the user's primary key as text, of a user and of a key that belongs to one; `key_id` the API key's.
    """

    owner: str
    tenant: str
    kind: str
    user_id: str | None = None
    key_id: int | None = None

    @classmethod
    def of(cls, owner: str, tenant: str) -> Identity:
        """Return the identity of an owner such as "user:5", "key:3" (of the tenant "user:5", or its own), "site:x"."""
        name, _, own_id = owner.partition(":")
        kind = _KINDS.get(name, OTHER) if own_id or owner == "site:" else OTHER
        if kind == KEY and not own_id.isdecimal():
            kind = OTHER
        holder, _, user_id = (owner if kind == USER else tenant).partition(":")
        return cls(
            owner=owner,
            tenant=tenant,
            kind=kind,
            user_id=user_id if kind in (USER, KEY) and holder == "user" and user_id else None,
            key_id=int(own_id) if kind == KEY else None,
        )
