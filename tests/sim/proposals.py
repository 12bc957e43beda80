"""Random runs in which tokens are proposed: aborts, parks, preemptions, crashes, faults and too little memory.

In some of them a draft model proposes too, more or less rightly, and some ask the model's adapters. Answers are those
of one token a step, or their beginnings where an event has ended them; after each step the books of the engine are
right. What a draft model draws after known tokens is the model's own token: its memory holds these tokens, and no
others. (Laws 13 and 40.) The model is the echo engine's; tests/engine/model/test_random_runs.py runs a real one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from streamserve.engine.echo import EOS, EchoRunner
from streamserve.engine.plan import Runner, StepPlan
from streamserve.engine.sequence import SequenceRequest
from tests.support.engines.cores import Answer, Drive, request, resuming, sampling
from tests.support.engines.runners import FaultyRunner, GuessingRunner, SmallRunner, WrappedRunner

MAX_STEPS = 2_000
MAX_LEN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A model and a draft model that draws the same tokens, each with so many blocks of so many tokens.

    `poison` overwrites a block of both. `adapters`: the model's, and "" for none; a draft model has none, but for the
    echo engine's (`knows_adapters`). `stop_token_ids`: what some answers end by.
    """

    make: Callable[[int, int], tuple[Runner, Runner, Callable[[int], None]]]
    block_sizes: tuple[int, ...]
    adapters: tuple[str, ...]
    knows_adapters: bool
    eos_token_id: int
    stop_token_ids: tuple[int, ...]


def _echo_pair(num_blocks: int, block_size: int) -> tuple[Runner, Runner, Callable[[int], None]]:
    runner, draft = (EchoRunner(num_blocks=num_blocks, block_size=block_size) for _ in range(2))

    def poison(block_id: int) -> None:
        runner.poison(block_id)
        draft.poison(block_id)

    return runner, draft, poison


ECHO = Pair(
    make=_echo_pair,
    block_sizes=(2, 4, 16),
    adapters=("", "legal", "style"),
    knows_adapters=True,
    eos_token_id=EOS,
    stop_token_ids=tuple(range(300, 310)),
)


class AdaptedRunner(WrappedRunner):
    """A draft model that computes each sequence with its adapter, so that it draws what the model will."""

    def __init__(self, runner: Runner, adapter_of: Callable[[int], str]) -> None:
        super().__init__(runner)
        self._adapter_of = adapter_of

    def launch(self, plan: StepPlan) -> object:
        chunks = tuple(replace(chunk, adapter=self._adapter_of(chunk.seq_id)) for chunk in plan.chunks)
        return self.inner.launch(replace(plan, chunks=chunks))


