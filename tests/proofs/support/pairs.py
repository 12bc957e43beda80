"""Feature pairs: two changes at a time to the making of an answer, and what must then be the same.

A `Feature` changes the engine's config, what happens inside the engine, or the request. `ask_all` submits to any
`EngineClient` as a stream does: again, with the tokens so far, whenever the engine has parked a generation. The result
is compared with `plain_answers`, from an undisturbed engine. To add a client, start it with `config_of(features)` and
give its `generate` to `ask_all`; to disturb it (kill its engine), do so while `ask_all` runs.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, cycle
from typing import Any

from streamserve.clients.base import Generation
from streamserve.engine.config import CLASSES, EngineConfig, Policy
from streamserve.engine.core import EngineCore
from streamserve.engine.plan import PENDING, StepPlan
from streamserve.engine.policy.leads import is_held
from streamserve.engine.sequence import Sequence
from streamserve.protocol.engine import EngineStats
from streamserve.protocol.events import BlockStart, ChoiceDone, Done, Error, Event, Token
from streamserve.protocol.requests import Admission, GenerateRequest, Grammar, Resume, SamplingParams

BLOCK_SIZE = 4
NUM_BLOCKS = 257
MODEL_LEN = 128
MOST_CHOICES = 3
NUM_REQUESTS = 6  # of a workload
LEAD_TOKENS = 5
# No wait is too long, and no sequence parks for a waiting one: the features have no side effects.
PATIENT = {name: replace(one, max_queue_seconds=1e9, max_late_seconds=1e9) for name, one in CLASSES.items()}
PLAIN: Mapping[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_blocks": NUM_BLOCKS,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "prefill_chunk": 1024,
    "prefix_caching": False,
    "overlap": False,
    "lead_tokens": 10**6,
    "classes": PATIENT,
    "check_integrity": True,
}

# More than the slowest machine needs to encode a workload's prompts and compile its grammars.
_TOGETHER_SECONDS = 120.0

Admit = Callable[[GenerateRequest, Admission, Resume], Awaitable[Generation]]


class Together:
    """Holds an engine's steps until so many sequences are added: they run together, however slowly they arrive."""

    def __init__(self) -> None:
        self._news = threading.Condition()  # guards both numbers
        self._num_added = self._num_expected = 0

    def expect(self, num_sequences: int) -> None:
        """Let the engine begin no step until so many more sequences are added; 0: it may go on."""
        with self._news:
            self._num_expected = self._num_added + num_sequences
            self._news.notify_all()

    def add(self) -> None:
        """Count a sequence that has been added."""
        with self._news:
            self._num_added += 1
            self._news.notify_all()

    def wait(self) -> None:
        """Wait, on the engine's thread, until all are there."""
        with self._news:
            are_there = self._news.wait_for(lambda: self._num_added >= self._num_expected, _TOGETHER_SECONDS)
            assert are_there, f"{self._num_added} sequences were added of {self._num_expected}"


