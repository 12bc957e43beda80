"""Tenants with the same prompt of 2,048 tokens: one tenant's computation shortens no other tenant's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.config import EngineConfig
from streamserve.engine.echo import EchoRunner
from streamserve.protocol.events import Done, Token
from streamserve.protocol.requests import Admission, GenerateRequest, SamplingParams
from tests.proofs.scale import scaled
from tests.proofs.support.engines import core_of
from tests.proofs.support.pairs import PATIENT
from tests.support.engines.clients import load_of, ready

BLOCK_SIZE, NUM_BLOCKS = 32, 1025
PROMPT = tuple(random.Random(3).randrange(128) for _ in range(2_048))
# All whole blocks but the last: one token at least is computed.
MOST_CACHED = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
HOW = SamplingParams(temperature=0.0, seed=1, max_tokens=3, ignore_eos=True)
NUM_ROUNDS = scaled(200)


@asynccontextmanager
async def serving() -> AsyncIterator[ThreadClient]:
    """An engine with room for the prompts of a dozen tenants; an evicted block is poisoned."""
    runner = EchoRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    config = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=8, classes=PATIENT, check_integrity=True)
    client = ThreadClient("proof", load_of(runner, max_len=4_096), config)
    try:
        core_of(await ready(client)).pool._on_evict = runner.poison
        yield client
    finally:
        await client.aclose()


async def ask(client: ThreadClient, tenant: str) -> tuple[int, tuple[int, ...]]:
    """Submit the prompt; return how many of its tokens came from the cache, and the answer."""
    request = GenerateRequest(model="proof", prompt_token_ids=PROMPT, sampling=HOW)
    admission = Admission(owner=tenant, tenant=tenant, salt=tenant)
    *events, done = [event async for event in await client.generate(request, admission)]
    assert isinstance(done, Done)
    tokens = (event for event in events if isinstance(event, Token))
    return done.usage.cached_tokens, tuple(token_id for token in tokens for token_id in token.token_ids)


async def test_in_any_order() -> None:
    """A tenant's first request finds no cached block, however often another sent the same prompt; its later ones do."""
    rng, num_requests, num_cached, answers = random.Random(7), 0, 0, set()
    async with serving() as client:
        for number in range(NUM_ROUNDS):
            known: set[str] = set()
            for tenant in rng.choices((f"a{number}", f"b{number}"), k=6):
                cached, answer = await ask(client, tenant)
                assert cached == (MOST_CACHED if tenant in known else 0)
                known.add(tenant)
                answers.add(answer)
                num_requests, num_cached = num_requests + 1, num_cached + cached
    assert len(answers) == 1
    print(
        f"\ntenants, in any order: {num_requests:,} requests of {2 * NUM_ROUNDS} tenants for one prompt of"
        f" {len(PROMPT):,} tokens: 0 tokens cached across, {num_cached:,} within; all answers the same"
    )


async def test_at_the_same_time() -> None:
    """Tenants with concurrent requests share no block, while freed blocks are reused and poisoned."""
    answers, num_tenants = set(), 6
    async with serving() as client:
        for number in range(NUM_ROUNDS):
            got = await asyncio.gather(*(ask(client, f"{number}-{tenant}") for tenant in range(num_tenants)))
            assert [cached for cached, _ in got] == [0] * num_tenants
            answers |= {answer for _, answer in got}
    assert len(answers) == 1
    print(
        f"\ntenants, {num_tenants} at the same time: {num_tenants * NUM_ROUNDS} requests, 0 tokens cached, all answers"
        " the same"
    )
