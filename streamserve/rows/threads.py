"""`ThreadRows`: clients' own ids of conversations, as rows. See api/threads.py.

The start of an answer notes its stream as the thread's last (`note_thread`), in the transaction of the stream's row;
the first also makes the conversation. Any event loop.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone

from streamserve.api.call import Caller
from streamserve.api.conversations import Prepared, no_conversation
from streamserve.api.threads import PIECE, Place, Sent, ThreadView
from streamserve.dialects.fold import TOOL_USE
from streamserve.protocol.errors import BadRequest, NotFinished
from streamserve.protocol.events import TEXT
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import (
    SYSTEM_ROLES,
    Admission,
    Given,
    Message,
    Question,
    ThreadKey,
    Turn,
)
from streamserve.rows import orm
from streamserve.rows.attachments import asked_before
from streamserve.rows.branch import json_text, prompt_of, question_content, without_nul
from streamserve.rows.conversation_tree import Node, Nodes, branch_of, last_answer, newest_rest, nodes_of
from streamserve.rows.conversations import Conversation, Thread, new_row_id
from streamserve.rows.conversations import Message as MessageRow
from streamserve.streams.store import ANONYMOUS

# Of what a client sends these may be new; what is an assistant's is the server's.
_NEW_ROLES = ("user", "tool")


class ThreadRows:
    """The threads of a site's callers. With `keeps_conversations` those of users and keys have a conversation."""

    def __init__(self, limits: Limits, *, keeps_conversations: bool) -> None:
        self._limits, self._keeps = limits, keeps_conversations

    async def find(self, caller: Caller, key: ThreadKey) -> ThreadView | None:
        return await orm.read(_view, caller, key)

    async def prepare(
        self, caller: Caller, key: ThreadKey, sent: Sequence[Sent], *, continues: bool = False
    ) -> Prepared | None:
        if not self._keeps or caller.owner in ANONYMOUS:
            return None
        return await orm.read(self._prepare, caller, key, sent, continues)

    def _prepare(self, caller: Caller, key: ThreadKey, sent: Sequence[Sent], continues: bool) -> Prepared:
        told = [one for one in sent if one.message.role not in SYSTEM_ROLES]
        if not continues:
            _check_kept(told)
        conversation = _conversation_of(caller, key)
        nodes = {} if conversation is None else nodes_of(conversation, self._limits, len(told) + 1)
        if continues:
            parent_id, new = _last_end(conversation, nodes), list[Sent]()
        elif nodes:
            assert conversation is not None
            parent_id, new = _what_is_new(conversation, nodes, told)
        else:
            parent_id, new = "", told
        prepared = self._prepared(conversation, nodes, parent_id, new, source=key.dialect, param="messages")
        if not continues and not new and nodes[parent_id].role == "assistant":
            raise BadRequest("There is no new message to answer.", code="empty_prompt", param="messages")
        return prepared

    async def append(self, caller: Caller, sent: Sequence[Sent], place: Place) -> Prepared | None:
        if not self._keeps or caller.owner in ANONYMOUS:
            return None
        return await orm.read(self._append, caller, sent, place)

    def _append(self, caller: Caller, sent: Sequence[Sent], place: Place) -> Prepared | None:
        told = [one for one in sent if one.message.role not in SYSTEM_ROLES]
        _check_kept(told)
        conversation, parent_id = None, ""
        if place.stream_id:
            mine = Conversation.objects.of(caller.tenant)
            answer = MessageRow.objects.filter(stream_id=place.stream_id, conversation__in=mine).first()
            if answer is None:
                return None
            conversation, parent_id = answer.conversation, answer.pk
        elif place.conversation_id:
            conversation = _found(caller, place.conversation_id)
            parent_id = conversation.leaf
        nodes = {} if conversation is None else nodes_of(conversation, self._limits, len(told) + 1)
        if parent_id not in nodes:
            parent_id = ""
        return self._prepared(conversation, nodes, parent_id, told, source=place.source, param=None)

    def _prepared(
        self,
        conversation: Conversation | None,
        nodes: Nodes,
        parent_id: str,
        new: Sequence[Sent],
        *,
        source: str,
        param: str | None,
    ) -> Prepared:
        """Return the prompt, and the turn that adds what is `new`; without a conversation the turn begins one."""
        if parent_id and nodes[parent_id].state == "running":
            raise NotFinished("The answer before is still being made. Wait for its end, or stop it.", param=param)
        given, question = _added(new)
        turn = Turn(
            conversation_id=new_row_id() if conversation is None else conversation.pk,
            answer_id=new_row_id(),
            parent_id=parent_id,
            given=given,
            question=question,
            source=source if conversation is None else "",
        )
        model = "" if conversation is None else conversation.model
        return Prepared(messages=self._prompt(nodes, turn), turn=turn, model=model)

    def _prompt(self, nodes: Nodes, turn: Turn) -> tuple[Message, ...]:
        """Return the branch with what is new, in the words that a later turn will have, too."""
        added = [MessageRow(id=one.id, role=one.role, content=one.content, text=one.text) for one in turn.given]
        if turn.question is not None:
            question = turn.question
            added.append(MessageRow(id=question.id, role="user", content=question.content, text=question.text))
        num_chars = sum(len(one.text) for one in added)
        rows = [*branch_of(nodes, turn.parent_id, num_chars, self._limits), *added]
        return tuple(prompt_of(rows, asked_before(rows)))


