"""The tree of a conversation without the texts: which message follows which, and a branch's rows. Queries block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from django.db.models.functions import Length

from streamserve.api.history import first_kept
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits
from streamserve.rows.conversations import Conversation, Message


@dataclass(frozen=True, slots=True)
class Node:
    """A message without its content. `num_chars` are of its text."""

    id: str
    parent_id: str | None
    role: str
    state: str
    finish_reason: str
    num_chars: int
    client_id: str


Nodes = Mapping[str, Node]


def nodes_of(conversation: Conversation, limits: Limits, num_more: int = 2) -> dict[str, Node]:
    """Return the messages of a conversation by their ids, the oldest first.

    Raises BadRequest where `num_more` may not be added.
    """
    most = limits.max_conversation_messages
    columns = ("pk", "parent_id", "role", "state", "finish_reason", Length("text"), "client_id")
    found = [Node(*row) for row in Message.objects.filter(conversation=conversation.pk).values_list(*columns)[:most]]
    if len(found) > most - num_more:
        message = f"The conversation has {len(found):,} messages, and may have {most:,}. Begin another."
        raise BadRequest(message, code="conversation_full", param="conversation")
    return {one.id: one for one in found}


def branch_of(nodes: Nodes, end: str, num_more_chars: int, limits: Limits) -> list[Message]:
    """Return the rows of a branch up to `end`, as many of the newest as a prompt may have with what follows them.

    `num_more_chars`: of the question that follows; 0: there is none.
    """
    path: list[Node] = []
    while end in nodes and len(path) < len(nodes):
        path.append(nodes[end])
        end = nodes[end].parent_id or ""
    path.reverse()
    num_chars, are_questions = [one.num_chars for one in path], [one.role == "user" for one in path]
    if num_more_chars:
        num_chars, are_questions = [*num_chars, num_more_chars], [*are_questions, True]
    first = first_kept(
        num_chars,
        are_questions,
        most_chars=limits.max_prompt_chars,
        most_messages=limits.max_messages,
    )
    kept = [one.id for one in path[first:]]
    rows = Message.objects.only("role", "content", "text").in_bulk(kept)
    return [rows[one] for one in kept if one in rows]


def last_answer(nodes: Nodes, leaf: str) -> str:
    """Return the end of the branch that is shown: of a question its newest answer, or the answer before it."""
    node = nodes.get(leaf)
    if node is None or node.role != "user":
        return leaf if node is not None else ""
    answers = [one.id for one in nodes.values() if one.parent_id == leaf and one.role == "assistant"]
    return answers[-1] if answers else node.parent_id or ""


def newest_rest(nodes: Nodes, answer_id: str) -> str:
    """Return the last of what continues an answer: its rest, results of its tools, and the answer after these."""
    rest: dict[str, str] = {}
    for node in nodes.values():  # the oldest first
        if node.role != "user" and node.parent_id:
            rest[node.parent_id] = node.id
    end, num_left = answer_id, len(nodes)
    while end in rest and num_left:
        end, num_left = rest[end], num_left - 1
    return end
