"""Faults of the core and its output: which updates are delivered, for which sequence, and how often."""

from __future__ import annotations

from functools import partial

from tests.sim.planted import Mutant

_core = partial(Mutant, file="core.py")
_output = partial(Mutant, file="output.py")

MUTANTS = (
    _output(
        name="leak on abort",
        law=7,
        old="            self._remove(sequence)\n        self._updates",
        new="            del self.sequences[seq_id]\n        self._updates",
    ),
    _output(
        name="an abort is ignored",
        law=15,
        old="            self._remove(sequence)\n        self._updates",
        new="            pass\n        self._updates",
    ),
    _output(
        name="an abort leaves pending updates",
        law=15,
        old="        self._updates = [update for update in self._updates if update.seq_id != seq_id]\n",
        new="",
    ),
    _core(
        name="a sequence aborted during a step gets its result",
        law=15,
        old="        self._drain()  # sequences aborted meanwhile get no update\n",
        new="",
    ),
    _core(
        name="messages wait for the step to end",
        law=15,
        old="            self._drain()\n            has_launched",
        new="            has_launched",
    ),
    _core(
        name="one message a step",
        law=15,
        old="        while self._inbox:\n",
        new="        if self._inbox:\n",
    ),
    _output(
        name="unknown ids are not counted",
        law=30,
        old="self.num_unknown_ids += sequence is None\n        if sequence is not None:\n            self._remove(",
        new="if sequence is not None:\n            self._remove(",
    ),
    _output(
        name="a second terminal event",
        law=15,
        old='            self.emit(sequence, now, finish_reason="stop")\n',
        new=(
            '            self.emit(sequence, now, finish_reason="stop")\n'
            "            self._updates.append(self._updates[-1])\n"
        ),
    ),
    _output(
        name="a finished sequence continues",
        law=15,
        old="        if update.is_last:\n            self._remove(sequence)",
        new="        if update.is_last and finish_reason is None:\n            self._remove(sequence)",
    ),
    _output(
        name="what comes after a stop is cached",
        law=18,
        old="            self.pool.evict(sequence.block_hashes[kept // self.pool.block_size :])\n",
        new="",
    ),
    _output(
        name="a stop keeps a block too many",
        law=18,
        old="sequence.block_hashes[kept // self.pool.block_size :]",
        new="sequence.block_hashes[kept // self.pool.block_size + 1 :]",
    ),
    _output(
        name="what failed is cached",
        law=18,
        old="        self.pool.evict(sequence.block_hashes)\n",
        new="",
    ),
    _output(
        name="a failed chunk counts",
        law=5,
        old="        error = _error_of(part, sampled, scores)\n",
        new=(
            "        sequence.mark_computed(num_tokens)\n"
            "        self.pool.cache_blocks(sequence, num_tokens)\n"
            "        error = _error_of(part, sampled, scores)\n"
        ),
    ),
    _output(
        name="a failure is not reported",
        law=15,
        old="        error = _error_of(part, sampled, scores)\n",
        new="        error = None\n",
    ),
    _output(
        name="blocks are named before they count as computed",
        law=5,
        old=(
            "        sequence.mark_computed(num_tokens, num_wrong=num_wrong)\n"
            "        self.pool.cache_blocks(sequence, num_tokens - num_wrong)\n"
        ),
        new=(
            "        self.pool.cache_blocks(sequence, num_tokens - num_wrong)\n"
            "        sequence.mark_computed(num_tokens, num_wrong=num_wrong)\n"
        ),
    ),
    _output(
        name="a token is in an update and not kept",
        law=13,
        old="        token_ids = sequence.append(sampled.token_ids, self.max_model_len)\n",
        new=(
            "        token_ids = sampled.token_ids\n"
            "        if len(sequence.token_ids) % 7:\n"
            "            sequence.append(token_ids, self.max_model_len)\n"
        ),
    ),
    _output(
        name="a token is twice in an update",
        law=13,
        old="        return token_ids\n\n    def _learn",
        new="        return token_ids * (2 if self.num_generation_tokens % 50 == 0 else 1)\n\n    def _learn",
    ),
    _output(
        name="generated tokens are counted twice",
        law=30,
        old="        self.num_generation_tokens += len(token_ids)\n",
        new="        self.num_generation_tokens += 2 * len(token_ids)\n",
    ),
    _output(
        name="prompts are counted with every chunk",
        law=30,
        old="        if is_first:\n            self.num_prompt_tokens",
        new="        if True:\n            self.num_prompt_tokens",
    ),
    _output(
        name="every token is the first",
        law=21,
        old="        if sequence.first_token_at is None:\n            sequence.first_token_at = now\n",
        new="        sequence.first_token_at = now\n",
    ),
    _output(
        name="log-probabilities are one token late",
        law=21,
        old="logprobs = (sampled.logprobs if sampled is not None else ())[: len(token_ids)] or",
        new="logprobs = ()[: len(token_ids)] or",
    ),
    _output(
        name="resumed after its last token, it continues",
        law=14,
        old="        if reason is not None:  # resumed after its last token",
        new="        if False:",
    ),
    _output(
        name="a late request is served silently",
        law=19,
        old="if sequence.request.deadline is not None and sequence.request.deadline <= now:",
        new="if sequence.request.deadline is not None and sequence.request.deadline <= now - 1:",
    ),
    _output(
        name="a deadline ends waiting sequences only",
        law=19,
        old="        late = [one for one in self.sequences.values() if one.request.deadline is not None]",
        new=(
            "        late = [one for one in self.sequences.values() if one.request.deadline is not None"
            " and not one.held.block_table]"
        ),
    ),
    _output(
        name="a deadline ends sequences that are not late",
        law=16,
        old="if sequence.request.deadline is not None and sequence.request.deadline <= now:",
        new="if sequence.request.deadline is not None and sequence.request.deadline <= now + 0.1:",
    ),
    _core(
        name="the queue's head is refused while others run",
        law=16,
        old="        if not (chunks or schedule.parked or expired or self._in_flight):\n",
        new=(
            "        if len(self.scheduler.waiting) > 2:\n"
            '            self._output.fail(self.scheduler.waiting[0], "never_fits", now)\n'
            "        if not (chunks or schedule.parked or expired or self._in_flight):\n"
        ),
    ),
)
