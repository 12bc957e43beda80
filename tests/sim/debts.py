"""`Debts`: what each tenant owes, counted slowly, and the place in the queue that follows from it."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from streamserve.engine.plan import StepPlan
from streamserve.engine.sequence import Sequence

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

WINDOW_SECONDS = 10
SLACK_SECONDS = 1e-6


class Debts:
    """All computed tokens, by second and tenant. A sequence's debt is that of the moment when it was added.

    The core takes messages in when a step begins, and when a step has been collected. Each of these moments is kept as
    a second and the tokens computed in it so far.
    """

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self._tokens: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._moments: list[tuple[int, Counter[str]]] = []

    def before_step(self) -> None:
        """Note the moment before the core takes messages in."""
        self._moments = [self._now()]

    def after_collect(self, plan: StepPlan) -> None:
        """A step is collected: the core takes messages in, then charges the step, also to sequences that left."""
        self._moments.append(self._now())
        if self.sim.runner.is_void or plan in self.sim.runner.failed[-4:]:
            return
        for chunk in plan.chunks:
            self._tokens[int(self.sim.clock())][self.sim.tenants[chunk.seq_id]] += len(chunk.token_ids)

    def check(self, sequence: Sequence) -> None:
        """A new sequence's place is its arrival, plus its class's time, plus its tenant's debt."""
        request, shape = sequence.request, self.sim.shape
        ttft = self.sim.core._config.classes[request.latency_class].ttft_seconds
        debt = sequence.order_key[0] - request.arrived_at - ttft
        most = shape.max_debt_seconds
        right = [max(-most, min(self._debt(request.tenant, *moment), most)) for moment in self._moments]
        is_right = any(abs(debt - one) < SLACK_SECONDS for one in right)
        assert is_right, f"25: {request.tenant} owes {debt} s, not {right[0]}"

    def _now(self) -> tuple[int, Counter[str]]:
        second = int(self.sim.clock())
        return second, Counter(self._tokens.get(second, {}))

    def _debt(self, tenant: str, second: int, latest: Counter[str]) -> float:
        """Tokens above (or below) an equal share of the last ten seconds' work, as seconds of work."""
        slices = [self._tokens[s] for s in range(second - WINDOW_SECONDS + 1, second) if s in self._tokens]
        slices += [latest] * bool(latest)
        tenants: Counter[str] = sum(slices, Counter())
        if not tenants:
            return 0.0
        share = tenants.total() / len({*tenants, tenant})
        return (tenants[tenant] - share) * len(slices) / tenants.total()
