"""`ConversationRows`: conversations as rows. See `Conversations` in api/conversations.py; lists and search are in
conversation_lists.py, share links in shares.py.

`prepare` returns a branch as a prompt, and the `Turn` which the start of its answer inserts with the stream's row
(turns.py). The end of the answer is written by answer_messages.py. Any event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet
from django.utils import timezone

from streamserve.api.call import Caller
from streamserve.api.conversations import (
    Ask,
    Change,
    ConversationView,
    Listed,
    MessageView,
    Prepared,
    no_conversation,
    no_message,
)
from streamserve.dialects.batches import Page
from streamserve.protocol.errors import BadRequest, NotFinished
from streamserve.protocol.ids import is_stream_id
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Message as Turned
from streamserve.protocol.requests import Question, Turn
from streamserve.rows import orm
from streamserve.rows.attachments import asked_before, new_question
from streamserve.rows.branch import CAN_CONTINUE, json_text, prompt_of, question_content, without_nul
from streamserve.rows.conversation_lists import page_of
from streamserve.rows.conversation_tree import Nodes, branch_of, last_answer, nodes_of
from streamserve.rows.conversation_views import conversation_view, message_views
from streamserve.rows.conversations import MAX_TITLE_CHARS, Conversation, Message, new_row_id
from streamserve.rows.queries import delete_in_parts, last_of, part_of
from streamserve.rows.receivers import tell_rated, written
from streamserve.rows.threads import given_of
from streamserve.rows.turns import insert_conversation, rows_of, turn_of, user_of
from streamserve.signals import message_rated

UNDO_SECONDS = 600.0  # how long a deletion can be undone
_CONVERSATIONS_AT_ONCE = 100  # whose messages are deleted

_ROWS = Conversation.objects


class ConversationRows:
    """The conversations of a site's users and keys, within `limits`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    async def page(self, caller: Caller, listed: Listed) -> tuple[Sequence[ConversationView], bool]:
        """Return a part of the caller's conversations, and whether there are more."""
        return await orm.read(page_of, caller.tenant, listed)

    async def create(
        self,
        caller: Caller,
        *,
        model: str = "",
        title: str = "",
        source: str = "chat",
        metadata: Mapping[str, str] | None = None,
    ) -> ConversationView:
        """Make a conversation. Raises QuotaExceeded."""
        row = Conversation(
            owner=caller.owner,
            tenant=caller.tenant,
            user_id=user_of(caller.tenant),
            model=model,
            title=without_nul(title)[:MAX_TITLE_CHARS],
            titled_by="owner" if title else "words",
            source=source,
            metadata=json_text(metadata) if metadata else "",
        )
        await orm.call(self._insert, row)
        return conversation_view(row, is_running=False)

    def _insert(self, row: Conversation) -> None:
        with transaction.atomic(using=_ROWS.db):
            insert_conversation(row, self._limits.max_conversations)

    async def find(self, caller: Caller, conversation_id: str) -> ConversationView:
        """Return a conversation. Raises NotFound."""
        return await orm.read(_view, caller, conversation_id)

    async def change(self, caller: Caller, conversation_id: str, change: Change) -> ConversationView:
        """Change a conversation. Raises NotFound, also for a leaf that is none of its messages."""
        columns: dict[str, Any] = {}
        if change.title is not None:
            columns |= {"title": without_nul(change.title)[:MAX_TITLE_CHARS], "titled_by": "owner"}
        if change.is_pinned is not None:
            columns["is_pinned"] = change.is_pinned
        if change.leaf is not None:
            columns["leaf"] = change.leaf
        if change.metadata is not None:
            columns["metadata"] = json_text(change.metadata) if change.metadata else ""

        def write() -> ConversationView:
            row = _found(caller, conversation_id)
            if change.leaf is not None and not _messages_of(row).filter(pk=_checked(change.leaf, "leaf")).exists():
                raise no_message("leaf")
            _ROWS.filter(pk=row.pk).update(**columns)
            return _view(caller, conversation_id)

        return await (orm.call(write) if columns else orm.read(_view, caller, conversation_id))

    async def delete(self, caller: Caller, conversation_id: str) -> Sequence[str]:
        """Delete a conversation; return the ids of the streams that run in it, which the caller of this stops."""

        def write() -> list[str]:
            row = _found(caller, conversation_id)
            _ROWS.filter(pk=row.pk).update(deleted_at=timezone.now())
            return [str(one) for one in _messages_of(row).running().streams()]

        return await orm.call(write)

    async def restore(self, caller: Caller, conversation_id: str) -> ConversationView:
        """Undo a deletion; a conversation that is there stays as it is. Raises NotFound once that is too late."""

        def write() -> ConversationView:
            since = timezone.now() - timedelta(seconds=UNDO_SECONDS)
            row_id = _checked(conversation_id)
            _ROWS.filter(pk=row_id, tenant=caller.tenant, deleted_at__gte=since).update(deleted_at=None)
            return _view(caller, row_id)

        return await orm.call(write)

    async def messages(
        self, caller: Caller, conversation_id: str, *, limit: int, after: str = ""
    ) -> tuple[Sequence[MessageView], bool]:
        """Return a part of the messages of all branches, the oldest first, and whether there are more."""

        def find() -> tuple[list[MessageView], bool]:
            rows = _messages_of(_found(caller, conversation_id))
            page = Page(limit=limit, after=after, is_newest_first=False)
            found, has_more = part_of(rows, page, last_of(rows, page, lambda _, param: no_message(param)))
            return message_views(found), has_more

        return await orm.read(find)

    async def whole(self, caller: Caller, conversation_id: str) -> tuple[ConversationView, Sequence[MessageView]]:
        """Return a conversation with all its messages, the oldest first."""

        def find() -> tuple[ConversationView, list[MessageView]]:
            view = _view(caller, conversation_id)
            rows = Message.objects.filter(conversation=view.id)[: self._limits.max_conversation_messages]
            return view, message_views(rows)

        return await orm.read(find)

    async def add(self, caller: Caller, conversation_id: str, messages: Sequence[Turned]) -> Sequence[MessageView]:
        """Add messages at the end of the branch shown, without an answer; return them."""
        given = [given_of(one) for one in messages]

        def write() -> list[MessageView]:
            with transaction.atomic(using=_ROWS.db):
                row = _found(caller, conversation_id)
                nodes = nodes_of(row, self._limits, len(given))
                _refuse_running(nodes, row.leaf)
                rows = rows_of(given, row.pk, row.leaf if row.leaf in nodes else "")
                Message.objects.bulk_create(rows)
                _ROWS.filter(pk=row.pk).update(leaf=rows[-1].pk, updated_at=rows[0].created_at)
            return message_views(rows)

        return await orm.call(write)

    async def remove(self, caller: Caller, conversation_id: str, message_id: str) -> None:
        """Delete a message; what follows it follows the message before it."""

        def write() -> None:
            with transaction.atomic(using=_ROWS.db):
                conversation = _found(caller, conversation_id)
                row = _messages_of(conversation).filter(pk=_checked(message_id, "message")).first()
                if row is None:
                    raise no_message()
                _refuse_running(nodes_of(conversation, self._limits, 0), row.pk)
                row.children.update(parent=row.parent_id)
                _ROWS.filter(pk=conversation.pk, leaf=row.pk).update(leaf=row.parent_id or "")
                row.attachments.clear()
                row.delete()

        await orm.call(write)

    async def rate(
        self, caller: Caller, conversation_id: str, message_id: str, *, rating: int | None, comment: str
    ) -> MessageView:
        """Rate an answer: 1, -1, or None for no rating. Raises NotFound; BadRequest for a question."""

        def write() -> MessageView:
            row = _messages_of(_found(caller, conversation_id)).filter(pk=_checked(message_id, "message")).first()
            if row is None:
                raise no_message()
            if row.role != "assistant":
                raise BadRequest("Only answers are rated, and this message is a question.", param="message")
            row.rating, row.comment = rating, without_nul(comment)
            row.rated_at = None if rating is None else timezone.now()
            row.save(update_fields=["rating", "comment", "rated_at"])
            return message_views([row])[0]

        return await written(message_rated, Message, write, partial(tell_rated, message_id), alone=orm.call)

    async def prepare(self, caller: Caller, conversation_id: str, ask: Ask) -> Prepared:
        """Return the prompt of a branch, and the turn to insert with the stream's row: see `Conversations`."""
        return await orm.read(self._prepare, caller, conversation_id, ask)

    def _prepare(self, caller: Caller, conversation_id: str, ask: Ask) -> Prepared:
        conversation = _found(caller, conversation_id)
        nodes = nodes_of(conversation, self._limits)
        end, question = self._end(conversation, nodes, ask), None
        if ask.question:
            text, files = without_nul(ask.question), tuple(dict.fromkeys(ask.attachment_ids))
            question = Question(id=new_row_id(), content=question_content(text), text=text, attachment_ids=files)
        branch = branch_of(nodes, end, len(ask.question), self._limits)
        questions = asked_before(branch)
        if question is not None:
            branch.append(Message(id=question.id, role="user"))
            questions[question.id] = new_question(caller.tenant, question.text, question.attachment_ids)
        messages = prompt_of(branch, questions)
        if ask.answer_id and (not messages or messages[-1].role != "assistant" or not messages[-1].content):
            raise BadRequest("The answer has no text to go on from. Ask for another answer.", param="continue")
        turn = Turn(conversation_id=conversation.pk, answer_id=new_row_id(), parent_id=end, question=question)
        return Prepared(messages=tuple(messages), turn=turn, model=conversation.model)

    def _end(self, conversation: Conversation, nodes: Nodes, ask: Ask) -> str:
        """Return the id of the message that the question or the answer follows, "" for none. Raises as `prepare`."""
        if ask.question_id or ask.answer_id:
            param, role = ("parent", "user") if ask.question_id else ("continue", "assistant")
            node = nodes.get(ask.question_id or ask.answer_id)
        else:
            param, role = "parent", "assistant"
            parent = last_answer(nodes, conversation.leaf) if ask.parent is None else ask.parent
            if not parent:
                return ""
            node = nodes.get(parent)
        if node is None:
            raise no_message(param)
        if node.role != role and not (node.role == "tool" and ask.question):
            what = "a question follows an answer" if ask.question else "an answer follows a question"
            raise BadRequest(f"The message is of the wrong kind: {what}.", code="invalid_value", param=param)
        if node.state == "running":
            message = "The answer before is still being made. Wait for its end, or stop it."
            raise NotFinished(message, param=param)
        if ask.answer_id and node.state == "done" and node.finish_reason not in CAN_CONTINUE:
            message = "The answer is whole. Only an answer that was stopped, or ended at its length, can be continued."
            raise BadRequest(message, code="invalid_value", param="continue")
        return node.id

    async def continuation(self, stream_id: str) -> Turn | None:
        """Return the turn of a stream that goes on with the answer of an interrupted stream, None if it has no turn."""
        before = await orm.read(turn_of, stream_id)
        if before is None:
            return None
        return Turn(conversation_id=before.conversation_id, answer_id=new_row_id(), parent_id=before.answer_id)

    async def turn_of(self, stream_id: str) -> Turn | None:
        """Return the turn that a stream's start has inserted (its messages with their ids alone), None without one."""
        return await orm.read(turn_of, stream_id)


