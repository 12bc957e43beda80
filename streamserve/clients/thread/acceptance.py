"""Acceptance of a request, before the engine sees it: render, tokenise, check the sizes, resolve open parameters.

Runs on a tokenising thread: slow, pure, no engine thread and no loop. Every error of a request is found here, before
anything is allocated.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from streamserve.clients.thread import rules
from streamserve.engine.capacity import max_servable_tokens
from streamserve.engine.config import EngineConfig, LatencyClass
from streamserve.engine.grammar.compiler import GrammarCompiler
from streamserve.engine.grammar.matcher import Matcher
from streamserve.engine.plan import Runner
from streamserve.engine.sequence import SequenceRequest
from streamserve.engine.text.choice import Choice
from streamserve.engine.text.formats.base import AnswerSource, OutputFormat, Parser
from streamserve.engine.text.tokenizer import Prompt, PublicPrefixes, Tokenizer
from streamserve.protocol.engine import Accepted
from streamserve.protocol.errors import BadRequest, PromptTooLong, StreamserveError
from streamserve.protocol.requests import (
    Admission,
    GenerateRequest,
    Grammar,
    Resume,
    SamplingParams,
    check_needs,
    check_sampling,
)

logger = logging.getLogger(__name__)

# A seed is at most the largest signed 64-bit number.
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The properties of a loaded model."""

    max_model_len: int
    eos_token_ids: frozenset[int]
    num_parameters: int = 0
    dtype: str = ""
    device: str = ""
    revision: str = ""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class LoadedEngine:
    """The result of `load`. `max_tokens`: the largest prompt + max_tokens that can ever run.

    `format` finds the thoughts and tool calls in the model's output; without one it is text.
    """

    runner: Runner
    tokenizer: Tokenizer
    facts: EngineFacts
    format: OutputFormat | None = None
    max_tokens: int = field(init=False)
    public_prefixes: PublicPrefixes = field(init=False)
    grammars: GrammarCompiler = field(init=False)

    def __post_init__(self) -> None:
        runner = self.runner
        self.public_prefixes = PublicPrefixes(self.tokenizer)
        self.max_tokens = max_servable_tokens(self.facts.max_model_len, runner.num_blocks, runner.block_size)
        # A tag that is a token is no text, also where the tokenizer would show it: the parser takes it for the tag.
        tag_ids = () if self.format is None else self.format.tags.ids.values()
        self.grammars = GrammarCompiler(self.tokenizer, runner.vocab_size, self.facts.eos_token_ids.union(tag_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request ready for the engine: ids, resolved sampling and timeout, and the text side of each choice.

    `num_tokens`: of all choices, those that are known already and are to be computed. `needs`: see `Accepted`.
    `grammar`: what the whole output must match; then `rules.constrain` sets `matchers`, one for each choice. `echoes`:
    the prompt's text that each choice still has to begin with. `first_scored`: the prompt's first token, if it is still
    to be shown with the log-probabilities of the others.
    """

    request: GenerateRequest
    admission: Admission
    resume: Resume
    prompt: Prompt
    sampling: SamplingParams
    choices: tuple[Choice, ...]
    eos_token_ids: frozenset[int]
    timeout_seconds: float | None
    num_tokens: int
    needs: tuple[str, ...] = ()
    grammar: Grammar | None = None
    matchers: tuple[Matcher, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    echoes: tuple[str, ...] = ()
    first_scored: int | None = None

    def accepted(self, queue_position: int) -> Accepted:
        """Return what acceptance has fixed."""
        assert self.sampling.max_tokens is not None
        assert self.sampling.seed is not None
        return Accepted(
            num_prompt_tokens=len(self.prompt.token_ids),
            max_tokens=self.sampling.max_tokens,
            seed=self.sampling.seed,
            queue_position=queue_position,
            needs=self.needs,
        )

    def sequence_request(self, seq_id: int, index: int, queue_seconds: float) -> SequenceRequest:
        """Make the engine's part of one choice, which may wait so long; choices differ in their seeds.

        The first choice alone scores the prompt, for all.
        """
        admission, resume = self.admission, self.resume
        assert self.sampling.seed is not None
        assert admission.arrived_at is not None
        sampling = replace(self.sampling, seed=(self.sampling.seed + index) & _MAX_SEED)
        if index:
            sampling = replace(sampling, prompt_logprobs=None)
        return SequenceRequest(
            seq_id=seq_id,
            prompt_token_ids=self.prompt.token_ids,
            output_token_ids=resume.output_of(index),
            sampling=sampling,
            salt=admission.salt,
            num_public_tokens=self.prompt.num_public_tokens,
            eos_token_ids=self.eos_token_ids,
            arrived_at=admission.arrived_at,
            deadline=None if self.timeout_seconds is None else admission.arrived_at + self.timeout_seconds,
            latency_class=self.request.latency_class,
            tenant=admission.share_of,
            reader_tokens=None if resume.reader_tokens is None else resume.reader_tokens[index],
            first_token_at=resume.first_token_at,
            stream_id=admission.stream_id,
            num_losses=resume.num_losses,
            queue_seconds=queue_seconds,
            matcher=self.matchers[index] if self.matchers else None,
            bad_word_ids=self.bad_word_ids,
            num_scored=max(0, resume.num_prompt_logprobs - 1),
        )


def prepare(
    engine: LoadedEngine, config: EngineConfig, request: GenerateRequest, admission: Admission, resume: Resume
) -> Prepared:
    """Make a request ready, or raise BadRequest. Tokens already shown is fed to the choices silently."""
    latency_class = _checked_class(config, request)
    _check_position(request, resume)
    tokenizer, vocab_size = engine.tokenizer, engine.runner.vocab_size
    check_sampling(request.sampling)  # before it is computed with
    prompt = encode(engine, request)
    num_prompt_tokens = len(prompt.token_ids)
    rules.check_prompt_logprobs(request, num_prompt_tokens)
    is_scored_first = request.sampling.prompt_logprobs is not None and not resume.num_prompt_logprobs
    sampling = resolve_params(
        request, engine.facts.sampling_defaults, num_prompt_tokens, engine.max_tokens, config.default_max_tokens
    )
    check_sampling(sampling)  # the model's own defaults, too
    _check_ids(request, resume, prompt, vocab_size)
    grammar, source = request.grammar, None
    if engine.format is not None:
        grammar, source = (
            engine.format.grammar(request, prompt),
            _source(engine.format, request, prompt, f"{admission.stream_id}/{sampling.seed}"),
        )
    elif request.tools:
        rules.refuse_forced_call(request)
    choices = _choices(tokenizer, request, resume, sampling, source, is_free=grammar is None)
    bad_word_ids = rules.bad_word_ids(tokenizer, sampling, vocab_size) if sampling.bad_words else ()
    if sampling.allowed_token_ids:
        rules.check_choice(sampling, bad_word_ids, engine.facts.eos_token_ids, has_grammar=grammar is not None)
    return Prepared(
        request=request,
        admission=admission,
        resume=resume,
        prompt=prompt,
        sampling=sampling,
        choices=choices,
        eos_token_ids=engine.facts.eos_token_ids,
        timeout_seconds=latency_class.timeout_seconds if request.timeout_seconds is None else request.timeout_seconds,
        num_tokens=request.n * num_prompt_tokens + sum(map(len, resume.output_token_ids)),
        needs=() if source is None else ("blocks",),
        grammar=grammar,
        bad_word_ids=bad_word_ids,
        echoes=rules.echoes(tokenizer, request, resume, prompt) if request.echo else (),
        first_scored=prompt.token_ids[0] if is_scored_first else None,
    )


def _checked_class(config: EngineConfig, request: GenerateRequest) -> LatencyClass:
    """Return the request's latency class. Raises BadRequest for what no prompt and no model make right."""
    check_needs(request.needs)
    if request.input:
        message = f"input is for pipelines, and {request.model} is a model. Send messages or prompt."
        raise BadRequest(message, code="invalid_value", param="input")
    if request.n < 1:
        raise BadRequest(f"n is {request.n}; the engine takes 1 or more.", code="invalid_value", param="n")
    latency_class = config.classes.get(request.latency_class)
    if latency_class is None:
        raise BadRequest(f"latency_class is one of {', '.join(config.classes)}.", param="latency_class")
    return latency_class


def _check_position(request: GenerateRequest, resume: Resume) -> None:
    if resume.reader_tokens is not None and len(resume.reader_tokens) != request.n:
        raise BadRequest(f"reader_tokens has one number for each of the {request.n} choices.", param="reader_tokens")


def _choices(
    tokenizer: Tokenizer,
    request: GenerateRequest,
    resume: Resume,
    sampling: SamplingParams,
    source: AnswerSource | None,
    *,
    is_free: bool,
) -> tuple[Choice, ...]:
    """Make the text side of each choice, in the state in which its readers saw it last."""
    return tuple(
        Choice(
            tokenizer,
            sampling,
            index=index,
            shown_token_ids=resume.output_of(index),
            # The text of a grammar is its tokens' bytes, to the first one.
            strip_leading_space=request.messages is not None and is_free and not request.continue_final_message,
            source=source if index == 0 or source is None else replace(source, has_echo=request.echo),
            replay=resume.replay,
        )
        for index in range(request.n)
    )


def _source(format_: OutputFormat, request: GenerateRequest, prompt: Prompt, answer: str) -> AnswerSource | None:
    """Return what the choices need for their blocks, None where the whole output is text. `answer` names it."""
    if format_.parser(request, prompt) is None:
        return None

    def make_parser() -> Parser:
        parser = format_.parser(request, prompt)
        assert parser is not None
        return parser

    has_prompt = request.echo or request.sampling.prompt_logprobs is not None  # of choices but the first: its text only
    return AnswerSource(tags=format_.tags, make_parser=make_parser, answer=answer, has_echo=has_prompt)


def encode(engine: LoadedEngine, request: GenerateRequest) -> Prompt:
    """Render, tokenise and truncate; any error of the tokenizer fails this request only."""
    try:
        prompt = engine.tokenizer.encode(request)
    except StreamserveError:
        raise
    except Exception as error:  # the edge of one request
        logger.exception("tokenizer failed")
        raise BadRequest("the prompt could not be tokenised.", code="tokenizer_error", param="prompt") from error
    num_kept = _num_kept(request.sampling, engine.max_tokens)
    if num_kept is not None and num_kept < len(prompt.token_ids):
        return Prompt(token_ids=prompt.token_ids[-num_kept:])  # of which nothing is the server's own
    if request.public_messages:
        return replace(prompt, num_public_tokens=engine.public_prefixes.num_tokens(request, prompt.token_ids))
    return prompt


def _num_kept(sampling: SamplingParams, limit: int) -> int | None:
    """Return how many tokens of a prompt are kept at most, None for all.

    As many as fit are those that leave room for `max_tokens`, and never less than half of what the model takes.
    """
    asked = sampling.truncate_prompt_tokens
    if asked is None or asked > 0:
        return asked
    return max(1, limit - min(sampling.max_tokens or 1, limit // 2))


def resolve_params(
    request: GenerateRequest,
    defaults: Mapping[str, float],
    num_prompt_tokens: int,
    limit: int,
    default_max_tokens: int | None,
) -> SamplingParams:
    """Resolve what the caller left open: sampling fields by the model's `defaults`, the seed, and max_tokens.

    max_tokens is a maximum: it is lowered to what fits within `limit`. A prompt that leaves no room for a token of an
    answer does not fit.
    """
    asked = request.sampling.max_tokens
    if num_prompt_tokens + (1 if asked is None else min(asked, 1)) > limit:
        raise PromptTooLong(
            f"prompt has {num_prompt_tokens:,} tokens; this model takes {limit:,} with the answer. Shorten the prompt.",
            param="prompt",
        )
    room = limit - num_prompt_tokens
    resolved: dict[str, float] = {name: value for name, value in defaults.items() if name in request.unset}
    resolved["max_tokens"] = min(room, (default_max_tokens or room) if asked is None else asked)
    if request.sampling.seed is None:
        resolved["seed"] = secrets.randbits(63)
    return replace(request.sampling, **resolved)  # type: ignore[arg-type]


def _check_ids(request: GenerateRequest, resume: Resume, prompt: Prompt, vocab_size: int) -> None:
    """Refuse ids that the model lacks: its tokenizer may have more, and one such id would break the whole step."""
    groups = {
        "prompt": prompt.token_ids,
        "stop_token_ids": request.sampling.stop_token_ids,
        "logit_bias": tuple(token_id for token_id, _ in request.sampling.logit_bias),
        "allowed_token_ids": request.sampling.allowed_token_ids,
        "output_token_ids": tuple(chain.from_iterable(resume.output_token_ids)),
    }
    for param, ids in groups.items():
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise BadRequest(f"token ids of this model are 0 to {vocab_size - 1:,}.", param=param)
