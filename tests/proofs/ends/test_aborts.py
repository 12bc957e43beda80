"""An abort at any stage of an answer leaves nothing behind, and the answers beside it do not change.

`BENCHES` lists the clients under test.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from streamserve.clients.base import EngineClient, Generation
from streamserve.clients.process.messages import Cancel, encode
from streamserve.engine.config import EngineConfig
from streamserve.protocol.engine import EngineStats
from streamserve.protocol.events import Event, Token
from streamserve.protocol.requests import GenerateRequest, SamplingParams
from tests.proofs.scale import IS_SOAK, scaled
from tests.proofs.support.engines import ECHO, serving
from tests.proofs.support.pairs import MODEL_LEN, Answer, config_of, whole_answer
from tests.support.engines.clients import is_idle
from tests.support.engines.engine_processes import connected, end_engine, spec_in, until
from tests.support.engines.runners import DEADLINE_SECONDS, TurnByTurnRunner
from tests.support.processes import is_alive, open_names

NUM_ABORTS = 5_000
NUM_WORKERS = 8
NUM_COMPANIONS = 3
NUM_SEATS = NUM_WORKERS + NUM_COMPANIONS
COMPANION_TOKENS = 60
# An answer that ends soon, unless it is aborted; and a prompt of ten steps and more.
SHORT, LONG_PROMPT = 6, 10 * NUM_SEATS
# Workers find seats beside the companions; a step computes one token of each, or a few more of prompts.
ROOMY = replace(config_of(), prefix_caching=True, max_num_seqs=NUM_SEATS, max_num_batched_tokens=NUM_SEATS)
STAGE_OF = {0: "before a token", SHORT - 1: "before the last token", SHORT: "after the end"}
# Steps that an aborted answer takes part in afterwards, on average: the one in flight, and its result on the way back;
# in another process those of a few milliseconds more, while the abort is on its way.
MOST_LATE_STEPS = {"thread": 2, "process": 4}
# Only the companions find a seat.
FULL = replace(ROOMY, max_num_seqs=NUM_COMPANIONS)


@dataclass
class Bench:
    """A client under test. `abort_unknown` aborts an id that is not in use; `is_clean`: it remembers no request.

    `stats` returns current metrics, also where the client's own are a moment old. `pids`: further processes that must
    hold nothing. The engine server ignores ids that no worker can have given, and does not count them.
    """

    client: EngineClient
    abort_unknown: Callable[[int], None]
    is_clean: Callable[[], bool]
    stats: Callable[[], Awaitable[EngineStats]]
    pids: tuple[int, ...] = ()
    num_ticks: int = 0
    num_aborts: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    # Tokens that were received when their answer was aborted, and that the engine would make without an abort.
    num_received: int = 0
    num_asked_for: int = 0
    _aborted: dict[int, Generation] = field(default_factory=dict)  # by id(), each once
    _next_tick: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, prompt_len: int = 12) -> Generation:
        """Request the longest possible answer, to a prompt unlike any other."""
        return await self._ask(prompt_len, MODEL_LEN - prompt_len)

    async def ask_shortly(self) -> Generation:
        """Request a short answer."""
        return await self._ask(12, SHORT)

    async def _ask(self, prompt_len: int, max_tokens: int) -> Generation:
        number = next(self.numbers)
        self.num_asked_for += max_tokens
        prompt = tuple((number // 90**place) % 90 for place in range(4)) + tuple(range(20, 16 + prompt_len))
        return await self.client.generate(request_of(prompt, max_tokens, seed=number))

    def tick(self, _: Event) -> None:
        """A companion received an event: a step has ended."""
        self.num_ticks += 1
        self._next_tick.set()
        self._next_tick = asyncio.Event()

    async def ticks(self, num: int) -> None:
        """Wait for so many ticks."""
        until_tick = self.num_ticks + num
        while self.num_ticks < until_tick:
            await self._next_tick.wait()

    def abort(self, generation: Generation, num_tokens: int) -> None:
        """Cancel, and note how many tokens its reader had received, and how many it had not read yet."""
        if id(generation) not in self._aborted:
            self._aborted[id(generation)] = generation
            self.num_received += num_tokens
            self.num_received += sum(len(event.token_ids) for event in generation.ready() if isinstance(event, Token))
        generation.cancel()
        self.num_aborts += 1
        stage = STAGE_OF.get(num_tokens, "in mid-answer")
        self.seen[stage] = self.seen.get(stage, 0) + 1


def request_of(prompt: tuple[int, ...], max_tokens: int, seed: int) -> GenerateRequest:
    how = SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(model="proof", prompt_token_ids=prompt, sampling=how)


COMPANIONS = [
    request_of(tuple(range(5 * number, 30)), COMPANION_TOKENS, seed=number) for number in range(NUM_COMPANIONS)
]


@asynccontextmanager
async def thread_bench(config: EngineConfig) -> AsyncIterator[Bench]:
    """The thread client. Its engine has no device to wait for: the aborts set its pace."""
    loop = asyncio.get_running_loop()
    echo = replace(
        ECHO,
        make_runner=lambda config: TurnByTurnRunner(ECHO.make_runner(config), loop),
        poison=lambda runner, block_id: ECHO.poison(runner.inner, block_id),  # type: ignore[attr-defined]
    )
    async with serving(echo, config) as client:
        sequences = client._router

        async def stats() -> EngineStats:
            return client.stats()

        yield Bench(client, sequences.abort, lambda: not len(sequences) and is_idle(client), stats)


@asynccontextmanager
async def process_bench(config: EngineConfig) -> AsyncIterator[Bench]:
    """The process client. At the end the engine drains: it would never finish if anything were left."""
    with tempfile.TemporaryDirectory(prefix="engine-") as folder:
        engine = replace(config, max_model_len=MODEL_LEN)
        spec = spec_in(folder, engine=engine, echo_step_seconds=0.002, drain_seconds=1e6, hang_seconds=2.0)
        try:
            async with connected(spec) as client:
                session, pid = client._link.session, client.engine_pid
                assert session is not None
                assert pid is not None

                async def stats() -> EngineStats:
                    seen = client.stats()
                    await until(lambda: client.stats() is not seen)
                    return client.stats()

                def abort_unknown(request_id: int) -> None:
                    session.connection.send(encode(Cancel(request_id)))

                yield Bench(
                    client, abort_unknown, lambda: not session.sources and not session._questions, stats, (pid,)
                )
                await client.control("stop")
                await until(lambda: not is_alive(pid))
        finally:
            end_engine(spec)


BENCHES: dict[str, Callable[[EngineConfig], AbstractAsyncContextManager[Bench]]] = {
    "thread": thread_bench,
    "process": process_bench,
}


async def queued(bench: Bench) -> None:
    """All seats are taken; the request has waited for some steps."""
    generation = await bench.ask()
    await bench.ticks(2)
    bench.abort(generation, num_tokens=0)


async def at_once(bench: Bench) -> None:
    """It was accepted this moment; its first step may be in planning."""
    bench.abort(await bench.ask(), num_tokens=0)


async def mid_chunk(bench: Bench) -> None:
    """A part of its prompt is computed."""
    generation = await bench.ask(LONG_PROMPT)
    await bench.ticks(2 * NUM_COMPANIONS)
    bench.abort(generation, num_tokens=0)


async def decoding(bench: Bench) -> None:
    """It has some tokens."""
    generation = await bench.ask()
    bench.abort(generation, await read(generation, SHORT // 2))


async def last_step(bench: Bench) -> None:
    """All its tokens but one have come; the last may be in flight, or on its way to the client."""
    generation = await bench.ask_shortly()
    bench.abort(generation, await read(generation, SHORT - 1))


async def twice(bench: Bench) -> None:
    """Aborted again, and again after its end: nothing more happens."""
    generation = await bench.ask()
    bench.abort(generation, await read(generation, 2))
    bench.abort(generation, 2)
    ended = await bench.ask_shortly()
    assert await read(ended, SHORT) == SHORT
    assert [event async for event in ended]
    bench.abort(ended, SHORT)


async def unknown(bench: Bench) -> None:
    """An id that is not in use."""
    bench.abort_unknown(10**12 + next(bench.numbers))
    bench.num_aborts += 1
    await bench.ticks(1)


@dataclass(frozen=True, slots=True)
class Stage:
    """An engine in which aborts come at that stage, and the ways to abort, taken in turn by each worker."""

    config: EngineConfig
    ways: tuple[Callable[[Bench], Awaitable[None]], ...]
    num_workers: int = NUM_WORKERS


STAGES = {
    "queued": Stage(FULL, (queued, at_once)),
    "mid-chunk": Stage(ROOMY, (mid_chunk,), num_workers=1),  # prompts are computed one after the other
    "decoding": Stage(ROOMY, (decoding,)),
    "last step": Stage(ROOMY, (last_step,)),
    "twice": Stage(ROOMY, (twice,)),
    "unknown id": Stage(ROOMY, (unknown,)),
    "any": Stage(ROOMY, (at_once, mid_chunk, decoding, last_step, twice, unknown)),
}


async def read(generation: Generation, num_tokens: int) -> int:
    """Read that many tokens; return how many there were."""
    num_read = 0
    while num_read < num_tokens:
        event = await anext(generation)
        num_read += len(event.token_ids) if isinstance(event, Token) else 0
    return num_read


async def companion(bench: Bench, request: GenerateRequest, reference: Answer, is_over: asyncio.Event) -> int:
    """Submit the same request until the test ends; return how often. Each of its events is a tick."""
    for number in itertools.count(1):
        assert await whole_answer(bench.client.generate, request, on_event=bench.tick) == reference
        if is_over.is_set():
            return number
    raise AssertionError


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", BENCHES)
async def test_aborts_leave_nothing(name: str, stage: str) -> None:
    """Afterwards no block, sequence, task or descriptor is left; the answers beside the aborts are the same.

    The engine makes no further tokens for an aborted answer, except in the steps until the abort reaches it.
    """
    how = STAGES[stage]
    num_wanted = scaled(NUM_ABORTS) // len(STAGES) + 1
    async with BENCHES[name](how.config) as bench, asyncio.timeout(DEADLINE_SECONDS * (20 if IS_SOAK else 3)):
        references = [await whole_answer(bench.client.generate, one) for one in COMPANIONS]
        before = held(bench)
        at_first = await bench.stats()
        is_over = asyncio.Event()
        beside = [
            asyncio.create_task(companion(bench, one, reference, is_over))
            for one, reference in zip(COMPANIONS, references, strict=True)
        ]
        await bench.ticks(1)
        await asyncio.gather(*(work(bench, how.ways, num_wanted) for _ in range(how.num_workers)))
        is_over.set()
        num_answers = sum(await asyncio.gather(*beside))
        while not (is_empty(stats := await bench.stats()) and bench.is_clean()):  # noqa: ASYNC110  (see `until`)
            await asyncio.sleep(0)
        tasks, num_open = held(bench)
        assert tasks == before[0]
        # Fewer is no leak: an earlier test's descriptors may have been closed meanwhile.
        assert all(map(operator.le, num_open, before[1])), f"{num_open} descriptors, {before[1]} before"
        num_tokens = stats.generation_tokens - at_first.generation_tokens - num_answers * COMPANION_TOKENS
        num_late = num_tokens - bench.num_received
        assert num_late <= MOST_LATE_STEPS[name] * bench.num_aborts, f"{num_late} tokens were made after an abort"
        if stage == "unknown id" and not bench.pids:
            assert stats.unknown_ids - at_first.unknown_ids == bench.num_aborts
    seen = ", ".join(f"{count:,} {place}" for place, count in sorted(bench.seen.items()))
    print(
        f"\naborts, {name}, {stage}: {bench.num_aborts:,} aborts ({seen or 'of nothing'}) beside"
        f" {num_answers:,} answers that did not change; {num_tokens:,} tokens made, {num_late:,} of"
        f" them after an abort, without aborts {bench.num_asked_for:,}; left: {stats.blocks_used} blocks,"
        f" {stats.running + stats.waiting} sequences, 0 tasks, 0 descriptors"
    )


async def work(bench: Bench, ways: tuple[Callable[[Bench], Awaitable[None]], ...], num_wanted: int) -> None:
    """Abort in each way in turn until all workers together have aborted enough."""
    for way in itertools.cycle(ways):
        if bench.num_aborts >= num_wanted:
            return
        await way(bench)


def is_empty(stats: EngineStats) -> bool:
    """No sequence waits or runs, and each block is free or holds a cached prefix."""
    idle = stats.running == stats.waiting == stats.blocks_used == 0
    return idle and stats.blocks_cached + stats.blocks_free == stats.blocks_total


def held(bench: Bench) -> tuple[set[asyncio.Task[object]], list[int]]:
    """Return the existing tasks, and the number of descriptors here and in the engine's process."""
    return asyncio.all_tasks(), [len(open_names(pid)) for pid in ("self", *bench.pids)]
