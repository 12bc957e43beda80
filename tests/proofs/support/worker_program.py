"""A web worker reduced to the engine client: it submits requests and reads answers until it is killed.

python -m tests.proofs.support.worker_program NUM_REQUESTS NUM_SEATS < spec.json  prints a line when seats are taken
"""

from __future__ import annotations

import asyncio
import sys

from streamserve.clients.base import Generation
from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import config_from_json
from streamserve.protocol.requests import GenerateRequest
from tests.support.engines.engine_processes import ask, ready


async def work(num_requests: int, num_seats: int) -> None:
    """Read as many answers as there are seats; the other requests wait."""
    client = await ready(ProcessClient(config_from_json(sys.stdin.buffer.read())))
    generations = [await client.generate(request(number)) for number in range(num_requests)]
    await asyncio.gather(*(anext(one) for one in generations[:num_seats]))
    print("at work", flush=True)
    await asyncio.gather(*map(_read, generations))


def request(number: int) -> GenerateRequest:
    return ask(f"worker {number}", temperature=1.0, seed=number, max_tokens=2000)


async def _read(generation: Generation) -> None:
    async for _ in generation:
        pass


if __name__ == "__main__":
    asyncio.run(work(*map(int, sys.argv[1:])))
