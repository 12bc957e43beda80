"""`Answering`: one answer of a model within a run, across the engine's parks and refusals. asyncio.

The engine may end an answer early, as for any stream: because its reader is behind, an operator pauses, or it is lost.
The answer then continues from the model's own tokens, whatever the run's filters have shown. Its `EngineRun` has when
the engine is asked, and which refusals are final, as for streams; `Answering` counts what its readers lack of it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from streamserve.clients.base import EngineClient, Generation
from streamserve.clients.engine_run import EngineRun, ReaderTokens
from streamserve.clients.pipeline.filters import OutputFilter
from streamserve.clients.pipeline.journal import Journal, Key, joined
from streamserve.clients.pipeline.phases import RunPhases
from streamserve.clients.pipeline.speech import Speech
from streamserve.clients.pipeline.tools import ToolCall
from streamserve.dialects.fold import TOOL_USE, Answer, AnswerChoice
from streamserve.protocol.errors import EngineUnavailable, error_for
from streamserve.protocol.events import TEXT, BlockStart, BlockStop, Done, Error, Event, Status, Token
from streamserve.protocol.measures import FIRST_TOKEN, parts_of
from streamserve.protocol.requests import Admission, GenerateRequest, Resume
from streamserve.tracing.answers import describe_inner, inner_answer

# How long a run waits for an engine that refuses a new answer because it loads, is replaced, or is full.
ENGINE_SECONDS = 60.0


class Answering:
    """See above. `speech` None: the answer is not shown, and does not wait for readers. `journal`: of a job.

    `through` changes the text of the answer before the run's filters see it. Once it has begun, refusals are waited for
    for `window_seconds`.
    """

    def __init__(
        self,
        client: EngineClient,
        request: GenerateRequest,
        admission: Admission,
        speech: Speech | None,
        phases: RunPhases,
        through: OutputFilter | None = None,
        journal: Journal | None = None,
        window_seconds: float = math.inf,
    ) -> None:
        self._engine, self._speech, self._phases = EngineRun(client, request, admission, self), speech, phases
        self._through, self._journal = through, journal
        self._key: Key | None = None  # in the journal
        self._events: list[Event] = []  # for the journal
        self._answer = Answer()
        self._first_token_at: float | None = None
        self._first = 0  # tokens of the run that were shown before this answer
        self._has_turn = False
        self._window_seconds = window_seconds
        self._num_cached_tokens: int | None = None  # of the run that gave the first token, once it is parked
        self._asked_at: float | None = None  # when its engine was last asked

    async def run(self) -> tuple[str, Done]:
        """Return text and end of the answer. Raises StreamserveError, and Stopped by a filter."""
        with inner_answer(self._engine.request, self._engine.admission.trace) as span:
            if span is None:
                return await self._run()
            self._engine.admission = replace(self._engine.admission, trace=span.trace)
            text, done = await self._run()
            if self._asked_at is not None:  # else an earlier attempt has made it
                parks = self._engine.parking.num_parks
                describe_inner(span, done, None if parks else self._asked_at, num_parks=parks)
            return text, done

    async def _run(self) -> tuple[str, Done]:
        span, parts, began = self._phases.begin(FIRST_TOKEN), None, time.monotonic()
        try:
            if self._journal is not None:
                self._key, self._engine.request = self._journal.begin_answer(self._engine.request)
                if self._speech is not None:
                    self._speech.turn.expect(self._key)
                kept = self._journal.answer(self._key)
                if kept is not None:
                    return await self._repeat(kept)
                await self._continue(self._journal)
            while True:
                generation = await self._admitted()
                done = await self._take_all(generation)
                if done is not None:
                    parts = parts_of(done.breakdown)
                    if self._journal is not None and self._key is not None:
                        events, is_shown = [*joined(self._events), done], self._speech is not None
                        await self._journal.keep_answer(self._key, events, time.monotonic() - began, is_shown=is_shown)
                    return self._choice.text, done
                park = self._engine.drain()
                if self._choice.text and not generation.accepted.has_token_ids:  # it would begin anew
                    raise EngineUnavailable("The server of the model was lost in the middle of an answer. Try again.")
                await self._wait(self._engine.lose(park))
        finally:
            self._engine.cancel()
            self._phases.end(span, parts)
            if self._speech is not None and self._key is not None:
                self._speech.turn.expect_no_more(self._key)
            if self._has_turn and self._speech is not None:
                self._speech.turn.release()

    async def _repeat(self, events: list[Event]) -> tuple[str, Done]:
        """Show the answer that an earlier attempt of the job has finished, as far as the log lacks it."""
        if self._speech is not None:
            await self._take_turn(begins=False)
        for event in events:
            if isinstance(event, Done):
                await self._end(event, is_counted=self._journal is None or self._key not in self._journal.before)
                return self._choice.text, event
            self._note(event)
            if self._speech is not None:
                await self._show(event)
        raise EngineUnavailable("The end of an answer was not kept. Try again.")

    async def _continue(self, journal: Journal) -> None:
        """Continue what an earlier attempt has shown of this answer, if it was cut off in its middle."""
        if self._speech is None or self._through is not None or journal.memo.begun != self._key:
            return
        await self._take_turn(begins=False)
        token = await self._speech.continued()
        if token is not None:
            self._note(Token(text=token.text, token_ids=token.token_ids))
            self._num_cached_tokens = 0  # what is found now may be this answer's own blocks
            self._note_shown(self._events[-1])

    async def _end(self, done: Done, *, is_counted: bool = True) -> None:
        """Show the rest of the answer whose turn it is, and count it, unless an interrupted run before has."""
        if self._speech is None:
            return
        if self._through is not None and (rest := self._through.flush()):
            await self._speech.say(rest)
            self._note_shown(Token(text=rest, token_ids=()))
        decode_seconds = done.breakdown.get("decode")
        if self._engine.parking.num_parks and self._first_token_at is not None:
            # The engine has measured its last part alone.
            decode_seconds = time.monotonic() - self._first_token_at
        if is_counted:
            self._speech.count(done, decode_seconds)
        self._speech.finish_reason = done.finish_reason
        self._note_shown(done)

    def _note_shown(self, event: Event) -> None:
        if self._journal is not None:
            self._journal.note(event, self._key)

    async def _admitted(self) -> Generation:
        """Ask the engine to begin, or to continue; wait while it refuses. Raises a refusal that is final."""
        engine = self._engine
        while True:
            self._asked_at = time.monotonic()
            shown = (tuple(self._choice.token_ids),) if self._choice.token_ids else ()
            resume = Resume(output_token_ids=shown, first_token_at=self._first_token_at)
            given = await engine.ask(resume, self._patience_seconds())
            if not isinstance(given, list):
                break
            await self._wait(given)
        if engine.take(given):
            await self._show_wait([Status(status="resumed")])
        return given

    def _patience_seconds(self) -> float:
        # A row of a batch would only be run again from its beginning: it waits until its batch expires.
        if self._engine.request.is_row:
            return math.inf
        if self._engine.was_admitted:
            return self._window_seconds
        return 0.0 if self._engine.client.describe().state == "failed" else ENGINE_SECONDS

    async def _show_wait(self, statuses: Iterable[Status]) -> None:
        """Show what the answer waits for, unless it is another that is being shown."""
        if self._speech is not None and (self._has_turn or not self._speech.turn.is_held):
            for status in statuses:
                await self._speech.show(status)

    async def _wait(self, statuses: Iterable[Status]) -> None:
        """Show why the engine does not make the answer; wait until it is to be asked, or the reader has read more."""
        await self._show_wait(statuses)
        moved = asyncio.Event()
        with self._on_read(moved.set):
            while (seconds := self._engine.seconds_left) != 0.0:
                moved.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await moved.wait()

    @contextmanager
    def _on_read(self, notify: Callable[[], None]) -> Iterator[None]:
        """Call `notify` when the reader's position changes."""
        if self._speech is None:
            yield
            return
        self._speech.source.on_read.add(notify)
        try:
            yield
        finally:
            self._speech.source.on_read.discard(notify)

    async def _take_all(self, generation: Generation) -> Done | None:
        """Take the events of one admission; None if the engine has parked it."""
        with self._on_read(self._engine.report):
            async for event in generation:
                if isinstance(event, Error):
                    raise error_for(event.code, event.message, retryable=event.retryable)
                if isinstance(event, Done):
                    if self._num_cached_tokens is not None:
                        event = replace(event, usage=replace(event.usage, cached_tokens=self._num_cached_tokens))
                    if self._speech is not None:
                        await self._take_turn()
                        await self._end(event)
                    return event
                self._note(event)
                if self._speech is not None:
                    await self._take_turn()
                    await self._show(event)
        if self._num_cached_tokens is None and self._first_token_at is not None:
            self._num_cached_tokens = generation.num_cached_tokens  # later runs find this answer's own blocks
        return None

    @property
    def _choice(self) -> AnswerChoice:
        """What the model has made so far: an answer of a run has one choice."""
        return self._answer.choices[0]

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools that the answer has made, in order."""
        return tuple(
            ToolCall(id=call.block.id or f"call_{call.block.index}", name=call.block.name or "", arguments=call.text)
            for call in self._choice.blocks
            if call.kind == TOOL_USE
        )

    def _note(self, event: Event) -> None:
        if self._journal is not None and isinstance(event, Token | BlockStart | BlockStop):
            self._events.append(event)
        self._answer.feed(event)
        if isinstance(event, Token) and self._first_token_at is None:
            self._first_token_at = time.monotonic()

    async def _show(self, event: Event) -> None:
        assert self._speech is not None
        if isinstance(event, Token) and self._through is not None and self._choice.kind_of(event.index) == TEXT:
            event = replace(event, text=self._through.feed(event.text))
        if isinstance(event, Token | BlockStart | BlockStop):
            self._note_shown(event)
            await self._speech.take(event)
        elif isinstance(event, Status):
            await self._speech.show(event)

    async def _take_turn(self, *, begins: bool = True) -> None:
        """Wait until the earlier answers are shown whole."""
        if not self._has_turn and self._speech is not None:
            await self._speech.turn.acquire(self._key)
            self._has_turn, self._first = True, self._speech.num_tokens
            if begins and self._journal is not None and self._key is not None:
                await self._journal.memo.begin(self._key)

    # How far it is ahead of its readers, for the engine

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self._choice.token_ids)

    @property
    def reader_tokens(self) -> ReaderTokens:
        """How many tokens of this answer the reader has; None if it does not wait for readers."""
        if self._speech is None or self._speech.source.num_read is None:
            return None
        return (max(0, min(len(self._choice.token_ids), self._speech.source.num_read - self._first)),)

    @property
    def num_unread(self) -> int:
        """Tokens that the reader has not received; 0 if it does not wait for readers."""
        read = self.reader_tokens
        return 0 if read is None else len(self._choice.token_ids) - read[0]

    @property
    def is_away(self) -> bool:
        """Whether the readers of the run look away."""
        return self._speech is not None and self._speech.source.is_away
