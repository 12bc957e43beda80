"""What `EngineCore` says: `SequenceUpdate`, news of one sequence, and `CoreStats`, the figures of all. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from streamserve.engine.plan import RawLogprobs
from streamserve.engine.sequence import Park


@dataclass(slots=True, kw_only=True)
class SequenceUpdate:
    """News of one sequence. The last has one of `finish_reason` ("stop", "length"), `error` (a code) and `park`.

    After "stop" the last token is the eos or stop token: counted, but no part of the text. `num_cached_tokens`,
    `scheduled_at` and `first_token_at` are repeated in each update; an update without tokens says that the sequence
    was scheduled, or that it ended. Times are the core's clock; `at` is when the step was over.
    """

    seq_id: int
    at: float
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[RawLogprobs | None, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    park: Park | None = None
    num_cached_tokens: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None or self.error is not None or self.park is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreStats:
    """Figures after the last step. Block counts exclude the null block: used + cached + free = total.

    `blocks_used` are held by running sequences; `blocks_cached` are reclaimable and hold reusable prefixes.
    `queued_tokens` are those that waiting sequences still have to compute, `queued_seconds` how long that takes by the
    step-time model (0 until there is one). `parks` counts sequences that the engine itself parked, `out_of_memory` and
    `quarantines` steps that ended so; `token_budget` is what a step may compute now.
    """

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    unknown_ids: int = 0
    queued_tokens: int = 0
    queued_seconds: float = 0.0
    parks: int = 0
    out_of_memory: int = 0
    quarantines: int = 0
    token_budget: int = 0
    is_paused: bool = False
