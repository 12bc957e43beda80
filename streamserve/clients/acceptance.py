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

from streamserve.engine.choice import Choice
from streamserve.engine.config import EngineConfig
from streamserve.engine.plan import Runner
from streamserve.engine.scheduler import max_servable_tokens
from streamserve.engine.tokenizer import Prompt, Tokenizer
from streamserve.protocol.errors import BadRequest, PromptTooLong, StreamserveError
from streamserve.protocol.requests import LATENCY_CLASSES, GenerateRequest, SamplingParams

logger = logging.getLogger(__name__)


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
    """A request ready for the engine: ids, settled sampling, and the text side of each choice."""

    prompt: Prompt
    sampling: SamplingParams
    choices: tuple[Choice, ...]


def prepare(engine: LoadedEngine, config: EngineConfig, request: GenerateRequest) -> Prepared:
    """Make a request ready, or raise BadRequest. Text already shown is fed to the choices silently."""
    if request.latency_class not in LATENCY_CLASSES:
        raise BadRequest(f"latency_class is one of {', '.join(LATENCY_CLASSES)}.", param="latency_class")
    prompt = encode(engine.tokenizer, request)
    sampling = fill(request, engine.facts.sampling_defaults)
    sampling = settle(sampling, len(prompt.token_ids), engine.max_tokens, config.default_max_tokens)
    _check_ids(request, prompt, engine.runner.vocab_size)
    choices = tuple(_make_choice(engine.tokenizer, request, sampling, index) for index in range(request.n))
    return Prepared(prompt=prompt, sampling=sampling, choices=choices)


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
