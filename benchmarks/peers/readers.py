"""The loads that each contender gets, and what their readers measure at the client.

All read /v1/completions as SSE. A prompt is drawn anew for every contender and round, so that no cache knows it. Times
are milliseconds, but for the readings' own clocks. `ITL` is (last - first) / (tokens - 1), with the server's own
coalescing: a chunk may hold several tokens.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.peers.quiet import cpu_seconds
from benchmarks.peers.servers import Contender
from benchmarks.qoe_http.readers import Prompts, ServerFault, post

ANSWER_SECONDS = 600.0
_TAIL_LEN, _NUM_TAILS = 32, 4
Figures = dict[str, float]


class Failed(Exception):
    """A contender refused, broke off or did not answer: it is left out of what follows."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer: when it was asked for and when each chunk with text came, in seconds of one clock."""

    asked_at: float
    came_at: tuple[float, ...]
    num_tokens: int

    @property
    def ttft(self) -> float:
        """Milliseconds to the first text."""
        return (self.came_at[0] - self.asked_at) * 1e3

    @property
    def itl(self) -> float:
        """Mean milliseconds between tokens; 0 for one token."""
        return (self.came_at[-1] - self.came_at[0]) / max(1, self.num_tokens - 1) * 1e3

    def gaps(self, start: float, end: float) -> list[float]:
        """Return the milliseconds between chunks, of the gaps that overlap `start` to `end`."""
        return [(after - at) * 1e3 for at, after in pairwise(self.came_at) if after > start and at < end]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of prompts and answers. `mixed`: of the prompt beside `beside` streams of `beside_answer` tokens."""

    prompt: int = 89
    answer: int = 64
    long: int = 1000
    mixed: int = 3000
    beside: int = 8
    beside_answer: int = 192
    arrivals_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Client:
    """Reads one contender; `seed` makes the prompts of a round and a contender."""

    contender: Contender
    prompts: Prompts
    lengths: Lengths
    seed: str

    async def warm(self) -> None:
        """Read a few answers that do not count: the first pages, threads and connections."""
        await self._read_all([self._draw(self.lengths.prompt, f"warm {number}") for number in range(2)], 8)

    async def at_once(self, num_streams: int) -> Figures:
        """As many prompts at the same moment: medians over the streams, tokens a second, CPU a token."""
        sessions = self.contender.sessions
        cpu, began_at = cpu_seconds(sessions.values()), time.perf_counter()
        prompts = [self._draw(self.lengths.prompt, f"{num_streams} {number}") for number in range(num_streams)]
        readings = await self._read_all(prompts, self.lengths.answer)
        seconds, spent = time.perf_counter() - began_at, cpu_seconds(sessions.values())
        num_tokens = sum(reading.num_tokens for reading in readings)
        figures = _middle(readings) | {"tokens_per_second": num_tokens / seconds}
        for role, session in sessions.items():
            figures[f"{role}_cpu_ms"] = (spent[session] - cpu[session]) / num_tokens * 1e3
        return figures

    async def long_prompt(self) -> Figures:
        """A long prompt, and the same again."""
        prompt = self._draw(self.lengths.long, "long")
        return {"cold_ms": (await self._read(prompt, 8)).ttft, "again_ms": (await self._read(prompt, 8)).ttft}

    async def mixed(self) -> Figures:
        """A very long prompt while others read: the gaps between their chunks from its request to its first text."""
        lengths = self.lengths
        started = [asyncio.Event() for _ in range(lengths.beside)]
        async with asyncio.TaskGroup() as group:
            prompts = [self._draw(lengths.prompt, f"beside {number}") for number in range(lengths.beside)]
            others = [
                group.create_task(self._read(prompt, lengths.beside_answer, event))
                for prompt, event in zip(prompts, started, strict=True)
            ]
            for event in started:
                await event.wait()
            late = await self._read(self._draw(lengths.mixed, "mixed"), 8)
        gaps = sorted(gap for other in others for gap in other.result().gaps(late.asked_at, late.came_at[0]))
        if not gaps:
            raise Failed("the streams ended before the long prompt began")
        return {"gap_p99_ms": gaps[int(0.99 * (len(gaps) - 1))], "gap_max_ms": gaps[-1], "ttft_ms": late.ttft}

    async def prefix(self) -> Figures:
        """Prompts at once that share a long beginning which the server has seen."""
        shared = self._draw(self.lengths.long, "shared")
        await self._read(shared, 8)
        tails = [self._draw(_TAIL_LEN, f"tail {number}") for number in range(_NUM_TAILS)]
        readings = await self._read_all([shared + tail for tail in tails], 8)
        return {"ttft_ms": median(reading.ttft for reading in readings)}

    async def arrivals(self, per_second: float, seed: str) -> Figures:
        """Readers who come by a Poisson process, the same for the same seed, however late the server is."""
        rng, at, times = random.Random(seed), 0.0, []
        while (at := at + rng.expovariate(per_second)) < self.lengths.arrivals_seconds:
            times.append(at)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._come(number, at)) for number, at in enumerate(times or [0.0])]
        ttfts = sorted(task.result().ttft for task in tasks)
        itl = median(task.result().itl for task in tasks)
        return {"ttft_ms": median(ttfts), "ttft_p95_ms": ttfts[int(0.95 * (len(ttfts) - 1))], "itl_ms": itl}

    async def _come(self, number: int, at: float) -> Reading:
        await asyncio.sleep(at)
        return await self._read(self._draw(self.lengths.prompt, f"arrival {number}"), self.lengths.answer)

    def _draw(self, num_tokens: int, what: str) -> str:
        return self.prompts.draw(num_tokens, f"{self.seed} {what}")

    async def _read_all(self, prompts: Sequence[str], answer_len: int) -> list[Reading]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._read(prompt, answer_len)) for prompt in prompts]
        return [task.result() for task in tasks]

    async def _read(self, prompt: str, answer_len: int, started: asyncio.Event | None = None) -> Reading:
        """Read one answer, whole; `started` is set at its first text. Raises Failed."""
        asked_at, came_at, num_tokens = time.perf_counter(), [], 0
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                async for data in post(self.contender.server, "/v1/completions", self._body(prompt, answer_len)):
                    if any(choice.get("text") for choice in data.get("choices", ())):
                        came_at.append(time.perf_counter())
                        if started is not None:
                            started.set()
                    if data.get("usage"):
                        num_tokens = data["usage"]["completion_tokens"]
        except (OSError, TimeoutError, ServerFault) as error:
            raise Failed(f"{type(error).__name__}: {error}") from error
        if num_tokens != answer_len or not came_at:
            raise Failed(f"an answer had {num_tokens} of {answer_len} tokens, in {len(came_at)} chunks")
        return Reading(asked_at, tuple(came_at), num_tokens)

    def _body(self, prompt: str, answer_len: int) -> dict[str, Any]:
        body = {"model": self.contender.model, "prompt": prompt, "max_tokens": answer_len, "temperature": 0.8}
        return body | {"stream": True} | self.contender.fields


def _middle(readings: Sequence[Reading]) -> Figures:
    """Return the medians over streams that began together."""
    return {
        "itl_ms": median(reading.itl for reading in readings),
        "ttft_ms": median(reading.ttft for reading in readings),
    }
