"""What a message keeps of an answer's log, and a branch of messages as the prompt of the next answer. Pure.

    log ──► answer_columns ──► a message's row          once, when the answer has ended
    rows of a branch ──► prompt_of ──► Message turns    at each question: the same rows give the same words

So that the engine finds a turn's prompt in its prefix cache, the prompt of a branch begins with the prompt of the turn
before, and goes on with the text that the engine has generated after it. It has no thoughts of earlier answers, as in
`answer_turn` (streams/store.py), and whole tool calls. Answers without text or calls are left out with their questions:
templates want roles to alternate. An answer and its continuations are one turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from streamserve.dialects.fold import TOOL_USE, Answer
from streamserve.protocol.events import TEXT, Done, Error, LoggedEvent
from streamserve.protocol.requests import Message as Turn
from streamserve.rows.conversations import Message

# An answer's row after these goes on where it ended.
CAN_CONTINUE = ("length", "cancelled", "abandoned")


def question_content(text: str) -> str:
    """Return the content of a question's message, as JSON text."""
    return json_text({"blocks": [{"index": 0, "kind": TEXT, "text": text}], "citations": [], "steps": []})


def without_nul(text: str) -> str:
    """Return a text as PostgreSQL takes it."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def answer_columns(events: Sequence[LoggedEvent], error_code: str) -> dict[str, Any]:
    """Return the columns of an answer's message: what its log shows, up to where its reader has stopped it.

    `error_code`: why it failed, where the log has no end.
    """
    end = events[-1].event if events else None
    kept_seq = end.kept_seq if isinstance(end, Done) else None
    answer = Answer.of(one for one in events if kept_seq is None or one.seq <= kept_seq)
    first, usage = answer.choices[0], end.usage if isinstance(end, Done) else answer.usage
    content = {
        "blocks": [block.as_json() for block in first.block_texts()],
        "citations": [citation.payload() for citation in answer.citations],
        "steps": [step.payload() for step in answer.steps],
        **_of_run(answer),
    }
    is_done = isinstance(end, Done)
    return {
        "state": "done" if is_done else "failed",
        "content": json_text(content),
        "text": without_nul(first.text),
        "finish_reason": end.finish_reason if isinstance(end, Done) else "",
        "error_code": "" if is_done else end.code if isinstance(end, Error) else error_code,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
    }


def _of_run(answer: Answer) -> dict[str, Any]:
    """Return what only a pipeline's run has shown: what it asks its user, its own events, its state."""
    found = {
        "approvals": [approval.payload() for approval in answer.approvals],
        "customs": [custom.payload() for custom in answer.customs],
        "state": answer.state,
    }
    return {name: value for name, value in found.items() if value not in ([], None)}


def prompt_of(branch: Sequence[Message], questions: Mapping[str, Turn]) -> list[Turn]:
    """Return the messages of a branch as turns of a prompt, which end with a question or the text of an answer.

    `questions`: the turns of the branch's questions, with their files, by id (attachments.py). A result of a client's
    tool is a turn of its own.
    """
    turns: list[Turn] = []
    has_answer = False  # of the last question, which may have shown nothing; questions that came together have none
    for row in branch:
        if row.role == "user":
            if has_answer:
                _drop_unanswered(turns)
            turns.append(questions[row.pk])
            has_answer = False
            continue
        has_answer = has_answer or row.role == "assistant"
        blocks = json.loads(row.content).get("blocks", []) if row.content else []
        if row.role == "tool":
            turns.append(Turn(role="tool", content=row.text, extra={"tool_call_id": blocks[0]["id"]}))
            continue
        text = "".join(block["text"] for block in blocks if block["kind"] == TEXT)
        calls = [call for block in blocks if (call := _call_json(block)) is not None]
        if turns and turns[-1].role == "assistant":
            before = turns.pop()
            text, calls = before.content + text, [*before.extra.get("tool_calls", ()), *calls]
        if text or calls:
            turns.append(Turn(role="assistant", content=text, extra={"tool_calls": calls} if calls else {}))
    return turns


def _drop_unanswered(turns: list[Turn]) -> None:
    """Leave out the last question if its answer has shown nothing."""
    if turns and turns[-1].role == "user":
        turns.pop()


def _call_json(block: dict[str, Any]) -> dict[str, Any] | None:
    """Return a block's call in OpenAI's shape; None for another block, and for a call that was not whole."""
    if block["kind"] != TOOL_USE:
        return None
    try:
        json.loads(block["text"])
    except (ValueError, RecursionError):
        return None
    function = {"name": block.get("name"), "arguments": block["text"]}
    return {"id": block.get("id"), "type": "function", "function": function}


def json_text(value: Any) -> str:
    """Return the content of a message as its column has it."""
    return json.dumps(value, separators=(",", ":"))  # ASCII: NUL is escaped
