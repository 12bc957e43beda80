"""A request as three frozen values, which go whole from a body to the engine, and the JSON that keeps them in a row.

    GenerateRequest   what was asked                        dialects make it of a body, after checking every field once
    Admission         what was decided about it             the site makes it: whose it is, its salt, id and times
    Resume            where its answer continues            the stream makes it: what was shown, its reader's position

`SamplingParams` are a part of the first, and go whole to the sampler.

Two releases share the rows during a rolling restart. An event's unknown field is skipped, a request's must not be:
without its grammar an answer is silently another answer. So a row keeps no field at its default, and a field that is
unknown here is refused. What no field expresses a request names in `needs`, and `check_needs` refuses what is not in
`KNOWN_NEEDS`: an answer in blocks is such a need, as an engine that does not parse them would continue it with tokens
outside of any block. No web process uses an engine process of another version. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from streamserve.protocol.engine import Accepted
from streamserve.protocol.errors import BadRequest, UnmetNeeds
from streamserve.protocol.events import BlockText, Status
from streamserve.protocol.trace import Trace, parse

PARTS = "parts"
# The types of a message's parts: of text, with the field that has it; and of what only models elsewhere take.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
OTHER_PARTS = ("image_url", "input_audio", "file")
# What a request may need of the release that serves it, beside its fields.
KNOWN_NEEDS = frozenset({"blocks", "filters", PARTS})

# Roles of a message by which the caller has a system prompt of its own ("developer" is OpenAI's newer word).
SYSTEM_ROLES = ("system", "developer")
# Variables of chat templates that the server sets: by them a caller could replace the prompt, or change how it is made
# (CVE-2025-62426: `tokenize`, which other servers take).
RESERVED_TEMPLATE_NAMES = frozenset(
    {
        *("messages", "conversation", "tools", "chat_template", "tokenize", "tokenizer_kwargs", "processor_kwargs"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"),
        *("additional_special_tokens", "raise_exception", "strftime_now", "namespace"),
    }
)


@dataclass(frozen=True, slots=True)
class Range:
    """What an engine can compute with, whatever a site allows: `low` to `high`.

    With `is_model_default` the generation config of a model may set the field where the caller does not.
    """

    low: float
    high: float
    is_model_default: bool = False


_MAX_COUNT = 2**31 - 1
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, penalties 0 / 0 / 1 mean off. `max_tokens` None means
    as many as fit (clamped at acceptance). `logprobs` None is off, 0 the chosen token only, k the k likeliest as well.
    `seed` None lets acceptance draw a seed, which is then fixed for the life of the stream.
    `logit_bias` adds to the logits of token ids, before everything else. Only `allowed_token_ids` may be chosen, where
    there are any; the token sequences of `bad_words` never are. `include_stop` keeps the stop string that ended the
    answer in its text, and the text of a stop token. `prompt_logprobs` k asks for the log-probabilities of the prompt's
    own tokens and the k likeliest at each place; None is off. `skip_special_tokens` False shows special tokens that the
    model writes. Only the last `truncate_prompt_tokens` tokens of the prompt are kept, -1 as many as fit, None all.
    """

    temperature: Annotated[float, Range(0.0, 1e6, is_model_default=True)] = 1.0
    top_k: Annotated[int, Range(0, _MAX_COUNT, is_model_default=True)] = 0
    top_p: Annotated[float, Range(1e-6, 1.0, is_model_default=True)] = 1.0
    min_p: Annotated[float, Range(0.0, 1.0, is_model_default=True)] = 0.0
    presence_penalty: Annotated[float, Range(-1e3, 1e3)] = 0.0
    frequency_penalty: Annotated[float, Range(-1e3, 1e3)] = 0.0
    repetition_penalty: Annotated[float, Range(1e-3, 1e3, is_model_default=True)] = 1.0
    seed: Annotated[int | None, Range(0, _MAX_SEED)] = None
    max_tokens: Annotated[int | None, Range(0, _MAX_COUNT)] = None
    min_tokens: Annotated[int, Range(0, _MAX_COUNT)] = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int | None, Range(0, 1_000)] = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    include_stop: bool = False
    prompt_logprobs: Annotated[int | None, Range(0, 1_000)] = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int | None, Range(-1, _MAX_COUNT)] = None

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt's own tokens are asked for."""
        return self.prompt_logprobs is not None

    @property
    def num_prompt_candidates(self) -> int:
        """How many tokens are named at each place of the prompt that is scored: its own, and those asked for beside."""
        return 1 + (self.prompt_logprobs or 0)

    @property
    def logprob_fields(self) -> tuple[str, ...]:
        """The fields by which log-probabilities are asked for."""
        return tuple(name for name in ("logprobs", "prompt_logprobs") if getattr(self, name) is not None)

    def of_choice(self, index: int) -> SamplingParams:
        """Return the params of one of several choices: each has a seed of its own, and the first scores the prompt for
        all.

        The seed is resolved.
        """
        assert self.seed is not None
        seed = (self.seed + index) & _MAX_SEED
        return replace(self, seed=seed, prompt_logprobs=None if index else self.prompt_logprobs)


