"""What is asked for, as frozen values: `SamplingParams`, `Message`, `GenerateRequest`.

Dialects make these from bodies, after checking every field once; everything below trusts them. `decode_request` reads
one back from where it was kept. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

LATENCY_CLASSES = ("chat", "completion", "document", "batch")
# What a model's generation config may decide where the caller does not.
MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, penalties 0 / 0 / 1 mean off. `max_tokens` None means
    as many as fit (clamped at acceptance). `logprobs` None is off, 0 the chosen token only, k the k likeliest as well.
    `seed` None lets the server draw one at acceptance, which is then fixed for the life of the stream.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation. `content` is text; `extra` is for the chat template (tool calls, name)."""

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request to a model: exactly one of `messages`, `prompt` and `prompt_token_ids` is set.

    `salt` keeps prefix-cache blocks apart between tenants ("" only where the server itself made the whole prompt).
    `output_token_ids[choice]` are tokens already shown to readers: an unparked or re-admitted stream sends them back,
    and generation continues after them. `unset` names the sampling fields that the caller left open: the model's
    generation config fills those it has an opinion on, acceptance `seed` and `max_tokens`. `arrived_at` is
    `time.monotonic()` of the first arrival (one clock for all processes of a machine), `first_token_at` of the first
    token, when there was one. `reader_tokens[choice]` says how many output tokens the furthest reader has received;
    None: nobody's reading is waited for.
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


def decode_request(value: object) -> GenerateRequest:
    """Return the request that `dataclasses.asdict` and JSON have made `value` of.

    Raises ValueError for anything else: a missing or wrong field, or one that this release does not know.
    """
    names = {one.name for one in fields(GenerateRequest)}
    unknown = set(value) - names if isinstance(value, Mapping) else set()
    if unknown:
        raise ValueError(f"a request with {', '.join(sorted(map(str, unknown)))}, which is not known here")
    return msgspec.convert(value, GenerateRequest)  # its ValidationError is a ValueError
