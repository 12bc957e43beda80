"""Faults of several tokens a step: which are kept, and what a draft model's memory holds."""

from __future__ import annotations

from functools import partial

from tests.sim.planted import Mutant

_plan = partial(Mutant, file="plan.py")
_output = partial(Mutant, file="output.py")
_sequence = partial(Mutant, file="sequence.py")
_scheduler = partial(Mutant, file="scheduler.py")
_drafter = partial(Mutant, file="drafter.py")

MUTANTS = (
    _plan(
        name="a proposed token is kept, whatever was drawn",
        law=13,
        old="            if chosen != proposed:\n                break\n",
        new="",
    ),
    _plan(
        name="one token too many is kept",
        law=13,
        old="            if chosen != proposed:\n                break\n",
        new="            if chosen != proposed and len(kept) > 1:\n                break\n",
    ),
    _output(
        name="what was refused stays computed",
        law=13,
        old="        num_wrong = len(part.chunk.samples) - len(token_ids)\n",
        new="        num_wrong = 0\n",
    ),
    _output(
        name="a draft model's refused tokens are not rolled back",
        law=40,
        old="sequence.held.num_drafted_tokens += min(num_accepted, len(proposed) - 1)",
        new="sequence.held.num_drafted_tokens += len(proposed) - 1",
    ),
    _output(
        name="a draft model's last proposal counts as computed",
        law=40,
        old="sequence.held.num_drafted_tokens += min(num_accepted, len(proposed) - 1)",
        new="sequence.held.num_drafted_tokens += num_accepted",
    ),
    _sequence(
        name="a draft model knows a sequence whose blocks were freed",
        law=40,
        old="held, self.held = self.held, Holding()",
        new="held, self.held = self.held, Holding(num_drafted_tokens=self.held.num_drafted_tokens)",
    ),
    _scheduler(
        name="a part of a prompt counts as all of it",
        law=40,
        old="            sequence.held.num_drafted_tokens = draft.start + len(draft.token_ids)\n",
        new="            sequence.held.num_drafted_tokens = len(sequence.token_ids)\n",
    ),
    _scheduler(
        name="a draft model begins one token late",
        law=40,
        old="        start = sequence.held.num_drafted_tokens\n        end = min(",
        new="        start = min(sequence.held.num_drafted_tokens + 1, num_known - 1)\n        end = min(",
    ),
    _scheduler(
        name="a draft model proposes where a block ends",
        law=6,
        old=(
            "            min(map(len, sequence.held.tables)) * self._pool.block_size"
            " - sequence.num_launched_tokens - 1,\n"
        ),
        new="",
    ),
    _drafter(
        name="a draft model draws by another position",
        law=40,
        old="SampleSpec(position=end,",
        new="SampleSpec(position=end + 1,",
    ),
    _drafter(
        name="a pass repeats the newest token a place too far",
        law=40,
        old="start, token_ids = (end - 1, proposed[-1:])",
        new="start, token_ids = (end, proposed[-1:])",
    ),
)
