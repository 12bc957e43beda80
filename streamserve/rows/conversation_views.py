"""Rows of conversations as the values of api/conversations.py. Blocks where it makes a query."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from streamserve.api.conversations import AttachmentView, ConversationView, MessageView
from streamserve.rows.conversations import Attachment, Conversation, Message


def conversation_view(row: Conversation, *, is_running: bool) -> ConversationView:
    """Return a conversation as its owner sees it."""
    return ConversationView(
        id=row.pk,
        title=row.title,
        model=row.model,
        source=row.source,
        is_pinned=row.is_pinned,
        leaf=row.leaf,
        is_running=is_running,
        created_at=row.created_at,
        updated_at=row.updated_at,
        metadata=json.loads(row.metadata) if row.metadata else {},
    )


def message_views(rows: Iterable[Message]) -> list[MessageView]:
    """Return messages with their attachments, which take one query."""
    found = list(rows)
    links = Message.attachments.through.objects.filter(message__in=[row.pk for row in found if row.role == "user"])
    by_message: dict[str, list[Attachment]] = {}
    for link in links.select_related("attachment").defer("attachment__text").order_by("pk"):
        by_message.setdefault(link.message_id, []).append(link.attachment)
    return [message_view(row, by_message.get(row.pk, ())) for row in found]


def message_view(row: Message, attachments: Iterable[Attachment] = ()) -> MessageView:
    """Return a message as its owner sees it."""
    content: dict[str, Any] = json.loads(row.content) if row.content else {}
    return MessageView(
        id=row.pk,
        parent=row.parent_id or "",
        role=row.role,
        state=row.state,
        blocks=content.get("blocks", ()),
        citations=content.get("citations", ()),
        steps=content.get("steps", ()),
        attachments=[attachment_view(one, content.get("kept", {}).get(one.pk)) for one in attachments],
        text=row.text,
        stream_id=row.stream_id or "",
        model=row.model,
        finish_reason=row.finish_reason,
        error_code=row.error_code,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        completion_tokens=row.completion_tokens,
        rating=row.rating,
        comment=row.comment,
        created_at=row.created_at,
        finished_at=row.finished_at,
        client_id=row.client_id,
        approvals=content.get("approvals", ()),
        customs=content.get("customs", ()),
        run_state=content.get("state"),
    )


def attachment_view(row: Attachment, num_kept: int | None = None) -> AttachmentView:
    """Return a file as its owner sees it."""
    return AttachmentView(
        id=row.pk,
        name=row.name,
        content_type=row.content_type,
        num_bytes=row.num_bytes,
        num_chars=row.num_chars,
        created_at=row.created_at,
        num_kept=num_kept,
    )
