"""Machines: the cost of a step, the memory for keys and values, and from both what a request costs and what 1x is.

A request's price is the time of its tokens in full batches: prefill pays for its tokens, positions and pairs, a decode
for its sequence too and its part of the step's base. 1x is demand ÷ capacity: so many requests of the mix a second that
their prices add up to one second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from streamserve.engine.plan import Chunk, StepPlan
from streamserve.loadtest.visits import Visit, draw_visits

BLOCK_SIZE = 32
# So many visits stand for the mix.
_SAMPLE_SECONDS = 4000.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, linear in five sizes: 1, its sequences, its tokens, the positions that each sequence has, and
    the pairs of a token and a position. On a CPU a decode costs much more than a token of prefill.
    """

    base: float
    sequence: float
    token: float
    position: float
    pair: float

    def of_chunk(self, chunk: Chunk) -> float:
        """Return what a chunk adds to a step."""
        return self.of_tokens(chunk.start, len(chunk.token_ids))

    def of_tokens(self, start: int, num_tokens: int) -> float:
        """Return what a chunk adds to a step that computes so many tokens from position `start` on."""
        num_pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        end = start + num_tokens
        return self.sequence + self.token * num_tokens + self.position * end + self.pair * num_pairs

    def of_step(self, plan: StepPlan) -> float:
        """Return the seconds of a step."""
        return self.base + sum(map(self.of_chunk, plan.chunks))

    def __str__(self) -> str:
        return (
            f"{self.base * 1e3:.1f} ms + {self.sequence * 1e6:.0f} us a sequence + {self.token * 1e6:.0f} us a token"
            f" + {self.position * 1e6:.2f} us a position + {self.pair * 1e9:.1f} ns a pair"
        )

    @classmethod
    def parse(cls, text: str) -> StepCost:
        """Parse five numbers: milliseconds, microseconds (three times), nanoseconds."""
        scales = (1e-3, 1e-6, 1e-6, 1e-6, 1e-9)
        return cls(*(float(part) * scale for part, scale in zip(text.split(","), scales, strict=True)))


@dataclass(frozen=True)
class Machine:
    """A machine: `seats` sequences in a step at most, and `num_blocks` of 32 tokens for all that are begun."""

    name: str
    cost: StepCost
    num_blocks: int
    seats: int = 16

    @cached_property
    def full_batch(self) -> float:
        """How many sequences a full step has: the seats, or as many answers of the mix as the memory holds at once."""
        sample = draw_visits(0, 1.0, _SAMPLE_SECONDS)
        # Long answers are in memory for longer, on average with half of what they will be.
        weights = [visit.answer_len for visit in sample]
        lengths = [visit.prompt_len + visit.answer_len / 2 + BLOCK_SIZE / 2 for visit in sample]
        held = sum(map(float.__mul__, map(float, weights), lengths)) / sum(weights)
        return min(self.seats, self.num_blocks * BLOCK_SIZE / held)

    def price(self, visit: Visit, num_tokens: int | None = None, *, batch: float | None = None) -> float:
        """Return the seconds of a request, or of its prompt and the first `num_tokens` of its answer.

        The prompt is computed at once; it gives the first token. `batch`: the sequences of a full step.
        """
        cost, start = self.cost, visit.prompt_len
        num_decodes = (visit.answer_len if num_tokens is None else num_tokens) - 1
        prefill = cost.of_tokens(0, start)
        if num_decodes < 1:
            return prefill
        each = cost.base / (batch or self.full_batch) + cost.sequence + cost.token
        positions = num_decodes * start + num_decodes * (num_decodes + 1) / 2
        return prefill + num_decodes * each + (cost.position + cost.pair) * positions

    @cached_property
    def capacity(self) -> float:
        """Requests of the mix a second that fill the machine: 1x."""
        return 1 / fmean(self.price(visit) for visit in draw_visits(0, 1.0, _SAMPLE_SECONDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A GPU and a model by counting bytes and FLOPs: what a step reads, and what it computes, at the peak rates.

    The two are added as if nothing overlapped, which makes up for no kernel reaching its peak. Assumed: a step reads
    all weights once and each sequence's keys and values once; a token costs two FLOPs a weight, a pair four for each
    number of the query heads in each layer; `launch_seconds` is what the host adds to a step.
    """

    bytes_per_second: float
    flops: float
    memory_bytes: float
    num_weights: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    launch_seconds: float
    bytes_per_number: int = 2  # bf16

    @property
    def bytes_per_position(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_number

    def machine(self, name: str) -> Machine:
        """Return the machine; nine tenths of what the weights leave free hold keys and values."""
        weights = self.num_weights * self.bytes_per_number
        cost = StepCost(
            base=self.launch_seconds + weights / self.bytes_per_second,
            sequence=0.0,
            token=2 * self.num_weights / self.flops,
            position=self.bytes_per_position / self.bytes_per_second,
            pair=4 * self.num_layers * self.num_heads * self.head_dim / self.flops,
        )
        free = 0.9 * (self.memory_bytes - weights)
        return Machine(name, cost, int(free / self.bytes_per_position / BLOCK_SIZE))


# H200 SXM by its data sheet: 141 GB of HBM3e at 4.8 TB/s, 989 TFLOP/s in bf16 without sparsity. The model has the shape
# of Llama 3.1 8B. Derived, not measured.
H200 = Roofline(
    bytes_per_second=4.8e12,
    flops=989e12,
    memory_bytes=141e9,
    num_weights=8.03e9,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    launch_seconds=1e-3,
)

MACHINES = {
    # The demo model on one thread of a Zen 5 core, as `--fit` measured it on 2026-11-22.
    "cpu": Machine("cpu", StepCost.parse("2.1,39,44,0.56,59"), 2048),
    # A small GPU: the base is nearly all of a step, attention costs nothing.
    "gpu": Machine("gpu", StepCost.parse("20,20,10,0.01,0"), 2048),
    "h200": H200.machine("h200"),
}


def machine_of(name: str, seats: int) -> Machine:
    """Return a machine with so many seats."""
    return replace(MACHINES[name], seats=seats)
