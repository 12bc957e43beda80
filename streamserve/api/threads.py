"""`Threads`: clients' own ids of conversations (AI SDK, AG-UI, …), each of its caller's tenant. docs/front-ends.md.

    sent by the client      system  user  assistant  user        all of it, or the last message alone
    kept by the server              user  assistant              its history wins
                                                     └─ new: what is not an assistant's at the end, under an unknown id

With conversations the prompt is made of the branch that the server keeps, and what is new is added to it with the
answer; without (off, or no login) it is what was sent, and the thread names the caller's last stream alone. asyncio;
no HTTP and no rows: rows/threads.py has them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from streamserve.api.answers import Answers
from streamserve.api.call import Caller
from streamserve.api.conversations import WRITE_DELAYS, Prepared
from streamserve.protocol.errors import BadRequest, NotFinished
from streamserve.protocol.requests import SYSTEM_ROLES, GenerateRequest, Message, ThreadKey, Turn
from streamserve.streams.store import NullStore

# Separates a stored message's id from the name of a piece of it, where a dialect shows one message in several.
PIECE = ":"
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A message as its client has sent it. `id`: the client's own, or one that it has from here; "": none.

    `is_edit`: the last message, new words in place of the message that has its id: a branch beside that.
    """

    id: str = ""
    message: Message
    is_edit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadView:
    """A thread: its last stream, and its conversation ("": none is kept)."""

    stream_id: str
    conversation_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where messages are added, by a client that sends what is new alone.

    After the answer of `stream_id`; or at the end of `conversation_id`; else in a new conversation, begun by `source`.
    """

    source: str
    stream_id: str = ""
    conversation_id: str = ""


class Threads(Protocol):
    """The threads of a site's callers."""

    async def find(self, caller: Caller, key: ThreadKey) -> ThreadView | None:
        """Return the caller's thread of that id; None where it has none, or where its conversation was deleted."""

    async def prepare(
        self, caller: Caller, key: ThreadKey, sent: Sequence[Sent], *, continues: bool = False
    ) -> Prepared | None:
        """Return the prompt of the branch that `sent` goes on with, and the turn to insert; None: nothing is kept.

        `continues`: the answer goes on with the thread's last answer; `sent` is not looked at. Stores nothing. Raises
        BadRequest (`param` "messages") where nothing is to be answered, or for what a conversation cannot keep;
        NotFinished while the answer before is being made.
        """

    async def append(self, caller: Caller, sent: Sequence[Sent], place: Place) -> Prepared | None:
        """Return the prompt of a branch with all of `sent` after it, and the turn to insert; None: nothing is kept.

        None also for the `stream_id` of an answer that no conversation of the caller's has. Stores nothing. Raises
        NotFound for an unknown conversation; BadRequest, NotFinished as `prepare`.
        """


class MemoryThreads:
    """The threads of a process without a database: each names the last stream of its caller."""

    def __init__(self, store: NullStore) -> None:
        self._store = store

    async def find(self, caller: Caller, key: ThreadKey) -> ThreadView | None:
        stream_id = self._store.last_of(caller.tenant, key)
        return ThreadView(stream_id=stream_id) if stream_id else None

    async def prepare(
        self, caller: Caller, key: ThreadKey, sent: Sequence[Sent], *, continues: bool = False
    ) -> Prepared | None:
        return None

    async def append(self, caller: Caller, sent: Sequence[Sent], place: Place) -> Prepared | None:
        return None


def thread_key(dialect: str, client_id: str, param: str) -> ThreadKey:
    """Return the key of a client's id. Raises BadRequest."""
    if _CLIENT_ID.fullmatch(client_id) is None:
        message = f"'{param}' has 1 to 200 printable ASCII characters without spaces."
        raise BadRequest(message, code="invalid_value", param=param)
    return ThreadKey(dialect=dialect, client_id=client_id)


async def with_thread(
    request: GenerateRequest,
    sent: Sequence[Sent],
    caller: Caller,
    key: ThreadKey,
    answers: Answers,
    threads: Threads,
    *,
    continues: bool = False,
) -> tuple[GenerateRequest, Turn | None]:
    """Return the request with its messages, and what its start adds to the thread's conversation (None: none is kept).

    With `continues` the answer goes on with the thread's last answer, and the request stays as it is. An answer that
    has just ended is being written: this waits for that a little. Raises BadRequest, NotFinished.
    """
    prepared = await _prepared(threads, caller, key, sent, continues)
    model = request.model or (prepared.model if prepared else "") or await answers.default_model(caller)
    if continues:
        return request, None if prepared is None else prepared.turn
    if prepared is None:
        messages, turn = tuple(one.message for one in sent), None
        if not messages:
            raise BadRequest("'messages' has no message.", code="empty_prompt", param="messages")
    else:
        system = (one.message for one in sent if one.message.role in SYSTEM_ROLES)
        own = (one for one in request.messages or () if one.role in SYSTEM_ROLES)
        messages, turn = (*own, *system, *prepared.messages), prepared.turn
    return replace(request, model=model, messages=messages), turn


async def appended(caller: Caller, sent: Sequence[Sent], place: Place, threads: Threads) -> Prepared | None:
    """Return what `Threads.append` does. For an answer that has just ended and is being written this waits a little."""
    return await _until_written(lambda: threads.append(caller, sent, place))


async def _prepared(
    threads: Threads, caller: Caller, key: ThreadKey, sent: Sequence[Sent], continues: bool
) -> Prepared | None:
    return await _until_written(lambda: threads.prepare(caller, key, sent, continues=continues))


async def _until_written(prepare: Callable[[], Awaitable[Prepared | None]]) -> Prepared | None:
    for delay in WRITE_DELAYS:
        try:
            return await prepare()
        except NotFinished:
            await asyncio.sleep(delay)
    return await prepare()
