"""Configuration values of the engine, apart from the things that run. Unknown keys are refused in conf.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from streamserve.protocol.requests import BATCH, PREFILL_ONLY

# A request starts in time if this share of its class's `max_late_seconds` is left, for the steps to its first token.
_LATE_SHARE = 0.2
# By how much each token of its prompt puts a request back in the queue: where not all can be served, the seats and the
# memory of one long prompt serve several short prompts.
PROMPT_TOKEN_SECONDS = 0.0005
# By how much its length puts a request back in the queue at most, as a share of its class's `max_late_seconds`.
_LENGTH_SHARE = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyClass:
    """The scheduling parameters of one class of requests, in seconds; `pace`: tokens a second that its readers read.

    `ttft_seconds` and `total_seconds` are budgets: what the first token and the whole answer should take. The first is
    what a request's place in the queue begins with (`order_seconds`). A first token that comes `max_late_seconds` after
    it is late. A request that can only be late waits behind those that are not,
    `max_queue_seconds` at most (None: no request of the class is ever late), and is refused while an overload stands
    (see `Patience`). `pace` is assumed of a reader until it is measured. `timeout_seconds` is for requests that name
    none; None: as long as they need.
    """

    ttft_seconds: float
    total_seconds: float | None = None
    pace: float = 20.0
    max_queue_seconds: float | None = None
    max_late_seconds: float = 2.0
    timeout_seconds: float | None = None

    def order_seconds(self, num_prompt_tokens: int, token_seconds: float = PROMPT_TOKEN_SECONDS) -> float:
        """Return what is added to a request's arrival for its place in the queue: its budget, more for a long prompt.

        Where not all can be served, the seats and the memory of one long prompt serve several short prompts. So each
        token puts it back by `token_seconds`, up to a share of `max_late_seconds`; it is late no sooner for
        that. Without `max_queue_seconds` nothing is late, and no length counts.
        """
        if self.max_queue_seconds is None:
            return self.ttft_seconds
        most = _LENGTH_SHARE * self.max_late_seconds
        return self.ttft_seconds + min(token_seconds * num_prompt_tokens, most)

    @property
    def queue_seconds(self) -> float:
        """How long a request may wait for its first step while no overload stands."""
        return math.inf if self.max_queue_seconds is None else self.max_queue_seconds

    @property
    def standing_queue_seconds(self) -> float:
        """How long a request may wait and its first token still be in time."""
        if self.max_queue_seconds is None:
            return math.inf
        return min(self.queue_seconds, self.ttft_seconds + (1 - _LATE_SHARE) * self.max_late_seconds)


CLASSES: Mapping[str, LatencyClass] = MappingProxyType(
    {
        "chat": LatencyClass(ttft_seconds=0.5, total_seconds=5.0, max_queue_seconds=30.0),
        "completion": LatencyClass(ttft_seconds=0.2, total_seconds=2.0, max_queue_seconds=15.0),
        "document": LatencyClass(ttft_seconds=3.0, total_seconds=15.0, max_queue_seconds=120.0),
        BATCH: LatencyClass(ttft_seconds=10.0, total_seconds=60.0),
        PREFILL_ONLY: LatencyClass(ttft_seconds=1e9, max_queue_seconds=30.0, timeout_seconds=120.0),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The thresholds of the scheduler's rules, in seconds. Constants: no site sets them; tests and simulations do.

    docs/log.md has what other values gave.
    """

    # While its reader has tokens for less than that, a sequence goes before all that are further ahead, and before any
    # admission: a reader bridges a long step with it. Infinite: all decode in every step.
    hungry_seconds: float = 1.0
    # A sequence this far ahead of its reader may park where a new sequence lacks memory. Sooner, more is computed
    # twice; later, fewer are served.
    min_ahead_seconds: float = 45.0
    # A held answer parks when its reader has not moved for so long: it is gone. A reader that only looked away finds
    # its answer in memory.
    stalled_seconds: float = 30.0
    # A tenant that has had so many seconds of work more than its share lets other tenants go first: until then the
    # order of arrival is fair enough, and a flood delays other tenants for no longer.
    max_debt_seconds: float = 1.0
    prompt_token_seconds: float = PROMPT_TOKEN_SECONDS


POLICY = Policy()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Shape and limits of one engine.

    `num_blocks` None: computed from `kv_cache_bytes`; that None: from `memory_share`, the share of all RAM (CPU) or of
    what is free after weights (GPU); that None: a quarter of RAM up to 4 GiB on CPU, 0.9 of what is free on a GPU.
    `max_model_len` None: the model's own. `itl_target_seconds` bounds how much prefill may join a step that also
    decodes, by a fitted step-time model; until it is fitted, `prefill_chunk` tokens may. `max_step_seconds` bounds it
    in every step: no long prompt keeps other sequences waiting for longer, unless one block of it does. `max_waiting`
    bounds the queue of each class in memory; in time its patience does. `max_num_seqs` bounds a step, `max_admitted`
    the sequences that hold memory (None: memory does). `lead_tokens`: a sequence this far ahead of what its reader has
    received is held until that has read on; it parks where another answer lacks memory, or when its reader has stalled.
    `batch_weight`: what a token of a batch's row counts in its tenant's share. `overlap`: launch a step before the step
    before it is collected; None: where the runner can. `step_seconds`: a step that takes longer, and longer than eight
    times the step-time model's prediction, counts as hung.
    """

    block_size: int = 32
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    memory_share: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_admitted: int | None = None
    max_num_batched_tokens: int = 2048
    prefill_chunk: int = 256
    itl_target_seconds: float = 0.2
    max_step_seconds: float = 0.3
    prefix_caching: bool = True
    max_waiting: int = 1024
    lead_tokens: int = 256
    batch_weight: float = 0.5
    overlap: bool | None = None
    default_max_tokens: int | None = None
    step_seconds: float = 12.0
    check_integrity: bool = False
    classes: Mapping[str, LatencyClass] = field(default_factory=lambda: CLASSES)
    policy: Policy = POLICY


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and in what numeric form. `path` is a folder or a hub id, or "echo" for the engine without weights.

    `dtype`: "auto" (the checkpoint's), "float32" or "bfloat16". `device`: "auto" (CUDA if there is a GPU), "cpu",
    "cuda". `chat_template` names one of a model's templates ("": "default"; with tools "tool_use", if the model has
    it). `packed` None: linear layers by the fastest back end that is right; False: by torch's own. `native`: kernels in
    C++ (streamserve/native/) where there are some for the machine (CPU). `quantize`, "int8" or "int4": linear layers
    are rounded to it while they are loaded (CPU, native kernels). "": as the checkpoint has them; quantised weights of
    a GGUF file stay so where the kernels compute them. `keep_packed`: rounded weights are kept in a file, for the next
    load (engine/model/linear/packs.py). `answers`, for "echo" only: what it answers, by words of the
    question, and else the question itself (clients/factory.py); None: words that depend on every token.
    `format` names how the output marks thoughts and tool calls (engine/text/formats/); None: what the tokenizer shows.
    """

    alias: str
    path: str
    dtype: str = "auto"
    device: str = "auto"
    packed: bool | None = None
    native: bool = True
    quantize: str = ""
    keep_packed: bool = True
    parity_probe: bool = True
    chat_template: str = ""
    num_threads: int | None = None
    answers: dict[str, str] | None = None
    format: str | None = None
