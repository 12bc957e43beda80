"""`Drafting`: for which sequences, and how far, a draft model proposes tokens, where its time pays.

A draft model is a small model with the same tokens. Each token that it proposes takes a pass of it before the step, and
a row of the step. With `rate` of its tokens accepted, d of them make of one plain step

    speed(d) = (1 + rate + rate^2 + … + rate^d) / (1 + d * (row + draft))      plain steps' worth of tokens a time

where `row` and `draft` are what a row for each of the step's decodes and a pass over them take, as shares of the time
of a plain step. The best d is taken, if that is faster than what the lookup has found (see `Speculation`). A sequence
that the draft model does not know yet is computed by it first: only where as many tokens as the answer has so far would
win that back.

That is a model of the cost; whether it pays is measured too (see `Pays`). No answer changes by it: see `Chunk.kept`.
Pure; engine thread only. (Idea: speculative decoding, Leviathan et al., arXiv 2211.17192, whose walltime is the formula
above; that it is measured: TurboSpec, arXiv 2406.14066.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from streamserve.engine.plan import Draft, StepPlan, StepResult
from streamserve.engine.policy.speculation import DRAFTED, MOST_PROPOSED, Proposer
from streamserve.engine.step_time import StepTime

_UNFITTED_TOKENS = 16  # of which a pass takes as long as for the weights, until its time is known
_LEAST_SPEED = 1.05  # less than that is not worth the risk
_MOST_MISSING = 16  # tokens that a draft model lacks in a step that is measured: a prompt is weighed on its own
_SPEED_WEIGHT = 0.1  # of the newest step
_LOOK_EVERY, _MOST_LOOK_EVERY = 48, 48 << 5  # steps
_PLAIN_STEPS, _DRAFT_STEPS = 2, 5  # of a look
_STEPS_TO_KNOW = 2
_LOOK_SHARE = 0.02  # of the time, for what a look must compute first
_TOKENS_TO_LOOK = 64  # about as many are computed at once for that
_REST_STEPS = 500  # after a pass that ran out of memory
_FIRST_LEN = 16  # tokens that an answer is taken to have left, beside as many as it has


@dataclass(slots=True)
class _Mean:
    """The mean of some numbers, of which the newest weigh at least `_SPEED_WEIGHT`."""

    value: float = 0.0
    count: int = 0

    def add(self, number: float) -> None:
        self.count += 1
        self.value += max(_SPEED_WEIGHT, 1 / self.count) * (number - self.value)


@dataclass(slots=True)
class Pays:
    """Tokens a second of steps of about as many decodes, with a draft model and `plain`.

    Only steps of nothing but decodes count. The slower way is looked at for a few steps now and then: a draft model
    that does not pay ever more seldom, and not before a sequence comes that it knows soon (see `most_to_look`).
    `num_waited`: steps since it was asked last.
    """

    drafted: _Mean = field(default_factory=_Mean)
    plain: _Mean = field(default_factory=_Mean)
    num_steps: int = 0  # of this turn: first the look, then the better way
    look_every: int = _LOOK_EVERY
    num_waited: int = 0

    @property
    def is_better(self) -> bool:
        """Whether a draft model is not known to be slower."""
        is_known = min(self.drafted.count, self.plain.count) >= _STEPS_TO_KNOW
        return not is_known or self.drafted.value >= self.plain.value

    def may_draft(self) -> bool:
        """Return whether the next step has proposals of a draft model."""
        if self.is_better:
            return self.num_steps >= _PLAIN_STEPS
        return self.num_steps < _DRAFT_STEPS

    def note(self, num_tokens: int, seconds: float, *, has_drafted: bool, is_measure: bool) -> None:
        """Learn from a step that gave so many tokens; not `is_measure`: of its time nothing."""
        is_waiting = not (has_drafted or self.is_better) and self.num_steps < _DRAFT_STEPS
        self.num_waited = 0 if has_drafted else self.num_waited + 1
        self.num_steps += not is_waiting
        if self.num_steps >= self.look_every:
            self.look_every = _LOOK_EVERY if self.is_better else min(2 * self.look_every, _MOST_LOOK_EVERY)
            self.num_steps = 0
        if seconds > 0 and is_measure:
            (self.drafted if has_drafted else self.plain).add(num_tokens / seconds)


@dataclass(slots=True)
class _Step:
    """A step with proposals of a draft model, or without to compare with; `seconds` of the passes before it."""

    num_decodes: int
    has_drafted: bool
    is_measure: bool
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Drafting:
    """What one draft model costs and gives. `weight`: its weights as a share of the model's; `max_len`: its context.

    `time` is of its passes.
    """

    weight: float
    max_len: int
    time: StepTime = field(default_factory=StepTime)
    pays: dict[int, Pays] = field(default_factory=dict)  # by the number of bits of the number of decodes
    rest_steps: int = _REST_STEPS
    _step: _Step | None = None
    _num_rests: int = 0

    def depth(
        self, proposer: Proposer, most: int, *, num_missing: int, num_left: int, num_rows: int, step_time: StepTime
    ) -> int:
        """Return how many tokens to propose after a sequence, up to `most`; 0: none.

        Of the sequence the draft model lacks `num_missing` tokens; its answer is taken to have `num_left` to come.
        """
        rate, row = proposer.acceptance[DRAFTED], step_time.share_of(num_rows)
        row = min(1.0, num_rows / _UNFITTED_TOKENS) if row is None else row
        cost = row + self._share(num_rows, num_rows, step_time)
        best, speed = _best_depth(rate, cost, most)
        if speed < _LEAST_SPEED:
            proposer.acceptance.drift(DRAFTED)
        if speed < max(_LEAST_SPEED, proposer.speed):
            return 0
        to_catch_up = self._share(num_missing, num_rows, step_time) if num_missing > _MOST_MISSING else 0.0
        return best if to_catch_up * num_rows <= (1 - 1 / speed) * num_left else 0

    def _share(self, num_tokens: int, num_rows: int, step_time: StepTime) -> float:
        """Return how long a pass over so many tokens takes, as a share of a plain step with so many decodes."""
        seconds, plain = self.time.seconds_for(num_tokens, 1), step_time.seconds_for(num_rows, 1)
        if seconds is None or plain is None:
            return self.weight * max(1.0, num_tokens / _UNFITTED_TOKENS)
        return seconds / plain

    def may_draft(self, num_decodes: int) -> bool:
        """Return whether the next step, of so many decodes, may have proposals; if not, it is one to compare with."""
        self._num_rests = max(0, self._num_rests - 1)
        may_draft = not self._num_rests and self._pays(num_decodes).may_draft()
        self._step = _Step(num_decodes, has_drafted=False, is_measure=True)
        return may_draft

    def most_to_look(self, num_decodes: int, step_time: StepTime) -> float:
        """Return how many tokens a draft model may compute to know sequences, while it is not known to pay.

        In the time of a small share of the steps since it was asked last: otherwise each look would compute all that
        sequences have become meanwhile, and looking seldom would cost as much as looking often.
        """
        pays = self._pays(num_decodes)
        if pays.is_better:
            return math.inf
        of_tokens = self._share(_TOKENS_TO_LOOK, num_decodes, step_time) / _TOKENS_TO_LOOK
        usual = MOST_PROPOSED * num_decodes if pays.num_steps else 0  # of sequences that a look has begun with
        return max(usual, _LOOK_SHARE * pays.num_waited / of_tokens)

    def begin(self, drafts: tuple[Draft, ...], num_decodes: int) -> None:
        """Note what a draft model is asked before the next step."""
        is_measure = all(draft.num_wanted and len(draft.token_ids) <= _MOST_MISSING for draft in drafts)
        self._step = _Step(num_decodes, has_drafted=True, is_measure=is_measure)

    def note_pass(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a pass before a step."""
        self.time.note(plan, seconds)
        if self._step is not None:
            self._step.seconds += seconds

    def rest(self) -> None:
        """Propose nothing for a while: a pass ran out of memory."""
        self._num_rests = self.rest_steps

    def note_step(self, plan: StepPlan, result: StepResult, seconds: float) -> bool:
        """Learn from a step; return whether it has proposals of a draft model."""
        step, self._step = self._step, None
        if step is None:
            return False
        if step.num_decodes == len(plan.chunks):
            num_tokens = sum(len(one.token_ids) for one in result.sampled)
            is_measure = step.is_measure and (step.has_drafted or plan.num_tokens == step.num_decodes)
            self._pays(step.num_decodes).note(
                num_tokens, seconds + step.seconds, has_drafted=step.has_drafted, is_measure=is_measure
            )
        return step.has_drafted

    def _pays(self, num_decodes: int) -> Pays:
        return self.pays.setdefault(num_decodes.bit_length(), Pays())


def _best_depth(rate: float, cost: float, most: int) -> tuple[int, float]:
    """Return the number of proposals that gives most, and how many plain steps' worth of tokens that is a time."""
    best, speed, power, num_tokens = 0, 1.0, 1.0, 1.0
    for depth in range(1, most + 1):
        power *= rate
        num_tokens += power
        if num_tokens / (1 + cost * depth) <= speed:
            break
        best, speed = depth, num_tokens / (1 + cost * depth)
    return best, speed


def num_left(num_output_tokens: int, num_remaining_tokens: int) -> int:
    """Return how many tokens an answer is taken to have left: as many as it has, and a few."""
    return min(num_remaining_tokens, num_output_tokens + _FIRST_LEN)


def most_missing(drafting: Drafting, seconds: float, *, start: int, unfitted: int) -> int:
    """Return how many tokens a draft model may compute before a step to know sequences, within `seconds`."""
    within = drafting.time.tokens_within(max(0.0, seconds), tokens=0, pairs=0, start=start)
    return unfitted if within is None else math.floor(within)
