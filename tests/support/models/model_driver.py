"""Drives a runner with hand-made plans: pages in random order, chunks of any size, sequences that join late."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.model.load.start import load_runner
from streamserve.engine.model.runner import ModelRunner
from streamserve.engine.plan import PENDING, Chunk, Sampled, StepPlan
from tests.support.engines.specs import spec_of

BLOCK_SIZE = 4
NUM_BLOCKS = 200
TINY: dict[str, Any] = {"dtype": "float32", "device": "cpu", "keep_packed": False}


def load_tiny(folder: Path, **fields: Any) -> ModelRunner:
    """Load a tiny model in fp32 with small blocks; what is packed is not kept, unless `fields` say so."""
    engine = EngineConfig(
        block_size=fields.pop("block_size", BLOCK_SIZE), num_blocks=fields.pop("num_blocks", NUM_BLOCKS)
    )
    model = ModelConfig(alias="tiny", path=str(folder), **{**TINY, **fields})
    return load_runner(model, engine)


def prompts(vocab_size: int, lengths: Sequence[int] = (41, 23, 9, 1)) -> list[list[int]]:
    """Return random prompts, the same every time."""
    rng = random.Random(7)
    return [[rng.randrange(2, vocab_size) for _ in range(length)] for length in lengths]


@dataclass
class Running:
    """One sequence in the driver."""

    seq_id: int
    tokens: list[int]
    num_prompt: int
    tables: list[tuple[int, ...]]  # by group of layers
    spec: dict[str, Any]
    num_computed: int = 0
    sampled: list[Sampled] = field(default_factory=list)

    def chunk(self, size: int) -> Chunk:
        """Return the next `size` tokens, or the remaining ones."""
        part = self.tokens[self.num_computed : self.num_computed + size]
        is_last = self.num_computed + len(part) == len(self.tokens)
        spec = spec_of(len(self.tokens), **{"temperature": 0.0, **self.spec})
        return Chunk(
            seq_id=self.seq_id,
            start=self.num_computed,
            token_ids=tuple(part),
            block_table=self.tables[0],
            other_tables=tuple(self.tables[1:]),
            samples=(spec,) if is_last else (),
        )


class Driver:
    """Sequences over one runner. Blocks are dealt from a shuffled deck (the seed is in the failure's locals)."""

    def __init__(self, runner: ModelRunner, *, seed: int = 0) -> None:
        self.runner = runner
        self.deck = list(range(1, runner.num_blocks))
        random.Random(seed).shuffle(self.deck)
        self.step_id = 0

    def start(self, seq_id: int, prompt: Sequence[int], max_tokens: int, **spec: Any) -> Running:
        """Give a sequence its blocks."""
        num_blocks = -(-(len(prompt) + max_tokens) // self.runner.block_size)
        tables = []
        for _ in self.runner.windows:
            tables.append(tuple(self.deck[:num_blocks]))
            self.deck = self.deck[num_blocks:]
        return Running(seq_id, list(prompt), len(prompt), tables, spec)

    def step(self, running: Sequence[Running], chunk: int) -> dict[int, Sampled]:
        """Run one plan with a chunk of every sequence and append the tokens."""
        plan = StepPlan(step_id=self.step_id, chunks=tuple(one.chunk(chunk) for one in running))
        self.step_id += 1
        result = self.runner.collect(self.runner.launch(plan))
        assert result.step_id == plan.step_id
        found = {sampled.seq_id: sampled for sampled in result.sampled}
        for one, part in zip(running, plan.chunks, strict=True):
            one.num_computed += len(part.token_ids)
            if one.seq_id in found:
                one.sampled.append(found[one.seq_id])
                one.tokens.append(found[one.seq_id].token_ids[0] if found[one.seq_id].token_ids else 0)
        return found

    def run(
        self, all_prompts: Sequence[Sequence[int]], *, max_tokens: int, chunk: int, stagger: int = 1, **spec: Any
    ) -> list[list[int]]:
        """Run all prompts in a mixed batch, one more joining every `stagger` steps; return the new tokens."""
        waiting = [self.start(i, prompt, max_tokens, **spec) for i, prompt in enumerate(all_prompts)]
        sequences = list(waiting)
        running: list[Running] = []
        while waiting or running:
            if waiting and (self.step_id % stagger == 0 or not running):
                running.append(waiting.pop(0))
            self.step(running, chunk)
            running = [one for one in running if len(one.sampled) < max_tokens]
        return [[sampled.token_ids[0] if sampled.token_ids else 0 for sampled in one.sampled] for one in sequences]

    def run_overlapped(
        self, all_prompts: Sequence[Sequence[int]], *, max_tokens: Sequence[int], **spec: Any
    ) -> list[list[int]]:
        """Launch every step before the one before it is collected; return the new tokens.

        The order of the batch changes every step, and sequences end one by one.
        """
        sequences = [
            self.start(i, prompt, most, **spec)
            for i, (prompt, most) in enumerate(zip(all_prompts, max_tokens, strict=True))
        ]
        found: dict[int, list[int]] = {one.seq_id: [] for one in sequences}
        flying: Any = None
        running = sequences
        while running or flying:
            handle = self.launch(running) if running else None
            if flying:
                for sampled in self.runner.collect(flying).sampled:
                    found[sampled.seq_id].append(sampled.token_ids[0] if sampled.token_ids else 0)
            flying = handle
            running = [one for one in reversed(running) if len(one.tokens) < one.num_prompt + max_tokens[one.seq_id]]
        return list(found.values())

    def launch(self, running: Sequence[Running]) -> Any:
        """Launch one plan with all known tokens of every sequence; its token is pending afterwards."""
        plan = StepPlan(step_id=self.step_id, chunks=tuple(one.chunk(len(one.tokens)) for one in running))
        self.step_id += 1
        for one in running:
            one.num_computed = len(one.tokens)
            one.tokens.append(PENDING)
        return self.runner.launch(plan)
