"""Faults of the scheduler: order, room, the tokens of a step, the tenants' debts."""

from __future__ import annotations

from functools import partial

from tests.sim.planted import Mutant

_scheduler = partial(Mutant, file="scheduler.py")
_budget = partial(Mutant, file="budget.py")
_fairness = partial(Mutant, file="budget.py")
_patience = partial(Mutant, file="patience.py")
_step_time = partial(Mutant, file="step_time.py")

MUTANTS = (
    _scheduler(
        name="the last in the queue goes first",
        law=11,
        old="            prompts = begun + self.waiting[:may_start]\n",
        new="            prompts = begun + self.waiting[-may_start:] * may_start\n",
    ),
    _scheduler(
        name="starvation: a sequence that does not fit is passed by",
        law=11,
        old="                if victim is None:\n                    may_start = False\n                    continue",
        new=(
            "                if victim is None:\n"
            "                    if not any(self._start(one, now) for one in self.waiting[1:]):\n"
            "                        may_start = False\n                    continue"
        ),
    ),
    _scheduler(
        name="starvation: admission waits until the begun prompts are computed",
        law=34,
        old="        may_start = not budget.has_preempted\n",
        new="        may_start = not begun and not budget.has_preempted\n",
    ),
    _scheduler(
        name="begun prompts first, then waiting ones",
        law=34,
        old="            sequence = min(prompts, key=_num_lacking if budget.is_shared else order_key)\n",
        new="            sequence = min(prompts, key=_num_lacking) if budget.is_shared else prompts[0]\n",
    ),
    _scheduler(
        name="the next in order takes the share",
        law=34,
        old="key=_num_lacking if budget.is_shared else order_key)",
        new="key=order_key)",
    ),
    _scheduler(
        name="the shortest prompt takes the step",
        law=34,
        old="key=_num_lacking if budget.is_shared else order_key)",
        new="key=_num_lacking)",
    ),
    _budget(
        name="a long prompt takes the whole step",
        law=34,
        old="            share = min(self._block_size, most // 2) if has_others else 0\n",
        new="            share = 0\n",
    ),
    _budget(
        name="a share is lost",
        law=10,
        old="            self._share -= num_tokens\n",
        new="            self._share = 0\n            num_tokens = 0\n",
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
        name="the last to arrive goes first",
        law=11,
        old="sequence.order_key = request.arrived_at + ",
        new="sequence.order_key = -request.arrived_at + ",
    ),
    _scheduler(
        name="the queue is in the order of return",
        law=25,
        old="sequence.order_key = request.arrived_at + ",
        new="sequence.order_key = now + ",
    ),
    _scheduler(
        name="preempted sequences go to the end of the queue",
        law=8,
        old="        insort(self.waiting, sequence, key=order_key)\n",
        new="        self.waiting.append(sequence)\n",
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
        old="            victim = self.running[-1]\n            if victim is self.running[0]:",
        new="            victim = self.running[0]\n            if victim is self.running[-1]:",
    ),
    _scheduler(
        name="a sequence is preempted before memory is out",
        law=12,
        old="        while self._pool.num_free == 0:",
        new="        while self._pool.num_free <= 2 and len(self.running) > 1:",
    ),
    _scheduler(
        name="a preempted sequence keeps its blocks",
        law=7,
        old="        sequence.release(self._pool)\n        sequence.num_preemptions += 1",
        new="        sequence.num_preemptions += 1",
    ),
    _scheduler(
        name="a preempted sequence is lost",
        law=8,
        old="        sequence.num_preemptions += 1\n        self._enqueue(sequence)",
        new="        sequence.num_preemptions += 1",
    ),
    _scheduler(
        name="a preempted sequence counts as not preempted",
        law=28,
        old="        sequence.num_preemptions += 1\n        self._enqueue(sequence)",
        new="        self._enqueue(sequence)",
    ),
    _scheduler(
        name="a finished sequence keeps its blocks",
        law=7,
        old="        sequence.transition(State.FINISHED)\n        sequence.release(self._pool)",
        new="        sequence.transition(State.FINISHED)",
    ),
    _scheduler(
        name="one too many in the batch",
        law=9,
        old="        if len(self.running) == self._config.max_num_seqs:",
        new="        if len(self.running) > self._config.max_num_seqs:",
    ),
    _scheduler(
        name="more blocks are needed than are free",
        law=16,
        old="        return needed <= num_free",
        new="        return needed <= num_free + 1",
    ),
    _scheduler(
        name="cached blocks without a holder count as held",
        law=16,
        old="num_held = sum(block.ref_count > 0 for block in prefix)",
        new="num_held = len(prefix)",
    ),
    _scheduler(
        name="a lone request waits for its reserve",
        law=10,
        old="        if beside:  # a sequence that would run alone always has room\n            growth = sum(",
        new="        if True:\n            growth = 99 + sum(",
    ),
    _scheduler(
        name="admission continues after a preemption",
        law=11,
        old="        may_start = not budget.has_preempted\n",
        new="        may_start = True\n",
    ),
    _scheduler(
        name="a decode gets no block",
        law=6,
        old="        sequence.block_table += self._pool.allocate(1)\n",
        new="",
    ),
    _scheduler(
        name="a decode gets a block with every token",
        law=6,
        old=(
            "        if self._pool.num_blocks_for(sequence.num_launched_tokens + 1) <= len(sequence.block_table):\n"
            "            return True\n"
        ),
        new="",
    ),
    _scheduler(
        name="prefill first: decodes get what is left",
        law=10,
        old="        self._schedule_decodes(budget)\n        parked = tuple(self._schedule_prefills(budget, now))\n",
        new=(
            "        parked = tuple(self._schedule_prefills(budget, now))\n"
            "        if budget.num_tokens > 4:\n"
            "            self._schedule_decodes(budget)\n"
        ),
    ),
    _scheduler(
        name="the order of chunks depends on addresses in memory",
        law=31,
        old="        for sequence in [one for one in self.running if one.num_unplanned_tokens == 1]:",
        new="        for sequence in sorted((one for one in self.running if one.num_unplanned_tokens == 1), key=id):",
    ),
    _scheduler(
        name="chunked prompts do not continue",
        law=10,
        old="        begun = [one for one in self.running if one.num_unplanned_tokens > 1]\n",
        new="        begun: list[Sequence] = []\n",
    ),
    _scheduler(
        name="no sequence is in the queue too long",
        law=20,
        old="        return late\n",
        new="        return []\n",
    ),
    _scheduler(
        name="the queue time ends half way",
        law=20,
        old="sequence.expires_at = now + self._queue_seconds(request, now)",
        new="sequence.expires_at = now + self._queue_seconds(request, now) / 2",
    ),
    _scheduler(
        name="an answer that has shown tokens is refused",
        law=20,
        old="        if not sequence.num_output_tokens:\n            sequence.expires_at",
        new="        if True:\n            sequence.expires_at",
    ),
    _scheduler(
        name="a scheduled sequence is refused",
        law=20,
        old="if one.expires_at < now and one.scheduled_at is None]",
        new="if one.expires_at < now]",
    ),
    _patience(
        name="every queue is a burst",
        law=20,
        old="return max(left, latency_class.standing_queue_seconds)",
        new="return latency_class.queue_seconds",
    ),
    _patience(
        name="no queue is a burst",
        law=20,
        old="return max(left, latency_class.standing_queue_seconds)",
        new="return latency_class.standing_queue_seconds",
    ),
    _patience(
        name="every request of a burst gets the whole time",
        law=20,
        old="return max(left, latency_class.standing_queue_seconds)",
        new="return latency_class.queue_seconds if left > 0 else latency_class.standing_queue_seconds",
    ),
    _patience(
        name="a queue that refusals have emptied is a burst",
        law=20,
        old="(is_empty and since_refusal > latency_class.queue_seconds)",
        new="is_empty",
    ),
    _patience(
        name="a burst is over when its first request begins",
        law=20,
        old="left = self._empty_at[name] + latency_class.queue_seconds - now",
        new="left = latency_class.queue_seconds if is_empty else 0.0",
    ),
    _scheduler(
        name="one class's queue is every class's",
        law=20,
        old="any(one.is_new and one.request.latency_class == name for one in self.waiting)",
        new="any(one.is_new for one in self.waiting)",
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
        old="        return min(self.num_tokens, max(least, within))",
        new="        return self.num_tokens if self.has_decodes else min(self.num_tokens, max(least, within))",
    ),
    _budget(
        name="no prefill gets a token beside decodes",
        law=10,
        old="        return min(self.num_tokens, max(least, within))",
        new="        return 0",
    ),
    _budget(
        name="every chunk samples",
        law=9,
        old="sample=sequence.sample_spec() if num_tokens == sequence.num_unplanned_tokens else None,",
        new="sample=sequence.sample_spec(),",
    ),
    _budget(
        name="a chunk's table is one block short",
        law=6,
        old="block_table=tuple(sequence.block_table[: -(-end // self._block_size)]),",
        new="block_table=tuple(sequence.block_table[: end // self._block_size]),",
    ),
    _budget(
        name="a chunk starts where nothing is in flight",
        law=28,
        old="        start = sequence.num_launched_tokens\n        end = start",
        new="        start = sequence.num_computed_tokens\n        end = start",
    ),
    _fairness(
        name="a lone tenant has debts",
        law=25,
        old="excess = self._tokens[tenant] - self._total / num_tenants",
        new="excess = self._tokens[tenant]",
    ),
    _fairness(
        name="a light tenant has a heavy one's debts",
        law=25,
        old="excess = self._tokens[tenant] - self._total / num_tenants",
        new="excess = self._total / num_tenants - self._tokens[tenant]",
    ),
    _fairness(
        name="no tenant has debts",
        law=25,
        old="return excess / tokens_per_second",
        new="return 0.0",
    ),
    _fairness(
        name="a newcomer stands behind a flood",
        law=25,
        old="num_tenants = len(self._tokens) + (tenant not in self._tokens)",
        new="num_tenants = len(self._tokens)",
    ),
    _fairness(
        name="a tenant is charged for other work",
        law=25,
        old="        self._tokens[tenant] += num_tokens\n        self._total",
        new='        self._tokens["a"] += num_tokens\n        self._total',
    ),
    _fairness(
        name="debts never expire",
        law=25,
        old="while self._slices and self._slices[0][0] < first:",
        new="while self._slices and self._slices[0][0] < first - 1000:",
    ),
    _scheduler(
        name="debts have no bound",
        law=25,
        old="debt = max(-most, min(self._debt.seconds(request.tenant, now), most))",
        new="debt = max(-most, self._debt.seconds(request.tenant, now))",
    ),
)
