"""`benchmarks.qoe --real`: the demo model behind `Streams`, and readers with a pace, on the real clock.

A reader pulls the next event when it has read the one before and acknowledges what it has read; with "received" it
acknowledges each event as it comes. It could not have read an event before it pulls it, so the same `Reading` scores
it. Everything runs in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import aclosing
from dataclasses import replace
from statistics import fmean
from typing import Any

from benchmarks.clients import LONG_TEXT, MODELS, Contender
from benchmarks.machine import progress
from benchmarks.readers import Reading, Visit, draw_visits, score
from streamserve.clients.factory import make_client
from streamserve.engine.config import EngineConfig
from streamserve.protocol.errors import Refused
from streamserve.protocol.events import Done, Error, Token
from streamserve.protocol.requests import GenerateRequest, Message, SamplingParams
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.follow import follow
from streamserve.streams.registry import Streams

ALIAS = "helpdesk"
CONTENDERS = ("ours", "ours, received", "fcfs")
TOKENS_OF_TEXT = 26  # LONG_TEXT's, about
GIVE_UP_SECONDS = 240.0
_UNBOUNDED = 10**9  # events of credit: only the acknowledged position holds the engine back


async def run_real(contenders: dict[str, tuple[EngineConfig, str]], options: argparse.Namespace) -> None:
    """Print a table like that of the simulation."""
    from benchmarks.qoe import print_head, print_line

    capacity = await measure_capacity(contenders["fcfs, endless"][0], options.seconds / 3)
    title = f"the demo model through Streams, {contenders['ours'][0].max_num_seqs} seats"
    print(f"\n{title}; 1x is {capacity:.2f} requests/s for {options.seconds:g} s; {options.rounds} rounds in turns")
    print_head()
    seen: dict[str, list[Any]] = {name: [] for name in CONTENDERS}
    for number in range(options.rounds):
        visits = draw_visits(number + 1, capacity * options.real, options.seconds)
        for name in CONTENDERS:
            progress(f"real, round {number + 1} of {options.rounds}, {name}: {len(visits)} requests")
            config, acks = contenders[name]
            readings, num_parks, num_computed = await run(config, visits, acks)
            seen[name].append(score(readings, num_parks, num_computed))
    for name, scores in seen.items():
        print_line(f"{options.real:g}x {name}", scores)


async def measure_capacity(config: EngineConfig, seconds: float) -> float:
    """Return how many answers' worth of tokens the engine makes in a second with all seats taken and no slow reader."""
    progress("measuring the capacity of the demo model")
    visits = draw_visits(99, 200 / seconds, seconds)
    client = await _open(config)
    busy = asyncio.Semaphore(2 * config.max_num_seqs)

    async def answer(visit: Visit) -> None:
        async with busy:
            async for _ in await client.generate(_request(visit)):
                pass

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(visit)) for visit in visits]
        await asyncio.sleep(seconds / 2)  # the seats fill
        num_before, at = client.stats().generation_tokens, time.monotonic()
        await asyncio.sleep(seconds / 2)
        num_tokens, seconds = client.stats().generation_tokens - num_before, time.monotonic() - at
        for task in tasks:
            task.cancel()
    await client.aclose()
    return num_tokens / seconds / fmean(visit.answer_len for visit in visits)


async def run(config: EngineConfig, visits: list[Visit], acks: str) -> tuple[list[Reading], int, int]:
    """Start every reader at its time; return the readings, the number of parks, and the number of tokens computed."""
    client = await _open(config)
    streams = Streams({ALIAS: client}, MemoryLog())
    started_at = time.monotonic() + 0.5
    try:
        async with asyncio.timeout(GIVE_UP_SECONDS):
            visitors = (_visit(streams, visit, started_at, paced=acks == "read") for visit in visits)
            readings = await asyncio.gather(*visitors)
        stats = client.stats()
    finally:
        await streams.aclose()
        await client.aclose()
    return readings, stats.parks, stats.prefix_queries - stats.prefix_hits + stats.generation_tokens


async def _open(config: EngineConfig) -> Any:
    client = make_client(MODELS[ALIAS], config)
    await Contender("thread", client).open()
    return client


async def _visit(streams: Streams, visit: Visit, started_at: float, *, paced: bool) -> Reading:
    """Ask at the visit's time and read to the end; times are from `started_at` on."""
    reading = Reading(visit)
    await asyncio.sleep(started_at + visit.arrives_at - time.monotonic())
    try:
        stream = await streams.start(_request(visit), owner=visit.tenant, tenant=visit.tenant)
    except Refused:
        return reading
    async with aclosing(follow(streams, stream, transport="paced", credit=_UNBOUNDED)) as events:
        async for logged in events:
            _note(reading, logged.event, time.monotonic() - started_at)
            if paced and reading.read_at:
                await asyncio.sleep(started_at + reading.read_at[-1] - time.monotonic())
            events.ack(events.seq)
    return reading


def _note(reading: Reading, event: object, now: float) -> None:
    if isinstance(event, Token):
        reading.take(now, len(event.token_ids))
    elif isinstance(event, Done | Error):
        reading.is_whole = isinstance(event, Done)


def _request(visit: Visit) -> GenerateRequest:
    text = LONG_TEXT * max(1, visit.prompt_len // TOKENS_OF_TEXT)
    sampling = SamplingParams(temperature=0.8, max_tokens=visit.answer_len, seed=visit.number, ignore_eos=True)
    request = GenerateRequest(
        model=ALIAS,
        messages=(Message(role="user", content=f"{visit.number}: {text}"),),
        sampling=sampling,
        latency_class=visit.latency_class,
    )
    return replace(request, tenant=visit.tenant)
