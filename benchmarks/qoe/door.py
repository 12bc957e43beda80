"""What the door's refusals are worth: readers served with and without it, and how right `Retry-After` is.

    python -m benchmarks.qoe.door [--loads 1.5,2,3] [--seeds 2] [--seconds 60]

The simulation of `python -m benchmarks.qoe` with the client's `AdmissionControl` before the core. Without the door a
request that is late is refused when it expires. A refused reader does not come back. `Retry-After` is right if a time
is within a factor of 2 of it: "accepted", the time until the door would accept the same request; "begun", the time
until a request of its class comes that gets a first token (of those refusals after which one did). Times below a
second, which the header cannot say, count as a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.qoe.machines import Machine, machine_of
from benchmarks.qoe.score import share_served
from benchmarks.qoe.simulation import Simulation
from benchmarks.qoe.workload import Workload
from benchmarks.support.machine import describe_machine, parser, progress
from streamserve.clients.thread.admission import AdmissionControl
from streamserve.clients.timings import RecentTimes
from streamserve.engine.config import EngineConfig
from streamserve.engine.output import SequenceUpdate
from streamserve.loadtest.visits import Visit
from streamserve.protocol.errors import Overloaded


class Door(Simulation):
    """`has_door` False: every request is added, and only counted."""

    def __init__(self, machine: Machine, visits: Sequence[Visit], *, has_door: bool) -> None:
        super().__init__(machine, EngineConfig(speculation="off"), visits)
        self.num_refused = self.num_right = self.num_expired = self.num_judged = self.num_begun_right = 0
        self._refused: list[tuple[float, Visit, int]] = []  # when, Retry-After: while the door would refuse them
        self._unbegun: list[tuple[float, Visit, int]] = []  # the same, until one of the class that came later has begun
        self._has_door = has_door
        self._times = RecentTimes(self.clock)
        config = EngineConfig(num_blocks=machine.num_blocks, max_num_seqs=machine.seats)
        self._admission = AdmissionControl(config, self._times, self.clock)

    def _ask(self, stream: Any) -> None:
        visit = stream.visit
        is_new = not stream.token_ids and not stream.parking.num_parks
        if is_new and self._has_door:
            try:
                self._admission.check_wait(
                    self.core, visit.latency_class, tenant=visit.tenant, num_tokens=visit.prompt_len
                )
            except Overloaded as refused:
                self.num_refused += 1
                self._refused.append((self.clock.now, visit, refused.retry_after))
                self._unbegun.append(self._refused[-1])
                return
        super()._ask(stream)

    def _let_in(self) -> None:
        super()._let_in()
        still = [one for one in self._refused if not self._accepts(one[1])]
        for at, _, retry_after in set(self._refused) - set(still):
            self.num_right += _is_right(retry_after, self.clock.now - at)
        self._refused = still

    def _accepts(self, visit: Visit) -> bool:
        seconds, most = self._admission.predict(
            self.core.backlog, visit.latency_class, tenant=visit.tenant, num_tokens=visit.prompt_len
        )
        return seconds <= most

    def _note_begun(self, visit: Visit) -> None:
        """Judge the refusals of its class before it came."""
        alike = [one for one in self._unbegun if one[1].latency_class == visit.latency_class]
        judged = [one for one in alike if one[0] <= visit.arrives_at]
        self.num_judged += len(judged)
        self.num_begun_right += sum(_is_right(retry_after, visit.arrives_at - at) for at, _, retry_after in judged)
        self._unbegun = [one for one in self._unbegun if one not in judged]

    def _take(self, update: SequenceUpdate) -> None:
        stream = self._running[update.seq_id]
        if update.token_ids and not stream.token_ids:
            self._note_begun(stream.visit)
        if update.is_last:
            self.num_expired += update.error is not None
            if update.scheduled_at is not None:
                first = update.first_token_at or update.at
                times = {"prefill": first - update.scheduled_at, "decode": update.at - first}
                self._times.note_finished({**times, "queue": 0.0, "ttft": 0.0, "itl_p50": 0.0, "itl_p95": 0.0})
        super()._take(update)


def _is_right(retry_after: int, seconds: float) -> bool:
    return retry_after / 2 <= max(1.0, seconds) <= 2 * retry_after


def main() -> None:
    """Print a line for each load, without the door and with it."""
    options = parser(__doc__)
    options.add_argument("--loads", default="1.5,2,3")
    options.add_argument("--machine", default="cpu")
    options.add_argument("--seats", type=int, default=16)
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--seconds", type=float, default=60.0, help="in which requests come")
    chosen = options.parse_args()
    machine = machine_of(chosen.machine, chosen.seats)
    print(describe_machine())
    print(f"{'load':6}{'':10}{'served':>8}{'at once':>9}{'expired':>9}   Retry-After right: accepted, begun")
    for load in map(float, chosen.loads.split(",")):
        for has_door in (False, True):
            print_line(machine, load, chosen.seeds, chosen.seconds, has_door=has_door)


def print_line(machine: Machine, load: float, num_seeds: int, seconds: float, *, has_door: bool) -> None:
    """Simulate and print the means of the seeds."""
    served = num_visits = num_refused = num_expired = num_right = num_judged = num_begun_right = 0
    for seed in range(1, num_seeds + 1):
        progress(f"{load:g}x, seed {seed}, {'with' if has_door else 'without'} the door")
        visits = Workload(load=load).draw(seed, machine.capacity, seconds)
        simulation = Door(machine, visits, has_door=has_door)
        served += round(share_served(simulation.run()) * len(visits))
        num_visits += len(visits)
        num_refused += simulation.num_refused
        num_expired += simulation.num_expired
        num_right += simulation.num_right
        num_judged += simulation.num_judged
        num_begun_right += simulation.num_begun_right
    shares = [f"{number / num_visits:.1%}" for number in (served, num_refused, num_expired)]
    accepted, begun = _share(num_right, num_refused), _share(num_begun_right, num_judged)
    name = "door" if has_door else "no door"
    print(f"{load:<6g}{name:10}{shares[0]:>8}{shares[1]:>9}{shares[2]:>9}   {accepted}, {begun}", flush=True)


def _share(number: int, most: int) -> str:
    return f"{number / most:.0%}" if most else "–"


if __name__ == "__main__":
    main()