@dataclass(slots=True)
class PlanCounts:
    """What was planned in a run, counted on the engine's thread. Another process's plans are not visible: all 0."""

    most_tokens: int = 0  # in a step
    num_partial: int = 0  # chunks that end before the end of a prompt
    num_pending: int = 0  # chunks on a token of a step that is not collected yet
    num_short_of_blocks: int = 0  # steps beside which a sequence waited though a seat was free
    num_paused: int = 0  # sequences that could decode, and were left out of a step
    choices: set[tuple[tuple[int, ...], int | None]] = field(default_factory=set)  # by prompt and seed
    together: Together = field(default_factory=Together)

    def note(self, core: EngineCore, plan: StepPlan) -> None:
        """Count a plan that is about to run."""
        self.most_tokens = max(self.most_tokens, plan.num_tokens)
        self.num_partial += sum(len(chunk.token_ids) > 0 and not chunk.samples for chunk in plan.chunks)
        self.num_pending += sum(chunk.token_ids == (PENDING,) for chunk in plan.chunks)
        running, planned = core.scheduler.running, {chunk.seq_id for chunk in plan.chunks}
        decodes = [one for one in running if one.num_unplanned_tokens == 1]
        self.num_paused += sum(one.seq_id not in planned for one in decodes)
        config, now = core._config, core._clock()
        num_hungry = sum(
            not is_held(one, config) and one.ahead_seconds(now) < config.policy.hungry_seconds for one in decodes
        )
        has_seat = num_hungry + sum(one.num_unplanned_tokens > 1 for one in running) < config.max_num_seqs
        self.num_short_of_blocks += bool(core.scheduler.waiting) and has_seat
        asked = [one.request for one in running if one.seq_id in planned]
        self.choices |= {(one.prompt_token_ids, one.sampling.seed) for one in asked}


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One change that must not alter an answer. Two of one `group` exclude each other.

    `config`, `policy` and `n` define the engine and the request; with `has_reader` it parks at the lead limit.
    `prepare` reaches into a core on a thread of this process. `had_effect` decides from the counts of the run, never
    from the config, whether the feature had an effect.
    """

    name: str
    group: str
    config: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, float] = field(default_factory=dict)
    n: int = 1
    has_reader: bool = False
    prepare: Callable[[EngineCore], None] | None = None
    had_effect: Callable[[EngineStats, PlanCounts], bool]


class Preempt:
    """Preempts every sequence in mid-prompt, and then at its first and each third token; each time once."""

    def __init__(self) -> None:
        self._done: set[tuple[int, int]] = set()

    def __call__(self, running: tuple[Sequence, ...]) -> list[Sequence]:
        return [one for one in running if self._is_due(one)]

    def _is_due(self, sequence: Sequence) -> bool:
        num_output = sequence.num_output_tokens
        mark = sequence.seq_id, num_output // 3 if num_output else -1
        if mark in self._done or not sequence.num_computed_tokens:
            return False
        self._done.add(mark)
        return True


def _force_preemption(core: EngineCore) -> None:
    core.scheduler.forced_preempt = Preempt()


def _chunks_of(size: int) -> Feature:
    config = {"max_num_seqs": min(size, 8), "max_num_batched_tokens": size, "prefill_chunk": size}
    return Feature(
        name=f"chunks of {size}",
        group="chunk",
        config=config,
        had_effect=lambda stats, plans: plans.num_partial > 0 and plans.most_tokens <= size,
    )


PARK = Feature(
    name="park",
    group="park",
    config={"lead_tokens": LEAD_TOKENS},
    policy={"stalled_seconds": 0.0},
    has_reader=True,
    had_effect=lambda stats, plans: stats.parks > 0,
)
PREEMPTION = Feature(
    name="preemption",
    group="preemption",
    prepare=_force_preemption,
    had_effect=lambda stats, plans: stats.preemptions > 0,
)
LITTLE_MEMORY = Feature(
    name="little memory",
    group="memory",
    config={"num_blocks": 18},  # the longest answer takes 16
    had_effect=lambda stats, plans: plans.num_short_of_blocks > 0,
)
CACHE = Feature(
    name="prefix cache",
    group="cache",
    config={"prefix_caching": True},
    had_effect=lambda stats, plans: stats.prefix_hits > 0,
)
CHOICES = Feature(
    name="n > 1",
    group="n",
    n=MOST_CHOICES,
    had_effect=lambda stats, plans: len(plans.choices) == MOST_CHOICES * NUM_REQUESTS,
)
OVERLAP = Feature(
    name="overlap",
    group="overlap",
    config={"overlap": True},
    had_effect=lambda stats, plans: plans.num_pending > 0,
)
CHUNKS = tuple(map(_chunks_of, (1, 7, 16)))
PAUSE = Feature(
    name="pause",
    group="pause",
    config={"max_num_seqs": 1},
    policy={"hungry_seconds": 1e-6},
    has_reader=True,
    had_effect=lambda stats, plans: plans.num_paused > 0,
)
FEATURES = (PARK, PREEMPTION, LITTLE_MEMORY, CACHE, *CHUNKS, CHOICES, OVERLAP, PAUSE)


def pairs_of(features: Iterable[Feature]) -> list[tuple[Feature, Feature]]:
    """Return all compatible pairs: with one sequence at a time memory is never short."""
    alone = {LITTLE_MEMORY.name, CHUNKS[0].name}
    return [
        (one, other)
        for one, other in combinations(features, 2)
        if one.group != other.group and {one.name, other.name} != alone
    ]


def config_of(features: Iterable[Feature] = ()) -> EngineConfig:
    """Return the plain engine's config with the features' changes."""
    fields, policy = dict(PLAIN), {}
    for feature in features:
        fields |= feature.config
        policy |= feature.policy
    return EngineConfig(**fields, policy=Policy(**policy))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedChoice:
    """One choice of an answer, as its reader has it at the end; of each block the kind, the name and the text."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    blocks: Mapping[int, tuple[str, str | None, str]] = field(default_factory=dict)

    def take(self, token: Token) -> ReceivedChoice:
        kind, name, text = self.blocks.get(token.index, ("text", None, ""))
        blocks = {**self.blocks, token.index: (kind, name, text + token.text)}
        token_ids = self.token_ids + token.token_ids
        return replace(self, token_ids=token_ids, text=self.text + token.text, blocks=blocks)

    def begin(self, start: BlockStart) -> ReceivedChoice:
        """Begin a block; a continued answer may repeat the start of the one that it was cut in."""
        return replace(self, blocks={start.index: (start.kind, start.name, ""), **self.blocks})