def _view(caller: Caller, key: ThreadKey) -> ThreadView | None:
    row = Thread.objects.named(caller.tenant, key).first()
    if row is None:
        return None
    if row.conversation_id and not Conversation.objects.of(caller.tenant).filter(pk=row.conversation_id).exists():
        return None
    return ThreadView(stream_id=row.stream_id, conversation_id=row.conversation_id)


def _conversation_of(caller: Caller, key: ThreadKey) -> Conversation | None:
    """Return the thread's conversation; None where it has none, or it was deleted."""
    ids = Thread.objects.named(caller.tenant, key).values("conversation_id")
    return Conversation.objects.of(caller.tenant).filter(pk__in=ids).first()


def _check_kept(told: Sequence[Sent]) -> None:
    """Raise BadRequest for what a conversation cannot keep, or where nothing asks for an answer."""
    if not told:
        raise BadRequest("'messages' has no message.", code="empty_prompt", param="messages")
    for one in told:
        if one.message.parts:
            message = "A conversation keeps text alone; files of text go to POST /attachments of a conversation."
            raise BadRequest(message, code="unsupported_content", param=one.message.param or "messages")
    if told[-1].message.role == "user" and not told[-1].message.content:
        raise BadRequest("The question must not be empty.", code="empty_prompt", param="messages")


def _what_is_new(conversation: Conversation, nodes: Nodes, told: Sequence[Sent]) -> tuple[str, list[Sent]]:
    """Return the message that the answer's turn follows, and the messages that are new before the answer."""
    known = _Known(nodes)
    edited = known.find(told[-1]) if told[-1].is_edit else None
    if edited is not None:
        return edited.parent_id or "", [told[-1]]
    num_old = len(told)
    while num_old and told[num_old - 1].message.role in _NEW_ROLES and known.find(told[num_old - 1]) is None:
        num_old -= 1
    before, new = told[:num_old], list(told[num_old:])
    found = [known.find(one) for one in before]
    last = next((index for index in reversed(range(num_old)) if found[index] is not None), None)
    if last is None:
        if not new:
            raise BadRequest("There is no new message to answer.", code="empty_prompt", param="messages")
        return _last_end(conversation, nodes), new
    node = found[last]
    assert node is not None
    if node.role == "user" and (new or last + 1 < num_old):
        answer_id = last_answer(nodes, node.id)  # what follows a question follows its answer
        return newest_rest(nodes, answer_id) if answer_id else "", new
    is_end = not new and last + 1 == num_old
    return node.id if is_end and node.role in _NEW_ROLES else newest_rest(nodes, node.id), new


