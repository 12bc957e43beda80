"""`Drafter`: proposals of a draft model, a small model with the same tokens, by passes of its runner before a step.

Its KV memory has blocks of the same numbers as the model's. So a sequence has the same block table in both, and what
frees its blocks (its end, a park, a preemption) frees them in both; `Holding.num_drafted_tokens` is how far they hold
what the draft model has computed. The first pass computes what it lacks of each sequence, and draws a token of each;
each further pass draws another. Pure ints; engine thread only. (Idea: vLLM's draft models, which share block tables.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from streamserve.engine.plan import Chunk, Draft, Runner, Sampled, SampleSpec, StepPlan

Guard = Callable[[StepPlan], AbstractContextManager[None]]
OnPass = Callable[[StepPlan, float], None]


class Drafter:
    """Runs the passes. `vocab_size`: the model's; a draft model may have more logits, which name no token."""

    def __init__(self, runner: Runner, vocab_size: int, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._known_size = runner.vocab_size
        self._vocab_size = vocab_size
        self._clock = clock
        self._num_passes = 0

    def draft(self, drafts: Iterable[Draft], guard: Guard, on_pass: OnPass) -> dict[int, tuple[int, ...]]:
        """Return what may follow each sequence, for some of them nothing. `guard` is around each pass.

        After `StepOutOfMemory` what was to be computed of a sequence counts as missing.
        """
        wanted = {draft.seq_id: draft for draft in drafts}
        found: dict[int, tuple[int, ...]] = dict.fromkeys(wanted, ())
        while wanted:
            plan = StepPlan(
                step_id=self._num_passes,
                chunks=tuple(self._chunk(draft, found[draft.seq_id]) for draft in wanted.values()),
            )
            self._num_passes += 1
            started_at = self._clock()
            with guard(plan):
                result = self._runner.collect(self._runner.launch(plan))
            on_pass(plan, self._clock() - started_at)
            newest = {one.seq_id: self._proposed(one) for one in result.sampled}
            for seq_id, token_ids in newest.items():
                found[seq_id] += token_ids
            wanted = {
                seq_id: draft
                for seq_id, draft in wanted.items()
                if newest.get(seq_id) and len(found[seq_id]) < draft.num_wanted
            }
        return found

    def _chunk(self, draft: Draft, proposed: tuple[int, ...]) -> Chunk:
        """Return the next pass's part of a sequence: what the draft model lacks of it, or its newest token."""
        num_known = draft.start + len(draft.token_ids)
        end = num_known + len(proposed)
        start, token_ids = (end - 1, proposed[-1:]) if proposed else (draft.start, draft.token_ids)
        if self._known_size < self._vocab_size:  # rows that fill up the model's vocabulary may be fewer in the draft's
            token_ids = tuple(min(token_id, self._known_size - 1) for token_id in token_ids)
        table = draft.block_table[: -(-end // self._runner.block_size)]
        samples = (SampleSpec(position=end, sampling=draft.sampling),) if draft.num_wanted else ()
        return Chunk(seq_id=draft.seq_id, start=start, token_ids=token_ids, block_table=table, samples=samples)

    def _proposed(self, one: Sampled) -> tuple[int, ...]:
        """Return what a pass proposes of a sequence: nothing where it has failed, or where that is no token."""
        return one.token_ids if all(token_id < self._vocab_size for token_id in one.token_ids) else ()
