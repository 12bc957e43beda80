"""What a run shows: `Speech` puts it in order, and `RunSource` gives it to the generation that the stream reads.

    Run ── Speech ── emit ──► RunSource ── put ──► Generation ── ready ──► the stream

One answer is shown at a time: those that are generated side by side follow each other. Tokens keep the ids that the
model gave, whatever a filter has made of their text. Every block goes through filters of its own: text, thoughts, calls
and results of tools.

A run cannot be continued from its tokens, as an answer of a model can: it is never parked, and it continues while its
readers are away. It makes no more than they may read: `emit` waits while `MAX_WAITING` events are not taken, as in an
outage of the log, and the model is given the readers' position. On the event loop of its client; knows no model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from streamserve.clients.base import Source
from streamserve.clients.pipeline.filters import Chain, OutputFilter, Stopped
from streamserve.clients.pipeline.journal import Shown, Turns, is_mark
from streamserve.clients.pipeline.tools import ToolCall
from streamserve.protocol.engine import Accepted
from streamserve.protocol.events import (
    TEXT,
    Approval,
    BlockStart,
    BlockStop,
    Citation,
    Custom,
    Done,
    Event,
    State,
    Status,
    Token,
    Usage,
)

MAX_WAITING = 256
# How many tokens a run whose tokens have no ids may be ahead of its furthest reader (an agent: its provider may not
# wait for long, so this is more than most answers have).
LEAD_TOKENS = 1024


class RunSource(Source):
    """The events of a run. `task` is the run's; set by the client once it is started."""

    def __init__(self, accepted: Accepted) -> None:
        super().__init__(accepted, max_queued=MAX_WAITING)
        self.task: asyncio.Task[None] | None = None
        self.shown: Shown | None = None  # of a job that is tried again: what it does not show again
        self.said = Said()
        self.num_before = 0  # tokens of interrupted runs before this run
        self._before: Shown | None = None  # what those have shown
        self._first_index = 0  # of the blocks that this run's readers have
        self._has_state = False  # this run's readers have its state
        self.num_read: int | None = 0  # tokens that the furthest reader has; None: the run does not wait for readers
        self.num_put = 0  # tokens that the log has, where they have no ids
        self.is_away = False  # the readers look away
        self.on_read: set[Callable[[], None]] = set()  # of the answers that wait for readers; several side by side

    @property
    def can_park(self) -> bool:
        """A run cannot be continued from its tokens."""
        return False

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool) -> None:
        """Note how many tokens the furthest reader has, and whether the readers look away."""
        self.is_away = is_away
        self.num_read = None if num_tokens is None else num_tokens[0]
        for notify in tuple(self.on_read):
            notify()

    def cancel(self) -> None:
        """End the run at the next point where it waits."""
        if self.task is not None:
            self.task.cancel()

    # For the run

    def follow(self, before: Sequence[Event]) -> None:
        """Leave out what the interrupted run before has shown; the blocks after it count from 0."""
        indexes = [event.index for event in before if isinstance(event, Token | BlockStart)]
        self._before, self._first_index = Shown(before), max(indexes, default=-1) + 1

    def put(self, event: Event) -> None:
        """Show an event without waiting. Nothing follows a terminal event. Raises NotRepeatable."""
        if not self.generation.is_open:
            return
        self.said.note(event)
        own = event if self._before is None else self._after_before(self._before, event)
        if own is not None:
            self._put_own(own)

    def _put_own(self, event: Event) -> None:
        """Show what of an event of this run its log does not have."""
        rest = event if self.shown is None else self.shown.rest_of(event)
        if rest is not None:
            self.num_put += isinstance(rest, Token) and bool(rest.text)
            self.generation.put([rest])

    def _after_before(self, before: Shown, event: Event) -> Event | None:
        """Return what of an event is this run's own, with the number of its block here."""
        rest = before.rest_of(event)
        if isinstance(event, Token):
            self.num_before += len(event.token_ids) - (len(rest.token_ids) if isinstance(rest, Token) else 0)
        if isinstance(rest, Token | BlockStart | BlockStop):
            return replace(rest, index=rest.index - self._first_index)
        return self._first_state(before) if isinstance(rest, State) and not self._has_state else rest

    def _first_state(self, before: Shown) -> State:
        self._has_state = True
        return before.whole_state()

    def finish(self) -> None:
        """Show what readers lack of the state. Raises NotRepeatable if not all has come that was shown before."""
        if self._before is not None:
            self._before.check_over()
            if self._before.rest_of_state() is not None:
                self._put_own(self._first_state(self._before))
        if self.shown is not None:
            self.shown.check_over()
            if (rest := self.shown.rest_of_state()) is not None:
                self.generation.put([rest])

    async def readers(self) -> None:
        """Wait while the furthest reader is far behind, in a run whose tokens have no ids."""
        if self.generation.accepted.has_token_ids:
            return
        moved = asyncio.Event()
        self.on_read.add(moved.set)
        try:
            while self.num_read is not None and self.num_put - self.num_read >= LEAD_TOKENS:
                moved.clear()
                await moved.wait()
        finally:
            self.on_read.discard(moved.set)

    async def emit(self, event: Event) -> None:
        """Show an event; wait while too many are not taken."""
        await self.room()
        self.put(event)

    async def room(self) -> None:
        """Wait while too many events are not taken."""
        await self.generation.room()