def _found(caller: Caller, conversation_id: str) -> Conversation:
    found = Conversation.objects.of(caller.tenant).filter(pk=conversation_id).first()
    if found is None:
        raise no_conversation()
    return found


def _last_end(conversation: Conversation | None, nodes: Nodes) -> str:
    """Return the end of the branch that is shown, "" where there is none."""
    return "" if conversation is None else last_answer(nodes, conversation.leaf)


class _Known:
    """The messages of a conversation by the ids that clients have for them."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._by_client_id = {node.client_id: node for node in nodes.values() if node.client_id}

    def find(self, sent: Sent) -> Node | None:
        """Return the message, or the message that it is a piece of."""
        if not sent.id:
            return None
        return self._by_client_id.get(sent.id) or self._nodes.get(sent.id.partition(PIECE)[0])


def _added(new: Sequence[Sent]) -> tuple[tuple[Given, ...], Question | None]:
    """Return new messages as rows: the last as the question, where it is a user's."""
    given = [given_of(one.message, one.id) for one in new]
    if not given or given[-1].role != "user":
        return tuple(given), None
    last = given.pop()
    question = Question(id=last.id, content=last.content, text=last.text, client_id=last.client_id)
    return tuple(given), question


def given_of(message: Message, client_id: str = "") -> Given:
    """Return a message that its client has sent as a row will keep it."""
    text = without_nul(message.content)
    if message.role == "user":
        content = question_content(text)
    elif message.role == "tool":
        content = _content([{"kind": "tool_result", "id": message.extra.get("tool_call_id"), "text": text}])
    else:
        content = _content([*([{"kind": TEXT, "text": text}] if text else []), *_calls(message)])
    return Given(id=new_row_id(), role=message.role, content=content, text=text, client_id=client_id)


def _calls(message: Message) -> Iterable[dict[str, Any]]:
    for call in message.extra.get("tool_calls", ()):
        function = call["function"]
        yield {"kind": TOOL_USE, "id": call.get("id"), "name": function["name"], "text": _arguments(function)}


def _arguments(function: Any) -> str:
    arguments = function.get("arguments") or "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _content(blocks: Iterable[dict[str, Any]]) -> str:
    numbered = [{"index": index, **block} for index, block in enumerate(blocks)]
    return json_text({"blocks": numbered, "citations": [], "steps": []})


def note_thread(key: ThreadKey, admission: Admission) -> None:
    """Note a stream that starts as its thread's last, in the transaction of its row.

    Raises NotFinished where another question has begun the thread's conversation meanwhile.
    """
    turn, rows = admission.turn, Thread.objects.named(admission.tenant, key)
    columns: dict[str, Any] = {"stream_id": admission.stream_id, "updated_at": timezone.now()}
    if turn is not None:
        columns["conversation_id"] = turn.conversation_id
    if turn is not None and turn.source:
        row = rows.select_for_update().first()
        others = "" if row is None else row.conversation_id
        if others and Conversation.objects.of(admission.tenant).filter(pk=others).exists():
            raise _begun()
    if rows.update(**columns):
        return
    try:
        with transaction.atomic(using=rows.db):
            rows.create(tenant=admission.tenant, dialect=key.dialect, client_id=key.client_id, **columns)
    except IntegrityError:
        raise _begun() from None


def _begun() -> NotFinished:
    return NotFinished("Another question has just begun this conversation. Send this one again.", param="id")


def forget_user(instance: Any, using: str, **kwargs: Any) -> None:
    """Delete a deleted user's threads, in that transaction."""
    Thread.objects.using(using).filter(tenant=f"user:{instance.pk}").delete()