def drop_conversations(rows: QuerySet[Conversation]) -> int:
    """Delete conversations with all they have, some rows in each transaction; return how many."""
    num = 0
    while keys := list(rows.order_by().values_list("pk", flat=True)[:_CONVERSATIONS_AT_ONCE]):
        delete_in_parts(Message.objects.filter(conversation__in=keys))
        num += delete_in_parts(_ROWS.filter(pk__in=keys))
    return num


def viewed(rows: QuerySet[Conversation]) -> QuerySet[Conversation]:
    """Return rows of conversations with `is_running`: whether an answer in them has not ended."""
    return rows.annotate(is_running=Exists(Message.objects.running().filter(conversation=OuterRef("pk"))))


def _refuse_running(nodes: Nodes, message_id: str) -> None:
    """Raise NotFinished for the message of an answer that runs."""
    if message_id in nodes and nodes[message_id].state == "running":
        raise NotFinished("The answer is still being made. Wait for its end, or cancel it.")


def _view(caller: Caller, conversation_id: str) -> ConversationView:
    row: Any = viewed(_ROWS.of(caller.tenant).filter(pk=_checked(conversation_id))).first()
    if row is None:
        raise no_conversation()
    return conversation_view(row, is_running=row.is_running)


def _found(caller: Caller, conversation_id: str) -> Conversation:
    row = _ROWS.of(caller.tenant).filter(pk=_checked(conversation_id)).first()
    if row is None:
        raise no_conversation()
    return row


def _messages_of(row: Conversation) -> Any:
    return Message.objects.filter(conversation=row.pk)


def _checked(row_id: str, param: str = "") -> str:
    """Return an id that a query takes: PostgreSQL refuses NUL. Raises NotFound."""
    if not is_stream_id(row_id):
        raise no_message(param) if param else no_conversation()
    return row_id
