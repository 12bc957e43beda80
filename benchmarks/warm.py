"""What `run.warm` saves: a pipeline that searches while its static prefix is computed, and one that does not.

    python -m benchmarks.warm [--model helpdesk] [--prefix 1000] [--search 0.3] [--rounds 15]

The run looks something up for `--search` seconds (a sleep), then asks the model with a prefix of about `--prefix`
tokens and what it found. Each run has a prefix of its own, so that no cache of an earlier one helps: that is the
first answer after a deploy, or of a tenant. Both take turns, so that a busy machine slows both: read the ratio. The
time is that of the reader, from the request to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

from benchmarks.support.machine import describe_machine, parser, progress
from benchmarks.support.shape import model_folder
from streamserve.clients.base import EngineClient
from streamserve.clients.factory import make_client
from streamserve.clients.pipeline.client import Pipeline, PipelineClient
from streamserve.clients.pipeline.run import Run
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.protocol.events import Token
from streamserve.protocol.requests import GenerateRequest, Message
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.follow import follow
from streamserve.streams.registry import Streams
from streamserve.streams.store import Admission

MODEL, WITH, WITHOUT = "model", "with warm", "without"
_SENTENCE = "Answer in two sentences, from the passages only, and say where each of them is from. "
_numbers = itertools.count(1)


def pipelines(prefix: dict[int, str], search_seconds: float) -> dict[str, Pipeline]:
    """Return both pipelines: the same, but for one line. `prefix` has the system prompt of each run's number."""

    async def answer(run: Run, *, is_warm: bool) -> None:
        system = {"role": "system", "content": prefix[int(run.question)]}
        if is_warm:
            run.warm([system, {"role": "user", "content": "Found: the"}])
        await run.step("Looking it up", asyncio.sleep, search_seconds, phase="retrieval")
        user = {"role": "user", "content": "Found: the price is 9 euros. What is the price?"}
        await run.generate([system, user], max_tokens=8, ignore_eos=True, temperature=0.0)

    async def with_warm(run: Run) -> None:
        await answer(run, is_warm=True)

    async def without(run: Run) -> None:
        await answer(run, is_warm=False)

    return {
        WITH: Pipeline(name="with", function=with_warm, model=MODEL),
        WITHOUT: Pipeline(name="without", function=without, model=MODEL),
    }


async def measure(folder: str, dtype: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds to the first token of each round."""
    client = make_client(
        ModelConfig(alias=MODEL, path=folder, dtype=dtype, num_threads=options.threads), EngineConfig()
    )
    client.start()
    while client.describe().state == "loading":  # noqa: ASYNC110  (no event)
        await asyncio.sleep(0.05)
    assert client.describe().state == "ready", client.describe()
    prefixes: dict[int, str] = {}
    clients: dict[str, EngineClient] = {MODEL: client}
    for name, one in pipelines(prefixes, options.search).items():
        clients[name] = PipelineClient(one, {MODEL: client}, default_model=MODEL)
    streams = Streams(clients, MemoryLog())
    seen: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    try:
        sentences = options.prefix // await _num_tokens(client, _SENTENCE)
        for number in range(options.rounds + 1):  # the first round is not counted
            for name in (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH):
                key = next(_numbers)
                prefixes[key] = f"Handbook {key}. " + _SENTENCE * sentences
                seconds = await _first_token(streams, name, str(key))
                if number:
                    seen[name].append(seconds)
            progress(f"round {number} of {options.rounds}")
    finally:
        await streams.aclose()
        await client.aclose()
    return seen


async def _num_tokens(client: EngineClient, text: str) -> int:
    return len(await client.tokenize(GenerateRequest(model=MODEL, prompt=text)))


async def _first_token(streams: Streams, model: str, question: str) -> float:
    asked_at = time.monotonic()
    request = GenerateRequest(model=model, messages=(Message(role="user", content=question),))
    stream = await streams.start(request, Admission(owner=question, tenant=question))
    first_at = 0.0
    async with aclosing(follow(streams, stream)) as events:
        async for logged in events:
            if isinstance(logged.event, Token) and not first_at:
                first_at = time.monotonic()
    assert first_at, stream.terminal
    return first_at - asked_at


def main() -> None:
    """Measure, and print a line for each and the ratio."""
    options = parser(__doc__)
    options.add_argument("--model", default="helpdesk", help="helpdesk, S, or a folder")
    options.add_argument("--prefix", type=int, default=1000, help="tokens of the static prefix")
    options.add_argument("--search", type=float, default=0.3, help="seconds of the search")
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--threads", type=int, default=1)
    chosen = options.parse_args()
    print(f"{describe_machine()}; {chosen.model}, prefix {chosen.prefix} tokens, search {chosen.search * 1000:.0f} ms")
    with tempfile.TemporaryDirectory() as parent:
        folder, dtype = model_folder(chosen.model, Path(parent))
        seen = asyncio.run(measure(str(folder), dtype, chosen))
    medians = {name: statistics.median(seconds) for name, seconds in seen.items()}
    for name, seconds in seen.items():
        spread = f"{min(seconds) * 1000:.0f} to {max(seconds) * 1000:.0f}"
        print(f"{name:12}{medians[name] * 1000:8.0f} ms to the first token, median of {len(seconds)} ({spread})")
    ratios = [one / other for one, other in zip(seen[WITH], seen[WITHOUT], strict=True)]
    print(
        f"{'ratio':12}{medians[WITH] / medians[WITHOUT]:8.2f} of the medians, {statistics.median(ratios):.2f} by rounds"
    )


if __name__ == "__main__":
    main()
