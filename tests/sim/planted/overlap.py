"""Faults of overlapping steps: one is launched before the previous one is collected."""

from __future__ import annotations

from functools import partial

from tests.sim.planted import Mutant

_core = partial(Mutant, file="core.py")
_in_flight = partial(Mutant, file="in_flight.py")
_output = partial(Mutant, file="output.py")

MUTANTS = (
    _core(
        name="three steps in flight",
        law=28,
        old="self._most_in_flight = 1 if _overlaps(config, runner) else 0",
        new="self._most_in_flight = 2 if _overlaps(config, runner) else 0",
    ),
    _core(
        name="two steps in flight without overlap",
        law=28,
        old="self._most_in_flight = 1 if _overlaps(config, runner) else 0",
        new="self._most_in_flight = 1",
    ),
    _core(
        name="the last step is never collected",
        law=32,
        old="            if not has_launched or len(self._in_flight) > self._most_in_flight:",
        new="            if len(self._in_flight) > self._most_in_flight:",
    ),
    _core(
        name="an uncollected step is no work",
        law=28,
        old="return bool(self._inbox or self._in_flight or (self._sequences and not self._is_resting))",
        new="return bool(self._inbox or (self._sequences and not self._is_resting))",
    ),
    _in_flight(
        name="the newest step is collected first",
        law=28,
        old="        return self._steps.popleft()\n",
        new="        return self._steps.pop()\n",
    ),
    _in_flight(
        name="a late result of one that was preempted counts",
        law=28,
        old="return self.sequence.state is State.RUNNING and self.sequence.num_preemptions == self.num_preemptions",
        new="return self.sequence.state is State.RUNNING",
    ),
    _output(
        name="the extra token after a stop is in an update",
        law=15,
        old="if part.is_current and self.sequences.get(part.chunk.seq_id) is part.sequence",
        new="if True",
    ),
    _in_flight(
        name="a launched chunk is not in flight",
        law=28,
        old="            part.sequence.launch(len(part.chunk.token_ids), num_rows=len(part.chunk.samples))\n",
        new="            pass\n",
    ),
    _in_flight(
        name="every launched chunk gives a token",
        law=28,
        old="num_rows=len(part.chunk.samples))",
        new="num_rows=1)",
    ),
)
