"""Faults of recovery: from too little memory, and from a failed integrity check."""

from __future__ import annotations

from functools import partial

from tests.sim.planted import Mutant

_core = partial(Mutant, file="core.py")
_halves = partial(Mutant, file="in_flight.py")
_in_flight = partial(Mutant, file="in_flight.py")
_output = partial(Mutant, file="output.py")
_sequence = partial(Mutant, file="sequence.py")
_scheduler = partial(Mutant, file="scheduler.py")

MUTANTS = (
    _core(
        name="a suspect is computed among others",
        law=35,
        old="        if not suspects:\n            return chunks\n",
        new="        if suspects or not suspects:\n            return chunks\n",
    ),
    _core(
        name="a suspect is launched beside what is in flight",
        law=35,
        old="        while self._in_flight:  # Invariant: nothing else is in flight\n            self._collect()\n",
        new="",
    ),
    _core(
        name="two suspects share a step",
        law=35,
        old="still_ready((suspects[0],), self._sequences)",
        new="still_ready(tuple(suspects), self._sequences)",
    ),
    _core(
        name="sequences wait for suspects",
        law=35,
        old="return still_ready(tuple(chunk for chunk in chunks if chunk not in suspects), self._sequences)",
        new="return ()",
    ),
    _sequence(
        name="once a suspect, always one",
        law=35,
        old=" and self.num_output_tokens == len(request.output_token_ids)\n",
        new="\n",
    ),
    _in_flight(
        name="memory runs out: counts keep what was launched",
        law=33,
        old="                    sequences[chunk.seq_id].held.is_counted = False\n",
        new="                    pass\n",
    ),
    _halves(
        name="memory runs out: the parts draw as the whole would have",
        law=33,
        old="samples = chunk.samples and sequence.sample_specs(1)",
        new="samples = chunk.samples",
    ),
    _core(
        name="memory runs out: the second half is forgotten",
        law=26,
        old="        for half in halves(chunks, self.pool.block_size):",
        new="        for half in halves(chunks, self.pool.block_size)[:1]:",
    ),
    _core(
        name="memory runs out: it is tried whole again",
        law=26,
        old="        for half in halves(chunks, self.pool.block_size):",
        new="        for half in (chunks,):",
    ),
    _core(
        name="memory runs out: the smallest fails",
        law=26,
        old="largest = max(chunks, key=",
        new="largest = min(reversed(chunks), key=",
    ),
    _core(
        name="memory runs out: the step counts all the same",
        law=26,
        old="            self._note_out_of_memory(step.plan.chunks)\n            self._run_halves(step.plan.chunks)\n",
        new=(
            "            self._note_out_of_memory(step.plan.chunks)\n"
            "            for part in step.parts:\n"
            "                if part.is_current:\n"
            "                    part.sequence.num_computed_tokens += len(part.chunk.token_ids)\n"
        ),
    ),
    _core(
        name="memory runs out: the step launched on top of it counts",
        law=26,
        old="            self._in_flight.discard_all()  # they were launched on top of it\n",
        new="",
    ),
    _core(
        name="memory runs out: steps stay as large",
        law=26,
        old="        self.scheduler.lower_budget(num_tokens)\n",
        new="",
    ),
    _core(
        name="memory runs out: it is not counted",
        law=30,
        old="        self._num_out_of_memory += 1\n",
        new="",
    ),
    _core(
        name="memory runs out: the first half's failure ends all",
        law=26,
        old='            self._output.fail(self._sequences[largest.seq_id], "out_of_memory", self._clock())',
        new=(
            "            for one in chunks:\n"
            "                if one.seq_id in self._sequences:\n"
            '                    self._output.fail(self._sequences[one.seq_id], "out_of_memory", self._clock())'
        ),
    ),
    _in_flight(
        name="memory runs out: chunks stay in flight",
        law=26,
        old="            part.sequence.take_back(len(part.chunk.token_ids))\n",
        new="            pass\n",
    ),
    _halves(
        name="the first part of a cut chunk samples",
        law=9,
        old="        samples=(),\n        scores=first,\n",
        new="        scores=first,\n",
    ),
    _halves(
        name="the second part of a cut chunk starts anew",
        law=9,
        old="[replace(chunk, start=middle, token_ids=chunk.token_ids[num_tokens:], scores=rest)]",
        new="[replace(chunk, token_ids=chunk.token_ids[num_tokens:], scores=rest)]",
    ),
    _halves(
        name="halves of an aborted sequence are run",
        law=15,
        old="        if sequence is None or not _is_ready(chunk, sequence):\n            continue\n",
        new=(
            "        if sequence is None:\n            raise IndexError(chunk.seq_id)\n"
            "        if not _is_ready(chunk, sequence):\n            continue\n"
        ),
    ),
    _core(
        name="a mistake in the books kills the engine",
        law=27,
        old="        except Exception:\n            self._quarantine()",
        new="        except ZeroDivisionError:\n            self._quarantine()",
    ),
    _core(
        name="a quarantine is not counted",
        law=27,
        old="        self._num_quarantines += 1\n",
        new="",
    ),
    _output(
        name="a quarantine continues with the old pool",
        law=27,
        old="        self.pool = self.pool.renewed()\n",
        new="",
    ),
    _output(
        name="a quarantine does not end the holders of blocks",
        law=27,
        old='        for sequence in lost:\n            self.emit(sequence, now, error="internal_error")',
        new="        for sequence in lost:\n            del self.sequences[sequence.seq_id]",
    ),
    _output(
        name="a quarantine ends waiting sequences",
        law=27,
        old="        if self.is_suspect:\n            lost = ",
        new="        if True:\n            lost = ",
    ),
    _scheduler(
        name="a quarantine leaves running sequences",
        law=27,
        old="            if sequence.state is State.WAITING and not sequence.held.block_table:",
        new="            if sequence.state is State.WAITING or len(sequence.held.block_table) < 3:",
    ),
)
