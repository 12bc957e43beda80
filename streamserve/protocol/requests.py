"""A request as frozen values: `SamplingParams`, `Message`, `GenerateRequest`; the JSON that keeps one in its row; and
`Limits`, one value that bounds every number and size a client can send, before anything is allocated.

Dialects make these from bodies, after checking every field once; everything below trusts them.

Two releases share the rows and the engine processes during a rolling restart. An event's unknown field is skipped, a
request's must not be: without its grammar an answer is silently another one. So a request names in `needs` what it
cannot do without, and `check_needs` refuses what is not in `KNOWN_NEEDS`. A field that may be dropped is no need. An
answer in blocks is a need: an engine that does not parse them would continue it with tokens outside of any block.
0.1.0 knows no `needs`: it refuses a row that has the field (hence none is written where there are none), and its engine
would drop it, but no worker uses an engine process of another version. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from streamserve.protocol.errors import BadRequest, UnmetNeeds
from streamserve.protocol.events import BlockText


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds, inclusive. Sizes in bytes, lengths in characters or tokens, times in seconds."""

    max_body_bytes: int = 1024 * 1024
    max_json_depth: int = 64
    max_json_containers: int = 20_000  # arrays and objects in a body; a flat list of numbers is one
    max_messages: int = 512
    max_prompt_chars: int = 400_000
    max_tokens: int = 16_384
    max_n: int = 16
    max_prompts: int = 16
    max_stop: int = 16
    max_stop_chars: int = 64
    max_stop_token_ids: int = 64
    max_logprobs: int = 20
    max_logit_bias: int = 1_024
    max_allowed_token_ids: int = 4_096
    max_bad_words: int = 64
    max_bad_word_chars: int = 64
    max_temperature: float = 2.0
    max_top_k: int = 1_000_000
    max_timeout_seconds: float = 3600.0
    max_websocket_message_bytes: int = 256 * 1024
    max_metadata_keys: int = 16
    max_metadata_key_chars: int = 64
    max_metadata_chars: int = 512
    max_template_kwargs: int = 16
    max_tools: int = 128
    max_grammar_chars: int = 65_536
    max_file_bytes: int = 200 * 1024 * 1024
    max_tenant_file_bytes: int = 2 * 1024 * 1024 * 1024  # of all files that a tenant keeps
    max_uploads: int = 64  # bodies with a file that a process receives at a time
    max_uploads_per_principal: int = 8
    max_upload_bytes: int = 2 * 1024 * 1024 * 1024  # of all those bodies together
    max_batch_lines: int = 50_000
    max_batches: int = 16  # of a tenant that have not ended
    max_streams_per_principal: int = 16
    max_streams_per_visitor: int = 4  # without a login; requests without a cookie: of one client address
    max_streams_per_address: int = 16  # of all visitors of one client address; 0 is no bound
    max_streams_anonymous: int = 64  # of all visitors together
    max_queued_per_principal: int = 64  # requests that wait for one of these places, in a process
    max_queued_anonymous: int = 256  # of all visitors together
    max_jobs_per_principal: int = 100  # that have not ended
    max_jobs_per_visitor: int = 4
    max_jobs_anonymous: int = 32
    max_connections: int = 10_000  # requests and WebSockets in progress in a process; 0 is no bound
    max_connections_per_address: int = 0
    max_wrong_keys: int = 20  # that one address may send within a minute


# What a request may need of the release that serves it: fields that change the answer and that 0.1.0 does not know.
KNOWN_NEEDS = frozenset({"blocks", "filters", "grammar", "pipeline", "sampling", "tools"})

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, penalties 0 / 0 / 1 mean off. `max_tokens` None means
    as many as fit (clamped at acceptance). `logprobs` None is off, 0 the chosen token only, k the k likeliest as well.
    `seed` None lets acceptance draw one, which is then fixed for the life of the stream.
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
    seed: Annotated[int | None, Range(0, 2**63 - 1)] = None
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
class Message:
    """One turn of a conversation. `content` is text; the chat template gets `extra` too (tool calls, name).

    `extra["tool_calls"]` are calls in OpenAI's shape; their arguments are JSON text, or text that is none. `param` is
    the turn's place in the caller's body, for errors; "" for a turn of the server's own.
    """

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    param: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownChoice:
    """What readers were shown of one choice whose engine gives no token ids: its blocks, in `num_tokens` tokens."""

    blocks: tuple[BlockText, ...] = ()
    num_tokens: int = 0


