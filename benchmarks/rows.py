"""How much longer a new chat waits for its first token while hundreds of rows of batches run.

    python -m benchmarks.rows [--model helpdesk] [--rows 500] [--chats 3] [--rounds 5]

One engine in this process. In turns, so that a busy machine slows both alike: chats, one after the other, on an idle
engine; the same beside `--rows` rows, of which as many run as have seats, and the rest waits. Then the rows end. Every
prompt is new, so that no cache helps. The time is from the request to the first token, and so are the steps of the
engine, which do not depend on how busy the machine is: the step that runs when a chat comes, and its own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.support.machine import describe_machine, parser, progress
from benchmarks.support.shape import model_folder
from streamserve.clients.base import EngineClient, Generation
from streamserve.clients.factory import make_client
from streamserve.engine.config import BATCH, EngineConfig, ModelConfig
from streamserve.protocol.events import Token
from streamserve.protocol.requests import GenerateRequest, Message, SamplingParams

IDLE, BESIDE = "idle", "beside rows"
Waited = tuple[float, int]  # seconds and steps
_numbers = itertools.count(1)


async def measure(client: EngineClient, options: argparse.Namespace) -> dict[str, list[Waited]]:
    """Return how long each chat has waited for its first token."""
    seen: dict[str, list[Waited]] = {IDLE: [], BESIDE: []}
    for number in range(options.rounds + 1):  # the first round is not counted
        idle = [await first_token(client) for _ in range(options.chats)]
        async with asyncio.TaskGroup() as group:
            rows = [await client.generate(asked(BATCH, max_tokens=1900)) for _ in range(options.rows)]
            reading = [group.create_task(read(row)) for row in rows]
            while client.stats().running < min(options.rows, EngineConfig().max_num_seqs):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            beside = [await first_token(client) for _ in range(options.chats)]
            for row in rows:
                row.cancel()
            await asyncio.gather(*reading)
        while client.stats().running or client.stats().waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if number:
            seen[IDLE] += idle
            seen[BESIDE] += beside
        progress(f"round {number} of {options.rounds}")
    return seen


def asked(latency_class: str, *, max_tokens: int) -> GenerateRequest:
    """Return a request whose prompt no other one has."""
    number = next(_numbers)
    question = f"{number} is my account. What does the starter plan cost, and how do I cancel account {number}?"
    return GenerateRequest(
        model="model",
        messages=(Message(role="user", content=question),),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0),
        tenant=f"{latency_class} {number % 8}",
        salt=str(number),
        latency_class=latency_class,
        arrived_at=time.monotonic(),
    )


async def first_token(client: EngineClient) -> Waited:
    """Return how long a new chat waits for its first token; read its answer to the end."""
    began, steps = time.monotonic(), client.stats().steps
    waited: Waited | None = None
    async for event in await client.generate(asked("chat", max_tokens=8)):
        if isinstance(event, Token) and waited is None:
            waited = time.monotonic() - began, client.stats().steps - steps
    assert waited is not None
    return waited


async def read(row: Generation) -> None:
    """Read a row until it is cancelled."""
    async for _ in row:
        pass


async def run(folder: str, dtype: str, options: argparse.Namespace) -> dict[str, list[Waited]]:
    """Load the model, measure, and end it."""
    model = ModelConfig(alias="model", path=folder, dtype=dtype, num_threads=options.threads)
    client = make_client(model, EngineConfig())
    client.start()
    while client.describe().state == "loading":  # noqa: ASYNC110  (no event)
        await asyncio.sleep(0.05)
    assert client.describe().state == "ready", client.describe()
    try:
        return await measure(client, options)
    finally:
        await client.aclose()


def main() -> None:
    """Measure, and print a line for each."""
    options = parser(__doc__)
    options.add_argument("--model", default="helpdesk", help="helpdesk, S, or a folder")
    options.add_argument("--rows", type=int, default=500)
    options.add_argument("--chats", type=int, default=3, help="of each kind and round")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--threads", type=int, default=1)
    chosen = options.parse_args()
    print(f"{describe_machine()}; {chosen.model}, {chosen.rows} rows, {EngineConfig().max_num_seqs} seats")
    with tempfile.TemporaryDirectory() as parent:
        folder, dtype = model_folder(chosen.model, Path(parent))
        seen = asyncio.run(run(str(folder), dtype, chosen))
    for name, waited in seen.items():
        seconds, steps = ([one[at] for one in waited] for at in (0, 1))
        spread = f"{min(seconds) * 1000:.0f} to {max(seconds) * 1000:.0f}"
        print(
            f"{name:12}{statistics.median(seconds) * 1000:8.0f} ms, median of {len(waited)} ({spread});"
            f" {statistics.median(steps):.0f} steps ({min(steps)} to {max(steps)})"
        )


if __name__ == "__main__":
    main()