Answer = tuple[ReceivedChoice, ...]


def workload(seed: int, *, is_greedy: bool, num_ids: int, max_tokens: int) -> list[GenerateRequest]:
    """Prompts that share prefixes, of odd lengths; some end by stop strings or stop tokens, one counts penalties."""
    rng = random.Random(seed)

    def ids(num: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, num_ids) for _ in range(num))

    shared = ids(21)
    ways: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        (shared + ids(9), {}),
        (shared, {"stop": (" w", "st"), "min_tokens": 4}),
        (shared[:16] + ids(21), {"frequency_penalty": 0.5, "max_tokens": max_tokens // 2}),
        (ids(13), {"stop_token_ids": ids(num_ids // 20), "min_tokens": 3}),
        (ids(1), {}),
        (shared[:10] + ids(3), _rules(rng, num_ids)),
    ]
    base = SamplingParams(
        temperature=0.0 if is_greedy else 1.0, seed=rng.randrange(2**40), max_tokens=max_tokens, ignore_eos=True
    )
    return [
        GenerateRequest(model="proof", prompt_token_ids=prompt, sampling=replace(base, **how)) for prompt, how in ways
    ]


# What the answers of a constrained workload match, in the order of its requests: each can end, and go on for long.
_PATTERNS = (
    "( [a-z]+){3,9}.?",
    "( [a-z]+){2,40}",
    "",  # none: a neighbour that need not wait for its tokens
    "( [a-z]+|[,.?!-]|\n)+",
    "( [a-z]+| [^ a-z]+|[,.?!-]|\n){2,}",
)


def constrained(requests: Iterable[GenerateRequest]) -> list[GenerateRequest]:
    """Return a workload's requests, all but one of five with a grammar, which has no allowed ids beside it."""
    pairs = zip(requests, cycle(_PATTERNS), strict=False)
    return [
        replace(one, grammar=Grammar(kind="regex", value=made)) if made and not one.sampling.allowed_token_ids else one
        for one, made in pairs
    ]


def assert_matching(requests: Iterable[GenerateRequest], answers: Iterable[Answer]) -> None:
    """Whatever ended by itself matches; what a stop string or max_tokens cut need not."""
    for request, answer in zip(requests, answers, strict=True):
        may_be_cut = bool(request.sampling.stop or request.sampling.stop_token_ids)
        for choice in answer:
            if request.grammar is not None and choice.finish_reason == "stop" and not may_be_cut:
                assert re.fullmatch(request.grammar.value, choice.text), choice


def _rules(rng: random.Random, num_ids: int) -> dict[str, Any]:
    """Few tokens may be chosen, with biases, so that the bad words are often begun, and the stop string is kept."""
    allowed = tuple(rng.sample(range(2, num_ids), k=min(6, num_ids - 2)))
    first, second, third = map(chr, allowed[:3])  # the tokenizers here have an id for each character
    return {
        "bad_words": (first, second + second, second + third, third + third + third, third + second),
        "logit_bias": tuple((token_id, 2.0 * rng.random()) for token_id in allowed[::2]),
        "allowed_token_ids": allowed,
        "stop": (" w",),
        "include_stop": True,
        "min_tokens": 9,
        "frequency_penalty": 0.25,
    }


async def ask_all(
    admit: Admit,
    requests: Iterable[GenerateRequest],
    features: Iterable[Feature],
    on_event: Callable[[Event], None] = lambda event: None,
    plans: PlanCounts | None = None,
) -> list[Answer]:
    """Return the readers' final answers. The first request runs alone; the rest, all at once, find its prefix.

    With the `plans` of an engine in this process they begin in the same step.
    """
    n = max((feature.n for feature in features), default=1)
    has_reader = any(feature.has_reader for feature in features)
    first, *others = [
        whole_answer(admit, replace(one, n=n), arrived_at=float(number), has_reader=has_reader, on_event=on_event)
        for number, one in enumerate(requests)
    ]
    answers = [await first]
    if plans is not None:
        plans.together.expect(n * len(others))
    return [*answers, *await asyncio.gather(*others)]


async def whole_answer(
    admit: Admit,
    request: GenerateRequest,
    *,
    arrived_at: float = 0.0,
    has_reader: bool = False,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Answer:
    """Submit until the answer ends; whenever the engine parks it, the reader reads all and it is submitted again."""
    answer: Answer = (ReceivedChoice(),) * request.n
    admission = Admission(owner="", tenant="", arrived_at=arrived_at)
    while True:
        shown = tuple(choice.token_ids for choice in answer)
        readers = tuple(map(len, shown)) if has_reader else None
        generation = await admit(request, admission, Resume(output_token_ids=shown, reader_tokens=readers))
        answer, done = await _read_generation(generation, answer, on_event)
        if done is not None:
            assert done.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer)
            return answer
        assert generation.parked is not None, "it ended without a park or an end"


async def _read_generation(
    generation: Generation, answer: Answer, on_event: Callable[[Event], None]
) -> tuple[Answer, Done | None]:
    """Add a generation's events; a choice that had ended before repeats its end and nothing else."""
    received = list(answer)
    async for event in generation:
        on_event(event)
        assert not isinstance(event, Error), event
        if isinstance(event, Done):
            if len(received) == 1:
                received[0] = replace(received[0], finish_reason=event.finish_reason)
            return tuple(received), event
        if isinstance(event, Token) and answer[event.choice].finish_reason is None:
            received[event.choice] = received[event.choice].take(event)
        elif isinstance(event, BlockStart) and answer[event.choice].finish_reason is None:
            received[event.choice] = received[event.choice].begin(event)
        elif isinstance(event, ChoiceDone):
            received[event.choice] = replace(received[event.choice], finish_reason=event.finish_reason)
    return tuple(received), None


async def plain_answers(admit: Admit, requests: Iterable[GenerateRequest]) -> list[Answer]:
    """The reference: `MOST_CHOICES` answers to each request, one after the other, each with a seed of its own."""
    return [
        tuple([(await whole_answer(admit, _with_seed_of(one, choice)))[0] for choice in range(MOST_CHOICES)])
        for one in requests
    ]


def _with_seed_of(request: GenerateRequest, choice: int) -> GenerateRequest:
    """Return the request for a single choice of another request."""
    assert request.sampling.seed is not None
    return replace(request, sampling=replace(request.sampling, seed=request.sampling.seed + choice))


def assert_same(answers: Iterable[Answer], plain: Iterable[Answer], what: str) -> None:
    """Every choice equals the plain one."""
    for number, (answer, reference) in enumerate(zip(answers, plain, strict=True)):
        assert answer == reference[: len(answer)], f"{what}: request {number} is answered otherwise"
