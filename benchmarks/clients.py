"""The process client beside the thread client, in turns, in one run; and what a park and its resume cost.

    python -m benchmarks.clients [--engines echo,helpdesk] [--streams 1,8,32] [--tokens 128] [--rounds 5]

Speed: concurrent answers of a fixed length, read as a `Stream` reads them. "First" and "last" are the delays of these
tokens after the engine's own timestamps, including the way of the request. CPU time is per token: in the engine (its
thread, or its process), and in the worker that reads. Both engines run all the time, one of them idle.

Resume: the time from asking again with the tokens so far (`output_token_ids`) to the next token, with the prefix cache
warm and, under another salt, cold; beside the mean gap between two tokens of the same answer. One answer, alone.
`--shape` adds the core alone on SmolLM2-135M's shape. Nothing here needs Django.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from benchmarks.support.machine import describe_machine, parser, progress
from streamserve.clients.base import EngineClient, Generation
from streamserve.clients.factory import make_client
from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import LaunchConfig
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.protocol.events import Done, Token
from streamserve.protocol.requests import GenerateRequest, Message, SamplingParams

HELPDESK = Path(__file__).resolve().parents[1] / "project" / "demo_model" / "helpdesk"
MODELS = {
    "echo": ModelConfig(alias="echo", path="echo"),
    "helpdesk": ModelConfig(alias="helpdesk", path=str(HELPDESK), dtype="float32", num_threads=1),
}
CONFIG = EngineConfig(num_blocks=2048, max_model_len=2048)
LOAD_SECONDS = 120.0
ANSWER_SO_FAR = 64  # tokens before a park
TIMES_PARKED = 5  # in a round
LONG_TEXT = "My invoice of last month shows a charge that I do not know, and I would like to understand it. "
T = TypeVar("T")
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Speed:
    """One run of one client. Seconds; CPU seconds per token."""

    tokens_per_second: float
    first: float
    last: float
    engine_cpu: float
    worker_cpu: float


@dataclass(frozen=True, slots=True)
class Resume:
    """Seconds to the next token of one answer."""

    gap: float
    warm: float
    cold: float
    num_cached: int


class Contender:
    """A client whose engine is ready, with CPU clocks of both sides."""

    def __init__(self, name: str, client: EngineClient) -> None:
        self.name = name
        self.client = client

    async def open(self) -> None:
        """Load."""
        self.client.start()
        async with asyncio.timeout(LOAD_SECONDS):
            while self.client.describe().state in ("idle", "loading"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        if self.client.describe().state != "ready":
            raise RuntimeError(f"{self.name}: {self.client.describe()}")

    def engine_cpu(self) -> float:
        """CPU seconds of the engine so far."""
        if isinstance(self.client, ProcessClient):
            assert self.client.engine_pid is not None
            return time.clock_gettime(_process_clock(self.client.engine_pid))
        return time.clock_gettime(time.pthread_getcpuclockid(self._engine_thread()))

    def worker_cpu(self) -> float:
        """CPU seconds of this process so far, an engine in it left out."""
        seconds = time.process_time()
        return seconds if isinstance(self.client, ProcessClient) else seconds - self.engine_cpu()

    async def close(self) -> None:
        """End the engine too."""
        pid = self.client.engine_pid if isinstance(self.client, ProcessClient) else None
        await self.client.aclose()
        if pid is not None:
            os.kill(pid, signal.SIGTERM)

    def _engine_thread(self) -> int:
        threads = [one for one in threading.enumerate() if one.name == f"engine-{self.client.alias}"]
        assert len(threads) == 1
        assert threads[0].ident is not None
        return threads[0].ident


def _process_clock(pid: int) -> int:
    """Return the clock of all threads of another process: the kernel's MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED)."""
    return (~pid << 3) | 2


def main() -> None:
    """Measure every chosen engine."""
    options = parser(__doc__)
    options.add_argument("--engines", default="echo,helpdesk")
    options.add_argument("--streams", default="1,8,32")
    options.add_argument("--tokens", type=int, default=128, help="of an answer")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--shape", action="store_true", help="resume on SmolLM2-135M's shape too, 1k of prompt")
    options.add_argument("--dtype", default="bf16", help="for --shape: bf16 or fp32")
    chosen = options.parse_args()
    print(describe_machine())
    for engine in chosen.engines.split(","):
        asyncio.run(measure(engine, chosen))
    if chosen.shape:
        measure_shape(chosen)


