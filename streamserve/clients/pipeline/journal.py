"""`Journal`: what a run keeps, so that another attempt repeats no finished step and shows nothing twice.

An attempt is another try of a job, or another web process that continues a stream.

    step    the JSON of its result, and what it has shown     by its name and how often that name came before
    answer  its events as the model gave them                 the same, under the step that it is in
    turn    which answer is being shown: it may be cut off

A `Memo` keeps them: the job's rows (work/job_runs.py), or a log beside the stream's (streams/run_memo.py). An attempt
calls the author's function from the start: a finished step returns what was kept. A plain answer that was cut off
continues from its tokens; an answer with blocks, or behind filters, is made anew with the same seed, and compared. An
answer's name has a digest of its request, since answers side by side may be called in any order.

`Shown` is what earlier attempts have shown. A run that is tried again gives the same events from the start. Those that
the log has are taken off there, in order: texts character by character, token ids by their number, since a whole answer
may come as one event now. A run that gives something else than before cannot be continued: what was shown is never
retracted. asyncio; knows no database.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, replace
from itertools import chain, groupby
from typing import Any, Protocol, TypeGuard, cast

from streamserve.clients.pipeline.state import ShownStates
from streamserve.clients.pipeline.tools import ToolCall
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.events import (
    TEXT,
    Approval,
    BlockStart,
    BlockStop,
    Citation,
    Custom,
    Error,
    Event,
    State,
    Status,
    Token,
)
from streamserve.protocol.frames import decode_event, encode_event
from streamserve.protocol.json_patch import json_text
from streamserve.protocol.requests import GenerateRequest

KEPT_STATUSES = ("step", "trimmed")
# Steps, citations, own events of the author's, and what the user is asked.
Mark = Status | Citation | Custom | Approval


LOST = "This run has lost the process that it ran in, and cannot be continued. Ask again."


class NotRepeatable(StreamserveError):
    """A run that was tried again did something else than before."""

    code = "not_repeatable"

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The run was begun again and did something else than before ({reason}), so it cannot continue. Put what "
            "may change (times, random choices, searches) into steps: their results are kept."
        )


class Shown:
    """The events of a log, as far as the present attempt has not come to them yet."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._marks: Counter[Mark] = Counter()  # in any order
        self._states = ShownStates()
        spoken: list[Event] = []  # in order
        for event in events:
            if is_mark(event):
                self._marks[event] += 1
            elif isinstance(event, State):
                self._states.add(event)
            elif isinstance(event, Token | BlockStart | BlockStop):
                spoken.append(event)
        self._spoken = deque(joined(spoken))
        self._num_chars = self._num_ids = 0  # of the first of them, if that is a token, which have come again

    @property
    def is_over(self) -> bool:
        """Whether every text of earlier attempts has come again."""
        return not self._spoken

    def rest_of(self, event: Event) -> Event | None:
        """Return what of `event` was not shown before; None if all was. Raises NotRepeatable."""
        if isinstance(event, Token):
            return self._rest_of_token(event) if self._spoken else event
        if isinstance(event, BlockStart | BlockStop) and self._spoken:
            if self._spoken[0] != event:
                raise NotRepeatable(f"another block {event.index}")
            self._spoken.popleft()
            return None
        if isinstance(event, State):
            return self._states.rest_of(event)
        if isinstance(event, Mark) and self._marks[event]:
            self._marks[event] -= 1
            return None
        return event

    def _rest_of_token(self, event: Token) -> Token | None:
        first = self._spoken[0]
        if not isinstance(first, Token) or first.index != event.index:
            raise NotRepeatable("a longer text")
        num_chars = min(len(first.text) - self._num_chars, len(event.text))
        if not first.text.startswith(event.text[:num_chars], self._num_chars):
            raise NotRepeatable("another text")
        num_ids = min(len(first.token_ids) - self._num_ids, len(event.token_ids))
        rest = replace(event, text=event.text[num_chars:], token_ids=event.token_ids[num_ids:])
        self._num_chars, self._num_ids = self._num_chars + num_chars, self._num_ids + num_ids
        if self._num_chars == len(first.text) and self._num_ids == len(first.token_ids):
            self._spoken.popleft()
            self._num_chars = self._num_ids = 0
        if rest.text and len(self._spoken) > 1:
            raise NotRepeatable("a longer text")
        return rest if rest.text or rest.token_ids else None

    def plain_answer(self) -> Token | None:
        """Return what an answer has shown that was cut off, if it is text with token ids; else None."""
        spoken = [one for one in self._spoken if not (isinstance(one, BlockStart) and one.kind == TEXT)]
        if len(spoken) != 1 or not isinstance(spoken[0], Token) or not spoken[0].token_ids:
            return None
        return replace(
            spoken[0], text=spoken[0].text[self._num_chars :], token_ids=spoken[0].token_ids[self._num_ids :]
        )

    def rest_of_state(self) -> State | None:
        """Return what readers lack of the state that the run ends with; None if they have it."""
        return self._states.rest()

    def whole_state(self) -> State:
        """Return the state that the run has by now, as readers of another stream need it first."""
        return State(snapshot=json_text(self._states.own))

    def check_over(self) -> None:
        """Raise NotRepeatable if the run ends and has not come to all that was shown before."""
        if self._spoken:
            raise NotRepeatable("a shorter text")


