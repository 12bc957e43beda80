"""The real `EngineCore` with simulated readers and a simulated clock: the time of a step comes from a cost model.

`Parking` of clients/engine_run.py itself decides when a parked answer is requested again, and readers report their
position as often as `EngineRun` does, and no more often than a page acknowledges or a server polls. Not simulated:
transport, tokenizers, the client's bounds on the queue.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.qoe.machines import BLOCK_SIZE, Machine
from benchmarks.qoe.usage import Usage
from streamserve.clients.engine_run import Parking
from streamserve.engine.config import EngineConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import Sampled, StepPlan, StepResult
from streamserve.engine.sequence import SequenceRequest
from streamserve.loadtest.reading import Reading
from streamserve.loadtest.visits import LONGEST_ANSWER, Visit
from streamserve.protocol.requests import Admission, Resume, SamplingParams

_EOS = 0
# As in clients/engine_run.py: a position that has moved by fewer tokens is not reported.
REPORT_STEP = 5

# What the engine is given as a reader's position.
# As in clients/thread/engine_thread.py.
_REST_SECONDS = 0.25
READ = "read"  # what it has read: a page that acknowledges as it shows
RECEIVED = "received"  # all that was sent: a fast connection without acknowledgements
UNKNOWN = "unknown"  # nothing
# So often at most: a page acknowledges once a second, a server asks what is taken four times.
_SECONDS_BETWEEN = {READ: 1.0, RECEIVED: 0.25, UNKNOWN: 0.0}


class Clock:
    """The time of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ModelledRunner:
    """Advances the clock by the cost of each step, and ends each answer at its visit's length."""

    block_size = BLOCK_SIZE
    vocab_size = 50_000
    can_overlap = False
    windows = (None,)

    def __init__(self, machine: Machine, clock: Clock, visits: Sequence[Visit]) -> None:
        self.num_blocks = machine.num_blocks
        self.usage = Usage(machine.cost)
        self.numbers: dict[int, int] = {}  # of the visits, by the ids of their sequences in the engine
        self.open_numbers: set[int] = set()  # the same visits
        self._clock = clock
        self._last_positions = {visit.number: visit.prompt_len + visit.answer_len - 1 for visit in visits}

    def launch(self, plan: StepPlan) -> StepPlan:
        """Nothing happens before `collect`."""
        return plan

    def collect(self, handle: object) -> StepResult:
        """Advance the clock and sample."""
        assert isinstance(handle, StepPlan)
        numbers, sampled, decoding = self.numbers, [], set()
        for chunk in handle.chunks:
            if not chunk.samples:
                continue
            number = numbers[chunk.seq_id]
            decoding.add(number)
            is_end = chunk.samples[0].position >= self._last_positions[number]
            sampled.append(Sampled(seq_id=chunk.seq_id, token_ids=(_EOS if is_end else 7,)))
        parts = [(numbers[chunk.seq_id], chunk) for chunk in handle.chunks]
        self._clock.now += self.usage.note_step(parts, decoding, self.open_numbers)
        return StepResult(step_id=handle.step_id, sampled=tuple(sampled))

    def close(self) -> None:
        """Nothing to free."""


class _Stream:
    """One reader's answer: in the engine (`seq_id`), parked, or finished."""

    def __init__(self, visit: Visit) -> None:
        self.visit = visit
        self.reading = Reading(visit)
        self.parking = Parking()
        self.token_ids: list[int] = []
        self.seq_id: int | None = None
        self.first_token_at: float | None = None
        self.reported = 0
        self.reported_at = -math.inf
        self.is_due = False  # a look at its position is planned
        self.prompt = tuple(random.Random(visit.number).choices(range(1, 50_000), k=visit.prompt_len))


