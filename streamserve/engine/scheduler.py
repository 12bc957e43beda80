"""`Scheduler`: which tokens of which sequences the next step computes.

No prefill and no decode phase: every running sequence's computed tokens chase its known tokens under one token budget.
Knows ints, one order key, and how far readers are; no tensors, no text. Engine thread only; time is an argument.
(Idea: vLLM V1's scheduler; Andes, arXiv 2404.16283, for the readers; nano-vllm for the size.)

The policy. Readers are slower than the engine, so it serves more of them than a step holds (`max_num_seqs`): what has
blocks is admitted, and each step chooses among the admitted. Sequences have ranks: answers to readers, then rows of
batches, in the seats, tokens and memory that answers leave; what is prefilled only for the cache is computed while
there is nothing else to do. Each rank is ordered, and then packed into what is left of the step:

1. Hungry sequences decode: their readers have tokens for less than `hungry_seconds`. Least ahead first. Without a
   reader a sequence is always hungry.
2. Prompts that have begun continue. The head of the queue is admitted while hungry sequences and prompts together are
   fewer than a step holds, and its blocks fit. So no admission takes a token from a reader that would wait for it.
   A step that pays for its start takes no further prompts: the first prompts of a burst do not wait for the last.
3. Sequences that are ahead fill the rest, oldest key first. Those left out are paused: they keep their blocks.

Memory alone makes a sequence give blocks back (see `_make_room`); and a reader that is gone. A sequence `lead_tokens`
ahead of its reader is held: paused until that has read on, whatever is free (see `leads`).

The queue is in the order of the key, which never changes: arrival + the class's TTFT budget + a little for a long
prompt (see `LatencyClass.order_seconds`). What is late goes behind what is in time (see `Patience`). Among tenants
those further below their share go first (see `TenantShares`).

Bounds. An admitted sequence with a token is passed by hungrier sequences only, and their hunger falls with each token
that they get, while its own grows by a second a second: of n admitted sequences with paces up to p, it gets a token
within n * (p * d + 2) steps, where d is by how many seconds it was less hungry than the hungriest. Half of a step at
least is for prompts that have begun. A request that waits for longer than its class's `max_queue_seconds` is refused;
among the requests of one tenant, none that arrives later than r by more than the TTFT of r's class - the smallest TTFT
of any class is admitted before r, until r is late.
"""

from __future__ import annotations

import math
import sys
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter

from streamserve.engine.budget import StepBudget, TokenBudget, chunk_of
from streamserve.engine.config import EngineConfig
from streamserve.engine.kv.free_list import IntegrityError
from streamserve.engine.kv.pool import BlockPool
from streamserve.engine.plan import Chunk, Draft
from streamserve.engine.policy import leads
from streamserve.engine.policy.backlog import Rank
from streamserve.engine.policy.drafting import Drafting, most_missing, num_left
from streamserve.engine.policy.reserve import MemoryReserve
from streamserve.engine.policy.speculation import DRAFTED, MOST_PROPOSED, Proposer, Speculation
from streamserve.engine.policy.waiting import WaitingQueue, order_key, rank_of
from streamserve.engine.sequence import Sequence, State
from streamserve.engine.shared_prefill import SharedPrefixes
from streamserve.engine.step_time import StepTime
from streamserve.protocol.engine import Park

