"""The next turn of a conversation: the request before, its answer and a WebSocket `input` message → the next request.

A field that the caller set in the request before keeps its value unless the input changes it; a field that it left open
is open again. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streamserve.dialects.fields import read
from streamserve.dialects.generate import build, conflict, request_fields, sampling_fields
from streamserve.dialects.messages import messages, refuse_too_long
from streamserve.dialects.native import ON_DISCONNECT, NativeRequest, on_disconnect
from streamserve.protocol.errors import BadRequest, Gone
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GenerateRequest, Message

_FIXED = frozenset({"messages", "prompt", "n"})  # fields of a start that `request` cannot change


class NextTurn:
    """A checked input message: `text` or `messages`, and in `request` the fields that change."""

    def __init__(self, message: Mapping[str, Any], limits: Limits) -> None:
        if ("text" in message) == ("messages" in message):
            code = "conflicting_fields" if "text" in message else "missing_field"
            raise BadRequest("Send text or messages.", code=code, param="text")
        has_text = "text" in message
        self._turns = _user_turn(message["text"]) if has_text else messages(limits)(message["messages"], "messages")
        self._limits = limits
        table = {**sampling_fields(limits), **request_fields(limits), "on_disconnect": on_disconnect}
        changeable = {name: reader for name, reader in table.items() if name not in _FIXED}
        self._changed = read(message.get("request", {}), changeable)

    def after(self, before: GenerateRequest, answer: str | Message, on_disconnect: str) -> NativeRequest:
        """Return the request for `before`'s conversation, then `answer`, then the new turns. Its tools stay.

        Raises BadRequest or Gone for a conversation that cannot be continued, BadRequest for one that is too long.
        """
        turn = Message(role="assistant", content=answer) if isinstance(answer, str) else answer
        values = {"on_disconnect": on_disconnect, **_given(before, self._limits), **self._changed}
        values["messages"] = (*_conversation(before, turn), *self._turns)
        refuse_too_long(values["messages"], "messages", self._limits)
        request = build(values, self._limits, default_model=before.model)
        kept = values["on_disconnect"]
        return NativeRequest(
            generate=replace(
                request,
                latency_class=self._changed.get("latency_class", before.latency_class),
                tools=before.tools,
                tool_choice=before.tool_choice,
                parallel_tool_calls=before.parallel_tool_calls,
            ),
            on_disconnect=kept if kept in ON_DISCONNECT else ON_DISCONNECT[0],
        )


def _user_turn(text: str) -> tuple[Message, ...]:
    if not text:
        raise BadRequest("text must not be empty.", code="empty_prompt", param="text")
    return (Message(role="user", content=text),)


def _conversation(before: GenerateRequest, answer: Message) -> tuple[Message, ...]:
    """Return the turns so far and the answer, or raise an error that says what to send instead."""
    if before.messages is None and before.prompt == "":  # a finished stream of another process (streams/registry.py)
        message = "What was asked is no longer kept here. Send the whole conversation with start."
        raise Gone(message, code="conversation_gone", param="id")
    if before.messages is None:
        message = "That stream continued a bare prompt, which has no turns. Send messages with start."
        raise BadRequest(message, code="no_conversation", param="id")
    if before.n > 1:
        raise conflict("That stream has several answers. Choose one and send the conversation with start.", "id")
    turns = before.messages[before.has_public_system :]  # the server puts its own system prompt before each request
    if before.continue_final_message:  # one turn: its beginning was sent, the answer is its end, or all of it
        answer = answer if before.echo else replace(answer, content=turns[-1].content + answer.content)
        turns = turns[:-1]
    return (*turns, answer)


def _given(before: GenerateRequest, limits: Limits) -> dict[str, Any]:
    """Return the fields that the caller set, with their checked values."""
    names = set(sampling_fields(limits)) - set(before.unset)
    sampling = {name: getattr(before.sampling, name) for name in names}
    around = {"chat_template_kwargs": before.chat_template_kwargs, "timeout_seconds": before.timeout_seconds}
    return {"model": before.model, **{name: value for name, value in (sampling | around).items() if value is not None}}
