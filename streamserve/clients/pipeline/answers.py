"""`Answering`: one answer of a model within a run, across the engine's parks. asyncio.

The engine may end an answer early, as for any stream: because its reader is behind, an operator pauses, or it is lost.
The answer then continues from the model's own tokens, whatever the run's filters have shown.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace

from streamserve.clients.base import EngineClient, Generation
from streamserve.clients.pipeline.filters import OutputFilter
from streamserve.clients.pipeline.journal import Journal, Key, joined
from streamserve.clients.pipeline.phases import RunPhases
from streamserve.clients.pipeline.speech import Speech
from streamserve.clients.pipeline.tools import ToolCall
from streamserve.protocol.engine import HOPELESS, Losses, Park
from streamserve.protocol.errors import EngineUnavailable, error_for
from streamserve.protocol.events import TEXT, BlockStart, BlockStop, Done, Error, Event, Status, Token
from streamserve.protocol.measures import FIRST_TOKEN, parts_of
from streamserve.protocol.requests import GenerateRequest

_POLL_SECONDS = 0.1
# How long a run waits for an engine that loads or is replaced.
_ENGINE_SECONDS = 60.0


class Answering:
    """See above. `speech` None: the answer is not shown, and does not wait for readers. `journal`: of a job.

    `through` changes the text of the answer before the run's filters see it.
    """

    def __init__(
        self,
        client: EngineClient,
        request: GenerateRequest,
        speech: Speech | None,
        phases: RunPhases,
        through: OutputFilter | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._client, self._request, self._speech, self._phases = client, request, speech, phases
        self._through, self._journal = through, journal
        self._key: Key | None = None  # in the journal
        self._events: list[Event] = []  # for the journal, neighbouring tokens as one
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._other_blocks: set[int] = set()  # indexes of blocks that are not text
        self._calls: dict[int, tuple[BlockStart, list[str]]] = {}  # of tools, by the index of their block
        self._first_token_at: float | None = None
        self._first = 0  # tokens of the run that were shown before this answer
        self._has_turn = False
        self._losses = Losses()

    async def run(self) -> tuple[str, Done]:
        """Return text and end of the answer. Raises StreamserveError, and Stopped by a filter."""
        span, parts, began = self._phases.begin(FIRST_TOKEN), None, time.monotonic()
        try:
            if self._journal is not None:
                self._key, self._request = self._journal.begin_answer(self._request)
                kept = self._journal.answer(self._key)
                if kept is not None:
                    return await self._repeat(kept)
                await self._continue(self._journal)
            while True:
                generation = await self._accepted()
                try:
                    done = await self._take_all(generation)
                finally:
                    generation.cancel()
                    if self._speech is not None:
                        self._speech.generation.on_read = None
                if done is not None:
                    parts = parts_of(done.breakdown)
                    if self._journal is not None and self._key is not None:
                        events, is_shown = [*self._events, done], self._speech is not None
                        await self._journal.keep_answer(self._key, events, time.monotonic() - began, is_shown=is_shown)
                    return "".join(self._text), done
                assert generation.parked is not None
                if self._text and not generation.accepted.has_token_ids:  # it would begin anew
                    raise EngineUnavailable("The server of the model was lost in the middle of an answer. Try again.")
                self._note_loss(generation.parked)
                await self._wait(generation.parked)
        finally:
            self._phases.end(span, parts)
            if self._has_turn and self._speech is not None:
                self._speech.turn.release()

    async def _repeat(self, events: list[Event]) -> tuple[str, Done]:
        """Show the answer that an earlier attempt of the job has finished, as far as the log lacks it."""
        if self._speech is not None:
            await self._take_turn(begins=False)
        for event in events:
            if isinstance(event, Done):
                await self._end(event)
                return "".join(self._text), event
            self._note(event)
            if self._speech is not None:
                await self._show(event)
        raise EngineUnavailable("The end of an answer was not kept. Try again.")

    async def _continue(self, journal: Journal) -> None:
        """Go on from what an earlier attempt has shown of this answer, if it was cut off in its middle."""
        if self._speech is None or self._through is not None or journal.memo.begun != self._key:
            return
        await self._take_turn(begins=False)
        token = await self._speech.continued()
        if token is not None:
            self._note(Token(text=token.text, token_ids=token.token_ids))
            self._note_shown(self._events[-1])

    async def _end(self, done: Done) -> None:
        """Show the rest of the answer whose turn it is, and count it."""
        if self._speech is None:
            return
        if self._through is not None and (rest := self._through.flush()):
            await self._speech.say(rest)
            self._note_shown(Token(text=rest, token_ids=()))
        self._speech.count(done.usage, done.finish_reason)
        self._note_shown(done)

    def _note_shown(self, event: Event) -> None:
        if self._journal is not None:
            self._journal.note(event, self._key)

    async def _accepted(self) -> Generation:
        """Ask the engine to begin, or to continue; wait for one that is on its way."""
        # A row of a batch would only be run again from its beginning: it waits until its batch expires.
        until = math.inf if self._request.latency_class == "batch" else time.monotonic() + _ENGINE_SECONDS
        while True:
            shown, num_read = (tuple(self._token_ids),) if self._token_ids else (), self._num_read()
            request = replace(
                self._request,
                output_token_ids=shown,
                first_token_at=self._first_token_at,
                reader_tokens=None if num_read is None else (num_read,),
                num_losses=self._losses.num_losses,
            )
            try:
                generation = await self._client.generate(request)
            except EngineUnavailable as refused:
                if refused.lost is not None:
                    self._note_loss(refused.lost)
                if self._client.describe().state == "failed" or time.monotonic() > until:
                    raise
                if self._speech is not None and self._has_turn:
                    await self._speech.show(Status(status="loading", message="The model is being loaded."))
                await asyncio.sleep(_POLL_SECONDS)
                continue
            if not self._token_ids:  # what was decided for it stays when it goes on
                accepted = generation.accepted
                sampling = replace(request.sampling, seed=accepted.seed, max_tokens=accepted.max_tokens)
                unset = tuple(name for name in ("seed", "max_tokens") if getattr(request.sampling, name) is None)
                self._request = replace(self._request, sampling=sampling, unset=request.unset + unset)
            return generation

    def _note_loss(self, park: Park) -> None:
        """Count a park; raise EngineUnavailable if the answer itself ends its engines."""
        self._losses.note(park, len(self._token_ids))
        if self._losses.is_hopeless:
            raise EngineUnavailable(HOPELESS, code="engine_died")

    async def _take_all(self, generation: Generation) -> Done | None:
        """Take the events of one admission; None if the engine has parked it."""
        if self._speech is not None:
            self._speech.generation.on_read = lambda: self._report(generation)
        async for event in generation:
            if isinstance(event, Error):
                raise error_for(event.code, event.message, retryable=event.retryable)
            if isinstance(event, Done):
                if self._speech is not None:
                    await self._take_turn()
                    await self._end(event)
                return event
            self._note(event)
            if self._speech is not None:
                await self._take_turn()
                await self._show(event)
        return None

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools that the answer has made, in order."""
        return tuple(
            ToolCall(id=start.id or f"call_{index}", name=start.name or "", arguments="".join(pieces))
            for index, (start, pieces) in self._calls.items()
        )

    def _note(self, event: Event) -> None:
        if self._journal is not None and isinstance(event, Token | BlockStart | BlockStop):
            last = self._events[-1] if self._events else None
            if isinstance(event, Token) and isinstance(last, Token) and last.index == event.index:
                self._events[-1] = joined(last, event)
            else:
                self._events.append(event)
        if isinstance(event, BlockStart) and event.kind != TEXT:
            self._other_blocks.add(event.index)
            if event.kind == "tool_use":
                self._calls[event.index] = (event, [])
        elif isinstance(event, Token):
            if event.index not in self._other_blocks:
                self._text.append(event.text)
            elif event.index in self._calls:
                self._calls[event.index][1].append(event.text)
            self._token_ids += event.token_ids
            if self._first_token_at is None:
                self._first_token_at = time.monotonic()

    async def _show(self, event: Event) -> None:
        assert self._speech is not None
        if isinstance(event, Token) and self._through is not None and event.index not in self._other_blocks:
            event = replace(event, text=self._through.feed(event.text))
        if isinstance(event, Token | BlockStart | BlockStop):
            self._note_shown(event)
            await self._speech.take(event)
        elif isinstance(event, Status):
            await self._speech.show(event)

    async def _take_turn(self, *, begins: bool = True) -> None:
        """Wait until the answers before this one are shown whole."""
        if not self._has_turn and self._speech is not None:
            await self._speech.turn.acquire(self._key)
            self._has_turn, self._first = True, self._speech.num_tokens
            if begins and self._journal is not None and self._key is not None:
                await self._journal.memo.begin(self._key)

    def _num_read(self) -> int | None:
        """Return how many tokens of this answer the reader has; None if it does not wait for readers."""
        if self._speech is None or self._speech.generation.num_read is None:
            return None
        return max(0, min(len(self._token_ids), self._speech.generation.num_read - self._first))

    def _report(self, generation: Generation) -> None:
        num_read = self._num_read()
        generation.reader_at(None if num_read is None else (num_read,))

    async def _wait(self, park: Park) -> None:
        """Wait until the engine can be asked to go on."""
        if park.reason != "lead":
            await asyncio.sleep(max(_POLL_SECONDS, park.resume_seconds))
            return
        assert self._speech is not None
        moved = asyncio.Event()
        self._speech.generation.on_read = moved.set
        try:
            while (num_read := self._num_read()) is not None and len(self._token_ids) - num_read > park.resume_at_lead:
                moved.clear()
                await moved.wait()
        finally:
            self._speech.generation.on_read = None
