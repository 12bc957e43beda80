"""Faults of a sequence: its tokens, their positions, the choice of the next one."""

from __future__ import annotations

from functools import partial

from tests.sim.planted import Mutant

_sequence = partial(Mutant, file="sequence.py")
_constraints = partial(Mutant, file="constraints.py")
_holding = partial(Mutant, file="kv/holding.py")

MUTANTS = (
    _sequence(
        name="what was shown is lost on a park",
        law=13,
        old="self.token_ids = [*prompt, *request.output_token_ids]",
        new="self.token_ids = [*prompt, *request.output_token_ids[:-1]]",
    ),
    _sequence(
        name="the first token's time is lost on a park",
        law=21,
        old="        self.first_token_at = request.resume.first_token_at\n",
        new="",
    ),
    _sequence(
        name="a sequence keeps its table when it gives its blocks back",
        law=7,
        old="held, self.held = self.held, Holding()",
        new="held, self.held = self.held, Holding(block_table=list(self.held.block_table))",
    ),
    _sequence(
        name="a preempted sequence counts as computed",
        law=7,
        old=("        self.num_computed_tokens = self.num_launched_tokens = 0\n        self.num_pending = 0\n"),
        new=("        self.num_launched_tokens = self.num_computed_tokens\n        self.num_pending = 0\n"),
    ),
    _sequence(
        name="a preempted sequence stays in flight",
        law=28,
        old=("        self.num_computed_tokens = self.num_launched_tokens = 0\n        self.num_pending = 0\n"),
        new=("        self.num_launched_tokens -= self.num_computed_tokens\n        self.num_computed_tokens = 0\n"),
    ),
    _sequence(
        name="one token more than asked for",
        law=14,
        old="return self.num_output_tokens >= self.max_tokens or len(self.token_ids) >= max_model_len",
        new="return self.num_output_tokens > self.max_tokens or len(self.token_ids) >= max_model_len",
    ),
    _sequence(
        name="longer than the model",
        law=14,
        old="return self.num_output_tokens >= self.max_tokens or len(self.token_ids) >= max_model_len",
        new="return self.num_output_tokens >= self.max_tokens",
    ),
    _constraints(
        name="a stop token of the prompt ends the answer",
        law=14,
        old="or num_output_tokens > self.sampling.min_tokens",
        new="or num_output_tokens >= self.sampling.min_tokens",
    ),
    _constraints(
        name="eos ends nothing",
        law=14,
        old="frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_token_ids)",
        new="frozenset(sampling.stop_token_ids)",
    ),
    _constraints(
        name="min_tokens bans one time too few",
        law=13,
        old="if num_known - len(prompt) + num_new < sampling.min_tokens:",
        new="if num_known - len(prompt) + num_new + 1 < sampling.min_tokens:",
    ),
    _constraints(
        name="the pending token is not counted for min_tokens",
        law=28,
        old="if num_known - len(prompt) + num_new < sampling.min_tokens:",
        new="if num_known - len(prompt) < sampling.min_tokens:",
    ),
    _constraints(
        name="the draw forgets the pending token's position",
        law=28,
        old="position=num_known + num_new,",
        new="position=num_known,",
    ),
    _constraints(
        name="the draw is made at the output's position",
        law=13,
        old="position=num_known + num_new,",
        new="position=num_known - len(prompt),",
    ),
    _constraints(
        name="penalties forget what was shown",
        law=13,
        old="output_token_ids=tuple(token_ids[len(prompt) :]) if",
        new="output_token_ids=tuple(token_ids[len(prompt) + 1 :]) if",
    ),
    _sequence(
        name="penalties wait for the pending token",
        law=10,
        old="        return is_last or len(self.token_ids) + 1 >=",
        new="        return is_last or self.constraints.has_penalties or len(self.token_ids) + 1 >=",
    ),
    _sequence(
        name="counts continue though blocks were lost",
        law=33,
        old="held, self.held = self.held, Holding()",
        new="held, self.held = self.held, Holding(is_counted=self.held.is_counted)",
    ),
    _sequence(
        name="counts keep the token of a step that failed",
        law=33,
        old="        self.num_pending, self.held.is_counted = 0, False\n\n",
        new="        self.num_pending = 0\n\n",
    ),
    _holding(
        name="counts are begun anew in each step",
        law=33,
        old="return self.penalty_slot is not None and not self.is_counted",
        new="return self.penalty_slot is not None",
    ),
    _sequence(
        name="nothing waits for the pending token",
        law=28,
        old="        if not self.num_pending:\n            return False",
        new="        return False",
    ),
    _sequence(
        name="everything waits for the pending token",
        law=10,
        old="        is_last = self.num_output_tokens + 1 >= self.max_tokens\n",
        new="        is_last = True\n",
    ),
    _sequence(
        name="landing does not end what is in flight",
        law=28,
        old="        self.num_launched_tokens -= num_wrong\n        self.num_computed_tokens",
        new="        self.num_launched_tokens += num_tokens\n        self.num_computed_tokens",
    ),
    _sequence(
        name="a landed token stays pending",
        law=28,
        old="        if self.num_launched_tokens == self.num_computed_tokens:\n            self.num_pending = 0\n",
        new="",
    ),
)
