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

from streamserve.engine.capacity import max_servable_tokens
from streamserve.engine.config import EngineConfig, LatencyClass
from streamserve.engine.grammar.compiler import GrammarCompiler
from streamserve.engine.grammar.matcher import Matcher
from streamserve.engine.plan import DraftModel, Runner
from streamserve.engine.sequence import SequenceRequest
from streamserve.engine.text.choice import Choice
from streamserve.engine.text.formats.base import AnswerSource, OutputFormat, Parser
from streamserve.engine.text.tokenizer import Prompt, PublicPrefixes, Tokenizer, checked_bytes
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
    refuse_parts,
)

logger = logging.getLogger(__name__)

# Log-probabilities that a request may ask for of its prompt: about 6 MB in the log.
MOST_PROMPT_CANDIDATES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The properties of a loaded model."""

    max_model_len: int
    eos_token_ids: frozenset[int]
    num_parameters: int = 0
    dtype: str = ""
    device: str = ""
    linears: str = ""
    revision: str = ""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    adapters: frozenset[str] = frozenset()


@dataclass(slots=True, kw_only=True)
class LoadedEngine:
    """The result of `load`. `max_tokens`: the largest prompt + max_tokens that can ever run.

    `format` finds the thoughts and tool calls in the model's output; without a format the output is text. `draft` is
    closed by the runner. A step computes up to `step_tokens`.
    """

    runner: Runner
    tokenizer: Tokenizer
    facts: EngineFacts
    format: OutputFormat | None = None
    draft: DraftModel | None = None
    step_tokens: int = 0
    max_tokens: int = field(init=False)
    public_prefixes: PublicPrefixes = field(init=False)
    grammars: GrammarCompiler = field(init=False)

    def __post_init__(self) -> None:
        runner = self.runner
        self.public_prefixes = PublicPrefixes(self.tokenizer)
        self.max_tokens = max_servable_tokens(
            self.facts.max_model_len, runner.num_blocks, runner.block_size, runner.windows, self.step_tokens
        )
        # A tag that is a token is no text, also where the tokenizer would show it: the parser takes it for the tag.
        tag_ids = () if self.format is None else self.format.tags.ids.values()
        self.grammars = GrammarCompiler(self.tokenizer, runner.vocab_size, self.facts.eos_token_ids.union(tag_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request ready for the engine: ids, resolved sampling and timeout, and the text side of each choice.

    `num_tokens`: the tokens of all choices that are known already and have to be computed. `needs`: see `Accepted`.
    `grammar`: what the whole output must match; then `constrain` (grammar.py) sets `matchers`, one for each choice.
    `echoes`: the prompt's text that each choice still has to begin with. `first_scored`: the prompt's first token, if
    it is still to be shown with the log-probabilities of the other tokens.
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
    prediction_token_ids: tuple[int, ...] = ()
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
        arrived_at, timeout = self.admission.arrived_at, self.timeout_seconds
        assert arrived_at is not None
        return SequenceRequest(
            seq_id=seq_id,
            prompt_token_ids=self.prompt.token_ids,
            sampling=self.sampling.of_choice(index),
            admission=self.admission,
            resume=self.resume,
            index=index,
            num_public_tokens=self.prompt.num_public_tokens,
            eos_token_ids=self.eos_token_ids,
            deadline=None if timeout is None else arrived_at + timeout,
            latency_class=self.request.latency_class,
            queue_seconds=queue_seconds,
            matcher=self.matchers[index] if self.matchers else None,
            bad_word_ids=self.bad_word_ids,
            prediction_token_ids=self.prediction_token_ids,
            adapter=self.request.adapter,
        )


def prepare(
    engine: LoadedEngine, config: EngineConfig, request: GenerateRequest, admission: Admission, resume: Resume
) -> Prepared:
    """Make a request ready, or raise BadRequest. Tokens already shown is fed to the choices silently."""
    latency_class = _checked_class(config, request)
    if request.adapter and request.adapter not in engine.facts.adapters:
        message = f"model {request.model} has no adapter {request.adapter!r}."
        raise BadRequest(message, code="model_not_found", param="model")
    _check_position(request, resume)
    tokenizer, vocab_size = engine.tokenizer, engine.runner.vocab_size
    check_sampling(request.sampling)  # before it is computed with
    prompt = encode(engine, request)
    num_prompt_tokens = len(prompt.token_ids)
    _check_prompt_logprobs(request, num_prompt_tokens)
    is_scored_first = request.sampling.scores_prompt and not resume.num_prompt_logprobs
    sampling = resolve_params(
        request,
        engine.facts.sampling_defaults,
        num_prompt_tokens,
        engine.max_tokens,
        config.default_max_tokens,
        max_model_len=engine.facts.max_model_len,
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
        _refuse_forced_call(request)
    choices = _choices(tokenizer, request, resume, sampling, source, is_free=grammar is None)
    bad_word_ids = ids_of_bad_words(tokenizer, sampling, vocab_size) if sampling.bad_words else ()
    if sampling.allowed_token_ids:
        _check_choice(sampling, bad_word_ids, engine.facts.eos_token_ids, has_grammar=grammar is not None)
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
        prediction_token_ids=_ids_of_prediction(tokenizer, request.prediction, engine.max_tokens)
        if config.speculation == "lookup"
        else (),
        echoes=_echoes(tokenizer, request, resume, prompt) if request.echo else (),
        first_scored=prompt.token_ids[0] if is_scored_first else None,
    )


def _ids_of_prediction(tokenizer: Tokenizer, prediction: str, max_tokens: int) -> tuple[int, ...]:
    """Return the tokens of what the caller expects, as far as an answer can be."""
    if not prediction:
        return ()
    checked_bytes(prediction, "prediction")
    return tokenizer.text_ids(prediction)[:max_tokens]


def _checked_class(config: EngineConfig, request: GenerateRequest) -> LatencyClass:
    """Return the request's latency class. Raises BadRequest for what no prompt and no model make right."""
    check_needs(request.needs)
    refuse_parts(request)
    for name in ("input", "state"):
        if getattr(request, name):
            message = f"{name} is for pipelines, and {request.model} is a model. Send messages or prompt."
            raise BadRequest(message, code="invalid_value", param=name)
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
            # The text of a grammar is its tokens' bytes, to the first byte.
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

    has_prompt = request.shows_prompt  # of choices but the first: its text only
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
    *,
    max_model_len: int = 0,
) -> SamplingParams:
    """Resolve what the caller left open: sampling fields by the model's `defaults`, the seed, and max_tokens.

    max_tokens is a maximum: it is lowered to what fits within `limit`. A prompt that leaves no room for a token of an
    answer does not fit. Where the limit is that of the KV memory, the message has `max_model_len` too.
    """
    asked = request.sampling.max_tokens
    if num_prompt_tokens + (1 if asked is None else min(asked, 1)) > limit:
        limits, way_out = f"this model takes {limit:,} with the answer", "Shorten the prompt."
        if limit < max_model_len:
            limits = f"the memory of this model holds {limit:,} with the answer, of the {max_model_len:,} it takes"
            way_out = "Shorten the prompt, or raise KV_CACHE_BYTES."
        raise PromptTooLong(f"prompt has {num_prompt_tokens:,} tokens; {limits}. {way_out}", param="prompt")
    room = limit - num_prompt_tokens
    resolved: dict[str, float] = {name: value for name, value in defaults.items() if name in request.unset}
    resolved["max_tokens"] = min(room, (default_max_tokens or room) if asked is None else asked)
    if request.sampling.seed is None:
        resolved["seed"] = secrets.randbits(63)
    return replace(request.sampling, **resolved)  # type: ignore[arg-type]


