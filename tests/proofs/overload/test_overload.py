"""Ten times the requests that the engine can answer: each ends with an answer or a true refusal, and none is lost.

The real client on its thread. Load is counted in steps, not in seconds: each step brings ten times as many requests as
a step at capacity answered, however fast the machine is, and so many steps do.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from time import monotonic, sleep

import pytest

from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.config import EngineConfig, LatencyClass
from streamserve.engine.echo import EchoRunner
from streamserve.protocol.errors import Refused
from streamserve.protocol.events import Done, Error, Event, Status
from streamserve.protocol.requests import GenerateRequest, SamplingParams
from tests.proofs.scale import scaled
from tests.support.engines.clients import load_of, ready
from tests.support.processes import resident_bytes

TIMES = 10
# Minutes, or seconds: many times the 40 steps of the longest answer, at whose ends a step gives less.
NUM_STEPS = scaled(18_000)
STEP_SECONDS = 0.002
NUM_SEATS = 8
NUM_BLOCKS = 36
# Memory for fewer answers than there are seats, at their longest: some are preempted. Most are refused because they
# would wait longer than their class allows, and some do wait longer.
CONFIG = EngineConfig(
    block_size=16,
    max_num_seqs=NUM_SEATS,
    max_waiting=128,
    classes={
        "chat": LatencyClass(ttft_seconds=0.5, max_queue_seconds=2.0, max_late_seconds=1.0),
        "completion": LatencyClass(ttft_seconds=0.1, max_queue_seconds=0.4),
    },
)
MOST_GROWTH_BYTES = 32 << 20


@dataclass
class Tally:
    """How requests ended."""

    ends: Counter[str] = field(default_factory=Counter)
    num_asked: int = 0
    num_tokens: int = 0
    longest_retry_after: int = 0

    async def follow(self, client: ThreadClient, request: GenerateRequest) -> None:
        """Submit a request, read to the end, and count how it ended."""
        self.num_asked += 1
        try:
            self._count([event async for event in await client.generate(request)])
        except Refused as refused:
            self._count_refusal(refused)

    def _count_refusal(self, refused: Refused) -> None:
        assert refused.http_status in (429, 503)
        assert 1 <= refused.retry_after <= 120
        self.ends[f"{refused.http_status} {refused.code}"] += 1
        self.longest_retry_after = max(self.longest_retry_after, refused.retry_after)

    def _count(self, events: list[Event]) -> None:
        match events[-1]:
            case Done(usage=usage):
                self.ends["answers"] += 1
                self.num_tokens += usage.completion_tokens
            case Error(code="queue_timeout", retryable=True):
                before = {event.status for event in events[:-1] if isinstance(event, Status)}
                assert before <= {"queued"}, "it had begun"
                assert all(isinstance(event, Status) for event in events[:-1]), "it had begun"
                self.ends["queue_timeout"] += 1
            case other:
                raise AssertionError(f"it ended with {other}")


def endless_requests() -> Iterator[GenerateRequest]:
    """Prompts of 20 to 60 tokens for 8 to 40; half of them begin alike."""
    rng = random.Random(5)
    while True:
        prompt = tuple(rng.randrange(128) for _ in range(rng.randint(20, 60)))
        how = SamplingParams(temperature=1.0, seed=rng.randrange(2**40), max_tokens=rng.randint(8, 40), ignore_eos=True)
        yield GenerateRequest(model="proof", prompt_token_ids=prompt, sampling=how, latency_class="chat")
        prompt = tuple(range(16)) + prompt[16:]
        yield GenerateRequest(model="proof", prompt_token_ids=prompt, sampling=how, latency_class="completion")


class Load:
    """Brings `per_step` requests with every step, in tasks of its group, regardless of how they end."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.requests = endless_requests()
        self.transcript = Tally()
        self.per_step = 0.0
        self.tasks: asyncio.TaskGroup | None = None
        self.client: ThreadClient | None = None
        self._due = 0.0
        self._num_left = 0
        self._is_over = asyncio.Event()

    def on_plan(self, _: object) -> None:
        """A step begins. On the engine thread."""
        self.loop.call_soon_threadsafe(self._bring_due)

    async def run(self, num_steps: int) -> None:
        """Wait until so many more steps have begun."""
        self._num_left = num_steps
        self._is_over.clear()
        await self._is_over.wait()

    def _bring_due(self) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            self._is_over.set()
        self._due += self.per_step
        num_requests = int(self._due)
        self._due -= num_requests
        self.bring(num_requests)

    def bring(self, num_requests: int) -> None:
        """Submit so many requests now."""
        for _ in range(num_requests):
            assert self.client is not None
            assert self.tasks is not None
            self.tasks.create_task(self.transcript.follow(self.client, next(self.requests)))


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[ThreadClient, Load]]:
    """An engine whose steps take at least two milliseconds, and a load that has not begun."""
    load = Load()
    runner = EchoRunner(num_blocks=NUM_BLOCKS, block_size=16, pause=partial(sleep, STEP_SECONDS))
    load.client = client = ThreadClient("proof", load_of(runner), CONFIG, on_plan=load.on_plan)
    try:
        yield await ready(client), load
    finally:
        await client.aclose()


