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
    """The scheduling parameters of one class of requests.

    A request's place in the queue begins with its budget for the first token (`order_seconds`). A request that can only
    be late waits behind those that are not, and is refused while an overload stands (see `Patience`).
    """

    ttft_seconds: float
    """Time to the first token that is aimed at."""
    total_seconds: float | None = None
    """Time to the end of the answer that is aimed at; shown beside what was measured."""
    gap_p95_seconds: float | None = None
    """95th percentile of the gaps between deltas at the reader that is aimed at: counted as kept or missed where
    readers report their times (docs/monitoring.md). No rule of the scheduler.
    """
    pace: float = 20.0
    """Tokens a second that a reader takes in, until that is measured."""
    max_queue_seconds: float | None = None
    """How long a request may wait for its first step while no overload stands; `None`: for ever, and the class is never
    late.
    """
    max_late_seconds: float = 2.0
    """How much later than `TTFT_SECONDS` a first token is of use."""
    timeout_seconds: float | None = None
    """For requests that name no `timeout_seconds`; `None`: no end."""

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
        "chat": LatencyClass(ttft_seconds=0.5, total_seconds=5.0, gap_p95_seconds=0.5, max_queue_seconds=30.0),
        "completion": LatencyClass(ttft_seconds=0.2, total_seconds=2.0, gap_p95_seconds=0.3, max_queue_seconds=15.0),
        "document": LatencyClass(ttft_seconds=3.0, total_seconds=15.0, gap_p95_seconds=1.0, max_queue_seconds=120.0),
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
SPECULATION = ("lookup", "off")  # the first is the default
KV_DTYPES = ("auto", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Shape and limits of one engine. Each field's meaning is below it; docs/reference/settings.md is made of them."""

    block_size: int = 32
    """Tokens in a KV block."""
    num_blocks: int | None = None
    """Blocks; `None`: from `KV_CACHE_BYTES`."""
    kv_cache_bytes: int | None = None
    """Memory of the KV cache; `None`: by `MEMORY_SHARE`."""
    memory_share: float | None = None
    """The KV cache's share of all memory (CPU), or of what is free after the weights (GPU): `0.4` is 40 %. `None`: a
    quarter of RAM up to 4 GiB, 0.9 on a GPU. Give each its own where several models share a machine.
    """
    kv_dtype: str = KV_DTYPES[0]
    """How keys and values are kept: `"auto"`, in the model's dtype; `"int8"`, on a CPU: in eight bits, each vector with
    a scale of its own (docs/quantised.md#keys-and-values), so that the same memory holds nearly twice the tokens of 16
    bits.
    """
    max_model_len: int | None = None
    """Context in tokens; `None`: the model's own."""
    max_num_seqs: int = 64
    """Sequences in one step. More may be admitted (docs/glossary.md): readers are slower than the engine, so each step
    takes those whose readers run out first.
    """
    max_admitted: int | None = None
    """Sequences that hold memory at once; `None`: as many as fit. Above `MAX_NUM_SEQS` it also lets the memory be
    larger: at most that many of the longest sequences fill it.
    """
    max_num_batched_tokens: int = 2048
    """Tokens in one step."""
    prefill_chunk: int = 256
    """How many join it until there are measurements."""
    itl_target_seconds: float = 0.2
    """How long a step may take that also decodes: as many prompt tokens join it as fit, by the measured time of steps.
    """
    max_step_seconds: float = 0.3
    """How long any step may take, by the same measurements (a block of a prompt is always computed). A long prompt is
    computed over many steps; of each it leaves a block to the other prompts.
    """
    prefix_caching: bool = True
    """Reuse the blocks of prompts that begin alike, within one tenant."""
    max_waiting: int = 1024
    """Requests of one class that may wait, a bound of memory; the next is refused with 503, unless its tenant has less
    than its share of these places, so that no flood keeps others out. In time they are bounded by `CLASSES`.
    """
    lead_tokens: int = 256
    """How far an answer may be ahead of what its reader has received; then it is paused until that has read on. It
    keeps its memory, unless another answer lacks it or its reader has not moved for 30 s. 96 at least.
    """
    batch_weight: float = 0.5
    """What a token of class `batch` counts in that share; of any other class a token is a token."""
    speculation: str = SPECULATION[0]
    """What proposes further tokens of an answer to a step, which keeps those it would have chosen. `"lookup"`: what
    followed the same tokens before, in the prompt, in the answer so far, or in the request's `prediction`, where that
    pays by the measured time of steps, and not while steps overlap (GPU). `"off"`: nothing.
    """
    overlap: bool | None = None
    """Launch a step before the previous step is collected; `None`: where it pays (CUDA)."""
    default_max_tokens: int | None = None
    """For requests that name none; `None`: what fits."""
    step_seconds: float = 12.0
    """Longer than this, and than eight times what was to be expected, a step counts as hung: the engine is replaced."""
    check_integrity: bool = False
    """Check all bookkeeping after every step (tests)."""
    classes: Mapping[str, LatencyClass] = field(default_factory=lambda: CLASSES)
    policy: Policy = POLICY


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and in what numeric form. Each field's meaning is below it."""

    alias: str
    path: str
    """A folder with `config.json` and `*.safetensors`, a GGUF file (docs/quantised.md) (`…/model.gguf`), a hub id
    (`org/name`), or `"echo"`: an engine without weights, which needs no PyTorch.
    """
    dtype: str = "auto"
    """`"auto"` (the checkpoint's), `"float32"`, `"bfloat16"`. With each, the likeliest token is the likeliest of
    float32 logits.
    """
    device: str = "auto"
    """`"auto"` (CUDA if there is a GPU), `"cpu"`, `"cuda"`."""
    packed: bool | None = None
    """What computes linear layers on a CPU. `None`: of our kernels (`NATIVE`), oneDNN, FBGEMM (weights in float16,
    where the processor has no bfloat16) and torch's own, the fastest that gives torch's numbers, each weight compared;
    measured at the first load of a model, kept in `~/.cache/streamserve`, and named by `streamserve_models` and on the
    live page. `False`: torch's own.
    """
    native: bool = True
    """On a CPU: linear layers, attention over block tables, draws and the writing of the KV memory by kernels in C++
    (AVX-512, AVX2 or plain, whichever the processor has). The engine's process compiles them once, in seconds, with
    `$CXX`, `g++` or `clang++`, into the user's cache (`~/.cache/streamserve/native`, or a folder in `/tmp` where there
    is no home); `python -m streamserve.native.build` does it beforehand, and a wheel that `make wheel` built brings
    them. Without a compiler torch computes the same in more time (a decode step of 135 M parameters in bfloat16, one
    thread, AVX-512: 3.5 and 3.0 times, at 1 and 8 streams), and the log and a check name the reason. On a GPU:
    attention, norms, gates and draws by Triton, and a step of decodes as one CUDA graph, which takes some seconds at
    each load; they need the package triton, which PyTorch's CUDA build brings, and a C compiler. `False`: torch
    computes.
    """
    quantize: str = ""
    """`"int8"` or `"int4"`: on a CPU, linear layers are rounded while they are loaded (docs/quantised.md#quantize), and
    take half or a third of the memory. It needs the native kernels, and is refused without them. `""`: as the
    checkpoint has them.
    """
    keep_packed: bool = True
    """Weights that were rounded or quantised (docs/quantised.md#the-second-load) are kept in
    `~/.cache/streamserve/packs` as they are computed with, about as large as they are in memory: the next load takes
    seconds. Files of earlier versions of the model are removed. `False`: each load packs anew.
    """
    draft: str = ""
    """A smaller model with the same tokens (docs/engines.md#a-draft-model), in any form of `PATH`: it proposes what
    this model then checks, several tokens a step. Its weights and its share of each KV block come out of the same
    memory. A model with other tokens is refused. `""`: none.
    """
    draft_quantize: str = ""
    """`QUANTIZE` of the draft model."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters by name, each the folder that PEFT has written (docs/adapters.md): each is a model of its own for
    callers, and all share this model's weights and its steps.
    """
    parity_probe: bool = True
    """Compare the engine with plain attention at load, and refuse a model that differs."""
    chat_template: str = ""
    """Name of the chat template, of a model that has several; `""`: `default`. A request with tools is rendered by
    `tool_use`, where the model has it.
    """
    num_threads: int | None = None
    """Torch's threads; `None`: its own choice. Between two parts of a step they spin for a fraction of a millisecond
    (`GOMP_SPINCOUNT=10000`, `KMP_BLOCKTIME=1`), then they sleep. If your environment sets one of these or
    `OMP_WAIT_POLICY`, nothing is added: `PASSIVE` is for a machine whose cores all have other work.
    """
    answers: dict[str, str] | None = None
    """For `"echo"` only: what it answers, by words of the question (`{"price": "It costs 3 euros."}`); any other
    question is its own answer. `None`: endless words that depend on every token.
    """
    format: str | None = None
    """How the output marks thoughts and tool calls: a name of reasoning-and-tools.md (docs/reasoning-and-tools.md), or
    the dotted path of a function that returns an `OutputFormat`; `None`: what the tokenizer and its chat template show.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderConfig:
    """Which embedding model, in what numeric form, and the bounds of its batches and its queue."""

    alias: str
    path: str
    """A folder with `config.json` and `*.safetensors`, a hub id (`org/name`), or `"echo"`: vectors of the words of a
    text, which need no PyTorch.
    """
    dtype: str = "auto"
    """`"auto"` (the checkpoint's), `"float32"`, `"bfloat16"`. Vectors are float32 with each."""
    device: str = "auto"
    """`"auto"` (CUDA if there is a GPU), `"cpu"`, `"cuda"`."""
    num_threads: int | None = None
    """Torch's threads; `None`: its own choice."""
    max_model_len: int | None = None
    """Tokens of the longest input; `None`: the model's own."""
    matryoshka: bool | None = None
    """Whether callers may ask for fewer `dimensions`, which is right for a model that was trained so. `None`: where its
    `config.json` says it (`is_matryoshka`, `matryoshka_dimensions`).
    """
    max_batch_tokens: int = 16_384
    """Tokens of one pass, those that fill up shorter inputs counted. It bounds the pass's memory."""
    max_batch_seconds: float = 0.3
    """How long a pass may take by the measured time of passes, so that a short text does not wait for long for the
    documents before it. One input is always computed.
    """
    max_waiting_chars: int = 8_000_000
    """Characters (and token ids) of all requests that wait or are computed; the next is refused with 503."""

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_batch_seconds", "max_waiting_chars"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes more than 0")
