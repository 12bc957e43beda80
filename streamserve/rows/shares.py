"""`ShareRows`: links by which anyone reads one branch of a conversation, as rows. asyncio.

A link's token is 256 random bits; its row has the SHA-256 of it, so that no reader of the database can open the link.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from datetime import timedelta

from django.db import models, transaction
from django.db.models import Q
from django.utils import timezone

from streamserve.api.call import Caller
from streamserve.api.conversations import (
    ConversationView,
    MessageView,
    ShareView,
    no_conversation,
    no_share,
)
from streamserve.dialects.batches import Page
from streamserve.protocol.errors import BadRequest
from streamserve.rows import orm
from streamserve.rows.conversation_views import conversation_view, message_views
from streamserve.rows.conversations import Conversation, Message, Share
from streamserve.rows.queries import hold_limit, last_of, part_of

MAX_SHARES = 100  # of a conversation
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")


class ShareRows:
    """See `Shares` in api/conversations.py."""

    async def make(self, caller: Caller, conversation_id: str, *, expires_in: float | None) -> tuple[ShareView, str]:
        token = secrets.token_urlsafe(32)
        row = await orm.call(_insert, caller.tenant, conversation_id, _digest(token), expires_in)
        return _view(row), token

    async def page(
        self, caller: Caller, conversation_id: str, *, limit: int, after: str = ""
    ) -> tuple[Sequence[ShareView], bool]:
        rows, has_more = await orm.read(_page, caller.tenant, conversation_id, Page(limit=limit, after=after))
        return [_view(row) for row in rows], has_more

    async def revoke(self, caller: Caller, conversation_id: str, share_id: str) -> None:
        await orm.call(_revoke, caller.tenant, conversation_id, share_id)

    async def open(self, token: str) -> tuple[ConversationView, Sequence[MessageView]]:
        if _TOKEN.fullmatch(token) is None:
            raise no_share()
        return await orm.read(_open, _digest(token))


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _view(row: Share) -> ShareView:
    return ShareView(id=row.pk, created_at=row.created_at, expires_at=row.expires_at)


def _live() -> models.QuerySet[Share]:
    """Return the links that work now."""
    return Share.objects.filter(Q(expires_at=None) | Q(expires_at__gt=timezone.now()), revoked_at=None)


def _own(tenant: str, conversation_id: str) -> Conversation:
    row = Conversation.objects.of(tenant).filter(pk=conversation_id).first()
    if row is None:
        raise no_conversation()
    return row


def _insert(tenant: str, conversation_id: str, digest: str, expires_in: float | None) -> Share:
    conversation = _own(tenant, conversation_id)
    if not conversation.leaf:
        raise BadRequest("The conversation has no message yet that a link could show.", code="nothing_to_share")
    expires_at = None if expires_in is None else timezone.now() + timedelta(seconds=expires_in)
    with transaction.atomic(using=Share.objects.db):
        hold_limit(Share.objects.all(), conversation_id)
        if _live().filter(conversation=conversation_id).count() >= MAX_SHARES:
            raise BadRequest(f"A conversation has at most {MAX_SHARES} links. Revoke a link.", code="too_many_shares")
        return Share.objects.create(
            conversation=conversation, leaf=conversation.leaf, digest=digest, expires_at=expires_at
        )


def _page(tenant: str, conversation_id: str, page: Page) -> tuple[list[Share], bool]:
    _own(tenant, conversation_id)
    of_conversation = Share.objects.filter(conversation=conversation_id)
    last = last_of(of_conversation, page, lambda _id, _param: no_share())
    return part_of(_live().filter(conversation=conversation_id), page, last)


def _revoke(tenant: str, conversation_id: str, share_id: str) -> None:
    rows = Share.objects.filter(pk=share_id, conversation=_own(tenant, conversation_id))
    if not rows.exists():
        raise no_share()
    rows.filter(revoked_at=None).update(revoked_at=timezone.now())


def _open(digest: str) -> tuple[ConversationView, list[MessageView]]:
    share = _live().filter(digest=digest, conversation__deleted_at=None).select_related("conversation").first()
    if share is None:
        raise no_share()
    conversation = share.conversation
    path = _path(conversation.pk, share.leaf)
    rows = Message.objects.in_bulk(path)
    is_running = any(row.state == "running" for row in rows.values())
    return conversation_view(conversation, is_running=is_running), message_views(rows[one] for one in path)


def _path(conversation_id: str, leaf: str) -> list[str]:
    """Return the ids of a branch's messages, from the beginning to its leaf."""
    parents = dict(Message.objects.filter(conversation=conversation_id).order_by().values_list("pk", "parent_id"))
    path: list[str] = []
    while leaf in parents and len(path) < len(parents):
        path.append(leaf)
        leaf = parents[leaf] or ""
    return path[::-1]
