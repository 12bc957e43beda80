"""What the start of an answer adds to a conversation (`Turn`): inserted with the stream's row, read back, withdrawn.

    parent ◄── given … given ◄── question ◄── answer      each 1 µs after the one before: that is how they are known

The answer is as old as its stream.

Blocks; `insert_turn` and `withdraw` belong into the transaction of the stream's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from streamserve.api.attachments import no_attachment
from streamserve.api.conversations import no_conversation
from streamserve.models import Attachment, Conversation, Message, Thread
from streamserve.protocol.errors import QuotaExceeded
from streamserve.protocol.requests import Admission, Given, Question, Turn
from streamserve.rows.branch import without_nul
from streamserve.rows.queries import hold_limit

_TITLE_WORDS_CHARS = 60  # of a question's first words
_USER = "user:"
_RETRY_AFTER = 60
_AFTER = timedelta(microseconds=1)  # between messages that come together: lists show them in their order


def insert_conversation(row: Conversation, most: int) -> None:
    """Insert a conversation, in a transaction. Raises QuotaExceeded if its tenant has `most`."""
    rows = Conversation.objects
    hold_limit(rows.all(), row.tenant)
    if rows.of(row.tenant).order_by()[:most].count() >= most:
        message = f"You have {most:,} conversations, as many as one caller may. Delete some."
        raise QuotaExceeded(message, retry_after=_RETRY_AFTER)
    row.save(force_insert=True)


def insert_turn(turn: Turn, admission: Admission, *, model: str, created_at: datetime, max_conversations: int) -> None:
    """Insert the messages of an answer that starts, and show its branch. `created_at` is the stream's.

    Raises NotFound where the conversation, or a file, was deleted meanwhile, QuotaExceeded where there may be no more
    conversations: then nothing is stored.
    """
    tenant = admission.tenant
    if turn.source:
        _begin_conversation(turn, admission, model, max_conversations)
    rows = Conversation.objects.filter(pk=turn.conversation_id, tenant=tenant, deleted_at=None)
    if not rows.update(leaf=turn.answer_id, updated_at=timezone.now(), model=model):
        raise no_conversation()
    messages, question = [_row_of(one, one.role) for one in turn.given], turn.question
    if question is not None:
        messages.append(_row_of(question, "user"))
    messages.append(
        Message(id=turn.answer_id, role="assistant", state="running", stream_id=admission.stream_id, model=model)
    )
    _put_in_order(messages, turn.conversation_id, turn.parent_id, created_at - (len(messages) - 1) * _AFTER)
    Message.objects.bulk_create(messages)
    asked = [one.text for one in messages if one.role == "user"]
    if asked:
        rows.filter(title="").update(title=first_words(asked[0]))
    if question is not None and question.attachment_ids:
        try:
            Attachment.objects.attach(question.id, question.attachment_ids, tenant)
        except Attachment.DoesNotExist:
            raise no_attachment(question.attachment_ids[0], param="attachments") from None


def rows_of(given: Sequence[Given], conversation_id: str, parent_id: str) -> list[Message]:
    """Return messages that come without an answer, each after the message before it; they are not inserted yet."""
    rows = [_row_of(one, one.role) for one in given]
    _put_in_order(rows, conversation_id, parent_id, timezone.now())
    return rows


def _put_in_order(rows: Sequence[Message], conversation_id: str, parent_id: str, first_at: datetime) -> None:
    """Let each message follow the one before it, the first one `parent_id` ("": it begins the conversation)."""
    for number, row in enumerate(rows):
        row.conversation_id, row.parent_id = conversation_id, parent_id or None
        row.created_at, parent_id = first_at + number * _AFTER, row.pk


def _begin_conversation(turn: Turn, admission: Admission, model: str, most: int) -> None:
    tenant = admission.tenant
    row = Conversation(
        id=turn.conversation_id,
        owner=admission.owner,
        tenant=tenant,
        user_id=user_of(tenant),
        model=model,
        source=turn.source,
    )
    insert_conversation(row, most)


def _row_of(one: Given | Question, role: str) -> Message:
    return Message(id=one.id, role=role, content=one.content, text=without_nul(one.text), client_id=one.client_id)


def turn_of(stream_id: str) -> Turn | None:
    """Return the turn that a stream's start has inserted, its messages with their ids alone; None if it has none."""
    answer = Message.objects.filter(stream_id=stream_id).select_related("parent").first()
    if answer is None:
        return None
    brought = brought_by(answer)
    question = brought.pop() if brought and brought[-1].role == "user" else None
    first = (brought or [question or answer])[0]
    return Turn(
        conversation_id=answer.conversation_id,
        answer_id=answer.pk,
        parent_id=first.parent_id or "",
        given=tuple(Given(id=one.pk, role=one.role, content="", text="") for one in brought),
        question=None if question is None else Question(id=question.pk, content="", text=""),
    )


def brought_by(answer: Message) -> list[Message]:
    """Return the messages that came with an answer, in order: its question, and what its client brought before that."""
    found: list[Message] = []
    row: Any = answer
    while row.parent_id and (parent := row.parent) is not None and parent.created_at + _AFTER == row.created_at:
        found.append(parent)
        row = parent
    return found[::-1]


def withdraw(stream_id: str) -> None:
    """Delete the messages of an answer that was refused or is lost, and show the branch before it.

    What has text, or was continued, stays. A thread's conversation that this leaves empty goes too.
    """
    answer = Message.objects.exclude(state="done").filter(stream_id=stream_id, text="").first()
    if answer is None or answer.children.exists():
        return
    answer_id, brought, before = answer.pk, brought_by(answer), answer.parent_id or ""
    answer.delete()
    for row in reversed(brought):
        if row.children.exists():
            break
        before = row.parent_id or ""
        Attachment.objects.filter(messages=row.pk).update(is_sent=False)  # they may be sent again
        row.delete()
    conversations = Conversation.objects.filter(pk=answer.conversation_id)
    conversations.filter(leaf=answer_id).update(leaf=before)
    threads = Thread.objects.filter(conversation_id=answer.conversation_id)
    if threads.exists() and conversations.filter(messages=None).exists():
        threads.update(conversation_id="")
        conversations.delete()


def first_words(text: str) -> str:
    """Return the first words of a question as a title; never "" for a question with a word."""
    words = " ".join(text.split())
    if len(words) <= _TITLE_WORDS_CHARS:
        return words
    cut = words[: _TITLE_WORDS_CHARS + 1].rpartition(" ")[0] or words[:_TITLE_WORDS_CHARS]
    return f"{cut}…"


def user_of(tenant: str) -> str | None:
    """Return the key of the user whose tenant it is, as text; None for the tenant of a key without a user."""
    return tenant.removeprefix(_USER) if tenant.startswith(_USER) else None
