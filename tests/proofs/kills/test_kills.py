"""The engine process is killed or hangs, again and again, under sixteen streams: their readers see a pause.

Numbers stay dense, shown text never repeats or changes, and the answer is that of a quiet run.
"""

from __future__ import annotations

import asyncio
import os
import random
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals

import pytest
from django.test import AsyncClient

from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import LaunchConfig
from streamserve.engine.config import EngineConfig, ModelConfig, Policy
from streamserve.protocol.errors import EngineUnavailable
from streamserve.protocol.requests import GenerateRequest, Message, SamplingParams
from streamserve.web import site
from tests.proofs.scale import IS_SOAK, scaled
from tests.proofs.support.killing import STEADY, Killer, Readers, kill_under_readers, signals_of
from tests.support.engines.engine_processes import ready, spec_in, until

pytestmark = [
    pytest.mark.timeout(3600 if IS_SOAK else 400),
    pytest.mark.sampled("the demo model at temperature 1, by a new seed each time"),
]

NUM_REQUESTS = 24 if IS_SOAK else 8
# Tokens shown between two kills, at most.
MOST_TOKENS = 800 if IS_SOAK else 400
# A reader that stands still has its answer parked as soon as it is held.
ENGINE = EngineConfig(
    block_size=8,
    num_blocks=2048,
    max_num_seqs=64,
    max_model_len=1024,
    lead_tokens=64,
    policy=Policy(stalled_seconds=0.0),
)
# However often it is killed, it is started again.
TIRELESS = 10**9
# The documented limit, and slack for a busy machine.
KILL_SECONDS, HANG_SECONDS, SLACK = 0.5, 15.0, 2


def seed_of(name: str) -> int:
    """Print the seed; KILLS_SEED replays what does not depend on the machine."""
    seed = int(os.environ.get("KILLS_SEED") or random.randrange(10**6))
    print(f"\nKILLS_SEED={seed} ({name})")
    return seed


