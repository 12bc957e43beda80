"""`Debts`: what each tenant has had of the engine's work, counted slowly, and who goes before whom because of that."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from streamserve.engine.in_flight import Launched
from streamserve.engine.plan import StepResult
from streamserve.engine.policy.backlog import Rank
from streamserve.engine.scheduler import Scheduler
from streamserve.engine.sequence import Sequence

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

WINDOW_SECONDS = 10


class Debts:
    """All computed tokens, by second and tenant."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self._tokens: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._wrong: list[str] = []
        self.heads: list[int] = []  # of this step
        self.num_charged = 0.0

    def watch(self, scheduler: Scheduler) -> None:
        """Record which sequence is the next to start, and what the tenants are charged."""
        head, charge = scheduler.queue.head, scheduler.queue.shares.charge

        def noted_charge(tenant: str, num_tokens: float, now: float) -> None:
            self._tokens[int(now)][tenant] += num_tokens
            self.num_charged += num_tokens
            charge(tenant, num_tokens, now)

        def checked_head(rank: int, now: float) -> Sequence | None:
            self.sim.laws.readers.note_ahead(now)
            found = head(rank, now)
            right = self._right(scheduler.waiting, now)
            if right is not None and is_row(right) is not (rank == Rank.ROWS):
                right = None  # no rank waits behind a later one
            if found is not right and not self._wrong:
                ids = [None if one is None else one.seq_id for one in (found, right)]
                self._wrong.append(f"25: {ids[0]} is next, and should be {ids[1]}")
            if found is not None:
                self.heads.append(found.seq_id)
            return found

        output, process = self.sim.core._output, self.sim.core._output.process_step

        def checked_process(step: Launched, result: StepResult, now: float) -> None:
            weights = [0.5 if is_row(part.sequence) else 1.0 for part in step.parts]
            right = sum(weight * len(part.chunk.token_ids) for weight, part in zip(weights, step.parts, strict=True))
            right += self.num_charged
            process(step, result, now)
            if self.num_charged != right and not self._wrong:
                self._wrong.append(f"25: {self.num_charged} tokens are charged, not {right}")

        output.process_step = checked_process  # type: ignore[method-assign]
        scheduler.queue.shares.charge = noted_charge  # type: ignore[method-assign]
        scheduler.queue.head = checked_head  # type: ignore[method-assign]

    def check_place(self, sequence: Sequence) -> None:
        """A new sequence's place is its arrival, its class's time and its prompt's; last for a row of a batch."""
        request = sequence.request
        latency_class = self.sim.core._config.classes[request.latency_class]
        seconds = latency_class.ttft_seconds
        if latency_class.max_queue_seconds is not None:
            seconds += min(0.0005 * len(request.prompt_token_ids), 0.35 * latency_class.max_late_seconds)
        right = request.arrived_at + seconds
        place = int(is_row(sequence)), right, sequence.seq_id
        assert sequence.ticket.order_key == place, f"25: place {sequence.ticket.order_key}, not {place}"

    def after_step(self) -> None:
        """Whatever was next was so by right."""
        assert not self._wrong, self._wrong[0]

    def _right(self, waiting: list[Sequence], now: float) -> Sequence | None:
        """The next: what has begun before; else in time before late, the lightest tenant's; by key.

        The same of the rows of batches, if nothing else waits.
        """
        waiting = [s for s in waiting if not is_row(s)] or waiting
        begun = [s for s in waiting if not _is_new(s)]
        if begun or not waiting:
            return min(begun, key=lambda s: s.ticket.order_key, default=None)
        in_time = [s for s in waiting if not self.sim.laws.waits.is_late(s, now)]
        group = sorted(in_time or waiting, key=lambda s: s.ticket.order_key)
        classes = self.sim.core._config.classes
        is_endless = {name: one.max_queue_seconds is None for name, one in classes.items()}
        kind = is_endless[group[0].request.latency_class]
        alike = [s for s in group if is_endless[s.request.latency_class] == kind]
        ranks = self._ranks({s.request.admission.share_of for s in alike}, now)
        return min(alike, key=lambda s: (ranks[s.request.admission.share_of], s.ticket.order_key))

    def _ranks(self, tenants: set[str], now: float) -> Counter[str]:
        """Seconds of work above (or below) an equal share of the last ten seconds, in whole largest debts."""
        second = int(now)
        slices = [self._tokens[s] for s in range(second - WINDOW_SECONDS + 1, second + 1) if s in self._tokens]
        had: defaultdict[str, float] = defaultdict(float)
        for tenant, number in (item for one in slices for item in one.items()):
            had[tenant] += number
        total = sum(had.values())
        if not had or len(tenants) < 2:
            return Counter()
        share, rate = total / len({*had, *tenants}), total / len(slices)
        unit = rate * self.sim.shape.max_debt_seconds
        return Counter({tenant: int((had[tenant] - share) / unit) for tenant in tenants})


def is_row(sequence: Sequence) -> bool:
    """Whether it is a row of a batch."""
    return sequence.request.latency_class == "batch"


def _is_new(sequence: Sequence) -> bool:
    return sequence.scheduled_at is None and not sequence.num_output_tokens
