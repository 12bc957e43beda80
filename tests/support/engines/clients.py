"""An echo engine on its real thread, and the requests and reads of the client tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from streamserve.clients.base import Generation
from streamserve.clients.thread.acceptance import EngineFacts, LoadedEngine
from streamserve.clients.thread.client import ThreadClient
from streamserve.clients.thread.engine_thread import Load
from streamserve.engine.config import EngineConfig
from streamserve.engine.echo import EchoRunner, EchoTokenizer
from streamserve.engine.plan import Progress, Runner
from streamserve.engine.text.tokenizer import Tokenizer
from streamserve.protocol.events import Event, Token
from streamserve.protocol.requests import NO_CALLER, Admission, GenerateRequest, Resume, SamplingParams
from tests.support.engines.runners import DEADLINE_SECONDS, GatedRunner

_OTHERS = (Admission, Resume)
CONFIG = EngineConfig(block_size=4, max_num_seqs=8, check_integrity=True)


def ask(prompt: str = "The quiet river", *, n: int = 1, **fields: Any) -> GenerateRequest:
    """Return a greedy request with a fixed seed; `fields` are GenerateRequest's or SamplingParams'."""
    outer = {name: fields.pop(name) for name in list(fields) if name in GenerateRequest.__slots__}
    sampling = SamplingParams(**{"temperature": 0.0, "seed": 7, "max_tokens": 12, **fields})
    return GenerateRequest(model="echo", prompt=prompt, sampling=sampling, n=n, **outer)


def asking(prompt: str = "The quiet river", **fields: Any) -> tuple[GenerateRequest, Admission, Resume]:
    """Return what `ask` makes, with its admission and where it continues; `fields` are those of either, too."""
    return split(lambda rest: ask(prompt, **rest), fields)


def split(
    make: Callable[[dict[str, Any]], GenerateRequest], fields: dict[str, Any]
) -> tuple[GenerateRequest, Admission, Resume]:
    """Return the three values of a request: `make` gets the fields that are no admission's and no resume's."""
    placed, resumed = ({name: fields.pop(name) for name in list(fields) if name in kind.__slots__} for kind in _OTHERS)
    return make(fields), replace(NO_CALLER, **placed), Resume(**resumed)


def echo_runner(*, can_overlap: bool = False) -> EchoRunner:
    return EchoRunner(num_blocks=257, block_size=4, can_overlap=can_overlap)


def load_of(runner: Runner | Callable[[], Runner], tokenizer: Tokenizer | None = None, max_len: int = 512) -> Load:
    def load(progress: Progress) -> LoadedEngine:
        progress("weights", 0.5)
        made = runner() if callable(runner) else runner
        facts = EngineFacts(max_model_len=max_len, eos_token_ids=frozenset())
        return LoadedEngine(runner=made, tokenizer=tokenizer or EchoTokenizer(), facts=facts)

    return load


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds. It sleeps: spinning would take the GIL from the engine."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110  # what is awaited happens on another thread
            await asyncio.sleep(0.001)


def is_idle(client: ThreadClient) -> bool:
    """Whether nothing is prepared, waits or runs, and nothing is left in the books of that."""
    core = client._thread.core
    assert core is not None
    left = core.backlog.waiting or core.backlog.running or core._changes
    return not left and not client._admission.num_in_preparation


async def ready(client: ThreadClient) -> ThreadClient:
    client.start()
    await until(lambda: client.describe().state != "loading")
    assert client.describe().state == "ready", client.describe()
    return client


@asynccontextmanager
async def serving(
    runner: Runner | None = None, config: EngineConfig = CONFIG, **load: Any
) -> AsyncIterator[ThreadClient]:
    client = ThreadClient("echo", load_of(runner or echo_runner(), **load), config)
    try:
        yield await ready(client)
    finally:
        if isinstance(runner, GatedRunner):
            runner.open()
        await client.aclose()


async def collect(generation: Generation) -> list[Event]:
    async with asyncio.timeout(DEADLINE_SECONDS):
        return [event async for event in generation]


def text(events: list[Event], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Token) and event.choice == choice)


def ids(events: list[Event], choice: int = 0) -> tuple[int, ...]:
    tokens = (event for event in events if isinstance(event, Token) and event.choice == choice)
    return tuple(token_id for event in tokens for token_id in event.token_ids)
