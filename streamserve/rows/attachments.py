"""The attachments of questions as their prompts have them. Queries block.

A question's `content` has, under "kept", how many characters of a file its prompt was cut to (api/fitting.py); what is
not there is whole. So a later turn has the same words.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from streamserve.api.attachments import no_attachment
from streamserve.protocol.attached import TextFile, message_of
from streamserve.protocol.requests import Message as RequestMessage
from streamserve.rows.conversations import Attachment, Message


def new_question(tenant: str, words: str, attachment_ids: Sequence[str]) -> RequestMessage:
    """Return the message of a question that is asked now, with its files whole. Raises NotFound."""
    if not attachment_ids:
        return message_of(words, [])
    rows = Attachment.objects.of(tenant).in_bulk(list(attachment_ids))
    for one in attachment_ids:
        if one not in rows:
            raise no_attachment(one, param="attachments")
    return message_of(words, [_file_of(rows[one]) for one in dict.fromkeys(attachment_ids)])


def forget_user(instance: Any, using: str, **kwargs: Any) -> None:
    """Take away the text and names of a deleted user's files, in that transaction; the purge drops files and rows."""
    rows = Attachment.objects.using(using).filter(tenant=f"user:{instance.pk}")
    rows.update(is_ready=False, is_sent=True, text="", name="")


def asked_before(rows: Iterable[Message]) -> dict[str, RequestMessage]:
    """Return the messages of questions of a conversation by their ids, as they were asked. One query."""
    questions = [row for row in rows if row.role == "user"]
    links = Attachment.messages.through.objects.filter(message__in=[row.pk for row in questions])
    files: dict[str, list[Attachment]] = {}
    for link in links.select_related("attachment").order_by("pk"):
        files.setdefault(link.message_id, []).append(link.attachment)
    return {row.pk: _message_of(row, files.get(row.pk, ())) for row in questions}


def _message_of(row: Message, attachments: Sequence[Attachment]) -> RequestMessage:
    if not attachments:
        return message_of(row.text, [])
    kept = json.loads(row.content).get("kept", {}) if row.content else {}
    num_chars = [kept.get(one.pk, len(one.text)) for one in attachments]
    return message_of(row.text, [_file_of(one) for one in attachments], num_chars)


def _file_of(row: Attachment) -> TextFile:
    return TextFile(name=row.name, type=row.content_type, text=row.text)