async def measure(engine: str, options: argparse.Namespace) -> None:
    """Print speed and resume of one engine through both clients."""
    with tempfile.TemporaryDirectory() as folder:
        spec = LaunchConfig(
            model=MODELS[engine], engine=CONFIG, site=folder, state_dir=folder, runtime_dir=f"{folder}/run"
        )
        contenders = [
            Contender("process", ProcessClient(spec)),
            Contender("thread", make_client(MODELS[engine], CONFIG)),
        ]
        progress(f"{engine}: loading twice")
        for one in contenders:
            await one.open()
        try:
            await _measure_open(engine, contenders, options)
        finally:
            for one in contenders:
                await one.close()


async def _measure_open(engine: str, contenders: list[Contender], options: argparse.Namespace) -> None:
    print(f"\n{engine}, {options.tokens} tokens an answer, medians of {options.rounds} rounds")
    print(f"{'':26}{'tokens/s':>10}{'first ms':>10}{'last ms':>10}{'engine us':>11}{'worker us':>11}   (per token)")
    for num_streams in map(int, options.streams.split(",")):
        runs = await take_turns(contenders, lambda one, n=num_streams: run(one, n, options.tokens), options.rounds)
        print_speed(num_streams, contenders, runs)
    print(f"\n{engine}, park and resume after {ANSWER_SO_FAR} tokens, ms to the next token")
    print(f"{'':26}{'plain step':>12}{'warm':>9}{'cold':>9}{'warm / step':>13}{'cold / warm':>13}{'cached':>8}")
    runs = await take_turns(contenders, park_often, options.rounds)
    for one, parks in zip(contenders, runs, strict=True):
        print_resume(one.name, [resume for some in parks for resume in some])


async def take_turns(
    contenders: list[Contender], work: Callable[[Contender], Awaitable[T]], rounds: int
) -> list[list[T]]:
    """Let every contender run once unmeasured, then `rounds` times in turns."""
    results: list[list[T]] = [[] for _ in contenders]
    for number in range(rounds + 1):
        for contender, seen in zip(contenders, results, strict=True):
            result = await work(contender)
            if number > 0:
                seen.append(result)
    return results


async def run(one: Contender, num_streams: int, num_tokens: int) -> Speed:
    """Read the answers concurrently."""
    engine, worker, started_at = one.engine_cpu(), one.worker_cpu(), time.monotonic()
    late = await asyncio.gather(*(_read(one.client, num_tokens) for _ in range(num_streams)))
    seconds = time.monotonic() - started_at
    engine, worker = one.engine_cpu() - engine, one.worker_cpu() - worker
    total = num_streams * num_tokens
    firsts, lasts = zip(*late, strict=True)
    return Speed(total / seconds, statistics.median(firsts), statistics.median(lasts), engine / total, worker / total)


async def _read(client: EngineClient, num_tokens: int) -> tuple[float, float]:
    """Read one answer; return the delays of its first and its last token."""
    asked_at = time.monotonic()
    generation = await client.generate(_ask(client.alias, num_tokens))
    first_at, done = None, None
    async for event in generation:
        for some in (event, *generation.ready()):
            if isinstance(some, Token) and first_at is None:
                first_at = time.monotonic()
            done = some
    assert isinstance(done, Done), done
    assert first_at is not None
    assert done.usage.completion_tokens == num_tokens
    return first_at - asked_at - done.breakdown["ttft"], time.monotonic() - asked_at - done.latency


def _ask(alias: str, num_tokens: int, repeat: int = 1) -> GenerateRequest:
    """Return a request with a prompt of its own."""
    number = next(_numbers)
    sampling = SamplingParams(temperature=0.8, max_tokens=num_tokens, seed=number, ignore_eos=True)
    message = Message(role="user", content=f"Question {number}. {LONG_TEXT * repeat}")
    return GenerateRequest(model=alias, messages=(message,), sampling=sampling, latency_class="batch")


async def park_often(one: Contender) -> list[Resume]:
    """Park some answers, one after the other."""
    return [await park(one.client) for _ in range(TIMES_PARKED)]


