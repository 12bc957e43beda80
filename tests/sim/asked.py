"""`Shape`, the configuration of one run's engine, and `Asked`, one answer as its readers see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamserve.engine.config import EngineConfig, LatencyClass, Policy
from streamserve.engine.kv.groups import ONE_GROUP, Windows
from streamserve.engine.sequence import SequenceRequest
from streamserve.protocol.engine import Park
from tests.sim.model import EOS

# Prompts share prefixes, so that the cache is used. EOS in a prompt has no effect.
STEMS = (
    tuple(range(40, 80)),
    (*range(40, 48), *range(80, 110)),
    (*range(40, 44), *range(90, 94), *range(48, 70), EOS),  # equal blocks after different ones
    (EOS, 2),
)
CLASSES = {
    "chat": LatencyClass(ttft_seconds=0.125, pace=32.0, max_queue_seconds=0.375, max_late_seconds=0.0625),
    "document": LatencyClass(ttft_seconds=2.0, pace=16.0, max_queue_seconds=8.0, max_late_seconds=0.25),
    "batch": LatencyClass(ttft_seconds=2.0, pace=16.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The configuration of one run's engine. `known_len`: how long it takes answers to be; None: it has seen none.

    `windows`: of the groups of the model's layers.
    """

    num_blocks: int = 25
    block_size: int = 4
    budget: int = 16
    max_num_seqs: int = 4
    prefill_chunk: int = 6
    itl_target_seconds: float = 20 / 1024
    max_step_seconds: float = 20 / 1024
    prefix_caching: bool = True
    overlap: bool = False
    max_model_len: int = 96
    lead_tokens: int = 12
    stalled_seconds: float = 0.25
    hungry_seconds: float = 0.1
    max_admitted: int | None = None
    min_ahead_seconds: float = 0.25
    max_debt_seconds: float = 1.0
    known_len: int | None = None
    windows: Windows = ONE_GROUP

    def config(self) -> EngineConfig:
        """Return it as the engine's own configuration."""
        return EngineConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            prefill_chunk=self.prefill_chunk,
            itl_target_seconds=self.itl_target_seconds,
            max_step_seconds=self.max_step_seconds,
            prefix_caching=self.prefix_caching,
            overlap=self.overlap,
            max_model_len=self.max_model_len,
            lead_tokens=self.lead_tokens,
            max_admitted=self.max_admitted,
            speculation="off",  # the laws count steps by tokens; see test_proposals.py
            policy=Policy(
                stalled_seconds=self.stalled_seconds,
                hungry_seconds=self.hungry_seconds,
                min_ahead_seconds=self.min_ahead_seconds,
                max_debt_seconds=self.max_debt_seconds,
            ),
            classes=CLASSES,
        )


@dataclass(eq=False)
class Asked:
    """One answer as its readers see it; a park and a new request change `seq_id` only.

    `received`: how far its reader has read; None: no reader paces it. `rate`: tokens a step. `park`: the engine's
    reason and resume conditions when it parked; `returns_at`: the step in which a reader that left comes back.
    `stopped_at`: where a stop string was found. `num_losses`: how often an engine was killed in a step with it, since
    its last token.
    """

    request: SequenceRequest
    answer: tuple[int, ...]
    reason: str
    received: float | None = None
    rate: float = 1.0
    shown: list[int] = field(default_factory=list)
    seq_id: int = 0
    is_over: bool = False
    park: Park | None = None
    parked_at: float = 0.0
    admitted_at: float = 0.0
    num_shown_before: int = 0
    returns_at: int | None = None
    first_token_at: float | None = None
    stopped_at: int | None = None
    num_losses: int = 0

    @property
    def is_open(self) -> bool:
        """Whether the engine holds it now."""
        return not self.is_over and self.park is None and self.returns_at is None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and the whole right answer."""
        return self.request.prompt_token_ids + self.answer

    @property
    def reader_tokens(self) -> int | None:
        """The reader's position, as the engine receives it."""
        return None if self.received is None else int(self.received)