def sampling(number: int, rng: random.Random, stop: tuple[str, ...], most_tokens: int) -> SamplingParams:
    """Greedy and seeded in turn; some end by a stop string, amid much text that nearly is one."""
    return SamplingParams(
        temperature=(0.0, 0.8, 1.2)[number % 3],
        seed=rng.randrange(2**40),
        max_tokens=rng.randint(most_tokens // 4, most_tokens),
        min_tokens=10,
        stop=stop if number % 4 == 1 else (),
        logprobs=3 if number % 7 == 2 else None,
        ignore_eos=number % 5 > 0,
    )


def echo_requests(rng: random.Random) -> list[GenerateRequest]:
    """Prompts of odd lengths, some with several choices."""
    return [
        GenerateRequest(
            model="echo",
            prompt=f"{number} " + "The quiet river " * rng.randint(0, 12),
            sampling=sampling(number, rng, (" water", "ing st", "🙂"), 240),
            n=(1, 1, 2, 3)[number % 4],
        )
        for number in range(NUM_REQUESTS)
    ]


def helpdesk_requests(rng: random.Random) -> list[GenerateRequest]:
    """Questions of customers."""
    from benchmarks.demo_model.questions import QUESTIONS

    return [
        GenerateRequest(
            model="echo",
            messages=(Message(role="user", content=question.text),),
            sampling=sampling(number, rng, (" the", "account"), 80),
            n=(1, 1, 1, 2)[number % 4],
        )
        for number, question in enumerate(QUESTIONS[:NUM_REQUESTS])
    ]


def helpdesk(folder: Path) -> LaunchConfig:
    """The demo model, in fp32: it gives the same tokens whatever its steps hold."""
    pytest.importorskip("torch", reason="needs the engine extra: pip install 'streamserve[engine]'")
    from project.settings import HELPDESK

    model = ModelConfig(alias="echo", path=str(HELPDESK), dtype="float32", parity_probe=False, num_threads=1)
    return spec_in(folder, model=model, engine=ENGINE, max_failures=TIRELESS, hang_seconds=5.0)


def check_counts(killer: Killer, signals: list[Signals], caplog: pytest.LogCaptureFixture) -> None:
    """Each signal costs one engine, and nothing else does; only hanging engines are detected by their silence.

    Of the steady readers, at least half are in mid-answer at each kill that is not an early one: those see a pause. A
    few kills show no such share, and one reader at each is enough.
    """
    num_silent = sum("is silent: killed" in record.getMessage() for record in caplog.records)
    assert killer.num_lost == len(signals)
    assert num_silent == signals.count(SIGSTOP)
    num_kills = len(signals) - killer.num_early
    assert killer.readers.num_waits >= num_kills * (len(STEADY) / 2 if num_kills >= 10 else 1)


async def test_kills_of_the_echo_engine(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """300 times, one in ten by a hang."""
    rng = random.Random(seed_of("echo"))
    spec = spec_in(folder, engine=ENGINE, max_failures=TIRELESS, hang_seconds=2.0, echo_step_seconds=0.004)
    signals = signals_of(scaled(300), rng)
    killer = await kill_under_readers(spec, echo_requests(rng), signals, rng, MOST_TOKENS)
    print(f"kills, echo: {killer.report(spec.hang_seconds)}")
    check_counts(killer, signals, caplog)
    if IS_SOAK:
        assert max(killer.noticed[SIGKILL]) <= SLACK * KILL_SECONDS


async def test_kills_of_the_demo_model(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fifteen times; recomputation gives the same tokens."""
    rng = random.Random(seed_of("demo model"))
    spec, signals = helpdesk(folder), signals_of(scaled(15), rng)
    killer = await kill_under_readers(spec, helpdesk_requests(rng), signals, rng, MOST_TOKENS // 2)
    print(f"kills, fp32 demo model: {killer.report(spec.hang_seconds)}")
    check_counts(killer, signals, caplog)
    if IS_SOAK:
        assert max(killer.noticed[SIGKILL]) <= SLACK * KILL_SECONDS


@pytest.mark.skipif(not IS_SOAK, reason="waits for ten seconds: needs STREAMSERVE_SOAK=1")
async def test_a_hang_with_the_patience_of_the_default(folder: Path) -> None:
    """A reader waits for a hung engine not much longer than `hang_seconds`."""
    rng = random.Random(seed_of("default patience"))
    spec = spec_in(folder, engine=ENGINE, max_failures=TIRELESS, echo_step_seconds=0.004)
    assert spec.hang_seconds == 10.0
    killer = await kill_under_readers(spec, echo_requests(rng), [SIGSTOP], rng, MOST_TOKENS)
    print(f"kills, default patience: {killer.report(spec.hang_seconds)}")
    assert killer.num_lost == 1
    assert max(killer.noticed[SIGSTOP]) <= SLACK * HANG_SECONDS


@pytest.mark.usefixtures("transactional_db")
async def test_after_too_many_failures_readers_get_an_error_and_later_service_returns(folder: Path) -> None:
    """Readers see a pause, then an error; /readyz and new requests answer 503; service returns by itself."""
    rng = random.Random(seed_of("failures"))
    spec = spec_in(folder, engine=ENGINE, max_failures=2, failure_seconds=5.0, echo_step_seconds=0.02)
    request = GenerateRequest(model="echo", prompt="So long", sampling=SamplingParams(max_tokens=400, ignore_eos=True))
    client = site.get_site().clients["echo"] = ProcessClient(spec)
    readers = Readers(client, rng)
    try:
        await ready(client)
        assert await readyz() == (200, "")
        reading = asyncio.gather(*(readers.read(seat, request) for seat in STEADY))
        num_kills = await kill_until_given_up(client, readers)
        assert await readyz() == (503, "a model is failed")
        with pytest.raises(EngineUnavailable) as refused:
            await client.generate(request)
        assert refused.value.code == "engine_died"
        assert 0 < refused.value.retry_after <= 6
        for transcript in await reading:
            assert transcript.statuses == ["waiting", "resumed"] * (num_kills - 1) + ["waiting"]
            assert transcript.end is not None
            assert (transcript.end[0], transcript.end[1]["code"]) == ("error", "engine_died")
            assert transcript.end[1]["retryable"]
        await ready(client)
        assert await readyz() == (200, "")
        again = await asyncio.gather(*(readers.read(seat, request) for seat in STEADY))
        assert {one.end[0] for one in again if one.end is not None} == {"done"}
        print(f"failures: {num_kills} kills, {len(STEADY)} errors, /readyz 200, 503, 200; {len(again)} answers after")
    finally:
        await readers.streams.aclose()
        await site.reset()


async def kill_until_given_up(client: ProcessClient, readers: Readers) -> int:
    """Kill each engine as soon as all readers have continued, until the client stops trying; return how often."""
    for num_kills in range(1, 100):
        await readers.progress(0)
        pid = client.engine_pid
        assert pid is not None
        readers.kill(pid, SIGKILL)
        await until(partial(is_decided, client, pid))
        if client.describe().state == "failed":
            return num_kills
    raise AssertionError("it is never given up")


def is_decided(client: ProcessClient, pid: int) -> bool:
    """Return whether another engine has started, or none will start."""
    return client.engine_pid not in (None, pid) or client.describe().state == "failed"


async def readyz() -> tuple[int, str]:
    response = await AsyncClient().get("/readyz")
    return response.status_code, response.json()["reason"]