async def saturate(client: ThreadClient, load: Load, num_requests: int) -> Tally:
    """Keep every seat filled, and one more request waiting for each seat."""
    tally = Tally()

    async def keep_asking() -> None:
        while tally.num_asked < num_requests:
            await tally.follow(client, next(load.requests))

    await asyncio.gather(*(keep_asking() for _ in range(2 * NUM_SEATS)))
    return tally


def kept_bytes() -> int:
    gc.collect()
    return resident_bytes("self")


async def overload(load: Load, per_step: float) -> int:
    """Bring requests for `NUM_STEPS`, and wait for all to end; return by how many bytes memory grew after a third."""
    async with asyncio.TaskGroup() as load.tasks:
        load.per_step = per_step
        load.bring(1)
        await load.run(NUM_STEPS // 3)
        before = kept_bytes()
        await load.run(NUM_STEPS * 2 // 3)
        growth = kept_bytes() - before
        load.per_step = 0.0
    return growth


@pytest.mark.alone
async def test_overload() -> None:
    """Each ends with an answer or a true refusal; memory stays flat; a step gives at least 0.9 of that at capacity.

    A Retry-After is true if it is at most a few times the time in which all waiting requests are answered at capacity.
    """
    async with serving() as (client, load):
        began_at = monotonic()
        at_capacity = await saturate(client, load, scaled(3_000))
        queue_seconds = (
            len(CONFIG.classes) * CONFIG.max_waiting * (monotonic() - began_at) / at_capacity.ends["answers"]
        )
        num_steps = client.stats().steps
        best = at_capacity.num_tokens / num_steps
        growth = await overload(load, TIMES * at_capacity.ends["answers"] / num_steps)
        stats = client.stats()
    tally, num_steps = load.transcript, stats.steps - num_steps
    goodput = tally.num_tokens / num_steps
    print(
        f"\noverload, {TIMES}x for {NUM_STEPS:,} steps: {tally.num_asked:,} requests in {num_steps:,} steps ended as"
        f" {', '.join(f'{count:,} {end}' for end, count in sorted(tally.ends.items()))};"
        f" Retry-After up to {tally.longest_retry_after} s where {queue_seconds:.1f} s are true;"
        f" goodput {goodput:.2f} tokens a step, {best:.2f} at capacity;"
        f" {stats.preemptions:,} preemptions; memory grew by {growth / 2**20:.1f} MiB"
    )
    assert sum(tally.ends.values()) == tally.num_asked
    assert tally.ends["answers"] < tally.num_asked * 2 / TIMES, "that was no overload"
    assert tally.longest_retry_after <= 4 * ceil(queue_seconds)
    assert growth < MOST_GROWTH_BYTES
    assert goodput >= 0.9 * best
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
