"""`EngineCore`: add, abort and stop sequences; `step()` runs the batch once and returns the updates.

Pure and synchronous: no thread, no clock (it is given one), no tensor, no text. `step` and `stats` belong to one
thread; all else only appends to a deque and may be called from any thread. (Idea: nano-vllm's `LLMEngine.step`;
SGLang's overlap loop; vLLM's EngineCore, with its lesson that an unknown id is ignored and counted, never asserted.)

Failures: a sequence's own (`Sampled.error`) ends that sequence; too little memory splits the step; a failed integrity
check ends the sequences that hold blocks (quarantine); an exception of the runner is raised: the engine is dead. A
suspect, whose steps have ended engines before, is computed in steps of its own until it has a token.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from streamserve.engine.config import EngineConfig
from streamserve.engine.drafter import Drafter
from streamserve.engine.in_flight import InFlight, Launched, RunnerFailed, halves, still_ready
from streamserve.engine.kv.free_list import IntegrityError
from streamserve.engine.kv.pool import BlockPool
from streamserve.engine.output import OutputProcessor, SequenceUpdate
from streamserve.engine.plan import (
    Chunk,
    DraftModel,
    OnStep,
    Runner,
    StepOutOfMemory,
    StepPlan,
    StepResult,
)
from streamserve.engine.policy.backlog import Backlog, Patience, Ticket
from streamserve.engine.policy.drafting import Drafting
from streamserve.engine.policy.leads import is_held
from streamserve.engine.policy.usage import Usage
from streamserve.engine.scheduler import Schedule, Scheduler
from streamserve.engine.sequence import SequenceRequest
from streamserve.protocol.engine import CoreStats

logger = logging.getLogger(__name__)


class EngineCore:
    """One model's engine. `on_plan` and `on_step` are `InFlight`'s; `on_evict` is `BlockPool`'s (tests).

    `draft` proposes tokens before a step, in engines that take one step at a time.

    With overlap a step is launched before the previous step is collected, so that the device never waits for the core.
    A sequence may then turn out to be over with a token in flight: that token is dropped, and never cached.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        clock: Callable[[], float],
        on_plan: Callable[[StepPlan], None] | None = None,
        *,
        revision: str = "",
        on_evict: Callable[[int], None] | None = None,
        on_step: OnStep | None = None,
        draft: DraftModel | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self.pool = BlockPool(  # a new pool after a quarantine
            runner.num_blocks,
            runner.block_size,
            revision=revision,
            prefix_caching=config.prefix_caching,
            on_evict=on_evict,
            windows=runner.windows,
            step_tokens=config.max_num_batched_tokens,
        )
        self.scheduler = Scheduler(config, self.pool)
        self._output = OutputProcessor(config, self.pool, self.scheduler)
        self._sequences = self._output.sequences
        self._in_flight = InFlight(
            runner,
            clock,
            step_seconds=config.step_seconds,
            predict=self.scheduler.step_time.predict,
            on_plan=on_plan,
            on_step=on_step,
        )
        self._most_in_flight = 1 if _overlaps(config, runner) else 0
        self._drafter: Drafter | None = None
        if draft is not None and not self._most_in_flight and self.scheduler.speculation is not None:
            _check_same_blocks(runner, draft.runner)
            self._drafter = Drafter(draft.runner, runner.vocab_size, clock)
            self.scheduler.drafting = Drafting(weight=draft.weight, max_len=draft.max_len)
        # Bounded by the accepted requests, which the client bounds: each adds at most an add, an abort, a stop, and its
        # reader's positions during one step.
        self._inbox: deque[Callable[[], None]] = deque()
        self._usage = Usage(config.policy.hungry_seconds)
        self._is_resting = False
        self._num_out_of_memory = 0
        self._num_short_drafts = 0  # passes of the draft model that ran out of memory
        self._num_quarantines = 0
        self._seconds_per_token = 0.0  # of what waits, when it was known last
        self._seen = Patience(config.classes)  # at the door, since the last step
        # Sequences added or ended (None) since the backlog was made, by id; and of these the ones that the inbox has
        # given to the engine thread, which the next backlog counts. Bounded like the inbox.
        self._changes: dict[int, Ticket | None] = {}
        self._counted: list[tuple[int, Ticket | None]] = []
        self.stats = self._count()  # after the last step
        self._backlog = self._make_backlog()  # the same

    def add(self, request: SequenceRequest) -> None:
        """Queue a sequence. The caller has checked that it can fit (`max_servable_tokens`)."""
        now = self._clock()
        ticket = self.scheduler.queue.ticket(request, now)
        if ticket.is_new:
            self._seen = self.backlog.patience_at(now)  # the queue may be empty until this request
        self._change(request.seq_id, ticket)
        self._inbox.append(lambda: self._output.add(request, self._clock()))

    def abort(self, seq_id: int) -> None:
        """End a sequence without an update: no plan made after this call holds it. Unknown ids are counted."""
        self._change(seq_id, None)
        self._inbox.append(partial(self._output.abort, seq_id))

    def stop(self, seq_id: int, at: int) -> None:
        """End a sequence after `at` output tokens (a stop string, found late): later tokens are dropped, not cached."""
        self._change(seq_id, None)
        self._inbox.append(lambda: self._output.truncate(seq_id, at, self._clock()))

    def reader_at(self, seq_id: int, num_tokens: int | None, is_away: bool = False) -> None:
        """Set how many output tokens the reader has received; None: stop waiting for readers.

        `is_away`: it reads nothing until the next report, which may be of the same position.
        """
        self._inbox.append(lambda: self._output.reader_at(seq_id, num_tokens, self._clock(), is_away=is_away))

    def pause(self) -> None:
        """Park every sequence, and each new sequence until `resume`."""
        self._inbox.append(lambda: self._output.pause(self._clock()))

    def resume(self) -> None:
        """Accept sequences again."""
        self._inbox.append(self._output.resume)

    def note_refusal(self) -> None:
        """Record that a request was refused at the door: without that the queue would be longer."""
        now = self._clock()
        self._seen = self.backlog.patience_at(now).refused(now)

    @property
    def backlog(self) -> Backlog:
        """What the engine has taken on: after the last step, with what was added and ended since. For any thread."""
        changes, backlog = self._changes.copy(), self._backlog
        patience = backlog.patience.merged(self._seen)
        if not changes and patience is backlog.patience:
            return backlog
        return backlog.changed(changes, patience)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything now."""
        return bool(self._inbox or self._in_flight or (self._sequences and not self._is_resting))

    @property
    def is_resting(self) -> bool:
        """Whether all sequences wait, for their readers or for time to pass: a step now and then is enough."""
        return bool(self._sequences) and not self.has_work

    def step(self) -> tuple[SequenceUpdate, ...]:
        """Launch a step, collect the step that is due, and return the updates, in the plans' order."""
        self._is_resting = False
        try:
            self._drain()
            has_launched = self._launch(self._try_suspect(self._plan(self._clock())))
            if not has_launched or len(self._in_flight) > self._most_in_flight:
                self._collect()
            self._check_counts()
        except RunnerFailed as failed:
            raise failed.error from failed.error.__cause__  # unchanged
        except Exception:
            self._quarantine()
        finally:
            self._in_flight.rest()
        if self._config.check_integrity:
            self.pool.check_integrity(self._sequences.values())
        self.stats = self._count()
        self._publish()
        return self._output.take_updates()

    def _change(self, seq_id: int, ticket: Ticket | None) -> None:
        """Note that a sequence was added or, without a ticket, ended; before the inbox takes the same."""
        self._changes[seq_id] = ticket
        self._inbox.append(partial(self._counted.append, (seq_id, ticket)))

    def _publish(self) -> None:
        """Replace the backlog, and then forget the changes that it counts."""
        self._backlog = self._make_backlog()
        for seq_id, ticket in self._counted:
            if self._changes.get(seq_id) is ticket:  # otherwise it has ended since
                self._changes.pop(seq_id, None)
        self._counted.clear()

    def _drain(self) -> None:
        queue = self.scheduler.queue
        queue.patience = queue.patience.merged(self._seen)
        while self._inbox:
            self._inbox.popleft()()

    def _plan(self, now: float) -> tuple[Chunk, ...]:
        """Choose what to compute, after sequences past their deadline have ended."""
        self._output.expire_deadlines(now)
        schedule = self.scheduler.schedule(now)
        for sequence, park in schedule.parked:
            self._output.emit(sequence, now, park=park)
        chunks = self._with_drafts(schedule)
        self._check_plan(chunks)
        # After `schedule`: a sequence that can start now is not refused, however long the step before took.
        expired = self.scheduler.queue.expired(now)
        self._usage.num_expired += len(expired)
        for sequence in expired:
            self._output.emit(sequence, now, error="queue_timeout")
        self._output.note_starts(chunks, now)
        self._output.note_places(now)
        self._usage.look(self.scheduler.running, now)
        if not (chunks or schedule.parked or expired or self._in_flight):
            self._rest(now)
        return chunks

    def _with_drafts(self, schedule: Schedule) -> tuple[Chunk, ...]:
        """Return the step's chunks, with what the draft model proposes."""
        drafting = self.scheduler.drafting
        if not schedule.drafts or self._drafter is None or drafting is None:
            return schedule.chunks
        try:
            drafted = self._in_flight.draft(self._drafter, schedule.drafts, self._sequences, drafting.note_pass)
        except StepOutOfMemory:
            self._num_short_drafts += 1
            drafting.rest()
            logger.warning("memory ran out in a pass of the draft model, which proposes nothing for a while")
            return schedule.chunks
        return self.scheduler.with_drafts(schedule, drafted)

    def _rest(self, now: float) -> None:
        """Nothing advances: all that run are held, or the first of the queue can never be served and fails."""
        stuck = [one for one in self.scheduler.running if not is_held(one, self._config)]
        if stuck:
            raise IntegrityError(f"{len(stuck)} sequences run, and none of them can advance")
        self._is_resting = bool(self.scheduler.running)
        if self.scheduler.waiting and not self.scheduler.running:
            self._output.fail(self.scheduler.waiting[0], "never_fits", now)

    def _check_plan(self, chunks: tuple[Chunk, ...]) -> None:
        """Raise `IntegrityError` unless each chunk continues its sequence, in its own blocks, within the budget."""
        num_tokens, most = sum(len(chunk.token_ids) for chunk in chunks), self._config.max_num_batched_tokens
        if num_tokens > most or len(chunks) > self._config.max_num_seqs:
            raise IntegrityError(f"{num_tokens} tokens in {len(chunks)} chunks are planned; {most} is the budget")
        if len({chunk.seq_id for chunk in chunks}) != len(chunks):
            raise IntegrityError("a plan holds a sequence twice")
        block_size = self.pool.block_size
        for chunk in chunks:
            sequence = self._sequences[chunk.seq_id]
            num_launched, num_computed = sequence.num_launched_tokens, sequence.num_computed_tokens
            first, end = chunk.start // block_size, chunk.start + len(chunk.token_ids)
            has_blocks = end <= len(chunk.block_table) * block_size and 0 not in chunk.block_table[first:]
            for table in chunk.other_tables:
                has_blocks = has_blocks and end <= len(table) * block_size and 0 not in table[first:]
            if chunk.start != num_launched or num_computed > num_launched or not has_blocks:
                raise IntegrityError(
                    f"sequence {chunk.seq_id} has {num_launched} launched and {num_computed} computed tokens; its chunk"
                    f" covers {chunk.start} to {end} in {len(chunk.block_table)} blocks"
                )

    def _check_counts(self) -> None:
        self.pool.check_counts()
        running, waiting, known = len(self.scheduler.running), len(self.scheduler.waiting), len(self._sequences)
        if running + waiting != known:
            raise IntegrityError(f"running {running} + waiting {waiting} != known {known} sequences")

    def _launch(self, chunks: tuple[Chunk, ...]) -> bool:
        """Launch a step; False if no chunk can be computed: none is due, or memory is short."""
        if not chunks:
            return False
        try:
            self._in_flight.launch(chunks, self._sequences)
        except StepOutOfMemory:
            self._note_out_of_memory(chunks)
            if not self._in_flight:  # otherwise the step in flight needs memory too: collect it, and plan less next
                self._run_halves(chunks)
            return False
        return True

    def _try_suspect(self, chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        """Run the first suspect of a plan as a step of its own, and return the chunks that are not suspects'.

        One at a time: what was computed beside it before is passed on before the next suspect is tried.
        """
        suspects = [chunk for chunk in chunks if self._sequences[chunk.seq_id].is_suspect]
        if not suspects:
            return chunks
        while self._in_flight:  # Invariant: nothing else is in flight
            self._collect()
        alone = still_ready((suspects[0],), self._sequences)
        if alone:
            try:
                self._run(alone)
            except StepOutOfMemory:
                self._note_out_of_memory(alone)
                self._run_halves(alone)
        return still_ready(tuple(chunk for chunk in chunks if chunk not in suspects), self._sequences)

    def _collect(self) -> None:
        """Wait for the oldest step in flight, if any, and process its result."""
        if not self._in_flight:
            return
        step = self._in_flight.pop()
        try:
            result, seconds = self._in_flight.collect(step)
        except StepOutOfMemory:
            self._in_flight.discard_all()  # they were launched on top of it
            self._note_out_of_memory(step.plan.chunks)
            self._run_halves(step.plan.chunks)
        else:
            self._process(step, result, seconds)

    def _process(self, step: Launched, result: StepResult, seconds: float) -> None:
        self._drain()  # sequences aborted meanwhile get no update
        if all(chunk.scores is None for chunk in step.plan.chunks):  # the model of step times is of plain steps
            self.scheduler.step_time.note(step.plan, seconds)
            drafting, speculation = self.scheduler.drafting, self.scheduler.speculation
            has_drafted = drafting is not None and drafting.note_step(step.plan, result, seconds)
            if speculation is not None and not has_drafted:
                speculation.note_step(step.plan, result, seconds)
        self._usage.note_step(step, seconds)
        self._output.process_step(step, result, self._clock())

    def _run_halves(self, chunks: tuple[Chunk, ...]) -> None:
        """Run a plan that was too large for memory in two parts, one after the other; no other step is in flight."""
        for half in halves(chunks, self.pool.block_size):
            self._drain()  # sequences aborted since the plan was made are in no new plan
            ready = still_ready(half, self._sequences)
            if ready:
                self._run_alone(ready)

    def _run_alone(self, chunks: tuple[Chunk, ...]) -> None:
        """Run a step. If memory runs out again, the largest chunk fails; the rest is planned again."""
        try:
            self._run(chunks)
        except StepOutOfMemory:
            largest = max(chunks, key=lambda chunk: len(chunk.token_ids))
            self._output.fail(self._sequences[largest.seq_id], "out_of_memory", self._clock())

    def _run(self, chunks: tuple[Chunk, ...]) -> None:
        """Launch, collect and process a step; no other step is in flight."""
        self._in_flight.launch(chunks, self._sequences)
        step = self._in_flight.pop()
        result, seconds = self._in_flight.collect(step)
        self._process(step, result, seconds)

    def _note_out_of_memory(self, chunks: tuple[Chunk, ...]) -> None:
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        self._num_out_of_memory += 1
        self.scheduler.lower_budget(num_tokens)
        logger.warning(
            "memory ran out in a step of %d tokens; steps now have %d at most", num_tokens, self.scheduler.token_budget
        )

    def _quarantine(self) -> None:
        """Recover from a failed integrity check, or any other error of our own bookkeeping."""
        logger.exception("the engine's bookkeeping is inconsistent: it continues with an empty block pool")
        self._num_quarantines += 1
        self._output.quarantine(self._clock())
        self.pool = self._output.pool

    def _make_backlog(self) -> Backlog:
        scheduler, stats = self.scheduler, self.stats
        if stats.queued_tokens and stats.queued_seconds:
            self._seconds_per_token = stats.queued_seconds / stats.queued_tokens
        preempted = (one for one in scheduler.waiting if one.scheduled_at is not None)
        return Backlog(
            waiting=tuple(one.ticket for one in scheduler.waiting if one.scheduled_at is None),
            running=tuple((one.ticket, one.scheduled_at or 0.0) for one in (*scheduler.running, *preempted)),
            patience=scheduler.queue.patience,
            seconds_per_token=self._seconds_per_token,
            cold_share=self._output.cold_share,
            blocks_used=stats.blocks_used,
            blocks_total=stats.blocks_total,
        )

    def _count(self) -> CoreStats:
        pool, output, usage = self.pool.stats(), self._output, self._usage
        readers, speculation = usage.readers(self.scheduler.running), self.scheduler.speculation
        return CoreStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            blocks_total=pool.total,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            blocks_free=pool.free,
            prefix_queries=pool.prefix_queries,
            prefix_hits=pool.prefix_hits,
            prompt_tokens=output.num_prompt_tokens,
            generation_tokens=output.num_generation_tokens,
            preemptions=self.scheduler.num_preemptions,
            steps=self._in_flight.num_launched,
            unknown_ids=output.num_unknown_ids,
            queued_tokens=self.scheduler.queued_tokens,
            queued_seconds=self.scheduler.queued_seconds(),
            parks=output.num_parks,
            out_of_memory=self._num_out_of_memory + self._num_short_drafts,
            quarantines=self._num_quarantines,
            token_budget=self.scheduler.token_budget,
            is_paused=output.is_paused,
            grammar_waits=output.num_grammar_waits,
            readers_away=readers["away"],
            readers_late=readers["late"],
            readers_hungry=readers["hungry"],
            readers_ahead=readers["ahead"],
            readers_pace=usage.readers_pace(self.scheduler.running),
            rows=readers["row"],
            expired=usage.num_expired,
            computed_tokens=usage.num_computed,
            recomputed_tokens=usage.num_recomputed,
            busy_seconds=usage.busy_seconds,
            proposed_tokens={} if speculation is None else dict(speculation.num_proposed),
            accepted_tokens={} if speculation is None else dict(speculation.num_accepted),
            drafted_tokens={} if speculation is None else dict(speculation.num_drafted),
            accepted_drafts={} if speculation is None else dict(speculation.num_drafted_accepted),
        )


def _overlaps(config: EngineConfig, runner: Runner) -> bool:
    if config.overlap and not runner.can_overlap:
        raise ValueError("overlap=True, and this runner takes one step at a time. Leave overlap out.")
    return runner.can_overlap if config.overlap is None else config.overlap


def _check_same_blocks(runner: Runner, draft: Runner) -> None:
    if (draft.num_blocks, draft.block_size) != (runner.num_blocks, runner.block_size):
        raise ValueError(
            f"the draft model has {draft.num_blocks} blocks of {draft.block_size} tokens, and the model"
            f" {runner.num_blocks} of {runner.block_size}"
        )
