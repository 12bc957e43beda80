"""What happens to a request before the engine sees it: render, tokenise, check that it can ever fit, fix what is open.

Runs on a tokenising thread: slow, pure, no engine thread and no loop. Everything that can be wrong with a request is
found here, before anything is allocated.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from streamserve.engine.config import EngineConfig
from streamserve.engine.plan import Runner
from streamserve.engine.scheduler import max_servable_tokens
from streamserve.engine.sequence import SequenceRequest
from streamserve.engine.text.choice import Choice
from streamserve.engine.text.tokenizer import Prompt, Tokenizer
from streamserve.protocol.errors import BadRequest, PromptTooLong, StreamserveError
from streamserve.protocol.requests import GenerateRequest, SamplingParams, check_needs

logger = logging.getLogger(__name__)

# Seeds are what fits into a signed 64-bit number, whatever was asked for.
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What loading found out about a model."""

    max_model_len: int
    eos_token_ids: frozenset[int]
    num_parameters: int = 0
    dtype: str = ""
    device: str = ""
    revision: str = ""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """What `load` returns: all that a client needs to serve."""

    runner: Runner
    tokenizer: Tokenizer
    facts: EngineFacts

    @property
    def max_tokens(self) -> int:
        """The largest prompt + max_tokens that can ever run."""
        return max_servable_tokens(self.facts.max_model_len, self.runner.num_blocks, self.runner.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request ready for the engine: ids, settled sampling and timeout, and the text side of each choice."""

    request: GenerateRequest
    prompt: Prompt
    sampling: SamplingParams
    choices: tuple[Choice, ...]
    eos_token_ids: frozenset[int]
    timeout_seconds: float | None

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices that are known already, and to be computed."""
        return self.request.n * len(self.prompt.token_ids) + sum(map(len, self.request.output_token_ids))

    def sequence_request(self, seq_id: int, index: int, accepted_at: float) -> SequenceRequest:
        """Make the engine's part of one choice; choices differ in their seeds."""
        request = self.request
        assert self.sampling.seed is not None
        arrived_at = request.arrived_at if request.arrived_at is not None else accepted_at
        return SequenceRequest(
            seq_id=seq_id,
            prompt_token_ids=self.prompt.token_ids,
            output_token_ids=shown_token_ids(request, index),
            sampling=replace(self.sampling, seed=(self.sampling.seed + index) & _MAX_SEED),
            salt=request.salt,
            num_public_tokens=self.prompt.num_public_tokens,
            eos_token_ids=self.eos_token_ids,
            arrived_at=arrived_at,
            deadline=None if self.timeout_seconds is None else arrived_at + self.timeout_seconds,
            latency_class=request.latency_class,
            tenant=request.tenant,
            reader_tokens=None if request.reader_tokens is None else request.reader_tokens[index],
            first_token_at=request.first_token_at,
        )


def prepare(engine: LoadedEngine, config: EngineConfig, request: GenerateRequest) -> Prepared:
    """Make a request ready, or raise BadRequest. Text already shown is fed to the choices silently."""
    check_needs(request)
    latency_class = config.classes.get(request.latency_class)
    if latency_class is None:
        raise BadRequest(f"latency_class is one of {', '.join(config.classes)}.", param="latency_class")
    if request.reader_tokens is not None and len(request.reader_tokens) != request.n:
        raise BadRequest(f"reader_tokens has one number for each of the {request.n} choices.", param="reader_tokens")
    prompt = encode(engine.tokenizer, request)
    sampling = fill(request, engine.facts.sampling_defaults)
    sampling = settle(sampling, len(prompt.token_ids), engine.max_tokens, config.default_max_tokens)
    _check_ids(request, prompt, engine.runner.vocab_size)
    choices = tuple(_make_choice(engine.tokenizer, request, sampling, index) for index in range(request.n))
    return Prepared(
        request=request,
        prompt=prompt,
        sampling=sampling,
        choices=choices,
        eos_token_ids=engine.facts.eos_token_ids,
        timeout_seconds=latency_class.timeout_seconds if request.timeout_seconds is None else request.timeout_seconds,
    )


def encode(tokenizer: Tokenizer, request: GenerateRequest) -> Prompt:
    """Render and tokenise; whatever a tokenizer raises costs this request only."""
    try:
        return tokenizer.encode(request)
    except StreamserveError:
        raise
    except Exception as error:  # the edge of one request
        logger.exception("tokenizer failed")
        raise BadRequest("the prompt could not be tokenised.", code="tokenizer_error", param="prompt") from error


def shown_token_ids(request: GenerateRequest, index: int) -> tuple[int, ...]:
    """Return the tokens of one choice that readers have seen already."""
    return request.output_token_ids[index] if index < len(request.output_token_ids) else ()


def fill(request: GenerateRequest, defaults: Mapping[str, float]) -> SamplingParams:
    """Give the sampling fields that the caller left open the model's own defaults."""
    ours = {name: value for name, value in defaults.items() if name in request.unset}
    return replace(request.sampling, **ours)  # type: ignore[arg-type]


def settle(sampling: SamplingParams, num_prompt: int, limit: int, default_max_tokens: int | None) -> SamplingParams:
    """Fix seed and max_tokens: an explicit one must fit, the default is clamped to what does."""
    asked = sampling.max_tokens
    if num_prompt + (1 if asked is None else asked) > limit:
        raise PromptTooLong(_too_long(num_prompt, limit, asked), param="max_tokens" if num_prompt < limit else "prompt")
    room = limit - num_prompt
    max_tokens = asked if asked is not None else min(room, default_max_tokens or room)
    seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
    return replace(sampling, max_tokens=max_tokens, seed=seed)


def _too_long(num_prompt: int, limit: int, max_tokens: int | None) -> str:
    asked = "" if max_tokens is None else f" with max_tokens={max_tokens:,}"
    remedy = "Shorten the prompt." if max_tokens is None else "Shorten the prompt or lower max_tokens."
    return f"prompt has {num_prompt:,} tokens; this model takes {limit:,}{asked}. {remedy}"


def _check_ids(request: GenerateRequest, prompt: Prompt, vocab_size: int) -> None:
    """The model may have more or fewer ids than its tokenizer; an id it lacks would break the whole step."""
    groups = {
        "prompt": prompt.token_ids,
        "stop_token_ids": request.sampling.stop_token_ids,
        "output_token_ids": tuple(chain.from_iterable(request.output_token_ids)),
    }
    for param, ids in groups.items():
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise BadRequest(f"token ids of this model are 0 to {vocab_size - 1:,}.", param=param)


def _make_choice(tokenizer: Tokenizer, request: GenerateRequest, sampling: SamplingParams, index: int) -> Choice:
    return Choice(
        tokenizer,
        sampling,
        index=index,
        shown_token_ids=shown_token_ids(request, index),
        strip_leading_space=request.messages is not None,
    )