class Simulation:
    """One engine, one workload. `acks`: a reader's position, one of READ, RECEIVED and UNKNOWN."""

    def __init__(self, machine: Machine, config: EngineConfig, visits: Sequence[Visit], *, acks: str = READ) -> None:
        self.clock = Clock()
        self.runner = ModelledRunner(machine, self.clock, visits)
        config = replace(config, num_blocks=machine.num_blocks, max_num_seqs=machine.seats, overlap=False)
        self.core = EngineCore(self.runner, config, self.clock)
        self.readings: list[Reading] = []
        self.parks: dict[str, int] = {}
        self._acks = acks
        self._coming = sorted(visits, key=lambda visit: visit.arrives_at, reverse=True)
        self._running: dict[int, _Stream] = {}
        self._parked: list[_Stream] = []
        # (when a position may be worth a report, tie, stream): each running stream is in it once at most.
        self._looks: list[tuple[float, int, _Stream]] = []
        self._num_ids = 0

    def run(self, until: float = math.inf) -> list[Reading]:
        """Run until `until` and return the reading of each reader that has arrived."""
        while (self._coming or self._running or self._parked) and self.clock.now < until:
            self._let_in()
            self._report_positions()
            self._ask_again()
            if self.core.has_work:
                for update in self.core.step():
                    self._take(update)
            else:
                next_at = max(self._next_event(), self.clock.now + 1e-6)
                if self._coming:
                    self.runner.usage.note_idle(next_at - self.clock.now)
                self.clock.now = next_at
        return self.readings

    def _let_in(self) -> None:
        while self._coming and self._coming[-1].arrives_at <= self.clock.now:
            stream = _Stream(self._coming.pop())
            self.readings.append(stream.reading)
            self._ask(stream)

    def _ask(self, stream: _Stream) -> None:
        self._num_ids += 1
        stream.seq_id, visit = self._num_ids, stream.visit
        stream.reported = self._position(stream)
        self._running[stream.seq_id] = stream
        self.runner.numbers[stream.seq_id] = visit.number
        self.runner.open_numbers.add(visit.number)
        request = SequenceRequest(
            seq_id=stream.seq_id,
            prompt_token_ids=stream.prompt,
            sampling=SamplingParams(seed=visit.number, max_tokens=LONGEST_ANSWER),
            eos_token_ids=frozenset({_EOS}),
            admission=Admission(owner=visit.tenant, tenant=visit.tenant, arrived_at=visit.arrives_at),
            resume=Resume(
                output_token_ids=(tuple(stream.token_ids),),
                reader_tokens=None if self._acks == UNKNOWN else (stream.reported,),
                first_token_at=stream.first_token_at,
            ),
            latency_class=visit.latency_class,
        )
        self.core.add(request)

    def _position(self, stream: _Stream) -> int:
        """Return the tokens that the reader is known to have."""
        return stream.reading.num_read(self.clock.now) if self._acks == READ else len(stream.token_ids)

    def _plan_look(self, stream: _Stream) -> None:
        """Plan the next look at a position: when a report is due, unless more tokens come before."""
        num_tokens, reported, read_at = len(stream.token_ids), stream.reported, stream.reading.read_at
        if stream.is_due or self._acks == UNKNOWN or num_tokens - reported < REPORT_STEP:
            return
        at = read_at[reported + REPORT_STEP - 1] if self._acks == READ else self.clock.now
        at = max(at, stream.reported_at + _SECONDS_BETWEEN[self._acks])
        stream.is_due = True
        heapq.heappush(self._looks, (at, stream.visit.number, stream))

    def _report_positions(self) -> None:
        while self._looks and self._looks[0][0] <= self.clock.now:
            stream = heapq.heappop(self._looks)[2]
            stream.is_due = False
            if stream.seq_id is None:
                continue
            position = self._position(stream)
            if position - stream.reported >= REPORT_STEP:
                stream.reported, stream.reported_at = position, self.clock.now
                self.core.reader_at(stream.seq_id, position)
            self._plan_look(stream)

    def _ask_again(self) -> None:
        now = self.clock.now
        ready = [one for one in self._parked if one.parking.seconds_left(self._num_unread(one), now) == 0]
        for stream in ready:
            self._parked.remove(stream)
            stream.parking.end()
            self._ask(stream)
            self._plan_look(stream)

    def _num_unread(self, stream: _Stream) -> int:
        return len(stream.token_ids) - self._position(stream)

    def _take(self, update: SequenceUpdate) -> None:
        stream = self._running[update.seq_id]
        if update.token_ids:
            stream.token_ids += update.token_ids
            stream.first_token_at = update.first_token_at
            stream.reading.take(update.at)
            self._plan_look(stream)
        if not update.is_last:
            return
        del self._running[update.seq_id], self.runner.numbers[update.seq_id]
        self.runner.open_numbers.remove(stream.visit.number)
        stream.seq_id = None
        stream.reading.is_whole = update.finish_reason is not None
        if update.park is not None:
            self.parks[update.park.reason] = self.parks.get(update.park.reason, 0) + 1
            stream.parking.begin(update.park, len(stream.token_ids), self.clock.now)
            self._parked.append(stream)

    def _next_event(self) -> float:
        """Return when an idle engine has work again: the next visit, or a parked answer that is requested again."""
        times = [self._coming[-1].arrives_at] if self._coming else []
        if self._running:  # all are held: the engine looks again after a while
            times.append(self.clock.now + _REST_SECONDS)
        if self._looks:
            times.append(self._looks[0][0])
        for stream in self._parked:
            position = self._position(stream)
            left = stream.parking.seconds_left(len(stream.token_ids) - position, self.clock.now)
            read_at = stream.reading.read_at[min(position, len(stream.token_ids) - 1)]
            times.append(self.clock.now + left if left is not None else read_at)
            if position < len(stream.token_ids):
                times.append(read_at)
        return min(times)

    @property
    def num_parks(self) -> int:
        """How often the engine parked a sequence."""
        return sum(self.parks.values())