# What a request may name as its `latency_class`; docs/settings.md has their budgets.
LATENCY_CLASSES = ("chat", "completion", "document", "batch")
# The routes whose requests may have another one by default.
ROUTES_WITH_CLASSES = ("streams", "websocket", "chat_completions", "completions", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request to a model: exactly one of `messages`, `prompt` and `prompt_token_ids` is set.

    A pipeline is requested like a model, and takes `input`, a JSON object, beside or instead of them.

    `salt` keeps prefix-cache blocks apart between tenants ("" only where the server itself made the whole prompt).
    `output_token_ids[choice]` are tokens already shown to readers: an unparked or re-admitted stream sends them back,
    and generation continues after them; `shown[choice]` is the same for an engine that gives no ids. `unset` names the
    sampling fields that the caller left open: the model's generation config fills those it has a default for,
    acceptance `seed` and `max_tokens`. `arrived_at` is `time.monotonic()` of the first arrival (one clock for all
    processes of a machine), `first_token_at` of the first token, when there was one. `reader_tokens[choice]` is how
    many output tokens the furthest reader has received; None lets the engine compute ahead of its readers. `num_losses`
    says how often an engine has ended in a step with this answer since its last new token. `was_admitted`: an engine
    has accepted it before, so that no full queue refuses it now. `needs` names what the request cannot do without.
    `tools` are shown to the model by its chat template; with `parallel_tool_calls` False it calls one at most.
    `continue_final_message`: the last message is the beginning of the answer, and is not closed. `echo`: the answer
    begins with the text of the prompt. `num_prompt_chars[choice]` of that text, and the log-probabilities of the first
    `num_prompt_logprobs` tokens, readers were shown before this admission.
    `replay`: the events of `output_token_ids` come again, before the new ones; an engine that gives no ids cannot do
    that, and continues no answer that has begun.
    `has_public_system`: the first message is the server's own (`with_system`), and its blocks need no salt; or the
    first `num_static_messages` are a pipeline's, the same in every run of it. No body sets either.
    `counted_as`: whose share of the engine it takes, where that is not its tenant's alone.
    `waited_seconds`: of the patience of its class, what it has spent before it was asked for here.
    """

    model: str
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    unset: tuple[str, ...] = ()
    n: int = 1
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float | None = None
    latency_class: str = "chat"
    tenant: str = ""
    salt: str = ""
    stream_id: str = ""
    arrived_at: float | None = None
    output_token_ids: tuple[tuple[int, ...], ...] = ()
    first_token_at: float | None = None
    reader_tokens: tuple[int, ...] | None = None
    num_losses: int = 0
    was_admitted: bool = False
    needs: tuple[str, ...] = ()
    has_public_system: bool = False
    num_static_messages: int = 0
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None
    continue_final_message: bool = False
    echo: bool = False
    input: Mapping[str, Any] = field(default_factory=dict)
    shown: tuple[ShownChoice, ...] = ()
    num_prompt_chars: tuple[int, ...] = ()
    num_prompt_logprobs: int = 0
    replay: bool = False
    counted_as: str = ""
    waited_seconds: float = 0.0

    @property
    def share_of(self) -> str:
        """Whose share of the engine it takes."""
        return self.counted_as or self.tenant

    @property
    def public_messages(self) -> tuple[Message, ...]:
        """The messages before anything of a caller's."""
        return (self.messages or ())[: self.num_static_messages or int(self.has_public_system)]


def with_system(request: GenerateRequest, system: str) -> GenerateRequest:
    """Return a chat with the server's own system prompt as its first message, unless the caller sent one."""
    messages = request.messages
    if not system or not messages or any(message.role in SYSTEM_ROLES for message in messages):
        return request
    return replace(request, messages=(Message(role="system", content=system), *messages), has_public_system=True)


_MOST_BIAS = 1e6


def check_sampling(sampling: SamplingParams) -> None:
    """Raise BadRequest for a value that a step cannot be computed with; None is none.

    The engine's own check, whatever the door before it has checked: one such value would end a step for all its
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


def check_needs(needs: tuple[str, ...]) -> None:
    """Raise UnmetNeeds for the needs of a request that this release lacks."""
    unmet = sorted(set(needs) - KNOWN_NEEDS)
    if unmet:
        message = f"The request needs {', '.join(unmet)}, which this release lacks. A newer worker may serve it."
        raise UnmetNeeds(message, param="needs")


# Fields that 0.1.0 does not have, by the need that guards them: its rows have none of them at their default.
_ADDED_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tools": ("tools", "tool_choice", "parallel_tool_calls"),
        "grammar": ("grammar",),
        "sampling": ("continue_final_message", "echo", "num_prompt_chars", "num_prompt_logprobs"),
        "pipeline": ("input",),
        "filters": ("replay",),
    }
)
_ADDED_SAMPLING = (
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "include_stop",
    "prompt_logprobs",
    "skip_special_tokens",
    "truncate_prompt_tokens",
)
_PLAIN: Mapping[str, Any] = msgspec.to_builtins(GenerateRequest(model=""), enc_hook=dict)  # the fields' defaults


def encode_request(request: GenerateRequest) -> dict[str, Any]:
    """Return the request as JSON values, for `decode_request` of this release or of the one before.

    It names the needs that its own fields imply, beside those that it has already.
    """
    kept: dict[str, Any] = msgspec.to_builtins(request, enc_hook=dict)
    # Counted by the process that has the stream; in the log; so is every stream that has a row; in a column of the row;
    # before it was accepted.
    for name in ("num_losses", "shown", "was_admitted", "counted_as", "waited_seconds"):
        del kept[name]
    for message in kept["messages"] or ():
        del message["param"]  # of the body, which was accepted
    sampling, needs = kept["sampling"], set(request.needs)
    for name in _ADDED_SAMPLING:
        if sampling[name] == _PLAIN["sampling"][name]:
            del sampling[name]
        else:
            needs.add("sampling")
    for need, names in _ADDED_FIELDS.items():
        for name in names:
            if kept[name] == _PLAIN[name]:
                del kept[name]
            else:
                needs.add(need)
    kept["needs"] = sorted(needs)
    for name in ("needs", "has_public_system", "num_static_messages"):
        if not kept[name]:
            del kept[name]
    return kept


def decode_request(value: object) -> GenerateRequest:
    """Return the request that `encode_request` has made `value` of.

    Raises UnmetNeeds for a request that needs what this release lacks, ValueError for anything that is no request: a
    missing or wrong field, or an unknown one that no need explains.
    """
    names = {one.name for one in fields(GenerateRequest)}
    unknown: set[Any] = set()
    if isinstance(value, Mapping):
        unknown = set(value) - names
        if value.get("needs"):
            check_needs(msgspec.convert(value["needs"], tuple[str, ...]))
    if unknown:
        raise ValueError(f"a request with {', '.join(sorted(map(str, unknown)))}, which is not known here")
    return msgspec.convert(value, GenerateRequest)  # its ValidationError is a ValueError
