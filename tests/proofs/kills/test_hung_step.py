"""An engine process whose step never ends dumps its stacks, exits by itself and is replaced."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import pytest

from streamserve.clients.process.paths import engine_paths
from streamserve.engine.config import EngineConfig
from tests.proofs.support.engine_program import running
from tests.proofs.support.killing import STEADY, Readers
from tests.support.engine_processes import ask, connected, spec_in

pytestmark = [pytest.mark.timeout(400)]

ENGINE = EngineConfig(block_size=4, num_blocks=2048, max_num_seqs=16, max_model_len=1024, step_seconds=1.0)
# In the middle of the answers, after the steps that tell how long one takes: small ones, and such as hold a prompt.
HANG_AT = 120
LEARNING = [ask(f"{number} {'and so on ' * 6}", max_tokens=20) for number in range(2)]


@pytest.mark.parametrize("how", ["waiting", "holding the GIL"])
async def test_a_step_that_never_ends_is_ended_and_readers_go_on(folder: Path, how: str) -> None:
    """faulthandler ends the process after `step_seconds`, long before its workers lose patience."""
    spec = spec_in(folder, engine=ENGINE, hang_seconds=60.0, made_at=1.0)
    fault = ["--hang-at", str(HANG_AT), *(["--hold-gil"] if how == "holding the GIL" else [])]
    requests = [ask(f"reader {seat}", temperature=seat % 2, seed=seat, max_tokens=200) for seat in range(len(STEADY))]
    with running(spec, *fault) as first:
        async with connected(spec) as client:
            readers = Readers(client, random.Random(0))
            assert client.engine_pid == first.pid
            for request in LEARNING:
                await readers.read(0, request)
            seen = await asyncio.gather(*map(readers.read, STEADY, requests))
            assert first.wait() == 1
            assert client.engine_pid not in (None, first.pid)
            calm = await asyncio.gather(*map(readers.read, STEADY, requests))
            await readers.streams.aclose()
    output = engine_paths(spec).log.read_text()
    assert re.search(r"Timeout \(0:0\d:\d\d", output), "one second, or eight times what a step took on a busy machine"
    assert "in never_end" in output
    assert [one.answer for one in seen] == [one.answer for one in calm]
    # Where a sound step takes a second, the machine being so busy, the next engine is ended too: more pairs then. Who
    # was not accepted yet has asked again, and was told nothing.
    assert all(one.statuses == ["waiting", "resumed"] * (len(one.statuses) // 2) for one in seen)
    assert any(one.statuses for one in seen)
    print(f"\nhung step, {how}: ended from inside, with its stack; {len(seen)} answers went on and equal the calm ones")
