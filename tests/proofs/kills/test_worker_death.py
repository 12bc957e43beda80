"""A killed worker's sequences leave the engine within one step; the other worker's answers do not change."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import LaunchConfig, config_to_json
from streamserve.engine.config import EngineConfig
from streamserve.protocol.requests import GenerateRequest
from tests.proofs.scale import IS_SOAK, scaled
from tests.proofs.support.engine_program import plans_of, running
from tests.proofs.support.pairs import PATIENT, Answer, whole_answer
from tests.support.engines.engine_processes import ask, connected, spec_in, until

pytestmark = [pytest.mark.timeout(3600 if IS_SOAK else 400)]

NUM_OURS, NUM_SEATS, NUM_THEIRS = 3, 8, 12  # some of these wait for a seat
ENGINE = EngineConfig(
    block_size=4, num_blocks=8192, max_num_seqs=NUM_SEATS, max_model_len=2048, classes=PATIENT, prefix_caching=False
)
OURS: list[GenerateRequest] = [
    ask(f"ours {number}", temperature=float(number), seed=number, max_tokens=300) for number in range(NUM_OURS)
]
# The step that was in planning when the worker died, and one more: of the median. A busy machine may keep the engine
# from hearing of a death for a second.
MOST_STEPS, BUSY_STEPS = 2, 100


async def test_a_dead_worker_costs_no_further_step(folder: Path) -> None:
    """kill -9: no later plan holds a sequence of its, running or waiting, and our answers keep their tokens."""
    seed = random.randrange(10**6)
    rng, num_deaths = random.Random(seed), scaled(40)
    spec = spec_in(folder, engine=ENGINE, autostart=False, echo_step_seconds=0.01, made_at=1.0)
    with running(spec, "--plans", str(folder / "plans")):
        async with connected(spec) as client:
            alone = await ask_ours(client)
            late = [await one_death(spec, client, folder / "plans", alone, rng) for _ in range(num_deaths)]
            steps = client.stats().steps
    after = {name: sorted(one[name] for one in late) for name in ("kill", "death")}
    assert after["death"][(num_deaths - 1) // 2] <= MOST_STEPS
    assert after["death"][-1] <= BUSY_STEPS
    print(
        f"\nworker deaths: {num_deaths} beside {NUM_OURS} answers of another worker, which did not change, in {steps:,}"
        f" steps; planned with the dead one's sequences: {sum(after['kill'])} steps after the kills,"
        f" {sum(after['death'])} of them after the deaths; left: 0 sequences, 0 blocks; seed {seed}"
    )


async def one_death(
    spec: LaunchConfig, client: ProcessClient, plans: Path, alone: list[Answer], rng: random.Random
) -> Counter[str]:
    """Kill a worker at a random moment; return how many steps with its sequences were planned after that."""
    ours = asyncio.create_task(ask_ours(client))
    await until(lambda: plans_of(plans)[-1][1] == NUM_OURS)
    moments = await asyncio.to_thread(live_and_die, spec, plans, rng.randrange(20))
    assert await ours == alone
    await until(lambda: client.stats().running == client.stats().waiting == client.stats().blocks_used == 0)
    mixed = [at for at, num_chunks in plans_of(plans) if num_chunks > NUM_OURS]
    return Counter({name: sum(at > moment for at in mixed) for name, moment in moments.items()})


def live_and_die(spec: LaunchConfig, plans: Path, num_steps: int) -> dict[str, float]:
    """Run a worker for so many steps, and kill it; return when that was, and when it was dead."""
    numbers = [str(NUM_THEIRS), str(NUM_SEATS - NUM_OURS)]
    command = [sys.executable, "-m", "tests.proofs.support.worker_program", *numbers]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(config_to_json(spec))
        worker.stdin.close()
        assert worker.stdout.readline() == b"at work\n"
        num_seen = len(plans_of(plans))
        while len(plans_of(plans)) < num_seen + num_steps:
            time.sleep(0.001)
        assert plans_of(plans)[-1][1] == NUM_SEATS
        killed_at = time.monotonic()
        worker.kill()
        worker.wait()
        return {"kill": killed_at, "death": time.monotonic()}


async def ask_ours(client: ProcessClient) -> list[Answer]:
    """Submit our requests, all at once."""
    return await asyncio.gather(*(whole_answer(client.generate, one) for one in OURS))
