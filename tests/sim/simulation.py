"""`Simulation`: a core, its requests, the faults that happen to it, and readers with a pace of their own.

Takes the place of the streams above the core: a sequence that parks is submitted again by the rules of `Park`. The laws
are in laws/; `step` checks them. Time is a fake clock, in powers of two so that sums are exact.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from streamserve.engine.core import EngineCore
from streamserve.engine.kv.free_list import IntegrityError
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import StepPlan
from streamserve.engine.policy.reserve import NUM_TO_KNOW
from streamserve.engine.sequence import Sequence, SequenceRequest
from streamserve.protocol.engine import Park
from streamserve.protocol.requests import Admission, Resume, SamplingParams
from tests.sim.asked import CLASSES, Asked, Shape
from tests.sim.laws.laws import Laws
from tests.sim.model import EOS, STEP_SECONDS, TOKEN_SECONDS, SimRunner, reference
from tests.support.engines.runners import FakeClock

# More than enough for all requested tokens, one at a time, with preemptions.
MAX_STEPS_TO_END = 4_000

# An end that was delivered this many steps before a crash may have been lost with it.
STEPS_TO_COMMIT = 10


class Simulation:
    """All events are methods; `step` checks the laws."""

    def __init__(self, shape: Shape | None = None) -> None:
        self.shape = shape or Shape()
        self.clock = FakeClock()
        self.asked: list[Asked] = []
        self.tenants: dict[int, str] = {}
        self.num_steps = 0
        self.plans: list[StepPlan] = []
        self.parks: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._next_id = 1
        self._ended: deque[tuple[int, Asked]] = deque(maxlen=8)
        self._start_engine()

    def _start_engine(self) -> None:
        """Start an engine without state; counts start again."""
        shape = self.shape
        self.by_seq_id: dict[int, Asked] = {}
        self.is_paused = self.was_paused = self.has_changed_meanwhile = self.has_jumped = False
        self.num_failures = self.num_out_of_memory = self.num_quarantines = self.num_unknown = self.num_late = 0
        self.deferred: list[Callable[[], None]] = []
        self._is_dying = self._is_suspect = False
        self._tokens_at_quarantine = -1
        self._to_fail: set[int] = set()
        self._to_preempt: set[int] = set()
        self._room: list[int] = []
        self.runner = SimRunner(
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            can_overlap=shape.overlap,
            windows=shape.windows,
        )
        self.runner.is_faulty = self._to_fail.__contains__
        self.runner.has_room = self._has_room
        self.runner.meanwhile = self._meanwhile
        self.laws = Laws(self)
        on_plan, on_evict = self.laws.check_plan, self.laws.note_evicted
        self.core = EngineCore(self.runner, shape.config(), self.clock, on_plan, on_evict=on_evict)
        self.core.scheduler.forced_preempt = self._forced
        self._learn_lengths()
        self.laws.waits.watch(self.core.scheduler)
        self.laws.debts.watch(self.core.scheduler)
        self.laws.hunger.watch()
        self.laws.givers.watch(self.core.scheduler)
        self.laws.flights.watch(self.core.scheduler)
        self.laws.counts.watch(self.core.scheduler)

    def _learn_lengths(self) -> None:
        """Many answers have ended after `known_len` tokens: too little memory is reserved for longer ones."""
        if self.shape.known_len is not None:
            lengths = self.core.scheduler._reserve._lengths
            for latency_class in CLASSES:
                for _ in range(NUM_TO_KNOW):
                    lengths.note(latency_class, self.shape.known_len)

    # What clients do.

    def ask(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        *,
        tenant: str = "a",
        num_public: int = 0,
        latency_class: str = "chat",
        timeout: float | None = None,
        reads: float | None = None,
        adapter: str = "",
    ) -> Asked:
        """Submit a request. With `reads` the engine knows of its reader, which takes that many tokens a step."""
        request = SequenceRequest(
            seq_id=0,
            prompt_token_ids=prompt,
            sampling=sampling,
            admission=Admission(owner=tenant, tenant=tenant, salt=tenant, arrived_at=self.clock()),
            num_public_tokens=num_public,
            eos_token_ids=frozenset({EOS}),
            deadline=None if timeout is None else self.clock() + timeout,
            latency_class=latency_class,
            adapter=adapter,
        )
        shape = self.shape
        eos, model_len = request.eos_token_ids, shape.max_model_len
        answer, reason = reference(prompt, sampling, eos, model_len, adapter, shape.windows)
        asked = Asked(request, answer, reason, None if reads is None else 0.0, reads or 0.0)
        self.asked.append(asked)
        self._admit(asked)
        return asked

    def open(self) -> list[Asked]:
        """The answers that the engine holds, in the order of their requests."""
        return [asked for asked in self.asked if asked.is_open]

    def abort(self, asked: Asked) -> None:
        """The reader leaves for good."""
        self._forget(asked)
        asked.is_over = True

    def leave(self, asked: Asked, num_steps: int = 0) -> None:
        """The reader leaves and comes back: the stream parks it. With 0 steps it is submitted again at once."""
        self._forget(asked)
        asked.returns_at = self.num_steps + num_steps

    def stop(self, asked: Asked) -> None:
        """A stop string was found after half of the shown text."""
        asked.stopped_at = len(asked.shown) // 2
        self.num_late += self.was_paused
        self.core.stop(asked.seq_id, asked.stopped_at)

    def set_rate(self, asked: Asked, rate: float) -> None:
        """The reader reads faster or slower from now on."""
        asked.rate = rate

    def abort_unknown(self) -> None:
        """Send an abort for a sequence that has ended."""
        self.num_unknown += 1
        self.core.abort(10**9)

    # Events of operators, memory and the model.

    def pause(self) -> None:
        """An operator pauses the engine."""
        self.core.pause()
        self.is_paused = self.was_paused = True

    def resume(self) -> None:
        """An operator resumes the engine."""
        self.core.resume()
        self.is_paused = False

    def fail(self, asked: Asked) -> None:
        """The answer's next chunk will fail."""
        self._to_fail.add(asked.seq_id)

    def preempt(self, asked: Asked) -> None:
        """Take the sequence's blocks away before the next step."""
        self._to_preempt.add(asked.seq_id)

    def tighten(self, num_tokens: int, num_launches: int, *, is_late: bool) -> None:
        """Give the next `num_launches` launches memory for `num_tokens` tokens only."""
        self._room = [num_tokens] * num_launches
        self.runner.is_late = is_late

    def corrupt(self) -> None:
        """Damage the books of the pool: the next step notices."""
        scheduler, schedule = self.core.scheduler, self.core.scheduler.schedule

        def noticed(now: float) -> object:
            scheduler.schedule = schedule  # type: ignore[method-assign]
            self.num_quarantines += 1
            self._is_suspect = self._tokens_at_quarantine == self.laws.answers.tokens
            self._tokens_at_quarantine = self.laws.answers.tokens
            self.num_failures += 1
            raise IntegrityError("planted")

        scheduler.schedule = noticed  # type: ignore[assignment,method-assign]

    def crash(self) -> None:
        """Kill the engine in its next step. Its updates are lost, and possibly ends delivered shortly before."""
        self._is_dying = True

    def _replace_engine(self) -> None:
        """Park every open answer as lost, also one whose last token was shown without its end."""
        for ended_at, asked in self._ended:
            asked.is_over = ended_at < self.num_steps - STEPS_TO_COMMIT
        self._ended.clear()
        lost = self.open()
        for asked in lost:  # every other one was lost in an earlier step of its own
            asked.num_losses += 1 + asked.seq_id % 2
        self._start_engine()
        for asked in lost:
            asked.park, asked.parked_at = Park(reason="lost"), self.clock()

    def has_cause(self, asked: Asked, seq_id: int, error: str) -> bool:
        """Whether an answer may end with this error now."""
        laws, request = self.laws, asked.request
        is_new, ran = laws.cached_tokens(seq_id) is None, {sequence.seq_id for sequence in laws.running}
        return {
            "numerical_error": seq_id in self._to_fail,
            "timeout": request.deadline is not None and request.deadline <= laws.started_at,
            "queue_timeout": is_new and not asked.shown and laws.waits.may_refuse(seq_id),
            "out_of_memory": self._was_too_large(seq_id),
            "internal_error": self.num_quarantines > laws.num_quarantines and (self._is_suspect or seq_id in ran),
        }.get(error, False)

    def _was_too_large(self, seq_id: int) -> bool:
        """Whether its chunk was the largest of a step that failed again, as half of one that failed before."""
        failed = self.runner.failed[-8:]  # of a suspect too, tried before the others
        largest = [max(plan.chunks, key=lambda chunk: len(chunk.token_ids)).seq_id for plan in failed[1:]]
        return seq_id in largest and sum(seq_id == c.seq_id for plan in failed for c in plan.chunks) > 1

    def defer(self, act: Callable[[Simulation, Asked], None], asked: Asked) -> None:
        """Call `act` while the next step runs, if the engine still has the answer then."""
        self.deferred.append(lambda: act(self, asked) if asked.is_open else None)

    def wait(self, seconds: float) -> None:
        """Let time pass without an event; in the middle of a step the step takes that much longer."""
        self.clock.advance(seconds)
        self.has_jumped = self.has_jumped or bool(self.runner.launched)

    # Steps and time.

    def step(self) -> None:
        """Run one step, and check the laws."""
        self.num_steps += 1
        self.clock.advance(TOKEN_SECONDS)
        self._read()
        self._ask_again()
        self.laws.before_step()
        updates = self.core.step()
        if self._is_dying:
            self._replace_engine()
            return
        for update in updates:
            self._take(self.laws.check_update(update), update)
        self.laws.after_step()
        self.was_paused, self.has_changed_meanwhile = self.is_paused, False

    def finish(self) -> None:
        """Submit nothing more and read everything: all answers end, and the engine is empty."""
        self._room, self.deferred, self._is_dying = [], [], False
        if self.is_paused:
            self.resume()
        for _ in range(MAX_STEPS_TO_END):
            if not self.core.has_work and all(asked.is_over for asked in self.asked):
                break
            self._hurry()
            self.step()
        self.laws.check_end()

    def _hurry(self) -> None:
        for asked in self.asked:
            if not asked.is_over:
                asked.rate = max(asked.rate, 2.0)
                if asked.returns_at is not None:
                    asked.returns_at = min(asked.returns_at, self.num_steps)

    def _read(self) -> None:
        for asked in self.asked:
            if asked.is_over or asked.received is None or not asked.rate:
                continue
            before = asked.reader_tokens
            asked.received = min(float(len(asked.shown)), asked.received + asked.rate)
            if asked.is_open and asked.reader_tokens != before:
                self.core.reader_at(asked.seq_id, asked.reader_tokens)

    def _ask_again(self) -> None:
        for asked in self.asked:
            if not asked.is_over and not asked.is_open and self._is_wanted(asked):
                asked.park = asked.returns_at = None
                self._admit(asked)

    def _is_wanted(self, asked: Asked) -> bool:
        """Whether a stream would submit a parked answer again now."""
        if asked.returns_at is not None:
            return asked.returns_at <= self.num_steps
        park, unread = asked.park, len(asked.shown) - (asked.received or 0)
        assert park is not None
        if park.reason == "lead":
            return unread <= park.resume_at_lead
        if park.reason == "ahead":
            return unread < 1 or self.clock() >= asked.parked_at + park.resume_seconds
        return park.reason == "lost" or self.num_steps % 8 == 0

    def _admit(self, asked: Asked) -> None:
        asked.seq_id, self._next_id = self._next_id, self._next_id + 1
        asked.admitted_at, asked.num_shown_before = self.clock(), len(asked.shown)
        self.by_seq_id[asked.seq_id] = asked
        self.tenants[asked.seq_id] = asked.request.admission.share_of
        resume = Resume(
            output_token_ids=(tuple(asked.shown),),
            reader_tokens=None if asked.reader_tokens is None else (asked.reader_tokens,),
            first_token_at=asked.first_token_at,
            num_losses=asked.num_losses,
        )
        one = replace(asked.request, seq_id=asked.seq_id, resume=resume)
        self.laws.note_admission(asked, one)
        self.core.add(one)

    def _forget(self, asked: Asked) -> None:
        self.core.abort(asked.seq_id)
        self.num_late += self.was_paused
        del self.by_seq_id[asked.seq_id]

    def _take(self, asked: Asked, update: SequenceUpdate) -> None:
        asked.shown += update.token_ids
        asked.num_losses = 0 if update.token_ids else asked.num_losses
        asked.first_token_at = update.first_token_at
        if not update.is_last:
            return
        del self.by_seq_id[update.seq_id]
        asked.park, asked.parked_at = update.park, self.clock()
        asked.is_over = update.park is None or asked.stopped_at is not None
        if update.finish_reason is not None and asked.stopped_at is None:
            self._ended.append((self.num_steps, asked))
        if update.park is not None:
            self.parks[update.park.reason] += 1
        if update.error is not None:
            self.errors[update.error] += 1

    def _forced(self, running: tuple[Sequence, ...]) -> list[Sequence]:
        victims = [sequence for sequence in running if sequence.seq_id in self._to_preempt]
        self._to_preempt.clear()
        self.laws.note_preempted(victims)
        return victims

    def _has_room(self, num_tokens: int) -> bool:
        room = self._room.pop() if self._room else num_tokens
        self.num_failures += num_tokens > room
        self.num_out_of_memory += num_tokens > room
        return num_tokens <= room

    def _meanwhile(self) -> None:
        """Let time pass and clients act while a step runs."""
        self.clock.advance(STEP_SECONDS + TOKEN_SECONDS * self.runner.launched[0].num_tokens)
        self.laws.note_found()
        deferred, self.deferred = self.deferred, []
        self.has_changed_meanwhile = bool(deferred)
        for act in deferred:
            self.num_late += 1
            act()
