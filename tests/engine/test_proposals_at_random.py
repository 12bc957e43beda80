"""Random runs in which tokens are proposed: aborts, stops, parks, preemptions, faults and too little memory.

Answers are those of one token a step, or their beginnings where an event has ended them; after each step the books of
the engine are right. `PROPOSALS_SEED=n` repeats one run.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from streamserve.engine.echo import EOS, EchoRunner
from streamserve.engine.plan import StepPlan
from streamserve.engine.sequence import SequenceRequest
from tests.support.engines.cores import Answer, Drive, request, resuming, sampling
from tests.support.engines.runners import FaultyRunner, SmallRunner

ONE_SEED = os.environ.get("PROPOSALS_SEED")
NUM_SEEDS, MAX_STEPS = 60, 2_000
MAX_LEN = 60


class RandomRun:
    """One run. `shown` has what each answer's reader has got, over all its parks."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.wanted = {one.seq_id: one for one in self._requests()}
        alone = Drive(num_blocks=257, max_model_len=MAX_LEN, speculation="off")
        self.right = {n: tuple(answer.token_ids) for n, answer in alone.run(*self.wanted.values()).items()}
        self.shown: dict[int, list[int]] = {n: [] for n in self.wanted}
        self.of_id: dict[int, int] = {}  # sequence → the answer that it is of
        self.is_over: set[int] = set()
        self.next_id = 1000
        self.drive = self._drive()

    def _requests(self) -> list[SequenceRequest]:
        rng, found = self.rng, []
        for n in range(1, 9):
            how = sampling(
                max_tokens=rng.randint(1, 40),
                temperature=rng.choice([0.0, 1.0]),
                seed=n,
                logprobs=rng.choice([None, 1]),
                stop_token_ids=rng.choice([(), tuple(range(300, 310))]),
                repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.3]),
            )
            prompt = range(10 * (n % 3), 10 * (n % 3) + rng.randint(1, 20))
            found.append(request(n, prompt, sampling=how, eos_token_ids=frozenset({EOS})))
        return found

    def _drive(self) -> Drive:
        rng = self.rng
        runner = EchoRunner(num_blocks=rng.choice([40, 60, 257]), block_size=rng.choice([2, 4, 16]))

        def is_too_large(plan: StepPlan) -> bool:
            return rng.random() < 0.04 and plan.num_tokens > 1

        small = SmallRunner(runner, is_too_large, at_collect=rng.random() < 0.5)
        faulty = FaultyRunner(small, lambda step_id, seq_id: rng.random() < 0.002)
        return Drive(
            runner=faulty,
            max_model_len=MAX_LEN,
            max_num_seqs=rng.choice([2, 4, 8]),
            max_num_batched_tokens=rng.choice([16, 64]),
            lead_tokens=rng.choice([5, 12, 1000]),
            prefix_caching=rng.random() < 0.7,
            speculation="lookup",
        )

    def play(self) -> None:
        """Run to the end of all answers."""
        core = self.drive.core
        core.scheduler.forced_preempt = lambda running: running[:1] if self.rng.random() < 0.03 else ()
        for n in self.wanted:
            self._admit(n)
        for _ in range(MAX_STEPS):
            if len(self.is_over) == len(self.wanted):
                break
            self._happen()
            for update in self.drive.step():
                n = self.of_id[update.seq_id]
                self.shown[n] += update.token_ids
                if update.is_last:
                    self._end(n, self.drive.answers[update.seq_id])
        assert len(self.is_over) == len(self.wanted), "the run does not come to an end"
        self.drive.assert_empty()

    def _admit(self, n: int) -> None:
        """Ask for the rest of an answer, with a prediction that is more or less right."""
        rng, shown = self.rng, tuple(self.shown[n])
        prediction = [token if rng.random() < 0.9 else token + 1 for token in self.right[n]]
        self.next_id += 1
        self.of_id[self.next_id] = n
        reads = len(shown) if rng.random() < 0.7 else None
        one = replace(self.wanted[n], seq_id=self.next_id, prediction_token_ids=tuple(prediction))
        self.drive.add(resuming(one, output_token_ids=shown, reader_tokens=reads))

    def _end(self, n: int, answer: Answer) -> None:
        if answer.park is not None:
            self._admit(n)
        elif answer.error is not None:
            assert answer.error in ("numerical_error", "out_of_memory")
            self.is_over.add(n)
        else:
            assert tuple(self.shown[n]) == self.right[n], f"answer {n} differs"
            self.is_over.add(n)

    def _happen(self) -> None:
        """Readers read on; now and then a reader leaves, and the engine is paused for a while."""
        rng, core = self.rng, self.drive.core
        for seq_id, n in list(self.of_id.items()):
            if n in self.is_over or seq_id != max(one for one, of in self.of_id.items() if of == n):
                continue
            if rng.random() < 0.5:
                core.reader_at(seq_id, len(self.shown[n]))
            if rng.random() < 0.003:
                core.abort(seq_id)
                self.is_over.add(n)
        if rng.random() < 0.02:
            core.pause()
        elif rng.random() < 0.5:
            core.resume()

    def check(self) -> None:
        """Whatever ended an answer, what was shown is its beginning."""
        for n, shown in self.shown.items():
            assert tuple(shown) == self.right[n][: len(shown)], f"answer {n} differs"


@pytest.mark.parametrize("seed", range(NUM_SEEDS) if ONE_SEED is None else [int(ONE_SEED)])
def test_random_runs(seed: int) -> None:
    """See above."""
    run = RandomRun(seed)
    run.play()
    run.check()


@pytest.mark.skipif(ONE_SEED is not None, reason="PROPOSALS_SEED asks for one run")
def test_everything_happens() -> None:
    """In these runs tokens prove right and wrong, answers park and are preempted, and memory is short."""
    accepted = proposed = parks = preemptions = short = 0
    for seed in range(15):
        run = RandomRun(seed)
        run.play()
        stats = run.drive.core.stats
        accepted += sum(stats.accepted_tokens.values())
        proposed += sum(stats.proposed_tokens.values())
        parks, preemptions, short = parks + stats.parks, preemptions + stats.preemptions, short + stats.out_of_memory
    assert 50 < accepted < proposed
    assert min(parks, preemptions, short) > 0