# Order of the prompts that share what another prompt left of a step.
_shortest_first = attrgetter("num_unplanned_tokens", "ticket.order_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The next step's chunks, decodes first, and the sequences parked to make room: finished, without blocks.

    No chunks: there are no tokens to compute, or all are in flight, or (when nothing runs) the first in the queue can
    never fit. `drafts`: what a draft model is asked about sequences in it; `with_drafts` takes the answer.
    """

    chunks: tuple[Chunk, ...]
    parked: tuple[tuple[Sequence, Park], ...] = ()
    drafts: tuple[Draft, ...] = ()


@dataclass(slots=True)
class Wanted:
    """The running sequences of one rank that lack tokens, each list in the order in which a step takes them.

    `hungry`: least ahead of its reader first. `prompts` that have begun, and those that are `ahead`: by key. What
    starts comes after `prompts`; the queue has its order.
    """

    hungry: list[Sequence] = field(default_factory=list)
    prompts: list[Sequence] = field(default_factory=list)
    ahead: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Waiting and running sequences, both in order of their tickets.

    `waiting` is the `queue`'s own list. The core feeds each step's cost to `step_time` and to the queue's `shares`, and
    sets `drafting` where there is a draft model.
    `forced_preempt` (tests) returns running sequences to preempt before a step.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={config.max_num_batched_tokens} is less than"
                f" max_num_seqs={config.max_num_seqs}: some sequences could never advance."
                " Raise it or lower max_num_seqs."
            )
        self.queue = WaitingQueue(config)
        self.waiting = self.queue.sequences
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.step_time = StepTime()
        self.speculation = Speculation() if config.speculation == "lookup" else None
        self.drafting: Drafting | None = None
        self.forced_preempt: Callable[[tuple[Sequence, ...]], Iterable[Sequence]] | None = None
        self._config = config
        self._max_admitted = math.inf if config.max_admitted is None else config.max_admitted
        self._pool = pool
        self._reserve = MemoryReserve()
        self._budget = TokenBudget(config, pool.block_size)
        self._parked: list[tuple[Sequence, Park]] = []  # by the plan that is being made

    @property
    def token_budget(self) -> int:
        """Tokens that a step may compute now."""
        return self._budget.num_tokens

    @property
    def queued_tokens(self) -> int:
        """Known tokens of all that wait."""
        return sum(len(sequence.token_ids) for sequence in self.waiting)

    def lower_budget(self, num_tokens: int) -> None:
        """Plan smaller steps for a while: one of `num_tokens` ran out of memory. See `TokenBudget`."""
        self._budget.lower(num_tokens)

    def note_length(self, sequence: Sequence) -> None:
        """Record that an answer has ended: the next answers of its class reserve memory by its length."""
        self._reserve.note_length(sequence)

    def queued_seconds(self) -> float:
        """Return how long the prefill of all that wait takes by the step-time model; 0 until that is fitted."""
        num_tokens = self.queued_tokens
        num_steps = -(-num_tokens // self.token_budget)
        return self.step_time.seconds_for(num_tokens, num_steps) or 0.0 if num_steps else 0.0

    def finish(self, sequence: Sequence) -> None:
        """End a waiting or running sequence and free its blocks."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.transition(State.FINISHED)
        self._pool.release(sequence)

    def start_over(self, pool: BlockPool, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Use a new pool, after an integrity check failed; of all the engine's `sequences`, the waiting sequences stay.

        Returns the others, finished; their blocks are not freed.
        """
        self._pool, self.running = pool, []
        self.waiting.clear()
        touched: list[Sequence] = []
        for sequence in sequences:
            if sequence.state is State.WAITING and not sequence.held.block_table:
                self.queue.put(sequence)
                continue
            if sequence.state is not State.FINISHED:
                sequence.transition(State.FINISHED)
            sequence.lose_blocks()
            touched.append(sequence)
        return touched

    def schedule(self, now: float) -> Schedule:
        """Choose the next step's chunks, and the sequences that park for others. The module's docstring tells why."""
        step = StepBudget(self._budget.num_tokens, self._config, self._pool.block_size, self.step_time)
        self._parked = []
        for rank in self._let_go(step, now):
            step.is_short = step.is_short or rank > Rank.ANSWERS  # what comes waits for its end
            self._pack(self._order(rank, step, now), rank, step, now)
        self.queue.note(now)
        self._reserve.note_step()
        self._budget.recover()
        drafts = self._drafts(step)
        return Schedule(chunks=_decodes_first(step.chunks.values()), parked=tuple(self._parked), drafts=drafts)

    def _let_go(self, step: StepBudget, now: float) -> list[int]:
        """Take out those that may not stay, and return the ranks that this step computes, in order.

        Answers whose readers are gone park. What is prefilled only for the cache leaves where there is other work, also
        where that cannot use the step; its blocks stay cached.
        """
        if self.forced_preempt is not None:
            for sequence in list(self.forced_preempt(tuple(self.running))):
                self._put_back(sequence)
                self.num_preemptions += 1
        for sequence in [one for one in self.running if leads.is_stalled(one, self._config, now)]:
            self._park(sequence, step, now)
        ends = (*self.running[:1], *self.running[-1:], *self.waiting[:1], *self.waiting[-1:])  # both are in order
        ranks = sorted({rank_of(one) for one in ends})
        if len(ranks) > 1 and ranks[-1] == Rank.PREFILL_ONLY:
            for sequence in [one for one in self.running if rank_of(one) == Rank.PREFILL_ONLY]:
                self._put_back(sequence)
            return [Rank.ANSWERS, Rank.ROWS]
        return ranks

    def _order(self, rank: int, step: StepBudget, now: float) -> Wanted:
        """Order the running sequences of a rank that lack tokens and are in no chunk. Those that are held want none."""
        by_lead: list[tuple[float, Sequence]] = []
        wanted = Wanted()
        for sequence in self.running:
            if rank_of(sequence) != rank or sequence.seq_id in step.chunks:
                continue
            if sequence.num_unplanned_tokens > 1:
                wanted.prompts.append(sequence)
            elif sequence.num_unplanned_tokens == 1 and not leads.is_held(sequence, self._config):
                left = sequence.ahead_seconds(now)
                if left < self._config.policy.hungry_seconds:
                    by_lead.append((left, sequence))
                else:
                    wanted.ahead.append(sequence)
        wanted.hungry += [sequence for _, sequence in sorted(by_lead, key=itemgetter(0))]
        return wanted

    def _pack(self, wanted: Wanted, rank: int, step: StepBudget, now: float) -> None:
        """Fit what a rank wants, in its order, to the seats, tokens and memory that are left.

        Up to half of the seats are kept for prompts that have begun; what these leave over goes to decodes again.
        """
        most = self._config.max_num_seqs
        num_seats = most - len(step.chunks)
        num_kept = min(len(wanted.prompts), max(1, num_seats // 2))
        step.is_short = step.is_short or bool(wanted.hungry)
        self._decode(wanted.hungry, most - num_kept, step, now)
        self._prefill(wanted.prompts, num_seats - len(wanted.hungry) - len(wanted.prompts), rank, step, now)
        self._decode([*wanted.hungry, *wanted.ahead], most, step, now, spares_peers=True)

    def _decode(
        self, decodes: list[Sequence], most: int, step: StepBudget, now: float, *, spares_peers: bool = False
    ) -> None:
        """Plan the next token of each, and what is proposed after it, until the step holds `most` sequences.

        `spares_peers`: in a step that holds other sequences, none of the same rank loses its blocks for these.
        """
        num_rows = min(len(decodes), most)
        for sequence in decodes:
            if len(step.chunks) >= most or step.num_tokens <= 0:
                return
            if sequence.seq_id in step.chunks or not self._can_decode(sequence):
                continue
            num_lacking = self._num_lacking(sequence)
            if num_lacking:
                if not self._make_room(sequence, step, now, spares_peers=spares_peers and bool(step.chunks)):
                    continue
                self._pool.extend(sequence, sequence.num_launched_tokens + 1)
            step.add(sequence, 1, num_rows=1 + self._num_proposed(sequence, step, num_rows))

    def _num_proposed(self, sequence: Sequence, step: StepBudget, num_rows: int) -> int:
        """Return how many tokens to propose after the next token of a decode; `num_rows`: decodes in the step.

        A runner counts tokens for penalties one by one.
        """
        if not (sequence.proposed_ids or self.speculation):
            return 0
        if sequence.num_pending or sequence.constraints.has_penalties:
            return 0
        most = self._most_proposed(sequence, step.num_tokens - self._config.max_num_seqs)
        if most > 0 and self.speculation and not sequence.proposed_ids:
            sequence.proposed_ids = self.speculation.propose(
                self._proposer_of(sequence, self.speculation),
                sequence.token_ids,
                most,
                num_rows=num_rows,
                share=self.step_time.share_of(num_rows),
            )
        return max(0, min(len(sequence.proposed_ids), most))

    def _most_proposed(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of `num_tokens` may be proposed after the next token: they cost other sequences nothing.

        They get no block of their own, no token that a seat may need, and none beyond the lead or the answer's end.
        """
        config = self._config
        most = min(
            min(map(len, sequence.held.tables)) * self._pool.block_size - sequence.num_launched_tokens - 1,
            num_tokens,
            sequence.num_remaining_tokens - 1,
            (config.max_model_len or sys.maxsize) - len(sequence.token_ids) - 1,
            leads.lead_left(sequence, config) - 1,
            MOST_PROPOSED,
        )
        return int(max(0, most))

    def _proposer_of(self, sequence: Sequence, speculation: Speculation) -> Proposer:
        if sequence.proposer is None:
            request = sequence.request
            sequence.proposer = speculation.proposer_for(len(request.prompt_token_ids), request.prediction_token_ids)
        return sequence.proposer

    def _drafts(self, step: StepBudget) -> tuple[Draft, ...]:
        """Return what to ask a draft model about the decodes of a step that holds no prompt, which would wait for it.

        What it must compute to know a sequence takes several steps where that is more than one may hold.
        """
        drafting, num_rows = self.drafting, len(step.chunks)
        if drafting is None or self.speculation is None or not step.chunks or step.has_prefill:
            return ()
        if not drafting.may_draft(num_rows):
            return ()
        drafts: list[Draft] = []
        num_tokens, num_missing, most_to_look = step.num_tokens, -1, 0.0
        for sequence in self.running:
            chunk = step.chunks.get(sequence.seq_id)
            if chunk is None or not chunk.samples:
                continue
            if sequence.num_pending or sequence.constraints.has_penalties:
                continue
            if sequence.is_suspect:
                return ()
            if num_missing < 0:
                num_missing = self._most_missing(drafting, num_rows, sequence.held.num_drafted_tokens)
                most_to_look = drafting.most_to_look(num_rows, self.step_time)
            if len(sequence.token_ids) - sequence.held.num_drafted_tokens > most_to_look:
                continue
            draft = self._draft_of(sequence, drafting, self.speculation, num_tokens, num_missing, num_rows)
            if draft is not None:
                drafts.append(draft)
                num_tokens -= max(0, draft.num_wanted - len(chunk.proposed_ids))
                num_missing -= len(draft.token_ids)
                most_to_look -= len(draft.token_ids)
        if drafts:
            drafting.begin(tuple(drafts), num_rows)
        return tuple(drafts)

    def _most_missing(self, drafting: Drafting, num_rows: int, start: int) -> int:
        """Return how many tokens a draft model may compute before a step: readers wait no longer than for a prompt."""
        config, size = self._config, self._pool.block_size
        seconds = config.itl_target_seconds - (self.step_time.seconds_for(num_rows, 1) or 0.0)
        return max(size, 2 * num_rows, most_missing(drafting, seconds, start=start, unfitted=config.prefill_chunk))

    def _draft_of(
        self,
        sequence: Sequence,
        drafting: Drafting,
        speculation: Speculation,
        num_tokens: int,
        num_missing: int,
        num_rows: int,
    ) -> Draft | None:
        """Return what to ask about a sequence; None: nothing, as it does not pay, or has to wait."""
        proposer, num_known = self._proposer_of(sequence, speculation), len(sequence.token_ids)
        most = min(self._most_proposed(sequence, num_tokens), drafting.max_len - num_known)
        if most <= 0 or num_missing <= 0:
            return None
        depth = drafting.depth(
            proposer,
            most,
            num_missing=num_known - sequence.held.num_drafted_tokens,
            num_left=num_left(sequence.num_output_tokens, sequence.num_remaining_tokens),
            num_rows=num_rows,
            step_time=self.step_time,
        )
        if not depth:
            return None
        start = sequence.held.num_drafted_tokens
        end = min(num_known, start + num_missing)
        return Draft(
            seq_id=sequence.seq_id,
            start=start,
            token_ids=tuple(sequence.token_ids[start:end]),
            block_table=tuple(sequence.held.block_table),
            sampling=replace(sequence.request.sampling, logprobs=None),
            num_wanted=depth if end == num_known else 0,
        )

    def with_drafts(self, schedule: Schedule, drafted: Mapping[int, tuple[int, ...]]) -> tuple[Chunk, ...]:
        """Return the step's chunks with what a draft model has `drafted`, which has computed `schedule.drafts`."""
        chunks = {chunk.seq_id: chunk for chunk in schedule.chunks}
        running = {sequence.seq_id: sequence for sequence in self.running}
        for draft in schedule.drafts:
            sequence, proposed = running[draft.seq_id], drafted[draft.seq_id]
            assert sequence.proposer is not None
            sequence.held.num_drafted_tokens = draft.start + len(draft.token_ids)
            if proposed:
                sequence.proposed_ids, sequence.proposer.kind = proposed, DRAFTED
                chunks[draft.seq_id] = chunk_of(sequence, 1, 1 + len(proposed), self._pool.block_size)
            elif draft.num_wanted:  # it has failed
                sequence.proposer.acceptance.refuse(DRAFTED)
        return _decodes_first(chunks.values())

    def _can_decode(self, sequence: Sequence) -> bool:
        """Whether it still runs, lacks one token, and the token before that is none that may be its last."""
        return (
            sequence.state is State.RUNNING
            and sequence.num_unplanned_tokens == 1
            and not sequence.must_wait(self._config.max_model_len)
        )

    def _prefill(self, begun: list[Sequence], num_starts: int, rank: int, step: StepBudget, now: float) -> None:
        """Continue and start prompts in order; the first that does not fit whole is `cut`.

        It leaves a block, or half of what there is if that is less, to the prompts with the least left to compute, and
        gets back what they do not take: the oldest prompt always gets most of a step, and no long prompt keeps a short
        one waiting. Sequences start strictly in order, `num_starts` at most: a sequence that does not fit holds back
        those behind it.
        """
        prefixes: SharedPrefixes | None = None
        cut: Sequence | None = None
        share = step.num_tokens  # what the cut prompt, if any, leaves to the other prompts
        while share > 0 and len(step.chunks) < self._config.max_num_seqs:
            begun = [one for one in begun if one.state is State.RUNNING]
            may_start = num_starts > 0 and rank < step.closed_from
            head = self.queue.head(rank, now) if may_start else None
            prompts = begun if head is None else [*begun, head]
            if not prompts or (cut is None and (step.has_enough or step.num_prefill_tokens(0) == 0)):
                break
            sequence = min(prompts, key=order_key if cut is None else _shortest_first)
            if sequence is head:
                has_started = self._start(sequence, step, now)
                num_starts = num_starts - 1 if has_started else 0
                if not has_started:
                    continue
            prefixes = prefixes or SharedPrefixes(self._pool, self.running, step.chunks.values())
            turn = prefixes.turn_of(sequence)
            begun = [one for one in begun if one is not sequence and one is not turn]
            if turn is None:  # it waits for a block that another sequence is writing
                continue
            wanted, most = turn.num_plannable_tokens, max(1, step.num_prefill_tokens(turn.num_launched_tokens))
            if cut is not None:
                num_tokens = self._with_blocks(turn, min(wanted, share), step, now)
                share -= num_tokens
            elif wanted <= most:
                num_tokens = self._with_blocks(turn, wanted, step, now)
            else:
                rest = min(self._pool.block_size, most // 2)
                num_tokens = self._with_blocks(turn, most - rest, step, now)
                cut, share = (turn, rest) if num_tokens else (None, share)
            if not num_tokens:
                continue
            step.add(turn, num_tokens, is_prefill=True)
            prefixes.note(turn, turn.num_launched_tokens + num_tokens)
        if cut is not None and cut.seq_id in step.chunks:
            step.extend(cut, self._extended(cut, step, share))

    def _with_blocks(self, sequence: Sequence, num_tokens: int, step: StepBudget, now: float) -> int:
        """Return how many of a prompt's next tokens have blocks, and allocate those that it lacks.

        It lacks some only in groups with a window: there it gets them as it computes, in place of those that it does
        not read any more.
        """
        if not self._pool.num_lacking(sequence, sequence.num_launched_tokens + num_tokens):
            return num_tokens
        has_room = self._pool.num_tokens_with_room(sequence, 1) > 0
        if not has_room and sequence.num_launched_tokens > sequence.num_computed_tokens:
            return 0  # what is in flight gives some back
        if not has_room and not self._make_room(sequence, step, now):
            return 0
        num_tokens = self._pool.num_tokens_with_room(sequence, num_tokens)
        self._pool.extend(sequence, sequence.num_launched_tokens + num_tokens)
        return num_tokens

    def _extended(self, sequence: Sequence, step: StepBudget, num_tokens: int) -> int:
        """Return by how many tokens a prompt's chunk can grow, and allocate the blocks that it lacks for them."""
        num_planned = len(step.chunks[sequence.seq_id].token_ids)
        num_tokens = self._pool.num_tokens_with_room(sequence, num_planned + num_tokens)
        self._pool.extend(sequence, sequence.num_launched_tokens + num_tokens)
        return num_tokens - num_planned

    def _start(self, sequence: Sequence, step: StepBudget, now: float) -> bool:
        """Admit the first in the queue, with blocks for its known tokens, if it has room or room can be made."""
        if not self._make_room(sequence, step, now):
            return False
        self.waiting.remove(sequence)
        self._pool.start(sequence, self._pool.find_prefix(sequence))
        sequence.transition(State.RUNNING)
        insort(self.running, sequence, key=order_key)
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            sequence.num_cached_tokens = sequence.num_computed_tokens
        return True

    def _make_room(self, taker: Sequence, step: StepBudget, now: float, *, spares_peers: bool = False) -> bool:
        """Take blocks from others until those are free that the taker needs; False: it gets none, or lost its own.

        Later ranks give way, the last first. Then peers park that are far enough ahead of their readers, furthest
        first: those that are held; for a sequence without output also others, `min_ahead_seconds` ahead (for resumed
        sequences all would take turns, and compute twice). Then, for a running taker, the last in order is preempted.
        For a waiting taker none leaves unless all of them would be enough; they may share blocks, so that may fail.
        """
        while not self._has_room(taker):
            # Of later ranks, those in the step compute a block that a sequence of an earlier rank waits for.
            later = [one for one in self.running if rank_of(one) > rank_of(taker) and one.seq_id not in step.chunks]
            parking = [one for one in self.running if self._may_park_for(one, taker, now)]
            leaving = [*later, *parking]
            if taker.state is State.WAITING and not (leaving and self._has_room(taker, leaving)):
                return False
            if later:
                self._preempt(later[-1], step)
            elif spares_peers:
                return False
            elif parking:
                furthest = max(parking, key=lambda one: one.ahead_seconds(now))
                self._park(furthest, step, now)
                if furthest is taker:
                    return False
            else:
                last = self.running[-1]
                # Invariant: the oldest is never preempted for room, and alone it always has some.
                if last is self.running[0]:
                    raise IntegrityError(
                        f"sequence {last.seq_id} runs alone and has no room: its blocks have other holders"
                    )
                self._reserve.note_shortage()
                self._preempt(last, step)
                if last is taker:
                    return False
        return True

    def _has_room(self, sequence: Sequence, leaving: Iterable[Sequence] = ()) -> bool:
        """Whether enough blocks are free, or would be without `leaving`.

        For a running sequence: for its next token. For a waiting sequence: for its known tokens and the growth of those
        that do not give way to it; and a place among the admitted.
        """
        gone = set(leaving)
        num_free = self._pool.num_free + sum(one.held.num_blocks for one in gone)
        if sequence.state is State.RUNNING:
            return self._num_lacking(sequence) <= num_free
        staying = [one for one in self.running if one not in gone]
        peers = [one for one in staying if rank_of(one) <= rank_of(sequence)]
        prefix = self._pool.find_prefix(sequence)
        has_place = len(staying) < self._max_admitted
        return has_place and self._reserve.fits(self._pool, sequence, prefix, peers, num_free)

    def _num_lacking(self, sequence: Sequence) -> int:
        """Return how many blocks a running sequence lacks for its next token."""
        if sequence.num_launched_tokens > len(sequence.held.block_table) * self._pool.block_size:
            raise IntegrityError(f"sequence {sequence.seq_id} has fewer blocks than it has filled")
        return self._pool.num_lacking(sequence, sequence.num_launched_tokens + 1)

    def _may_park_for(self, sequence: Sequence, taker: Sequence, now: float) -> bool:
        if rank_of(sequence) != rank_of(taker):
            return False
        is_new = taker.state is State.WAITING and not taker.num_output_tokens
        least = self._config.policy.min_ahead_seconds if is_new and len(self.running) < self._max_admitted else math.inf
        return leads.may_park(sequence, self._config, least, now)

    def _park(self, sequence: Sequence, step: StepBudget, now: float) -> None:
        park = leads.park_of(sequence, self._config, now)
        step.remove(sequence)
        self.finish(sequence)
        self._parked.append((sequence, park))

    def _preempt(self, sequence: Sequence, step: StepBudget) -> None:
        """Take its blocks for another sequence; none like it starts in this step."""
        step.remove(sequence)
        step.closed_from = min(step.closed_from, rank_of(sequence))
        self._put_back(sequence)
        self.num_preemptions += 1

    def _put_back(self, sequence: Sequence) -> None:
        """Return a running sequence to the queue without its blocks; most of them stay cached."""
        self.running.remove(sequence)
        sequence.transition(State.WAITING)
        self._pool.release(sequence)
        sequence.num_preemptions += 1
        self.queue.put(sequence)


def _decodes_first(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    return tuple(sorted(chunks, key=lambda chunk: len(chunk.token_ids) > 1))