async def park(client: EngineClient) -> Resume:
    """Begin an answer, drop it, and resume it twice: with its blocks in the prefix cache, and without."""
    request = _ask(client.alias, 4 * ANSWER_SO_FAR, repeat=4 if client.alias == "echo" else 20)
    generation = await client.generate(request)
    token_ids, times = await _take(generation, ANSWER_SO_FAR)
    step = (times[-1] - times[0]) / (len(times) - 1)  # the mean: tokens come in frames
    again = replace(request, output_token_ids=(tuple(token_ids),))
    warm, num_cached = await _next_token(client, again)
    cold, none_cached = await _next_token(client, replace(again, salt=f"cold {next(_numbers)}"))
    assert num_cached > 0 == none_cached
    return Resume(step, warm, cold, num_cached)


async def _next_token(client: EngineClient, request: GenerateRequest) -> tuple[float, int]:
    asked_at = time.monotonic()
    generation = await client.generate(request)
    _, times = await _take(generation, 1)
    return times[0] - asked_at, generation.num_cached_tokens


async def _take(generation: Generation, num_tokens: int) -> tuple[list[int], list[float]]:
    """Read tokens, then cancel."""
    token_ids: list[int] = []
    times: list[float] = []
    async for event in generation:
        if isinstance(event, Token):
            token_ids += event.token_ids
            times.append(time.monotonic())
        if len(token_ids) >= num_tokens:
            break
    generation.cancel()
    return token_ids, times


def print_speed(num_streams: int, contenders: list[Contender], runs: list[list[Speed]]) -> None:
    """Print a line for each client, and the ratio of the two, round by round."""
    for one, seen in zip(contenders, runs, strict=True):
        title = f"{one.name}, {num_streams} streams"
        speed, first, last = _median(seen, "tokens_per_second"), _median(seen, "first"), _median(seen, "last")
        engine, worker = _median(seen, "engine_cpu"), _median(seen, "worker_cpu")
        print(f"{title:26}{speed:10.0f}{first * 1e3:10.2f}{last * 1e3:10.2f}{engine * 1e6:11.0f}{worker * 1e6:11.0f}")
    ratios = [ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in zip(*runs, strict=True)]
    print(f"{'  process / thread':26}{statistics.median(ratios):10.2f}", flush=True)


def print_resume(title: str, seen: list[Resume]) -> None:
    """Print a line of medians."""
    gap, warm, cold = (_median(seen, name) * 1000 for name in ("gap", "warm", "cold"))
    of_step = statistics.median(one.warm / one.gap for one in seen)
    of_warm = statistics.median(one.cold / one.warm for one in seen)
    cached = _median(seen, "num_cached")
    print(f"{title:26}{gap:12.2f}{warm:9.2f}{cold:9.2f}{of_step:13.2f}{of_warm:13.2f}{cached:8.0f}", flush=True)


def _median(seen: list[Speed] | list[Resume], name: str) -> float:
    return statistics.median(getattr(one, name) for one in seen)


def measure_shape(options: argparse.Namespace) -> None:
    """Park and resume in the core alone, on a random model of SmolLM2-135M's shape."""
    from benchmarks.engine import DTYPES, LONG_PROMPT_LEN, build_model
    from benchmarks.support.contenders import Ours

    with tempfile.TemporaryDirectory() as folder:
        progress(f"SmolLM2-135M's shape in {options.dtype}: building and loading")
        build_model(Path(folder), DTYPES[options.dtype])
        ours = Ours(folder, DTYPES[options.dtype])
        seen = []
        for number in range(options.rounds + 1):
            progress(f"round {number} of {options.rounds}")
            seen.append(Resume(*ours.park(LONG_PROMPT_LEN, ANSWER_SO_FAR)))
        ours.close()
    print(f"\nSmolLM2-135M's shape, {options.dtype}, {LONG_PROMPT_LEN} + {ANSWER_SO_FAR} tokens, the core alone, ms")
    print(f"{'':26}{'plain step':>12}{'warm':>9}{'cold':>9}{'warm / step':>13}{'cold / warm':>13}{'cached':>8}")
    print_resume("core", seen[1:])


if __name__ == "__main__":
    main()