def _check_ids(request: GenerateRequest, resume: Resume, prompt: Prompt, vocab_size: int) -> None:
    """Refuse ids that the model lacks: its tokenizer may have more, and such an id would break the whole step."""
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


def ids_of_bad_words(tokenizer: Tokenizer, sampling: SamplingParams, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each bad word, as they stand at the beginning of a word and within a word.

    A tokenizer may have ids that its model lacks: words with these never come.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in sampling.bad_words:
        inner, outer = tokenizer.text_ids(word), tokenizer.text_ids(" " + word.lstrip())
        if not inner:
            raise BadRequest(f"{word!r} has no tokens in this model.", code="invalid_value", param="bad_words")
        found[inner] = None
        # A space of its own before the word changes nothing: the word after it is `inner`.
        if outer and outer[-len(inner) :] != inner:
            found[outer] = None
    return tuple(word for word in found if max(word) < vocab_size)


def _refuse_forced_call(request: GenerateRequest) -> None:
    """Raise BadRequest for a forced call of an engine without an output format: the echo engine by itself."""
    if request.tool_choice.mode == "required":
        raise BadRequest(
            "the echo engine makes no tool calls unless MODELS gives it a FORMAT. Set a format, such as qwen3, or use "
            "tool_choice auto or none.",
            code="tools_unsupported",
            param="tool_choice",
        )


def _check_prompt_logprobs(request: GenerateRequest, num_prompt_tokens: int) -> None:
    """Refuse log-probabilities of a system prompt that is the server's own, and more than a request may have.

    Each prompt token counts, and each candidate beside it.
    """
    top = request.sampling.prompt_logprobs
    if top is None:
        return
    if request.public_messages:
        message = (
            "prompt_logprobs would show this server's own system prompt. Send messages with your own, or a prompt."
        )
        raise BadRequest(message, code="conflicting_fields", param="prompt_logprobs")
    if num_prompt_tokens * (top + 1) > MOST_PROMPT_CANDIDATES:
        raise BadRequest(
            f"prompt_logprobs of {num_prompt_tokens:,} tokens with {top} candidates each; prompt tokens times "
            f"(prompt_logprobs + 1) may be {MOST_PROMPT_CANDIDATES:,}. Shorten the prompt or lower it.",
            code="invalid_value",
            param="prompt_logprobs",
        )


def _check_choice(
    sampling: SamplingParams,
    bad_word_ids: tuple[tuple[int, ...], ...],
    eos_token_ids: frozenset[int],
    *,
    has_grammar: bool,
) -> None:
    """Refuse `allowed_token_ids` of which none can be chosen, or perhaps none where a grammar needs another."""
    if has_grammar:
        message = "A grammar decides which tokens are allowed; leave allowed_token_ids out, or the grammar and tools."
        raise BadRequest(message, code="conflicting_fields", param="allowed_token_ids")
    allowed = set(sampling.allowed_token_ids)
    left = allowed - {word[0] for word in bad_word_ids if len(word) == 1}
    if sampling.min_tokens:
        left -= {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    if not left:
        message = "allowed_token_ids leaves no token: bad_words, or min_tokens for an end, forbid all. Allow another."
        raise BadRequest(message, code="conflicting_fields", param="allowed_token_ids")


def _echoes(tokenizer: Tokenizer, request: GenerateRequest, resume: Resume, prompt: Prompt) -> tuple[str, ...]:
    """Return the prompt's text that each choice of a request with `echo` still has to begin with."""
    if request.messages is not None:
        text = request.messages[-1].content
    elif request.prompt is None or request.sampling.truncate_prompt_tokens is not None:
        text = tokenizer.decode(prompt.token_ids)
    else:
        text = request.prompt
    shown = (*resume.num_prompt_chars, *[0] * (request.n - len(resume.num_prompt_chars)))
    return tuple(text[num_chars:] for num_chars in shown[: request.n])
