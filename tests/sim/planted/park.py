"""Faults of parking: at the lead limit, for a waiting sequence, for a pause."""

from __future__ import annotations

from functools import partial

from tests.sim.planted import Mutant

_scheduler = partial(Mutant, file="scheduler.py")
_output = partial(Mutant, file="output.py")

MUTANTS = (
    _output(
        name="no lead is too long",
        law=22,
        old="        if reader is None or sequence.num_output_tokens - reader < self._lead_tokens:",
        new="        if True:",
    ),
    _output(
        name="a lead is one token too long",
        law=22,
        old="sequence.num_output_tokens - reader < self._lead_tokens:",
        new="sequence.num_output_tokens - reader <= self._lead_tokens:",
    ),
    _output(
        name="parked for a lead that is none",
        law=22,
        old="sequence.num_output_tokens - reader < self._lead_tokens:",
        new="sequence.num_output_tokens < self._lead_tokens:",
    ),
    _output(
        name="a sequence without a reader parks",
        law=22,
        old="        if reader is None or sequence.num_output_tokens - reader < self._lead_tokens:",
        new="        if sequence.num_output_tokens - (reader or 0) < self._lead_tokens:",
    ),
    _output(
        name="a park comes with the end",
        law=15,
        old="park = self._lead_park(sequence) if token_ids and reason is None else None",
        new="park = self._lead_park(sequence) if token_ids else None",
    ),
    _output(
        name="a parked sequence continues",
        law=15,
        old="        if update.is_last:\n            self._remove(sequence)",
        new="        if update.is_last and park is None:\n            self._remove(sequence)",
    ),
    _output(
        name="lost token on park",
        law=22,
        old="self.emit(sequence, now, token_ids=token_ids, logprobs=logprobs, finish_reason=reason, park=park)",
        new="self.emit(sequence, now, token_ids=() if park else token_ids, finish_reason=reason, park=park)",
    ),
    _output(
        name="asked again too late",
        law=22,
        old='Park(reason="lead", resume_at_lead=self._lead_tokens // 2)',
        new='Park(reason="lead", resume_at_lead=0)',
    ),
    _output(
        name="parks are not counted",
        law=30,
        old="        self.num_parks += park is not None\n",
        new="",
    ),
    _scheduler(
        name="parked though no sequence is ahead enough",
        law=23,
        old="spare = [pair for pair in ahead if pair[1] >= self._config.min_ahead_seconds]",
        new="spare = [pair for pair in ahead if pair[1] >= 0]",
    ),
    _scheduler(
        name="the one least ahead parks",
        law=23,
        old="return max(spare, key=itemgetter(1))[0]",
        new="return min(spare, key=itemgetter(1))[0]",
    ),
    _scheduler(
        name="no sequence parks for waiting ones",
        law=23,
        old="        if not spare:\n            return None",
        new="        return None",
    ),
    _scheduler(
        name="a parked sequence's chunk is planned all the same",
        law=15,
        old="        budget.remove(sequence)\n",
        new="",
    ),
    _scheduler(
        name="a parked sequence keeps its blocks",
        law=7,
        old="        budget.remove(sequence)\n        self.finish(sequence)\n",
        new=(
            "        budget.remove(sequence)\n"
            "        self.running.remove(sequence)\n"
            "        sequence.transition(State.FINISHED)\n"
        ),
    ),
    _output(
        name="a pause parks no sequence",
        law=24,
        old=(
            "        for sequence in list(self.sequences.values()):\n            self.emit(sequence, now, park=_PAUSED)"
        ),
        new="        pass",
    ),
    _output(
        name="a paused engine takes new sequences",
        law=24,
        old="        elif self.is_paused:\n",
        new="        elif False:\n",
    ),
    _output(
        name="a pause never ends",
        law=32,
        old="        self.is_paused = False\n\n    def expire_deadlines",
        new="        self.is_paused = True\n\n    def expire_deadlines",
    ),
    _output(
        name="a pause is an end",
        law=24,
        old=(
            "        for sequence in list(self.sequences.values()):\n            self.emit(sequence, now, park=_PAUSED)"
        ),
        new=(
            "        for sequence in list(self.sequences.values()):\n"
            '            self.emit(sequence, now, finish_reason="stop")'
        ),
    ),
)
