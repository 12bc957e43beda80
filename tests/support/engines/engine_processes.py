"""Real engine processes for tests: specs in folders of their own, and functions to find, stop and kill them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from streamserve.clients.base import Generation
from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import LaunchConfig, engine_paths
from streamserve.clients.process.frame_socket import peer_of
from streamserve.engine.config import EngineConfig, ModelConfig, Policy
from streamserve.protocol.events import Event, Token
from streamserve.protocol.requests import Admission, GenerateRequest, Resume, SamplingParams
from tests.support.engines.clients import split

# A process starts in a second, or in many on a busy machine. No test depends on how long it takes.
DEADLINE_SECONDS = 90.0
ENGINE = EngineConfig(
    block_size=4, num_blocks=257, max_num_seqs=8, max_model_len=512, policy=Policy(stalled_seconds=0.0)
)
SLOW = 0.03  # seconds a step: a test can act before an answer ends
LONG = 400


def spec_in(folder: str | Path, **fields: Any) -> LaunchConfig:
    """Return the config of an echo engine with its files in `folder`."""
    given = {
        "model": ModelConfig(alias="echo", path="echo"),
        "engine": ENGINE,
        "site": str(folder),
        "state_dir": str(folder),
        "runtime_dir": f"{folder}/run",
        **fields,
    }
    return LaunchConfig(**given)


def ask(prompt: str = "The quiet river", *, n: int = 1, **fields: Any) -> GenerateRequest:
    """Return a request of 12 greedy tokens; `fields` override."""
    names = ("timeout_seconds", "chat_template_kwargs", "latency_class")
    outer = {name: fields.pop(name) for name in names if name in fields}
    sampling = SamplingParams(**{"temperature": 0.0, "seed": 7, "max_tokens": 12, "ignore_eos": True, **fields})
    return GenerateRequest(model="echo", prompt=prompt, sampling=sampling, n=n, **outer)


def asking(prompt: str = "The quiet river", **fields: Any) -> tuple[GenerateRequest, Admission, Resume]:
    """Return what `ask` makes, with its admission and where it continues; `fields` are those of either, too."""
    return split(lambda rest: ask(prompt, **rest), fields)


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110  (what happens in another process has no event here)
            await asyncio.sleep(0.01)


async def ready(client: ProcessClient) -> ProcessClient:
    """Start the client and wait for its engine."""
    client.start()
    await until(lambda: client.is_connected and client.describe().state == "ready")
    return client


@asynccontextmanager
async def connected(spec: LaunchConfig) -> AsyncIterator[ProcessClient]:
    """Yield a client with an engine that is ready. The engine outlives the client."""
    client = ProcessClient(spec)
    try:
        yield await ready(client)
    finally:
        await client.aclose()


def pid_of(spec: LaunchConfig) -> int | None:
    """Return the process that listens for a spec, answering or not; None if there is none."""
    with socket.socket(socket.AF_UNIX) as sock, suppress(OSError):
        sock.connect(str(engine_paths(spec).socket))
        return peer_of(sock).pid
    return None


def end_engine(spec: LaunchConfig) -> None:
    """Kill the process that listens for a spec, if there is one."""
    pid = pid_of(spec)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def collect(generation: Generation) -> list[Event]:
    return [event async for event in generation]


def token_ids(events: list[Event]) -> tuple[int, ...]:
    return tuple(token_id for event in events if isinstance(event, Token) for token_id in event.token_ids)


def engine_of(spec: LaunchConfig) -> int:
    pid = pid_of(spec)
    assert pid is not None
    return pid


async def sign_of_life(client: ProcessClient) -> None:
    """Wait for the next heartbeat; they come a second apart."""
    seen = client.stats()
    await until(lambda: client.stats() is not seen)
