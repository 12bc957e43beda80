"""Engines on threads of this process for the proofs: the echo runner, or a tiny random fp32 model.

Every freed block is poisoned: a read of it gives other tokens, or an error.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from streamserve.clients.thread.acceptance import EngineFacts, LoadedEngine
from streamserve.clients.thread.client import ThreadClient
from streamserve.clients.thread.engine_thread import Load
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.echo import VOCAB_SIZE, EchoRunner, EchoTokenizer
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import Runner
from streamserve.engine.sequence import SequenceRequest
from streamserve.engine.text.formats.base import OutputFormat
from streamserve.engine.text.tokenizer import Tokenizer
from tests.proofs.support.pairs import BLOCK_SIZE, MODEL_LEN, NUM_BLOCKS, Feature, PlanCounts, Together
from tests.support.engines.clients import ready
from tests.support.engines.runners import WrappedRunner

# Ids of the echo engine that stand for themselves in a prompt.
_NUM_BYTES = 128
# Of the trained model: tokens of prompt and answer, blocks for all answers of a workload, and for one and a part.
_LONGEST, _MANY_BLOCKS, _FEW_BLOCKS = 256, 1601, 65


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
    """The parts of an engine, which can be made again and again. `fit` changes the config for its longer answers."""

    name: str
    num_ids: int
    max_tokens: int
    make_runner: Callable[[EngineConfig], Runner]
    tokenizer: Tokenizer
    poison: Callable[[Runner, int], None]
    max_len: int = MODEL_LEN
    format: OutputFormat | None = None
    eos_token_ids: frozenset[int] = frozenset()
    fit: Callable[[EngineConfig], EngineConfig] = lambda config: config

    def load(self, runner: Runner) -> Load:
        """Return the load of an engine."""
        facts = EngineFacts(max_model_len=self.max_len, eos_token_ids=self.eos_token_ids)
        engine = partial(LoadedEngine, tokenizer=self.tokenizer, facts=facts, format=self.format)
        return lambda progress: engine(runner=runner)


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
    from streamserve.engine.model.load.start import load_runner

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


def thinking_model(folder: Path) -> Model:
    """Load the trained model that thinks and calls tools, once, with its tokenizer and its output format."""
    from streamserve.engine.model.load.start import load_runner
    from streamserve.engine.text.formats.markup import choose_format
    from streamserve.engine.text.hf_tokenizer import HFTokenizer

    config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=_MANY_BLOCKS, max_model_len=_LONGEST, overlap=True)
    model = ModelConfig(alias="thinker", path=str(folder), dtype="float32", device="cpu", parity_probe=False)
    runner: Any = load_runner(model, config)
    tokenizer = HFTokenizer(str(folder), None)

    def fit(config: EngineConfig) -> EngineConfig:
        return replace(config, num_blocks=_MANY_BLOCKS if config.num_blocks == NUM_BLOCKS else _FEW_BLOCKS)

    return Model(
        name="the trained model",
        num_ids=runner.vocab_size,
        max_tokens=120,
        make_runner=lambda config: _Lent(runner, config.num_blocks or 0),
        tokenizer=tokenizer,
        poison=lambda _, block_id: runner.kv.fill_block(block_id, math.nan),
        max_len=_LONGEST,
        format=choose_format(tokenizer, None),
        eos_token_ids=frozenset(runner.eos_token_ids) | tokenizer.eos_token_ids,
        fit=fit,
    )


@asynccontextmanager
async def serving(
    model: Model, config: EngineConfig, features: Iterable[Feature] = (), plans: PlanCounts | None = None
) -> AsyncIterator[ThreadClient]:
    """An engine that is ready, and prepared as the features require; `plans` counts what it plans."""
    config = model.fit(config)
    runner = model.make_runner(config)
    client = ThreadClient("proof", model.load(runner), config)
    try:
        core = core_of(await ready(client))
        core.pool._on_evict = lambda block_id: model.poison(runner, block_id)
        if plans is not None:
            core._in_flight._on_plan = partial(plans.note, core)
            _hold_steps(core, plans.together)
        for feature in features:
            if feature.prepare is not None:
                feature.prepare(core)
        yield client
    finally:
        if plans is not None:
            plans.together.expect(0)
        await client.aclose()


def _hold_steps(core: EngineCore, together: Together) -> None:
    """Have the core take each step only when all that are to run together are there."""
    add, step = core.add, core.step

    def add_one(request: SequenceRequest) -> None:
        add(request)
        together.add()

    def step_together() -> tuple[SequenceUpdate, ...]:
        together.wait()
        return step()

    core.add, core.step = add_one, step_together  # type: ignore[method-assign]


def core_of(client: ThreadClient) -> EngineCore:
    """Return the core on the client's thread; it may be prepared while it has no work."""
    core = client._thread.core
    assert core is not None
    return core
