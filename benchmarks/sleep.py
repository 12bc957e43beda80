"""How long an engine takes to load and to wake, and what it holds: python -m benchmarks.sleep FOLDER [KV] [QUANTIZE].

Each round starts an engine process under a budget, asks it once, and sends it to sleep. The first round packs weights
that were not packed before; the others find the files in the page cache.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from streamserve.clients.base import until_loaded
from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import LaunchConfig
from streamserve.engine.capacity import GIB, MIB
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.model.load.size import sized
from streamserve.engine.model.load.source import resolve
from streamserve.protocol.requests import GenerateRequest, SamplingParams

_NUM_ROUNDS = 3
_BUDGET = 1024 * GIB


def memory_of(pid: int) -> dict[str, int]:
    """Return what a process holds, and held at most, in MiB."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) // 1024 for name in ("VmRSS", "VmHWM")}


async def measure(path: str, kv_cache_bytes: int, quantize: str) -> None:
    """Print a line for each round."""
    model = ModelConfig(alias="model", path=path, quantize=quantize)
    engine = EngineConfig(kv_cache_bytes=kv_cache_bytes)
    num_bytes, _ = sized(model, engine, resolve(path), _BUDGET)
    print(f"computed {num_bytes // MIB:,} MiB; load average {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="sleep-") as folder:
        config = LaunchConfig(
            model=model, engine=engine, site=folder, state_dir=folder, runtime_dir=f"{folder}/run", memory_bytes=_BUDGET
        )
        client = ProcessClient(config)
        try:
            for number in range(_NUM_ROUNDS):
                await _round(client, "first load" if number == 0 else "wake")
        finally:
            await client.aclose()


async def _round(client: ProcessClient, name: str) -> None:
    began = time.monotonic()
    await until_loaded(client, 3600.0)
    seconds, pid = time.monotonic() - began, client.engine_pid
    if pid is None:
        raise SystemExit(client.describe().message)
    sampling = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.0)
    async for _ in await client.generate(GenerateRequest(model="model", prompt="hello " * 1000, sampling=sampling)):
        pass
    held = memory_of(pid)
    began = time.monotonic()
    await client.control("sleep")
    while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110, ASYNC240  (the end of another process has no event)
        await asyncio.sleep(0.01)
    print(
        f"{name}: {seconds:.1f} s; holds {held['VmRSS']:,} MiB, at most {held['VmHWM']:,}; asleep after "
        f"{time.monotonic() - began:.1f} s"
    )


def main() -> None:
    """Measure the model of the command line."""
    path, kv, quantize = (*sys.argv[1:], *("", "", "")[len(sys.argv) - 1 :])
    asyncio.run(measure(path, int(kv or 256 * MIB), quantize))


if __name__ == "__main__":
    main()
