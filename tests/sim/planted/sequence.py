"""Faults of a sequence: its tokens, their positions, the choice of the next one."""

from __future__ import annotations

from functools import partial

from tests.sim.planted import Mutant

_sequence = partial(Mutant, file="sequence.py")

MUTANTS = (
    _sequence(
        name="what was shown is lost on a park",
        law=13,
        old="self.token_ids = [*self.request.prompt_token_ids, *self.request.output_token_ids]",
        new="self.token_ids = [*self.request.prompt_token_ids, *self.request.output_token_ids[:-1]]",
    ),
    _sequence(
        name="the first token's time is lost on a park",
        law=21,
        old="        self.first_token_at = self.request.resume.first_token_at\n",
        new="",
    ),
    _sequence(
        name="a sequence keeps its table when it gives its blocks back",
        law=7,
        old="self.block_table, self.other_tables, self.num_null_blocks = [], [], 0",
        new="self.block_table, self.other_tables, self.num_null_blocks = list(self.block_table), [], 0",
    ),
    _sequence(
        name="a preempted sequence counts as computed",
        law=7,
        old=(
            "        self.num_computed_tokens = self.num_launched_tokens = 0\n"
            "        self.num_pending, self.is_counted = 0, False\n"
        ),
        new=(
            "        self.num_launched_tokens = self.num_computed_tokens\n"
            "        self.num_pending, self.is_counted = 0, False\n"
        ),
    ),
    _sequence(
        name="a preempted sequence stays in flight",
        law=28,
        old=(
            "        self.num_computed_tokens = self.num_launched_tokens = 0\n"
            "        self.num_pending, self.is_counted = 0, False\n"
        ),
        new=(
            "        self.num_launched_tokens -= self.num_computed_tokens\n"
            "        self.num_computed_tokens = 0\n"
            "        self.is_counted = False\n"
        ),
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
    _sequence(
        name="a stop token of the prompt ends the answer",
        law=14,
        old="or self.num_output_tokens > self.request.sampling.min_tokens",
        new="or self.num_output_tokens >= self.request.sampling.min_tokens",
    ),
    _sequence(
        name="eos ends nothing",
        law=14,
        old="            else self.request.eos_token_ids.union(sampling.stop_token_ids)",
        new="            else sampling.stop_token_ids",
    ),
    _sequence(
        name="min_tokens bans one time too few",
        law=13,
        old="if self.num_output_tokens + num_new < sampling.min_tokens:",
        new="if self.num_output_tokens + num_new + 1 < sampling.min_tokens:",
    ),
    _sequence(
        name="the pending token is not counted for min_tokens",
        law=28,
        old="if self.num_output_tokens + num_new < sampling.min_tokens:",
        new="if self.num_output_tokens < sampling.min_tokens:",
    ),
    _sequence(
        name="the draw forgets the pending token's position",
        law=28,
        old="position=len(self.token_ids) + num_new,",
        new="position=len(self.token_ids),",
    ),
    _sequence(
        name="the draw is made at the output's position",
        law=13,
        old="position=len(self.token_ids) + num_new,",
        new="position=self.num_output_tokens,",
    ),
    _sequence(
        name="penalties forget what was shown",
        law=13,
        old="output_token_ids=tuple(self.token_ids[len(prompt) :]) if",
        new="output_token_ids=tuple(self.token_ids[len(prompt) + len(self.request.output_token_ids) :]) if",
    ),
    _sequence(
        name="penalties wait for the pending token",
        law=10,
        old="        return is_last or len(self.token_ids) + 1 >= (max_model_len or sys.maxsize)",
        new="        return is_last or len(self.token_ids) + 1 >= (max_model_len or sys.maxsize) or self.has_penalties",
    ),
    _sequence(
        name="counts continue though blocks were lost",
        law=33,
        old="        self.num_pending, self.is_counted = 0, False\n        self.penalty_slot = None\n",
        new="        self.num_pending = 0\n        self.penalty_slot = None\n",
    ),
    _sequence(
        name="counts keep the token of a step that failed",
        law=33,
        old="        self.num_pending, self.is_counted = 0, False\n\n",
        new="        self.num_pending = 0\n\n",
    ),
    _sequence(
        name="counts are begun anew in each step",
        law=33,
        old="begins_counts = self.penalty_slot is not None and not self.is_counted",
        new="begins_counts = self.penalty_slot is not None",
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
