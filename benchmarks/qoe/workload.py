"""What comes in a run: the readers of `streamserve.loadtest.visits`, bursts, and a tenant that floods. Pure."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from streamserve.loadtest.visits import NUM_TENANTS, Visit, draw_visits

FLOODER = "flooder"

BURST_FACTOR, BURST_SECONDS = 5.0, 10.0
# The first burst, and the time from one to the next.
BURST_AT, BURST_EVERY = 20.0, 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What comes, as shares of the machine's capacity: a load, bursts of it, and a flood by one more tenant."""

    load: float
    has_bursts: bool = False
    flood: float = 0.0

    def __str__(self) -> str:
        if self.has_bursts:
            return f"{self.load:g}x, bursts of x{BURST_FACTOR:g} for {BURST_SECONDS:g} s every {BURST_EVERY:g} s"
        if self.flood:
            return f"{self.load:g}x of {NUM_TENANTS} tenants and {self.flood:g}x of one that floods"
        return f"{self.load:g}x"

    def draw(self, seed: int, per_second: float, seconds: float) -> list[Visit]:
        """Return the visits of a run on a machine that finishes `per_second` requests of the mix."""
        visits = draw_visits(seed, per_second * self.load, seconds, after=_after if self.has_bursts else operator.add)
        if self.flood:
            flood = draw_visits(seed + 1_000_000, per_second * self.flood, seconds, tenant=FLOODER, first=len(visits))
            visits = sorted([*visits, *flood], key=lambda visit: visit.arrives_at)
        return visits


def _after(gap: float, at: float) -> float:
    """Return when a gap is over in which the time of bursts counts `BURST_FACTOR` times."""
    while True:
        into = (at - BURST_AT) % BURST_EVERY if at >= BURST_AT else BURST_EVERY + at - BURST_AT
        is_burst = into < BURST_SECONDS
        left = BURST_SECONDS - into if is_burst else BURST_EVERY - into
        factor = BURST_FACTOR if is_burst else 1.0
        if gap <= left * factor:
            return at + gap / factor
        gap, at = gap - left * factor, at + left + 1e-9
