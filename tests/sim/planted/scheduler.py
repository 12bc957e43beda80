"""Faults of the scheduler: order, room, the tokens of a step, the tenants' debts."""

from __future__ import annotations

from functools import partial

from tests.sim.planted import Mutant

_scheduler = partial(Mutant, file="scheduler.py")
_budget = partial(Mutant, file="budget.py")
_reserve = partial(Mutant, file="policy/reserve.py")
_step_time = partial(Mutant, file="step_time.py")

MUTANTS = (
    _scheduler(
        name="begun prompts first, then waiting ones",
        law=34,
        old="            sequence = min(prompts, key=order_key if cut is None else _shortest_first)\n",
        new="            sequence = prompts[0] if cut is None else min(prompts, key=_shortest_first)\n",
    ),
    _scheduler(
        name="the next in order takes the share",
        law=34,
        old="key=order_key if cut is None else _shortest_first)",
        new="key=order_key)",
    ),
    _scheduler(
        name="the shortest prompt takes the step",
        law=34,
        old="key=order_key if cut is None else _shortest_first)",
        new="key=_shortest_first)",
    ),
    _scheduler(
        name="a long prompt takes the whole step",
        law=34,
        old="rest = min(self._pool.block_size, most // 2)",
        new="rest = 0",
    ),
    _scheduler(
        name="a share is lost",
        law=10,
        old="self._with_blocks(turn, min(wanted, share), step, now)\n                share -= num_tokens\n",
        new="share = 0\n",
    ),
    _budget(
        name="no step is too long",
        law=29,
        old="seconds = min(config.max_step_seconds, ",
        new="seconds = min(1e9, ",
    ),
    _step_time(
        name="the time of a step without tokens is forgotten",
        law=29,
        old="fit = _Fit(costs.get(_BASE, 0.0), costs[_PER_TOKEN]",
        new="fit = _Fit(0.0, costs[_PER_TOKEN]",
    ),
    _scheduler(
        name="the running are out of order",
        law=8,
        old="        insort(self.running, sequence, key=order_key)\n",
        new="        self.running.append(sequence)\n",
    ),
    _scheduler(
        name="the oldest is preempted",
        law=12,
        old="                self._preempt(last, step)\n",
        new="                self._preempt(self.running[0], step)\n",
    ),
    _scheduler(
        name="a sequence is preempted before memory is out",
        law=12,
        old="return self._num_lacking(sequence) <= num_free",
        new="return self._num_lacking(sequence) <= max(0, num_free - 2) or len(self.running) == 1",
    ),
    _scheduler(
        name="a preempted sequence keeps its blocks",
        law=7,
        old="        self._pool.release(sequence)\n        sequence.num_preemptions += 1",
        new="        sequence.num_preemptions += 1",
    ),
    _scheduler(
        name="a finished sequence keeps its blocks",
        law=7,
        old="        sequence.transition(State.FINISHED)\n        self._pool.release(sequence)",
        new="        sequence.transition(State.FINISHED)",
    ),
    _reserve(
        name="more blocks are needed than are free",
        law=16,
        old="        return needed <= num_free",
        new="        return needed <= num_free + 1",
    ),
    _reserve(
        name="cached blocks without a holder count as held",
        law=16,
        old="needed = pool.num_taken(sequence, prefix)",
        new="needed = -(-len(sequence.token_ids) // pool.block_size) - len(prefix[0])",
    ),
    _scheduler(
        name="a decode gets no block",
        law=6,
        old="                self._pool.extend(sequence, sequence.num_launched_tokens + 1)\n",
        new="                pass\n",
    ),
    _scheduler(
        name="chunked prompts do not continue",
        law=10,
        old="                wanted.prompts.append(sequence)\n",
        new="                pass\n",
    ),
    _scheduler(
        name="every start sets the scheduling time",
        law=21,
        old="        if sequence.scheduled_at is None:\n            sequence.scheduled_at = now\n",
        new="        if True:\n            sequence.scheduled_at = now\n",
    ),
    _budget(
        name="a step's budget is not spent",
        law=9,
        old="        self.num_tokens -= num_tokens\n",
        new="        self.num_tokens -= 1\n",
    ),
    _budget(
        name="prefill beside decodes has no limit",
        law=29,
        old="        return max(0, min(self.num_tokens, max(self._block_size - num_prefill, within)))",
        new="        return self.num_tokens if self.is_short else max(0, min(self.num_tokens, within))",
    ),
    _budget(
        name="no prefill gets a token beside decodes",
        law=10,
        old="        return max(0, min(self.num_tokens, max(self._block_size - num_prefill, within)))",
        new="        return 0",
    ),
    _budget(
        name="every chunk samples",
        law=9,
        old="samples = sequence.sample_specs(num_rows) if num_tokens == sequence.num_unplanned_tokens else ()",
        new="samples = sequence.sample_specs(num_rows)",
    ),
    _budget(
        name="a chunk's table is one block short",
        law=6,
        old="block_table=tuple(held.block_table[:num_blocks]),",
        new="block_table=tuple(held.block_table[: end // block_size]),",
    ),
    _budget(
        name="a chunk starts where nothing is in flight",
        law=28,
        old="    start = sequence.num_launched_tokens\n    end = start",
        new="    start = sequence.num_computed_tokens\n    end = start",
    ),
)
