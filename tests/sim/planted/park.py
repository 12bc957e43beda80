"""Faults of parking: at the lead limit, for a waiting sequence, for a pause."""

from __future__ import annotations

from functools import partial

from tests.sim.planted import Mutant

_scheduler = partial(Mutant, file="scheduler.py")
_output = partial(Mutant, file="output.py")
_leads = partial(Mutant, file="policy/leads.py")

MUTANTS = (
    _leads(
        name="no lead is too long",
        law=22,
        old="    if num_read is None:\n        return math.inf\n    return config",
        new="    return math.inf\n    return config",
    ),
    _leads(
        name="a lead is one token too long",
        law=22,
        old="    return lead_left(sequence, config) <= 0",
        new="    return lead_left(sequence, config) < 0",
    ),
    _leads(
        name="the pending token does not count for the lead",
        law=22,
        old="(sequence.num_output_tokens + sequence.num_pending - num_read)",
        new="(sequence.num_output_tokens - num_read)",
    ),
    _leads(
        name="held for a lead that is none",
        law=10,
        old="(sequence.num_output_tokens + sequence.num_pending - num_read)",
        new="(sequence.num_output_tokens + sequence.num_pending)",
    ),
    _leads(
        name="a sequence without a reader is held",
        law=10,
        old="    if num_read is None:\n        return math.inf\n",
        new="    num_read = num_read or 0\n",
    ),
    _leads(
        name="a stalled reader's answer never parks",
        law=22,
        old="return sequence.reader.still_seconds(now) >= config.policy.stalled_seconds and rests(sequence, config)",
        new="return False",
    ),
    _leads(
        name="a held sequence parks though memory is free",
        law=22,
        old="sequence.reader.still_seconds(now) >= config.policy.stalled_seconds",
        new="sequence.reader.still_seconds(now) >= 0",
    ),
    _leads(
        name="a held sequence does not park for memory",
        law=23,
        old="    if rests(sequence, config):\n        return True\n",
        new="",
    ),
    _scheduler(
        name="preempted though another is held",
        law=12,
        old="            elif parking:\n",
        new="            elif parking and taker.state is State.WAITING:\n",
    ),
    _scheduler(
        name="of the held the one least ahead parks",
        law=23,
        old="furthest = max(parking, key=",
        new="furthest = (min if taker.state is State.RUNNING else max)(parking, key=",
    ),
    _output(
        name="a parked sequence continues",
        law=15,
        old="        if update.is_last:\n            self._remove(sequence)",
        new="        if update.is_last and park is None:\n            self._remove(sequence)",
    ),
    _leads(
        name="asked again too late",
        law=22,
        old='Park(reason="lead", resume_at_lead=config.lead_tokens // 2)',
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
        old="least = self._config.policy.min_ahead_seconds if is_new and",
        new="least = 0.0 if is_new and",
    ),
    _scheduler(
        name="the one least ahead parks",
        law=23,
        old="furthest = max(parking, key=",
        new="furthest = (min if taker.state is State.WAITING else max)(parking, key=",
    ),
    _scheduler(
        name="no sequence parks for waiting ones",
        law=23,
        old="            elif parking:\n",
        new="            elif taker.state is State.WAITING:\n                return False\n            elif parking:\n",
    ),
    _scheduler(
        name="a parked sequence's chunk is planned all the same",
        law=15,
        old="        step.remove(sequence)\n        self.finish(sequence)\n",
        new="        self.finish(sequence)\n",
    ),
    _scheduler(
        name="a parked sequence keeps its blocks",
        law=7,
        old="        step.remove(sequence)\n        self.finish(sequence)\n",
        new=(
            "        step.remove(sequence)\n"
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
