"""Drives an `EngineCore` over the echo runner, and collects the output of every sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from streamserve.engine.config import CLASSES, EngineConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.echo import EchoRunner
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import DraftModel, OnStep, RawLogprobs, Runner, StepPlan
from streamserve.engine.sequence import SequenceRequest
from streamserve.protocol.engine import Park
from streamserve.protocol.requests import NO_CALLER, Admission, Resume, SamplingParams
from tests.support.engines.runners import FakeClock

MAX_STEPS = 10_000
# No wait is too long, unless a test sets a limit.
PATIENT = {name: replace(one, max_queue_seconds=1e9, max_late_seconds=1e9) for name, one in CLASSES.items()}


def sampling(**fields: Any) -> SamplingParams:
    """Return a fixed sampling: greedy, seed 0, ten tokens."""
    return SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": 10, **fields})


def request(seq_id: int, prompt: Iterable[int] = range(20), **fields: Any) -> SequenceRequest:
    """A sequence request of one choice; fields of sampling are given as `sampling=`, those of its admission and of
    where it continues by their names.
    """
    fields.setdefault("sampling", sampling())
    fields.setdefault("arrived_at", float(seq_id))
    admission = replace(NO_CALLER, **{name: fields.pop(name) for name in Admission.__slots__ if name in fields})
    resumed = {name: fields.pop(name) for name in Resume.__slots__ if name in fields}
    return resuming(
        SequenceRequest(seq_id=seq_id, prompt_token_ids=tuple(prompt), admission=admission, **fields), **resumed
    )


def resuming(one: SequenceRequest, **resumed: Any) -> SequenceRequest:
    """Return a request of one choice that continues: the fields of its `Resume`, without a tuple of choices around."""
    for name in ("output_token_ids", "reader_tokens"):
        if resumed.get(name) is not None:
            resumed[name] = (resumed[name],)
    return replace(one, resume=replace(one.resume, **resumed))


@dataclass
class Answer:
    """All updates of one sequence, put together."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[RawLogprobs | None] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    park: Park | None = None
    num_cached_tokens: int = 0
    updates: list[SequenceUpdate] = field(default_factory=list)

    def take(self, update: SequenceUpdate) -> None:
        assert not self.updates or not self.updates[-1].is_last, "an update after the last one"
        self.updates.append(update)
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs
        self.finish_reason, self.error, self.park = update.finish_reason, update.error, update.park
        self.num_cached_tokens = update.num_cached_tokens


class Drive:
    """A core with a fake clock; the integrity check runs after every step, and freed blocks are poisoned.

    With `overlap` a step is launched before the one before it is collected.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 65,
        block_size: int = 4,
        runner: Runner | None = None,
        revision: str = "",
        overlap: bool = False,
        on_step: OnStep | None = None,
        draft: Runner | DraftModel | None = None,
        on_evict: Callable[[int], None] | None = None,
        **config: Any,
    ) -> None:
        echo = EchoRunner(num_blocks=num_blocks, block_size=block_size, can_overlap=overlap)
        self.clock = FakeClock()
        self.plans: list[StepPlan] = []
        self.answers: dict[int, Answer] = {}
        self.core = EngineCore(
            runner or echo,
            EngineConfig(**{"max_num_seqs": 8, "check_integrity": True, "classes": PATIENT, **config}),
            self.clock,
            on_plan=self.plans.append,
            revision=revision,
            on_evict=on_evict if runner else echo.poison,
            on_step=on_step,
            draft=draft
            if draft is None or isinstance(draft, DraftModel)
            else DraftModel(runner=draft, weight=0.05, max_len=10_000),
        )

    def add(self, *requests: SequenceRequest) -> None:
        for one in requests:
            self.answers[one.seq_id] = Answer()
            self.core.add(one)

    def step(self) -> tuple[SequenceUpdate, ...]:
        self.clock.advance(0.01)
        updates = self.core.step()
        for update in updates:
            self.answers[update.seq_id].take(update)
        return updates

    def run(self, *requests: SequenceRequest) -> dict[int, Answer]:
        """Add the requests and step until no work is left."""
        self.add(*requests)
        for _ in range(MAX_STEPS):
            if not self.core.has_work:
                return self.answers
            self.step()
        raise AssertionError("the engine does not come to an end")

    def tokens(self, *requests: SequenceRequest) -> dict[int, list[int]]:
        """Run and return each sequence's new tokens."""
        return {seq_id: answer.token_ids for seq_id, answer in self.run(*requests).items()}

    def planned(self, plan: int = -1) -> dict[int, int]:
        """Return how many tokens of which sequence a plan holds."""
        return {chunk.seq_id: len(chunk.token_ids) for chunk in self.plans[plan].chunks}

    def assert_empty(self) -> None:
        """Check that no sequence holds a block."""
        stats = self.core.stats
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert stats.blocks_cached + stats.blocks_free == stats.blocks_total


def alone(one: SequenceRequest, **config: Any) -> list[int]:
    """The reference: the sequence by itself, whole prompt at once, no cache, nothing else in memory."""
    return Drive(prefix_caching=False, **config).tokens(one)[one.seq_id]