class RandomRun:
    """One run. `shown` has what each answer's reader has got, over all its parks.

    `has_draft`: with a draft model; None: by chance. `faulty`: sequences whose numbers were made not to be finite.
    """

    def __init__(self, seed: int, *, has_draft: bool | None = None, pair: Pair = ECHO) -> None:
        self.rng = random.Random(seed)
        self.pair = pair
        self.has_draft = self.rng.random() < 0.6 if has_draft is None else has_draft
        self.predicts = not self.has_draft or self.rng.random() < 0.3
        self.num_steps = self.num_drafted = self.num_crashes = 0
        self.draft: GuessingRunner | None = None
        self.adapters = self.rng.choice([("",), pair.adapters, pair.adapters[1:]])
        self.wanted = {one.seq_id: one for one in self._requests()}
        runner = pair.make(257, 4)[0]
        self.vocab_size = runner.vocab_size
        alone = Drive(runner=runner, max_model_len=MAX_LEN, speculation="off", prefix_caching=False)
        self.right = {n: tuple(answer.token_ids) for n, answer in alone.run(*self.wanted.values()).items()}
        self.shown: dict[int, list[int]] = {n: [] for n in self.wanted}
        self.of_id: dict[int, int] = {}  # sequence → the answer that it is of
        self.is_over: set[int] = set()
        self.faulty: set[int] = set()
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
                stop_token_ids=rng.choice([(), self.pair.stop_token_ids]),
                repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.3]),
            )
            prompt = range(10 * (n % 3), 10 * (n % 3) + rng.randint(1, 20))
            ends, adapter = frozenset({self.pair.eos_token_id}), rng.choice(self.adapters)
            found.append(request(n, prompt, sampling=how, eos_token_ids=ends, adapter=adapter))
        return found

    def _drive(self) -> Drive:
        rng = self.rng
        runner, other, poison = self.pair.make(rng.choice([40, 60, 257]), rng.choice(self.pair.block_sizes))

        def is_too_large(plan: StepPlan) -> bool:
            return rng.random() < 0.04 and plan.num_tokens > 1

        def is_faulty(_: int, seq_id: int) -> bool:
            if rng.random() < 0.002:
                self.faulty.add(self.of_id[seq_id])
                return True
            return False

        small = SmallRunner(runner, is_too_large, at_collect=rng.random() < 0.5)
        if self.has_draft:
            other = AdaptedRunner(other, self._adapter_of) if self.pair.knows_adapters else other
            scarce = SmallRunner(other, lambda plan: rng.random() < 0.02, at_collect=rng.random() < 0.5)
            self.draft = GuessingRunner(scarce, rng.choice([0.0, 0.2, 0.6]), seed=rng.randrange(100))
        drive = Drive(
            runner=FaultyRunner(small, is_faulty),
            draft=self.draft,
            on_evict=poison,
            max_model_len=MAX_LEN,
            max_num_seqs=rng.choice([2, 4, 8]),
            max_num_batched_tokens=rng.choice([16, 64]),
            prefill_chunk=rng.choice([1, 256]),
            lead_tokens=rng.choice([5, 12, 1000]),
            prefix_caching=rng.random() < 0.7,
            speculation="lookup",
        )
        drive.core.scheduler.forced_preempt = lambda running: running[:1] if rng.random() < 0.03 else ()
        if drive.core.scheduler.drafting is not None:
            drive.core.scheduler.drafting.rest_steps = 3
        return drive

    def play(self) -> None:
        """Run to the end of all answers."""
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
            self._check_draws()
            self.num_steps += 1
        assert len(self.is_over) == len(self.wanted), "32: the run does not come to an end"
        self.drive.assert_empty()

    def _admit(self, n: int) -> None:
        """Ask for the rest of an answer, with a prediction that is more or less right."""
        rng, shown = self.rng, tuple(self.shown[n])
        right = self.right[n] if self.predicts else ()
        prediction = [token if rng.random() < 0.9 else (token + 1) % self.vocab_size for token in right]
        self.next_id += 1
        self.of_id[self.next_id] = n
        reads = len(shown) if rng.random() < 0.7 else None
        one = replace(self.wanted[n], seq_id=self.next_id, prediction_token_ids=tuple(prediction))
        self.drive.add(resuming(one, output_token_ids=shown, reader_tokens=reads))

    def _end(self, n: int, answer: Answer) -> None:
        if answer.park is not None:
            self._admit(n)
        elif answer.error is not None:
            assert answer.error == "out_of_memory" or (answer.error == "numerical_error" and n in self.faulty)
            self.is_over.add(n)
        else:
            assert tuple(self.shown[n]) == self.right[n], f"13: answer {n} differs"
            self.is_over.add(n)

    def _adapter_of(self, seq_id: int) -> str:
        return self.wanted[self.of_id[seq_id]].adapter

    def _check_draws(self) -> None:
        """What the draft model has drawn after known tokens is what the model will."""
        if self.draft is None:
            return
        for (seq_id, position), token_id in self.draft.first.items():
            n = self.of_id[seq_id]
            if self.wanted[n].adapter and not self.pair.knows_adapters:
                continue
            tokens = (*self.wanted[n].prompt_token_ids, *self.right[n])
            assert position >= len(tokens) or token_id == tokens[position], f"40: {n} was drafted from other tokens"
            self.num_drafted += 1
        self.draft.first.clear()

    def _crash(self) -> None:
        """Lose the engine: what was open is asked again of a new engine, from what was shown."""
        self.num_crashes += 1
        self.draft = None
        self.drive = self._drive()
        for n in self.wanted:
            if n not in self.is_over:
                self._admit(n)

    def _happen(self) -> None:
        """Readers read on; now and then a reader leaves, the engine is paused for a while, or lost."""
        if self.rng.random() < 0.005:
            self._crash()
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
            assert tuple(shown) == self.right[n][: len(shown)], f"13: answer {n} differs"
