"""An engine process whose step never ends dumps its stacks, exits by itself and is replaced."""

from __future__ import annotations

import asyncio
import random
import re
import signal
from pathlib import Path

import pytest

from streamserve.clients.process.config import engine_paths
from streamserve.clients.process.supervision import HUNG
from streamserve.engine.config import EngineConfig
from tests.proofs.support.engine_program import running
from tests.proofs.support.killing import STEADY, Readers
from tests.support.engines.engine_processes import ask, connected, spec_in

pytestmark = [pytest.mark.alone, pytest.mark.timeout(400)]

ENGINE = EngineConfig(block_size=4, num_blocks=2048, max_num_seqs=16, max_model_len=1024, step_seconds=1.0)
# In the middle of the answers, after the steps that teach the step-time model: small steps, and steps with a prompt.
HANG_AT = 120
# A step that waits is ended by the loop of its process; one that holds the GIL by the timer of CPU time.
EXIT_STATUS = {"waiting": HUNG, "holding the GIL": -signal.SIGPROF}
LEARNING = [ask(f"{number} {'and so on ' * 6}", max_tokens=20) for number in range(2)]


@pytest.mark.parametrize("how", ["waiting", "holding the GIL"])
async def test_a_step_that_never_ends_is_ended_and_readers_continue(folder: Path, how: str) -> None:
    """Its own process ends it and dumps its stack, before its workers time out; no other engine is ended."""
    # Steps take a while, so that the engine accepts the requests before it hangs.
    spec = spec_in(folder, engine=ENGINE, hang_seconds=60.0, made_at=1.0, echo_step_seconds=0.005)
    fault = ["--hang-at", str(HANG_AT), *(["--hold-gil"] if how == "holding the GIL" else [])]
    requests = [ask(f"reader {seat}", temperature=seat % 2, seed=seat, max_tokens=200) for seat in range(len(STEADY))]
    with running(spec, *fault) as first:
        async with connected(spec) as client:
            readers = Readers(client, random.Random(0))
            assert client.engine_pid == first.pid
            for request in LEARNING:
                await readers.read(0, request)
            seen = await asyncio.gather(*map(readers.read, STEADY, requests))
            assert first.wait() == EXIT_STATUS[how]
            assert client.engine_pid not in (None, first.pid)
            calm = await asyncio.gather(*map(readers.read, STEADY, requests))
            assert client.stats().lost_engines == 1, "the hung one, and no engine that computes"
            await readers.streams.aclose()
    output = engine_paths(spec).log.read_text()
    assert "in never_end" in output
    if how == "waiting":
        [(limit, step)] = re.findall(r"no progress for ([\d.]+) s in step (\d+),", output)
        assert int(step) == HANG_AT
        assert ENGINE.step_seconds <= float(limit) < spec.hang_seconds
    assert [one.answer for one in seen] == [one.answer for one in calm]
    # A reader whose answer the engine had not accepted yet has asked again, and sees no pause.
    assert all(one.statuses in ([], ["waiting", "resumed"]) for one in seen)
    assert sum(bool(one.statuses) for one in seen) > len(seen) / 2
    print(f"\nhung step, {how}: ended from inside, with its stack; {len(seen)} answers went on and equal the calm ones")