class Said:
    """All that a run has shown, also before an interrupt: neighbouring tokens of a block as one event."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._last: Token | None = None  # the first of the tokens that are being joined

    def note(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, Token):
            if self._last is None or self._last.index != event.index:
                self._join()
                self._last = event
            self._texts.append(event.text)
            self._ids += event.token_ids
        elif isinstance(event, BlockStart | BlockStop | State) or is_mark(event):
            self._join()
            self._events.append(event)

    def events(self) -> list[Event]:
        """Return all events so far."""
        self._join()
        return self._events

    def _join(self) -> None:
        if self._last is not None:
            self._events.append(replace(self._last, text="".join(self._texts), token_ids=tuple(self._ids)))
            self._last, self._texts, self._ids = None, [], []


# Kinds of blocks that only runs have: a call that the run answers itself, and its result, which has the call's id.
# Readers leave out blocks of a kind that they do not know.
SERVER_TOOL_USE, TOOL_RESULT = "server_tool_use", "tool_result"
_RESULT_CHARS = 2_000  # of a tool's result, in one event


class Speech:
    """The shown side of one run."""

    def __init__(
        self,
        source: RunSource,
        filters: Sequence[Callable[[], OutputFilter]] = (),
        turn: Turns | None = None,
    ) -> None:
        self.source = source
        self.turn = turn or Turns()  # held by the answer that is shown
        self._num_tokens = 0  # so far, those of an interrupted run before it too
        self.finish_reason = "stop"
        self._filters, self._chain = filters, Chain(())  # of the open block
        self._prompt_tokens = self._cached_tokens = self._reasoning_tokens = 0
        # What was used without ids: by answers within the run, as they end; or in all, as an agent counts itself.
        self._inner = Usage()
        self._of_agent = Usage()
        self._accepted = self._rejected = 0  # of the tokens that were proposed
        self._decode_seconds, self._num_gaps = 0.0, 0  # between the tokens of the answers
        self._open: str | None = None  # the kind of the block that is open; None outside of blocks
        self._index = 0  # of the open block, or of the next block
        self._is_implied = False  # block 0 is open without a block_start

    @property
    def num_tokens(self) -> int:
        """Tokens shown so far."""
        return self._num_tokens - self.source.num_before

    @property
    def has_text(self) -> bool:
        """Whether any block was opened."""
        return self._open is not None or self._index > 0

    async def show(self, event: Event) -> None:
        """Show what is no part of an answer: a status, a citation, an event of the run's own."""
        await self.source.emit(event)

    async def take(self, event: Event) -> None:
        """Show an event of the answer whose turn it is. Raises Stopped."""
        if isinstance(event, BlockStart):
            await self._start(event.kind, event)
        elif isinstance(event, BlockStop):
            self.close_block(event)
        elif isinstance(event, Token):
            if self._open is None:
                await self._start(TEXT)
            self._num_tokens += len(event.token_ids)
            try:
                text = self._chain.feed(event.text)
            except Stopped as stopped:
                self._put_text(stopped.text, event.token_ids)
                raise Stopped from None
            self._put_text(text, event.token_ids)
            await self.source.room()

    async def continued(self) -> Token | None:
        """Return what an earlier attempt has shown of the answer whose turn it is, and count it as shown.

        None if it has to be made anew: it is empty, it has other blocks than text, or filters have changed it.
        """
        shown = self.source.shown
        token = None if shown is None or self._filters else shown.plain_answer()
        if token is not None:
            await self.take(Token(text=token.text, token_ids=token.token_ids))
        return token

    async def repeat(self, event: Event, *, is_counted: bool = True) -> None:
        """Show an event of a step that an earlier attempt has finished, as far as it was not shown then.

        `is_counted` False: its tokens are in the counts of an interrupted run before this run.
        """
        if isinstance(event, Done):
            if is_counted:
                self.count(event, event.breakdown.get("decode"))
            self.finish_reason = event.finish_reason
        elif isinstance(event, Status | Citation | Custom):
            await self.show(event)
        else:
            await self.take(event)

    async def say(self, text: str) -> None:
        """Show text that no model has made. Raises Stopped."""
        await self.take(Token(text=text, token_ids=()))

    async def ask(self, call: ToolCall, message: str | None) -> None:
        """Ask the user whether a call may run, whose block is shown. Filters see what is asked. Raises Stopped."""
        self.close_block()
        arguments = self._filtered(call.arguments)
        question = None if message is None else self._filtered(message)
        await self.source.emit(Approval(id=call.id, name=call.name, arguments=arguments, message=question))

    def _filtered(self, text: str) -> str:
        chain = Chain([make() for make in self._filters])
        return chain.feed(text) + chain.flush()

    async def show_call(self, call: ToolCall) -> None:
        """Show a call of an answer that is not shown. Raises Stopped."""
        async with self.turn:
            await self._start(SERVER_TOOL_USE, BlockStart(choice=0, index=0, kind="", id=call.id, name=call.name))
            self._put_text(self._chain.feed(call.arguments))
            self.close_block()

    async def show_result(self, call_id: str, text: str) -> None:
        """Show what a function has returned to the model, as far as the filters let it: a filter that stops ends it."""
        async with self.turn:
            await self._start(TOOL_RESULT, BlockStart(choice=0, index=0, kind=TOOL_RESULT, id=call_id))
            for begin in range(0, len(text), _RESULT_CHARS):
                try:
                    self._put_text(self._chain.feed(text[begin : begin + _RESULT_CHARS]))
                except Stopped as stopped:
                    self._put_text(stopped.text)
                    self.cut_block()
                    return
                await self.source.room()
            try:
                self.close_block()
            except Stopped:
                self.cut_block()

    def close_block(self, stop: BlockStop | None = None) -> None:
        """End the open block; show what the filters held back of it. Raises Stopped."""
        if self._open is None:
            return
        try:
            rest = self._chain.flush()
        except Stopped as stopped:
            self._put_text(stopped.text)
            raise Stopped from None
        self._put_text(rest)
        if not self._is_implied:
            signature = None if stop is None else stop.signature
            self.source.put(BlockStop(choice=0, index=self._index, signature=signature))
        self._open, self._is_implied = None, False
        self._index += 1

    def cut_block(self) -> None:
        """End the open block without what the filters hold: the answer was stopped."""
        if self._open is not None and not self._is_implied:
            self.source.put(BlockStop(choice=0, index=self._index))
        self._open, self._is_implied = None, False
        self._index += 1

    def count(self, done: Done, decode_seconds: float | None) -> None:
        """Add the counts of an answer that was shown to its end; `decode_seconds` from its first token to its last."""
        usage = done.usage
        self._prompt_tokens += usage.prompt_tokens
        self._cached_tokens += usage.cached_tokens
        self._reasoning_tokens += usage.reasoning_tokens
        self._accepted += usage.accepted_prediction_tokens
        self._rejected += usage.rejected_prediction_tokens
        self.finish_reason = done.finish_reason
        if decode_seconds is not None and usage.completion_tokens > 1:
            self._decode_seconds += decode_seconds
            self._num_gaps += usage.completion_tokens - 1

    def add_inner(self, usage: Usage) -> None:
        """Add what an answer has used that the run has asked for over HTTP."""
        self._inner = _sum(self._inner, usage)

    def count_agent(self, usage: Usage) -> None:
        """Note what an agent counts for all of its models, those of this site among them, as far as it counts."""
        self._of_agent = usage

    def done(self, *, latency: float, phases: Mapping[str, float], finish_reason: str = "") -> Done:
        """Return the event of a whole answer: its tokens are those that were shown."""
        shown = Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self.num_tokens,
            cached_tokens=self._cached_tokens,
            reasoning_tokens=self._reasoning_tokens,
            accepted_prediction_tokens=self._accepted,
            rejected_prediction_tokens=self._rejected,
        )
        usage = _sum(shown, _larger(self._inner, self._of_agent))
        breakdown = {}
        if self._num_gaps:
            breakdown = {"decode": self._decode_seconds, "tpot": self._decode_seconds / self._num_gaps}
        return Done(
            finish_reason=finish_reason or self.finish_reason,
            usage=usage,
            latency=latency,
            breakdown=breakdown,
            phases=phases,
        )

    async def _start(self, kind: str, start: BlockStart | None = None) -> None:
        """Open a block. A first text block needs no `block_start`, as in a plain answer."""
        self.close_block()
        self._is_implied = start is None and self._index == 0
        # The functions of a run are called here: a client that would call them itself must not take them for its own.
        kind = SERVER_TOOL_USE if kind == "tool_use" else kind
        self._open, self._chain = kind, Chain([make() for make in self._filters])
        if not self._is_implied:
            id, name = (None, None) if start is None else (start.id, start.name)
            await self.source.emit(BlockStart(choice=0, index=self._index, kind=kind, id=id, name=name))

    def _put_text(self, text: str, token_ids: tuple[int, ...] = ()) -> None:
        if text or token_ids:
            self.source.put(Token(text=text, token_ids=token_ids, index=self._index))


def _sum(one: Usage, other: Usage) -> Usage:
    """Return the first usage with the tokens of the other added."""
    return replace(
        one,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        completion_tokens=one.completion_tokens + other.completion_tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
        reasoning_tokens=one.reasoning_tokens + other.reasoning_tokens,
    )


def _larger(one: Usage, other: Usage) -> Usage:
    """Return the larger of two counts of the same tokens."""
    return Usage(
        prompt_tokens=max(one.prompt_tokens, other.prompt_tokens),
        completion_tokens=max(one.completion_tokens, other.completion_tokens),
        cached_tokens=max(one.cached_tokens, other.cached_tokens),
        reasoning_tokens=max(one.reasoning_tokens, other.reasoning_tokens),
    )
