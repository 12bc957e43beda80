"""`Ask`: what a request adds to a conversation that the server keeps, and the fields by which it says so. Pure.

conversation, prompt | messages            a new question after the branch that is shown
conversation, prompt | messages, parent    a new question after that message; null: at the beginning
conversation, parent                       another answer to that question
conversation, continue                     the rest of that answer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamserve.dialects.fields import Table, conflict, described, list_of, wrong_type, wrong_value
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.ids import is_stream_id
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Message

# Of these a conversation has its own, or none.
_NOT_HERE = {
    "continue_final_message": "Send 'continue' with the id of the answer",
    "echo": "The conversation has the text already",
    "prompt_logprobs": "They are of a bare prompt",
    "tools": "It keeps questions and answers, no results of tools",
    "tool_choice": "It keeps questions and answers, no results of tools",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a request adds to a conversation; exactly one of `question`, `question_id` and `answer_id` is not "".

    `question`: the text of a new question, after the message `parent` ("": at the beginning, None: after the branch
    shown), with its attachments. `question_id`: a question that gets another answer. `answer_id`: an answer to go on
    with.
    """

    conversation_id: str = ""
    question: str = ""
    parent: str | None = None
    attachment_ids: tuple[str, ...] = ()
    question_id: str = ""
    answer_id: str = ""


@described({"type": "string", "pattern": "^[0-9a-f]{32}$"})
def row_id(value: Any, param: str) -> str:
    """Read the id of a conversation, a message or an attachment."""
    if not isinstance(value, str):
        wrong_type(value, param, "a string")
    if not is_stream_id(value):
        wrong_value(param, "is no id: an id has 32 hex digits")
    return value


NAMES = ("conversation", "parent", "continue", "attachments")


def conversation_fields(limits: Limits) -> Table:
    """Return the readers of the fields."""
    return {**dict.fromkeys(NAMES, row_id), "attachments": list_of(row_id, high=limits.max_attachments)}


def take_ask(body: Mapping[str, Any], values: dict[str, Any]) -> Ask | None:
    """Return what a checked body asks of a conversation, None without one. Raises BadRequest.

    In `values` its question becomes the one message, which stands for the messages of the branch.
    """
    if "conversation" not in values:
        for name in NAMES:
            if name in values:
                raise conflict(f"{name} is of a conversation. Send 'conversation', its id, too.", name)
        return None
    for name, why in _NOT_HERE.items():
        if values.get(name):
            raise conflict(f"{name} cannot go with a conversation. {why}.", name)
    if values.get("n", 1) > 1:
        raise conflict("A question of a conversation gets one answer at a time: leave n out, and ask again.", "n")
    question, parent = _question(values), values.get("parent")
    values["messages"] = (Message(role="user", content=question, param="content"),)
    conversation_id = values["conversation"]
    if "continue" in values:
        for name, is_there in {
            "a question": question,
            "parent": parent,
            "attachments": values.get("attachments"),
        }.items():
            if is_there:
                raise conflict(f"'continue' goes on with an answer: send it without {name}.", "continue")
        return Ask(conversation_id=conversation_id, answer_id=values["continue"])
    if question:
        is_first = parent is None and "parent" in body
        files = tuple(values.get("attachments", ()))
        return Ask(
            conversation_id=conversation_id, question=question, parent="" if is_first else parent, attachment_ids=files
        )
    if parent is None:
        message = "Send a question; or 'parent', the question that gets another answer; or 'continue', an answer."
        raise BadRequest(message, code="missing_field", param="content")
    if values.get("attachments"):
        raise conflict("Attachments go with a new question. Another answer has those of its question.", "attachments")
    return Ask(conversation_id=conversation_id, question_id=parent)


def _question(values: dict[str, Any]) -> str:
    """Take the new question out of the checked values; "" for none."""
    turns, prompt = values.pop("messages", None), values.pop("prompt", None)
    if turns is None:
        return prompt or ""
    if prompt is not None:
        raise conflict("Send messages or prompt, not both.", "prompt")
    if turns and turns[0].parts:
        message = "A conversation keeps text alone. Attach files of text by their ids, in 'attachments'."
        raise BadRequest(message, code="unsupported_content", param="messages")
    if len(turns) != 1 or turns[0].role != "user" or turns[0].extra:
        message = "The server has the conversation's history. Send the new question alone: one message of role user."
        raise BadRequest(message, code="invalid_value", param="messages")
    if not turns[0].content:
        raise BadRequest("The question must not be empty.", code="empty_prompt", param="messages")
    return str(turns[0].content)