_RANGED = {
    name: get_args(hint)
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    if get_origin(hint) is Annotated
}
RANGES: Mapping[str, Range] = MappingProxyType({name: allowed for name, (_, allowed) in _RANGED.items()})
_WHOLE = frozenset(name for name, (kind, _) in _RANGED.items() if kind is not float)
# Fields that a model's generation config may set where the caller does not.
MODEL_DEFAULTS = tuple(name for name, found in RANGES.items() if found.is_model_default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments; `strict` enforces it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether the model may ("auto"), must ("required") or must not ("none") call a tool.

    `names` are the tools that it may call, () all of them: a named choice is "required" with one name.
    """

    mode: str = "auto"
    names: tuple[str, ...] = ()


GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "choice", "lark", "gbnf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the text of an answer must match. `kind` is one of GRAMMAR_KINDS.

    `value` is the JSON schema, as JSON text; the regular expression; the choices, as the JSON text of a list of
    strings; or the Lark or GBNF grammar. "json_object" has "". With thoughts or tool calls beside it, it holds for the
    text blocks only.
    """

    kind: str
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A file of text in a message: its text is in the message's content, from `start` to `end` (attached.py)."""

    name: str
    type: str
    start: int
    end: int
    is_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation. `content` is text; the chat template gets `extra` too (tool calls, name).

    `extra["tool_calls"]` are calls in OpenAI's shape; their arguments are JSON text, or text that is none. `param` is
    the turn's place in the caller's body, for errors; "" for a turn of the server's own. `attached` are the files whose
    text is at the beginning of `content`; what follows it, from `words_start`, is what the caller wrote. `parts` is the
    content as it was sent, where it has more than text (images, files): of a model elsewhere that takes them.
    """

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    param: str = field(default="", compare=False)
    attached: tuple[Attached, ...] = ()
    words_start: int = 0
    parts: tuple[Mapping[str, Any], ...] = ()

    @property
    def words(self) -> str:
        """The content without the files before it."""
        return self.content[self.words_start :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Approved:
    """A user's answer to an `Approval`: whether the call `id` may run. `message` is for the model, or ""."""

    id: str
    allow: bool
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownChoice:
    """What readers were shown of one choice whose engine gives no token ids: its blocks, in `num_tokens` tokens."""

    blocks: tuple[BlockText, ...] = ()
    num_tokens: int = 0


# The class of the rows of batches: computed in what all other classes leave, and first to give blocks back.
BATCH = "batch"
# The class of prompts that are only to be cached, which no request names: computed while there is nothing else to do.
# (Its name is in the statistics.)
PREFILL_ONLY = "warm"
# What a request may name as its `latency_class`; engine/config.py has their budgets.
LATENCY_CLASSES = ("chat", "completion", "document", BATCH)
# The routes whose requests may have another class by default.
ROUTES_WITH_CLASSES = ("streams", "websocket", "chat_completions", "responses", "completions", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request to a model, as it was asked: exactly one of `messages`, `prompt` and `prompt_token_ids` is set.

    A pipeline is requested like a model, and takes `input`, a JSON object, beside or instead of them. `state` is what
    its run's state begins with.

    `unset` names the sampling fields that the caller left open: the model's generation config fills those it has a
    default for, acceptance `seed` and `max_tokens`. `needs` names what the request cannot do without.
    `tools` are shown to the model by its chat template; with `parallel_tool_calls` False it calls one tool at most.
    `prediction`: what the caller expects the answer to be; it makes it faster where it is right, and changes nothing.
    `adapter`: the adapter of the model that answers, "" for the model itself. No body sets it: callers name an adapter
    as they name a model (clients/adapter.py).
    `continue_final_message`: the last message is the beginning of the answer, and is not closed. `echo`: the answer
    begins with the text of the prompt.
    `has_public_system`: the first message is the server's own (`with_system`), and its blocks need no salt; or the
    first `num_static_messages` are a pipeline's, the same in every run of it. No body sets either.
    `continues`: the run of that stream, which has ended in `interrupt`, goes on with the answers `approvals`; the rest
    is that run's own request (api/interrupts.py).
    """

    model: str
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    input: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    unset: tuple[str, ...] = ()
    n: int = 1
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float | None = None
    latency_class: str = "chat"
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None
    prediction: str = ""
    adapter: str = ""
    continue_final_message: bool = False
    echo: bool = False
    needs: tuple[str, ...] = ()
    has_public_system: bool = False
    num_static_messages: int = 0
    continues: str = ""
    approvals: tuple[Approved, ...] = ()

    @property
    def public_messages(self) -> tuple[Message, ...]:
        """The messages before anything of a caller's."""
        return (self.messages or ())[: self.num_static_messages or int(self.has_public_system)]

    @property
    def shows_prompt(self) -> bool:
        """Whether readers are shown something of the prompt: its text, or the log-probabilities of its tokens."""
        return self.echo or self.sampling.scores_prompt

    @property
    def is_row(self) -> bool:
        """Whether it is a row of a batch, or in the class of rows."""
        return self.latency_class == BATCH

    def of_prefill(self) -> GenerateRequest:
        """Return the request that only fills the prefix cache with the prompt, and generates nothing."""
        sampling = replace(self.sampling, max_tokens=0, min_tokens=0, prompt_logprobs=None)
        return replace(self, sampling=sampling, n=1, latency_class=PREFILL_ONLY, grammar=None, echo=False)

    def with_seed(self, seed: int) -> GenerateRequest:
        """Return the request with this seed, where the caller left it open."""
        if self.sampling.seed is not None:
            return self
        return replace(self, sampling=replace(self.sampling, seed=seed), unset=(*self.unset, "seed"))

    def as_accepted(self, accepted: Accepted) -> GenerateRequest:
        """Return the request with what acceptance has decided, so that asking again gives the same tokens."""
        unset = tuple(name for name in ("seed", "max_tokens") if getattr(self.sampling, name) is None)
        sampling = replace(self.sampling, seed=accepted.seed, max_tokens=accepted.max_tokens)
        needs = tuple(sorted({*self.needs, *accepted.needs}))
        return replace(self, sampling=sampling, unset=self.unset + unset, needs=needs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """What identifies a request that is answered once: digests of its caller and key, and of what it asks."""

    key: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadKey:
    """A client's own id of a conversation, in its dialect; another tenant may have the same."""

    dialect: str
    client_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A new question in a conversation. `content` is its message's JSON, `text` what is searched.

    `client_id`: the id that its client has given it ("": none).
    """

    id: str
    content: str
    text: str
    attachment_ids: tuple[str, ...] = ()
    client_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a client brings before its question: a result of its tool, or a message of an earlier conversation."""

    id: str
    role: str
    content: str
    text: str
    client_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the start of an answer adds to a conversation: a message for the answer, and its question before it.

    `parent_id`: the message that they follow ("": none). Without a question the answer follows `parent_id` itself: as
    another answer to that question, or as the continuation of that answer; or it follows the last of `given`, which
    stand between `parent_id` and the question. `source`: what has begun the conversation, where this makes it ("": it
    is there).
    """

    conversation_id: str
    answer_id: str
    parent_id: str = ""
    given: tuple[Given, ...] = ()
    question: Question | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What is decided about a request beside what it asks.

    Limits are counted per `owner`; every caller of `tenant` may read the stream. `counted_as` stands for both in the
    counting, where callers share it ("": they do not). `salt` keeps prefix-cache blocks apart between tenants ("" only
    where the server itself made the whole prompt). `on_disconnect` is what becomes of the answer without a reader
    (`ON_DISCONNECT` in streams/stream.py). With `once` there is one stream of that key. `begins_unloaded`: while its
    model loads the answer begins and shows `status: loading`; else its start waits. `turn` is inserted with the
    stream's record, and `thread` then has this stream as its last. `trimmed` is shown first of all: what of its files
    the prompt leaves out.

    Times are of `time.monotonic()`, which is one clock for all processes of a machine. Times of the answer count from
    `received_at` (None: from its start). `arrived_at`: its place in the engine's queue, which begins when its caller
    had a place for it and its model was there; None: when the engine accepts it. `waited_seconds`: of the patience of
    its class, what it spent before that. `stream_id` is given at its start. `trace`: the span that what is done for it
    is below; before its start the request's, None for none.
    """

    owner: str
    tenant: str
    counted_as: str = ""
    salt: str = ""
    on_disconnect: str = "park"
    once: Once | None = None
    begins_unloaded: bool = False
    turn: Turn | None = None
    thread: ThreadKey | None = None
    trimmed: Status | None = None
    stream_id: str = ""
    received_at: float | None = None
    arrived_at: float | None = None
    waited_seconds: float = 0.0
    trace: Trace | None = None

    @property
    def place_of(self) -> str:
        """Whose place among the concurrent streams it takes."""
        return self.counted_as or self.owner

    @property
    def share_of(self) -> str:
        """Whose share of the engine it takes."""
        return self.counted_as or self.tenant


# Of what the server itself asks its engines.
NO_CALLER = Admission(owner="", tenant="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where an answer continues, after a park, a loss or a wait; the default is its beginning.

    `output_token_ids[choice]` are tokens already shown to readers: generation continues after them. `shown[choice]` is
    the same for an engine that gives no ids. `replay`: the events of `output_token_ids` come again, before the
    new events; an engine that gives no ids cannot do that, and continues no answer that has begun.
    `num_prompt_chars[choice]` of the text of an echoed prompt, and the log-probabilities of the first
    `num_prompt_logprobs` tokens, were shown. `reader_tokens[choice]` is how many output tokens the furthest reader has
    received; None lets the engine compute ahead of its readers. `first_token_at`: `time.monotonic()` of the first
    token, None before it. `num_losses` counts how often an engine has ended in a step with this answer since its last
    new token. `was_admitted`: an engine has accepted it before, so that no full queue refuses it now.
    """

    output_token_ids: tuple[tuple[int, ...], ...] = ()
    shown: tuple[ShownChoice, ...] = ()
    replay: bool = False
    num_prompt_chars: tuple[int, ...] = ()
    num_prompt_logprobs: int = 0
    reader_tokens: tuple[int, ...] | None = None
    first_token_at: float | None = None
    num_losses: int = 0
    was_admitted: bool = False

    @property
    def has_tokens(self) -> bool:
        """Whether readers were shown a token id."""
        return any(self.output_token_ids)

    def output_of(self, choice: int) -> tuple[int, ...]:
        """Return the ids that were shown of a choice."""
        return self.output_token_ids[choice] if choice < len(self.output_token_ids) else ()


START = Resume()


def with_system(request: GenerateRequest, system: str) -> GenerateRequest:
    """Return a chat with the server's own system prompt as its first message, unless the caller sent a prompt."""
    messages = request.messages
    if not system or not messages or any(message.role in SYSTEM_ROLES for message in messages):
        return request
    return replace(request, messages=(Message(role="system", content=system), *messages), has_public_system=True)


_MOST_BIAS = 1e6


def check_sampling(sampling: SamplingParams) -> None:
    """Raise BadRequest for a value that a step cannot be computed with; None is none.

    The engine's own check, whatever was checked before: one such value would end a step for all its
    sequences.
    """
    for name, allowed in RANGES.items():
        value, is_whole = getattr(sampling, name), name in _WHOLE
        if value is None:
            continue
        is_number = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
        if not is_number or not allowed.low <= value <= allowed.high:  # false for NaN too
            kind = "a whole number" if is_whole else "a number"
            raise BadRequest(
                f"{name} is {value!r}; the engine takes {kind} from {allowed.low:g} to {allowed.high:g}.",
                code="invalid_value",
                param=name,
            )
    if sampling.truncate_prompt_tokens == 0:
        message = "truncate_prompt_tokens is 0; the engine takes 1 or more, or -1 for as many as fit."
        raise BadRequest(message, code="invalid_value", param="truncate_prompt_tokens")
    for name in ("stop", "bad_words"):
        if not all(getattr(sampling, name)):
            raise BadRequest(f"{name} has an empty string. Leave it out.", code="invalid_value", param=name)
    if not all(-_MOST_BIAS <= bias <= _MOST_BIAS for _, bias in sampling.logit_bias):  # false for NaN too
        raise BadRequest(
            f"logit_bias takes {-_MOST_BIAS:g} to {_MOST_BIAS:g}.", code="invalid_value", param="logit_bias"
        )


def size_of(request: GenerateRequest) -> int:
    """Return about how many bytes of memory a request takes, whatever it holds."""
    return len(repr(request))


def refuse_parts(request: GenerateRequest, taken: Sequence[str] = (), who: str = "this model") -> None:
    """Raise BadRequest for the first part of a message that is neither text nor of these types."""
    for message in request.messages or ():
        for index, part in enumerate(message.parts):
            if part["type"] not in (*TEXT_PARTS, *taken):
                place = f"{message.param}.content[{index}]"
                message_ = f"{place} is of type {part['type']}; {who} takes {', '.join(('text', *taken))} only."
                raise BadRequest(message_, code="unsupported_content", param=place)


def check_needs(needs: tuple[str, ...]) -> None:
    """Raise UnmetNeeds for the needs of a request that this release lacks."""
    unmet = sorted(set(needs) - KNOWN_NEEDS)
    if unmet:
        message = f"The request needs {', '.join(unmet)}, which this release lacks. A newer process may serve it."
        raise UnmetNeeds(message, param="needs")


_PLAIN_SAMPLING: Mapping[str, Any] = msgspec.to_builtins(SamplingParams())
# The fields' defaults, of which a row keeps none; the model is always kept.
_PLAIN: Mapping[str, Any] = {
    **msgspec.to_builtins(GenerateRequest(model=""), enc_hook=dict),
    "sampling": {},
    "model": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What a row keeps in one column: the request, and of its admission what has no column of its own."""

    request: GenerateRequest
    salt: str
    arrived_at: float | None
    trace: str = ""


def encode_request(request: GenerateRequest, admission: Admission) -> dict[str, Any]:
    """Return the request as JSON values, for `decode_request` of this release or of another.

    A field at its default is left out, so that a release that does not know it reads the row all the same.
    """
    asked: dict[str, Any] = msgspec.to_builtins(request, enc_hook=dict)
    for message in asked["messages"] or ():
        del message["param"]  # of the body, which was accepted
        for name in ("attached", "words_start", "parts"):
            if not message[name]:
                del message[name]
    if any(message.parts for message in request.messages or ()):
        asked["needs"] = sorted({*request.needs, PARTS})
    asked["sampling"] = {name: one for name, one in asked["sampling"].items() if one != _PLAIN_SAMPLING[name]}
    asked = {name: one for name, one in asked.items() if one != _PLAIN[name]}
    kept = {"request": asked, "salt": admission.salt, "arrived_at": admission.arrived_at}
    return kept if admission.trace is None else {**kept, "trace": admission.trace.header}


def decode_request(value: object, admission: Admission) -> tuple[GenerateRequest, Admission]:
    """Return the request that `encode_request` has made `value` of, and `admission` with what the row keeps of it.

    Raises UnmetNeeds for a request that needs what this release lacks, or has a field that it does not know; ValueError
    for anything that is no request: a missing or wrong field.
    """
    check_needs(tuple(_unknown_fields(value)))
    kept = msgspec.convert(value, _Kept)  # its ValidationError is a ValueError
    check_needs(kept.request.needs)
    trace = parse(kept.trace) if kept.trace else None
    return kept.request, replace(admission, salt=kept.salt, arrived_at=kept.arrived_at, trace=trace)


def _unknown_fields(value: object) -> Iterator[str]:
    """Yield the names of the fields that a kept request and its sampling have beside those that are known here."""
    asked = value.get("request") if isinstance(value, Mapping) else None
    sampling = asked.get("sampling") if isinstance(asked, Mapping) else None
    for found, known in ((asked, _PLAIN), (sampling, _PLAIN_SAMPLING)):
        if isinstance(found, Mapping):
            yield from map(str, found.keys() - known.keys())
