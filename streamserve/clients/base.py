"""How the rest of the site reaches an engine: `EngineClient` and `Generation`, whatever stands behind them.

asyncio; every method is called on the event loop. Implementations: thread (this process), process, remote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from streamserve.engine.core import CoreStats
from streamserve.engine.sequence import Park
from streamserve.protocol.events import Event
from streamserve.protocol.requests import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What acceptance fixes: sizes, the seed and the clamped max_tokens. Cached tokens are known at first schedule."""

    num_prompt_tokens: int
    max_tokens: int
    seed: int
    queue_position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What an engine says of itself.

    `state`: "idle" (not asked for yet), "loading", "ready", "paused" and "draining" (by an operator: it takes nothing
    new), "failed". `stage`, `fraction` (0 to 1), bytes and `elapsed_seconds` describe loading; `message` names the
    failure and the way out. `was_ready`: there was an engine before, so that another may be expected.
    """

    alias: str
    state: str
    stage: str = ""
    fraction: float = 0.0
    loaded_bytes: int = 0
    total_bytes: int = 0
    elapsed_seconds: float = 0.0
    message: str = ""
    max_model_len: int = 0
    has_chat_template: bool = False
    dtype: str = ""
    device: str = ""
    num_parameters: int = 0
    created: int = 0
    was_ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(CoreStats):
    """Live figures of one engine: the core's counts, and what its client has measured lately.

    `lost_engines`: how many died, hung or did not start since this worker began.
    """

    tokens_per_second: float = 0.0
    latency: dict[str, float] = field(default_factory=dict)
    lost_engines: int = 0


class Generation(Protocol):
    """One accepted request: an async iterator of events that ends after `Done` or `Error`.

    It also ends, without either, after `cancel()`, and when the engine has parked the sequences: `parked` then says
    why, and when to ask again with the tokens so far. `num_cached_tokens`: found in the prefix cache, as far as known
    by now; after a resume shown output tokens may be among them.

    Who sets `on_news` is called, on the loop, when there is something to take after `ready` or `__anext__` left
    nothing, and at the end, but for `cancel`; what came before is there already.
    """

    accepted: Accepted
    parked: Park | None
    num_cached_tokens: int
    on_news: Callable[[], None] | None

    @property
    def is_open(self) -> bool:
        """Whether more may come, after what is there now."""

    def __aiter__(self) -> Generation: ...

    async def __anext__(self) -> Event: ...

    def ready(self, most: int | None = None) -> list[Event]:
        """Take the events that are there now, or the first `most`, without waiting; [] says nothing of the end."""

    def reader_at(self, num_tokens: Sequence[int] | None) -> None:
        """Say how many output tokens of each choice the furthest reader has received; None: do not wait for readers.

        The engine parks who is `lead_tokens` ahead of that. Never blocks.
        """

    def cancel(self) -> None:
        """End. Synchronous and idempotent: once it returns, no StepPlan built later holds the sequences."""


class EngineClient(Protocol):
    """One model's engine."""

    alias: str

    async def generate(self, request: GenerateRequest) -> Generation:
        """Accept the request or raise: BadRequest (never fits, bad template), Refused (not now)."""

    async def tokenize(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the prompt's token ids as `generate` would see them."""

    async def warm(self, request: GenerateRequest) -> None:
        """Prefill the prompt into the prefix cache and generate nothing."""

    def start(self) -> None:
        """Begin loading, if that has not begun; returns at once."""

    async def control(self, action: str) -> None:
        """Do what an operator asks, for all who use this engine; returns when it has taken effect.

        "pause" parks every sequence and refuses all until "resume". "drain" refuses new requests and lets those that
        have begun come to their end, parks in between included ("resume" takes it back).
        """

    def describe(self) -> ModelDescription:
        """Say what the model is and how far loading has come. Never blocks."""

    def stats(self) -> EngineStats:
        """Return live figures. Never blocks."""

    async def aclose(self) -> None:
        """End every generation with an `error` event and free the engine."""
