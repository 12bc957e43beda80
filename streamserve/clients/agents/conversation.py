"""What a caller has sent, as an agent gets it: `turns`. Pure.

An agent has instructions of its own, so the caller's system messages are not passed on: they would stand above the
agent's, or replace them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from streamserve.clients.pipeline.run import Run
from streamserve.protocol.requests import SYSTEM_ROLES, Message


def turns(run: Run) -> list[Message]:
    """Return the conversation, the question last; what was sent as a prompt or as `input` is a question."""
    sent = [message for message in run.messages if message.role not in SYSTEM_ROLES]
    if sent:
        return sent
    question = run.question or (json.dumps(dict(run.input), ensure_ascii=False) if run.input else "")
    return [Message(role="user", content=question)] if question else []


def calls_of(message: Message) -> list[tuple[str, str, str]]:
    """Return the calls of an answer: id, name, and the JSON text of the arguments."""
    calls: list[Mapping[str, Any]] = message.extra.get("tool_calls") or []
    functions = [(call, call.get("function") or {}) for call in calls]
    return [
        (str(call.get("id") or ""), str(one.get("name") or ""), _text(one.get("arguments"))) for call, one in functions
    ]


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})
