"""Engines on threads of this process for the proofs: the echo runner, or a tiny random fp32 model.

Every freed block is poisoned: a read of it gives other tokens, or an error.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.echo import VOCAB_SIZE, EchoRunner, EchoTokenizer
from streamserve.engine.plan import Runner
from streamserve.engine.text.tokenizer import Tokenizer
from tests.proofs.support.pairs import BLOCK_SIZE, MODEL_LEN, NUM_BLOCKS, Feature, PlanCounts
from tests.support.clients import load_of, ready
from tests.support.engines import WrappedRunner

# Ids of the echo engine that stand for themselves in a prompt.
_NUM_BYTES = 128


class TinyTokenizer(EchoTokenizer):
    """Gives each of a tiny model's few ids one of the last pieces: words, punctuation, halves of code points."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Return one id for each character."""
        return tuple(map(ord, text))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for."""
        return super().token_bytes(token_id + VOCAB_SIZE - self.vocab_size)

    def is_special(self, token_id: int) -> bool:
        """Every id is part of the text."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The parts of an engine, which can be made again and again."""

    name: str
    num_ids: int
    max_tokens: int
    make_runner: Callable[[EngineConfig], Runner]
    tokenizer: Tokenizer
    poison: Callable[[Runner, int], None]


def _echo_runner(config: EngineConfig) -> EchoRunner:
    assert config.num_blocks is not None
    return EchoRunner(num_blocks=config.num_blocks, block_size=config.block_size, can_overlap=True)


ECHO = Model(
    name="echo",
    num_ids=_NUM_BYTES,
    max_tokens=24,
    make_runner=_echo_runner,
    tokenizer=EchoTokenizer(),
    poison=lambda runner, block_id: runner.poison(block_id),  # type: ignore[attr-defined]
)


class _Lent(WrappedRunner):
    """A runner that outlives its engines; each engine gets the number of blocks it wants."""

    def __init__(self, runner: Runner, num_blocks: int) -> None:
        super().__init__(runner)
        self.num_blocks = num_blocks

    def close(self) -> None:
        """Keep the model for the next engine."""


def tiny_model(folder: Path, model_type: str) -> Model:
    """Load a tiny random model in fp32, once; its engines take turns."""
    from streamserve.engine.model.runner import load_runner

    config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_model_len=MODEL_LEN, overlap=True)
    model = ModelConfig(alias="tiny", path=str(folder), dtype="float32", device="cpu", parity_probe=False)
    runner: Any = load_runner(model, config)

    def lend(config: EngineConfig) -> Runner:
        assert config.num_blocks is not None
        return _Lent(runner, config.num_blocks)

    return Model(
        name=f"fp32 {model_type}",
        num_ids=runner.vocab_size,
        max_tokens=10,
        make_runner=lend,
        tokenizer=TinyTokenizer(runner.vocab_size),
        poison=lambda _, block_id: runner.kv.fill_block(block_id, math.nan),
    )


@asynccontextmanager
async def serving(
    model: Model, config: EngineConfig, features: Iterable[Feature] = (), plans: PlanCounts | None = None
) -> AsyncIterator[ThreadClient]:
    """An engine that is ready, and prepared as the features require; `plans` counts what it plans."""
    runner = model.make_runner(config)
    client = ThreadClient("proof", load_of(runner, model.tokenizer, MODEL_LEN), config)
    try:
        core = core_of(await ready(client))
        core.pool._on_evict = lambda block_id: model.poison(runner, block_id)
        core._in_flight._on_plan = partial(plans.note, core) if plans is not None else None
        for feature in features:
            if feature.prepare is not None:
                feature.prepare(core)
        yield client
    finally:
        await client.aclose()


def core_of(client: ThreadClient) -> EngineCore:
    """Return the core on the client's thread; it may be prepared while it has no work."""
    core = client._thread.core
    assert core is not None
    return core