def is_mark(event: Event) -> TypeGuard[Mark]:
    """Return whether an event is kept of a run, and has no place among its texts."""
    return isinstance(event, Mark) and (not isinstance(event, Status) or event.status in KEPT_STATUSES)


def joined(events: Iterable[Event]) -> list[Event]:
    """Return the events with neighbouring tokens of a block as one event."""
    out: list[Event] = []
    for index, group in groupby(events, lambda event: event.index if isinstance(event, Token) else None):
        tokens = list(group)
        if index is not None and len(tokens) > 1:
            out.append(_one(cast("list[Token]", tokens)))
        else:
            out += tokens
    return out


def _one(tokens: Sequence[Token]) -> Token:
    """Return tokens of a block as one event."""
    token_ids = tuple(chain.from_iterable(token.token_ids for token in tokens))
    return replace(tokens[0], text="".join(token.text for token in tokens), token_ids=token_ids)


logger = logging.getLogger("streamserve.pipelines")

Key = tuple[str, int]
_MAX_NAME_CHARS = 200
_DIGEST_CHARS = 16
# An answer waits so long for the run to reach an answer that was shown before it. All that is kept of a run is there at
# once, so this is the time of what is repeated beside the answer.
_TURN_SECONDS = 60.0


class Memo(Protocol):
    """What is kept of one run, for the attempt that runs. Its writes raise when the run was taken from this process.

    `converts`: a step gives what JSON makes of its result, in every attempt. Else a result that JSON changes is given
    as it is and not kept, so that another attempt calls the function again.
    """

    converts: bool

    @property
    def kept(self) -> Mapping[Key, Mapping[str, Any]]:
        """JSON of what is finished, in the order in which it was shown."""

    @property
    def shown(self) -> Sequence[Event]:
        """What the log has."""

    @property
    def begun(self) -> Key | None:
        """The last answer that began to be shown."""

    async def load(self) -> None:
        """Read what earlier attempts have left."""

    async def until_begun(self) -> None:
        """Wait until the run's stream is recorded: until then it may be refused, as the second answer to a question."""

    async def keep(self, key: Key, value: Mapping[str, Any], seconds: float) -> None:
        """Keep the result of what is finished."""

    async def begin(self, key: Key) -> None:
        """Note the answer that is about to be shown."""

    def note_step(self, status: Status) -> None:
        """Note how far the job is."""

    def end_of(self, error: Error) -> Error | None:
        """Return how a failed attempt ends the run; None if another attempt follows."""


class Turns:
    """One answer is shown at a time; in a run that is tried again, in the order of before."""

    def __init__(self, order: Iterable[Key] = ()) -> None:
        self._order = deque(order)
        self._expected: set[Key] = set()
        self._passed: set[Key] = set()
        self._lock = asyncio.Lock()
        self._moved = asyncio.Event()

    def expect(self, key: Key) -> None:
        """Note that the run has come to that answer, which takes its turn some time."""
        self._expected.add(key)

    def expect_no_more(self, key: Key) -> None:
        """Note that the answer is over, whether it has had its turn or not."""
        self._expected.discard(key)

    async def acquire(self, key: Key | None = None) -> None:
        """Wait for the turn, which an answer may take several times, as the parts of what a step has shown.

        Raises NotRepeatable where the run does not come to the answer whose turn it is.
        """
        if key is not None:
            self.expect(key)
        while self._order and self._order[0] != key and key not in self._passed:
            first = self._order[0]
            self._moved.clear()
            try:
                async with asyncio.timeout(_TURN_SECONDS):
                    await self._moved.wait()
            except TimeoutError:
                if self._order and self._order[0] == first and first not in self._expected:
                    raise NotRepeatable("another answer") from None
        await self._lock.acquire()
        if self._order and self._order[0] == key:
            self._passed.add(self._order.popleft())

    async def acquire_for_good(self) -> None:
        """Wait until no answer is being shown, and let none be shown from then on: the run ends."""
        await self._lock.acquire()

    @property
    def is_held(self) -> bool:
        """Whether an answer is being shown."""
        return self._lock.locked()

    def release(self) -> None:
        """End the turn."""
        self._lock.release()
        self._moved.set()

    async def __aenter__(self) -> None:
        await self._lock.acquire()  # of what belongs to no answer, and has no place in the order

    async def __aexit__(self, *error: object) -> None:
        self.release()


class _Scope:
    """A step that runs: what is counted and shown within it."""

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.nums: Counter[str] = Counter()
        self.shown: list[tuple[Key | None, Event]] = []


_scope: ContextVar[_Scope | None] = ContextVar("scope", default=None)


class Place:
    """Where one result is kept of a run, of what is no function: the answer of an agent's model. `memo` None: nowhere.

    A result is JSON, and never None.
    """

    def __init__(self, memo: Memo | None, key: Key) -> None:
        self._memo, self._key = memo, key
        self._began = time.monotonic()
        kept = None if memo is None else memo.kept.get(key)
        self.found: Any = None if kept is None else kept["result"]

    async def keep(self, result: Any) -> None:
        """Keep the result for other attempts of the run."""
        if self._memo is not None:
            await self._memo.keep(self._key, {"result": result, "shown": []}, time.monotonic() - self._began)


