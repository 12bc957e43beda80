"""`Conversations` and `Shares`: the services of `/conversations`, and the values that they give. docs/conversations.md.

Values and protocols; asyncio, typed values, no HTTP and no rows. The rows are in rows/conversation_store.py, lists and
search in rows/conversation_lists.py, share links in rows/shares.py.

A conversation that is unknown, deleted or another tenant's raises the same NotFound (`no_conversation`), and so does a
message of another conversation (`no_message`). Every call may raise a database error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol

from streamserve.api.answers import Answers
from streamserve.api.call import Caller
from streamserve.dialects.conversation import Ask as Ask
from streamserve.dialects.native import NativeRequest
from streamserve.protocol.errors import BadRequest, NotFinished, NotFound, Unauthorized
from streamserve.protocol.requests import Message, Turn
from streamserve.streams.store import ANONYMOUS
from streamserve.streams.stream import Stream

# A client that has read the last event may ask before its answer's message is written. In seconds; two in all.
WRITE_DELAYS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.6)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationView:
    """A conversation as its owner sees it. `is_running`: an answer in it has not ended.

    `metadata`: the caller's own notes, of `/v1/conversations` alone.
    """

    id: str
    title: str
    model: str
    source: str
    is_pinned: bool
    leaf: str
    is_running: bool
    created_at: datetime
    updated_at: datetime
    metadata: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return its JSON. Times are Unix seconds."""
        return {
            "id": self.id,
            "title": self.title,
            "model": self.model,
            "source": self.source,
            "pinned": self.is_pinned,
            "leaf": self.leaf or None,
            "running": self.is_running,
            "created": _seconds(self.created_at),
            "updated": _seconds(self.updated_at),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachmentView:
    """A file that a question brings. `num_kept`: how many characters of its text the question's prompt has."""

    id: str
    name: str
    content_type: str
    num_bytes: int
    num_chars: int
    created_at: datetime
    num_kept: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return its JSON. Times are Unix seconds."""
        out = {
            "id": self.id,
            "name": self.name,
            "type": self.content_type,
            "bytes": self.num_bytes,
            "characters": self.num_chars,
            "created": _seconds(self.created_at),
        }
        return out if self.num_kept is None else {**out, "kept": self.num_kept}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageView:
    """A question or an answer. `parent`, `stream_id`, `finish_reason`, `error_code` and `client_id` may be "".

    `blocks`, `citations`, `steps`, `approvals` and `customs` are JSON objects as docs/events.md has them, `text` the
    text of the blocks; `run_state` is the state of its run, or None.
    """

    id: str
    parent: str
    role: str
    state: str
    blocks: Sequence[Mapping[str, Any]]
    citations: Sequence[Mapping[str, Any]]
    steps: Sequence[Mapping[str, Any]]
    attachments: Sequence[AttachmentView]
    text: str
    stream_id: str
    model: str
    finish_reason: str
    error_code: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    rating: int | None
    comment: str
    created_at: datetime
    finished_at: datetime | None
    client_id: str = ""
    approvals: Sequence[Mapping[str, Any]] = ()
    customs: Sequence[Mapping[str, Any]] = ()
    run_state: Any = None

    def as_json(self) -> dict[str, Any]:
        """Return its JSON. Times are Unix seconds."""
        return {
            "id": self.id,
            "parent": self.parent or None,
            "role": self.role,
            "state": self.state,
            "blocks": list(self.blocks),
            "citations": list(self.citations),
            "steps": list(self.steps),
            **self._of_run(),
            "attachments": [one.as_json() for one in self.attachments],
            "stream": self.stream_id or None,
            "model": self.model,
            "finish_reason": self.finish_reason or None,
            "error": self.error_code or None,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "completion_tokens": self.completion_tokens,
            },
            "rating": self.rating,
            "comment": self.comment,
            "created": _seconds(self.created_at),
            "finished": None if self.finished_at is None else _seconds(self.finished_at),
        }

    def _of_run(self) -> dict[str, Any]:
        """Return what only runs have, as far as this has it."""
        known = {"approvals": list(self.approvals), "customs": list(self.customs), "run_state": self.run_state}
        return {name: value for name, value in known.items() if value not in ([], None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Which conversations are asked for: `limit` after the conversation `after`, pinned first, then the newest.

    `search`: words that the title or a message has; `source`: what has begun it. "" is all.
    """

    limit: int
    after: str = ""
    search: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What to change of a conversation; None stays as it is. `leaf` is one of its messages."""

    title: str | None = None
    is_pinned: bool | None = None
    leaf: str | None = None
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The prompt of a branch, and what the start of its answer will add to the conversation.

    `messages` end with the question, or with the text of the answer that is continued. `model` is the conversation's,
    "" where it has none yet.
    """

    messages: tuple[Message, ...]
    turn: Turn
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareView:
    """A share link, without its token, which is not kept."""

    id: str
    created_at: datetime
    expires_at: datetime | None

    def as_json(self) -> dict[str, Any]:
        """Return its JSON. Times are Unix seconds."""
        expires = None if self.expires_at is None else _seconds(self.expires_at)
        return {"id": self.id, "created": _seconds(self.created_at), "expires": expires}


class Conversations(Protocol):
    """The conversations of a site's users and keys."""

    async def page(self, caller: Caller, listed: Listed) -> tuple[Sequence[ConversationView], bool]:
        """Return a part of the caller's conversations, and whether there are more."""

    async def create(
        self,
        caller: Caller,
        *,
        model: str = "",
        title: str = "",
        source: str = "chat",
        metadata: Mapping[str, str] | None = None,
    ) -> ConversationView:
        """Make a conversation; a title that is given is the owner's, and stays."""

    async def add(self, caller: Caller, conversation_id: str, messages: Sequence[Message]) -> Sequence[MessageView]:
        """Add messages at the end of the branch shown, without an answer; return them.

        Raises NotFound; BadRequest for a conversation that is full; NotFinished while its last answer runs.
        """

    async def remove(self, caller: Caller, conversation_id: str, message_id: str) -> None:
        """Delete a message; what follows it follows the message before it. Raises NotFound, NotFinished."""

    async def find(self, caller: Caller, conversation_id: str) -> ConversationView:
        """Return a conversation. Raises NotFound."""

    async def change(self, caller: Caller, conversation_id: str, change: Change) -> ConversationView:
        """Change a conversation. Raises NotFound, also for a leaf that is none of its messages."""

    async def delete(self, caller: Caller, conversation_id: str) -> Sequence[str]:
        """Delete a conversation; return the ids of the streams that run in it, which the caller of this stops."""

    async def restore(self, caller: Caller, conversation_id: str) -> ConversationView:
        """Undo a deletion; a conversation that is there stays as it is. Raises NotFound once that is too late."""

    async def messages(
        self, caller: Caller, conversation_id: str, *, limit: int, after: str = ""
    ) -> tuple[Sequence[MessageView], bool]:
        """Return a part of the messages of all branches, the oldest first, and whether there are more."""

    async def whole(self, caller: Caller, conversation_id: str) -> tuple[ConversationView, Sequence[MessageView]]:
        """Return a conversation with all its messages, the oldest first: for its export."""

    async def rate(
        self, caller: Caller, conversation_id: str, message_id: str, *, rating: int | None, comment: str
    ) -> MessageView:
        """Rate an answer: 1, -1, or None for no rating. Raises NotFound; BadRequest for a question."""

    async def prepare(self, caller: Caller, conversation_id: str, ask: Ask) -> Prepared:
        """Return the prompt of a branch, and the turn to insert with the stream's row. Stores nothing.

        Raises NotFound; BadRequest (`param` is "parent", "continue", "content" or "attachments") for a message of the
        wrong role, an answer that cannot be continued, or a conversation that is too long; NotFinished for a branch
        whose last answer runs.
        """

    async def continuation(self, stream_id: str) -> Turn | None:
        """Return the turn of a stream that goes on with the answer of an interrupted stream, None if it has no turn."""

    async def turn_of(self, stream_id: str) -> Turn | None:
        """Return the turn that a stream's start has inserted (a question with its id alone), None if it has none."""


class Shares(Protocol):
    """The share links of conversations: of a site with SHARE_LINKS."""

    async def make(self, caller: Caller, conversation_id: str, *, expires_in: float | None) -> tuple[ShareView, str]:
        """Make a link to the branch that is shown; return it with its token. Raises NotFound, BadRequest."""

    async def page(
        self, caller: Caller, conversation_id: str, *, limit: int, after: str = ""
    ) -> tuple[Sequence[ShareView], bool]:
        """Return a part of the links that are neither revoked nor expired, the newest first, and whether there are
        more.
        """

    async def revoke(self, caller: Caller, conversation_id: str, share_id: str) -> None:
        """End a link. Idempotent. Raises NotFound."""

    async def open(self, token: str) -> tuple[ConversationView, Sequence[MessageView]]:
        """Return what a link shows: its conversation, and the messages of its branch. Raises NotFound."""


async def with_history(
    asked: NativeRequest, caller: Caller, answers: Answers, conversations: Conversations | None
) -> tuple[NativeRequest, Turn | None]:
    """Return the request with the messages of its conversation, and the turn that its start adds.

    A request of no conversation stays as it is. Raises NotFound, BadRequest, NotFinished, Unauthorized.
    """
    if asked.ask is None:
        return asked, None
    if conversations is None:
        raise conversations_off()
    if caller.owner in ANONYMOUS:
        raise Unauthorized("Conversations are kept for users and API keys. Sign in, or send an API key.")
    prepared = await _prepared(conversations, caller, asked.ask)
    own, continues = asked.generate, bool(asked.ask.answer_id)
    model = own.model or prepared.model or await answers.default_model(caller)
    if continues and model in await answers.pipelines_of(caller):
        message = f"A pipeline begins each answer anew: {model!r} cannot go on with one. Ask for another answer."
        raise BadRequest(message, code="unsupported_parameter", param="continue")
    assert own.messages is not None
    history = (*own.messages[:-1], *prepared.messages)
    generate = replace(own, model=model, messages=history, continue_final_message=continues)
    return replace(asked, generate=generate), prepared.turn


async def _prepared(conversations: Conversations, caller: Caller, ask: Ask) -> Prepared:
    """Return what `prepare` does. An answer that has just ended is being written: then it waits for that a little."""
    for delay in WRITE_DELAYS:
        try:
            return await conversations.prepare(caller, ask.conversation_id, ask)
        except NotFinished:
            await asyncio.sleep(delay)
    return await conversations.prepare(caller, ask.conversation_id, ask)


async def turn_in(stream: Stream, turn: Turn | None, conversations: Conversations | None) -> Turn | None:
    """Return the turn that a stream has added: `turn`, unless its Idempotency-Key has started the stream before."""
    if conversations is None or (turn is not None and stream.admission.turn is turn):
        return turn
    return await conversations.turn_of(stream.id)


def ids_of(turn: Turn | None) -> dict[str, str]:
    """Return the ids of a turn's conversation, question and answer, as messages have them."""
    if turn is None:
        return {}
    question = {} if turn.question is None else {"question": turn.question.id}
    return {"conversation": turn.conversation_id, **question, "message": turn.answer_id}


def id_headers(turn: Turn | None) -> dict[str, str]:
    """Return the same ids as headers."""
    return {f"X-{name.capitalize()}-Id": row_id for name, row_id in ids_of(turn).items()}


def path_of(messages: Sequence[MessageView], leaf: str) -> list[MessageView]:
    """Return the messages from the beginning to `leaf`; [] for an unknown leaf."""
    by_id = {one.id: one for one in messages}
    path: list[MessageView] = []
    while leaf in by_id and len(path) < len(by_id):
        path.append(by_id[leaf])
        leaf = by_id[leaf].parent
    return path[::-1]


def conversations_off() -> NotFound:
    """Return the error of a site that keeps no conversations."""
    message = (
        "This site keeps no conversations: CONVERSATIONS in STREAMSERVE is off. Send the whole history as messages."
    )
    return NotFound(message, code="conversations_off", param="conversation")


def shares_off() -> NotFound:
    """Return the error of a site without share links."""
    message = "This site has no share links: SHARE_LINKS in STREAMSERVE is off, or CONVERSATIONS is."
    return NotFound(message, code="share_links_off")


def no_conversation() -> NotFound:
    """Return the error for an id that names no conversation of the caller's."""
    message = "No conversation has that id. GET /conversations lists yours."
    return NotFound(message, code="conversation_not_found", param="conversation")


def no_message(param: str = "message") -> NotFound:
    """Return the error for an id that names no message of the conversation."""
    message = "The conversation has no message with that id. GET /conversations/<id>/messages lists its messages."
    return NotFound(message, code="message_not_found", param=param)


def no_share() -> NotFound:
    """Return the error for a share link that does not exist, or no longer."""
    return NotFound("There is no such share link. It may have been revoked, or have expired.", code="share_not_found")


def _seconds(when: datetime) -> int:
    return int(when.timestamp())