class Journal:
    """Of one attempt. `before`: the keys of what an interrupted run before this run has finished, and counted."""

    def __init__(self, memo: Memo, seed: int, before: Collection[Key] = ()) -> None:
        self.memo, self._seed, self.before = memo, seed, before
        self._root = _Scope()

    def key(self, name: str) -> Key:
        """Return the key of the next step or answer of that name."""
        scope = _scope.get() or self._root
        ordinal = scope.nums[name]
        scope.nums[name] += 1
        full = f"{scope.path}{name}"
        if len(full) > _MAX_NAME_CHARS:
            digest = _digest(full)
            full = full[: _MAX_NAME_CHARS - len(digest)] + digest
        return full, ordinal

    def turns(self) -> Turns:
        """Return the turns of earlier attempts' answers, and then any."""
        order = [key for key, value in self.memo.kept.items() if value.get("is_shown")]
        if self.memo.begun is not None and self.memo.begun not in order:
            order.append(self.memo.begun)
        return Turns(order)

    def begin_answer(self, request: GenerateRequest) -> tuple[Key, GenerateRequest]:
        """Return the key of an answer, and its request with a seed: the same in every attempt."""
        asked = [request.model, request.prompt, request.messages, request.tools, asdict(request.sampling)]
        key = self.key(f"generate {_digest(repr(asked))}")
        if request.sampling.seed is None:
            seed = int(_digest(f"{self._seed} {key}"), 16) >> 1
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        return key, request

    def note(self, event: Event, key: Key | None = None) -> None:
        """Note what is shown within a step. `key` is the answer's that it belongs to."""
        scope = _scope.get()
        if scope is not None:
            scope.shown.append((key, event))

    def note_call(self, call: ToolCall) -> None:
        """Note a call of an answer that is not shown, which its user is asked about."""
        self.note(BlockStart(choice=0, index=0, kind="server_tool_use", id=call.id, name=call.name))
        self.note(Token(text=call.arguments, token_ids=()))
        self.note(BlockStop(choice=0, index=0))

    def note_result(self, call_id: str, text: str) -> None:
        """Note the result of a tool that is shown within a step: a block of its own."""
        self.note(BlockStart(choice=0, index=0, kind="tool_result", id=call_id))
        self.note(Token(text=text, token_ids=()))
        self.note(BlockStop(choice=0, index=0))

    async def step(
        self,
        name: str,
        function: Callable[[], Awaitable[Any]],
        show: Callable[[Key | None, list[Event]], Awaitable[None]],
        encode: Callable[[Any], Any],
        decode: Callable[[Any], Any],
    ) -> Any:
        """Return the step's result: what an earlier attempt has kept, or what `function` returns now.

        `show` shows again what the kept step has shown. A result that is no JSON is not kept: the step is repeated.
        """
        key = self.key(name)
        kept = self.memo.kept.get(key)
        if kept is not None:
            for of, events in kept["shown"]:
                await show(None if of is None else (of[0], of[1]), [_decoded(event) for event in events])
            return decode(kept["result"])
        scope, began = _Scope(f"{key[0]}#{key[1]}/"), time.monotonic()
        token = _scope.set(scope)
        try:
            result = await function()
        finally:
            _scope.reset(token)
        for of, event in scope.shown:
            self.note(event, of)
        try:
            kept_result = json.loads(json.dumps(encode(result), ensure_ascii=True, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            level = logging.WARNING if self.memo.converts else logging.DEBUG
            logger.log(level, "the result of the step %s is no JSON, and another attempt repeats it: %s", key[0], error)
            return result
        if not self.memo.converts and not _is_same(decode(kept_result), result):
            return result
        await self.memo.keep(key, {"result": kept_result, "shown": _grouped(scope.shown)}, time.monotonic() - began)
        return decode(kept_result) if self.memo.converts else result

    def answer(self, key: Key) -> list[Event] | None:
        """Return the events of a finished answer."""
        kept = self.memo.kept.get(key)
        return None if kept is None else [_decoded(event) for event in kept["events"]]

    async def keep_answer(self, key: Key, events: list[Event], seconds: float, *, is_shown: bool) -> None:
        """Keep a finished answer, `done` last. Before its turn ends."""
        await self.memo.keep(key, {"events": [_encoded(one) for one in events], "is_shown": is_shown}, seconds)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether JSON has kept a result as it was: 1 is not 1.0, and a tuple is no list."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_CHARS]


def _grouped(shown: Iterable[tuple[Key | None, Event]]) -> list[tuple[Key | None, list[str]]]:
    groups = groupby(shown, lambda one: one[0])
    return [(key, list(map(_encoded, joined(event for _, event in group)))) for key, group in groups]


def _encoded(event: Event) -> str:
    return base64.b64encode(encode_event(event)).decode()


def _decoded(text: str) -> Event:
    return decode_event(base64.b64decode(text))
