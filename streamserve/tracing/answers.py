"""The spans of an answer, by OpenTelemetry's GenAI conventions: one for the answer, and one for each of its phases.

    chat demo                       ├──────────────────────────────────────────────────────┤
      auth, intake, loading          ├─┤
      queue                             ├─────┤
      prefill                                 ├───┤
      decode                                       ├──────────────┤         ├──────────────┤
      parked                                                      ├─────────┤
      deliver                            ├────────────────────────┤         ├──────────────┤  one for each reader

A request without a stream (embeddings, moderations) is one span. A phase is made of the times that `Timings` and the
engine have measured, once the answer is over: nothing happens for a token. Attributes are names, ids, counts and times;
no text of a caller or a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from streamserve.protocol.embeddings import NUMBER_BYTES, Embedded, EmbedRequest
from streamserve.protocol.events import Done, Usage
from streamserve.protocol.measures import FIRST_TOKEN, GENERATION, LOADING, PARKED, Timings, parts_of
from streamserve.protocol.requests import GenerateRequest
from streamserve.protocol.trace import Trace
from streamserve.tracing.spans import CLIENT, INTERNAL, SERVER, Span, is_in_use, running, start, within

# `gen_ai.operation.name`.
CHAT, TEXT_COMPLETION, TOOL, EMBEDDINGS = "chat", "text_completion", "execute_tool", "embeddings"
MODERATION = "moderation"  # the conventions have no name for it
AGENT, WORKFLOW = "invoke_agent", "invoke_workflow"
_NAME_OF_RUN = {AGENT: "gen_ai.agent.name", WORKFLOW: "gen_ai.workflow.name"}
PROVIDER = "streamserve"

_BEFORE = ("auth", "intake", LOADING)  # phases up to the acceptance, in order
_DECODE = "decode"
_OF_DECODE = ("first_decode", GENERATION)
LOST = "lost"  # why an answer is parked whose engine has ended


def operation_of(request: GenerateRequest) -> str:
    """Return what a model is asked to do."""
    return TEXT_COMPLETION if request.messages is None else CHAT


def asked(request: GenerateRequest, operation: str) -> dict[str, Any]:
    """Return the attributes of a request. Stop strings are text of the caller, and are left out."""
    sampling = request.sampling
    values = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        _NAME_OF_RUN.get(operation, "gen_ai.request.model"): request.model,
        "streamserve.latency_class": request.latency_class,
    }
    if operation in _NAME_OF_RUN:
        return values
    return values | {
        "gen_ai.request.choice.count": request.n if request.n > 1 else None,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
    }


def used(usage: Usage, finish_reason: str | None) -> dict[str, Any]:
    """Return the attributes of an end."""
    return {
        "gen_ai.response.finish_reasons": None if finish_reason is None else (finish_reason,),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens or None,
    }


def of_tool(name: str, call_id: str, kind: str) -> dict[str, Any]:
    """Return the attributes of a call of a tool; its arguments and its result are text of users and models."""
    return {
        "gen_ai.operation.name": TOOL,
        "gen_ai.tool.name": name,
        "gen_ai.tool.call.id": call_id,
        "gen_ai.tool.type": kind,
    }


def begin_answer(request: GenerateRequest, operation: str, parent: Trace | None, at: float) -> Span | None:
    """Begin the span of an answer that a caller has asked for; None where the site records none."""
    if not is_in_use():
        return None
    span = _begin(f"{operation} {request.model}", asked(request, operation), parent, at)
    if span is not None:
        span.is_of_run = operation in _NAME_OF_RUN
    return span


@contextmanager
def without_stream(operation: str, model: str, parent: Trace | None, at: float) -> Iterator[Span | None]:
    """Record a request that has no stream, from `at` to the end of the block, as one span."""
    values = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
    }
    with running(_begin(f"{operation} {model}", values, parent, at) if is_in_use() else None) as span:
        yield span


def embedded(request: EmbedRequest, made: Embedded) -> dict[str, Any]:
    """Return the attributes of vectors that were made."""
    return {
        "gen_ai.embeddings.dimension.count": len(made.vectors[0]) // NUMBER_BYTES if made.vectors else None,
        "gen_ai.usage.input_tokens": made.num_tokens,
        "streamserve.num_inputs": len(request.inputs),
    }


def _begin(name: str, values: Mapping[str, Any], parent: Trace | None, at: float) -> Span | None:
    """Begin the span of what a caller has asked for."""
    links: tuple[Trace, ...] = ()
    if parent is not None and parent.begins_anew:
        links, parent = (parent,), None
    kind = INTERNAL if parent is not None and parent.is_recorded else SERVER
    return start(name, parent, at=at, kind=kind, attributes=values, links=links)


def add_phases(span: Span, timings: Timings, ended_at: float, phases: Mapping[str, float]) -> None:
    """Add a child for each phase of an answer, as far as it lies within its span. A run's steps have their own."""
    if not span.is_sampled:
        return
    for name, began, ended, reason in _laid_out(timings, ended_at, phases, is_run=span.is_of_run):
        if ended <= span.began:  # in another process, or another attempt
            continue
        began = max(began, span.began)
        if reason == LOST:
            span.note("streamserve.engine_lost", began)
        span.part(name, began, ended, {"streamserve.park.reason": reason or None})


@contextmanager
def inner_answer(request: GenerateRequest, trace: Trace | None) -> Iterator[Span | None]:
    """Record a model's answer within a run, or for what the site does itself."""
    if trace is None or not trace.is_recorded:
        yield None
        return
    operation = operation_of(request)
    with within(trace, f"{operation} {request.model}", attributes=asked(request, operation)) as span:
        yield span


def describe_inner(span: Span, done: Done, asked_at: float | None, *, num_parks: int) -> None:
    """Add what such an answer has used, and a child for each phase after `asked_at` that its engine measured.

    None: it has measured the last part alone, after a park.
    """
    span.describe({**used(done.usage, done.finish_reason), "streamserve.num_parks": num_parks})
    if asked_at is not None and span.is_sampled:
        parts = parts_of(done.breakdown)
        for name, began, ended in _in_row(asked_at, parts, _names(parts)):
            span.part(name, began, ended)


@contextmanager
def asked_elsewhere(trace: Trace | None, *, model: str, url: str, provider: str) -> Iterator[Elsewhere | None]:
    """Record a request to a server elsewhere; what is yielded has the headers that it carries, and takes its end."""
    if trace is None:
        yield None
        return
    where = urlsplit(url)
    values = {
        "gen_ai.operation.name": CHAT,
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": model,
        "server.address": where.hostname,
        "server.port": where.port,
    }
    with within(trace, f"{CHAT} {model}", kind=CLIENT, attributes=values) as span:
        yield Elsewhere(trace if span is None else span.trace, span)


class Elsewhere:
    """A request to a server elsewhere. Without spans it carries the caller's own header on."""

    def __init__(self, trace: Trace, span: Span | None) -> None:
        self.headers, self._span = trace.headers, span

    def end(self, usage: Usage, finish_reason: str) -> None:
        """Add what it has used."""
        if self._span is not None:
            self._span.describe(used(usage, finish_reason))


def _laid_out(
    timings: Timings, ended_at: float, phases: Mapping[str, float], *, is_run: bool
) -> Iterator[tuple[str, float, float, str]]:
    """Yield the name, the beginning and the end of each phase, and why the answer was parked in it."""
    for name, began, ended in _in_row(timings.started_at, phases, [name for name in _BEFORE if name in phases]):
        yield name, began, ended, ""
    is_parked = any(name == PARKED for name, _, _ in timings.changes)
    if timings.accepted_at is not None and not is_parked and not is_run and FIRST_TOKEN not in phases:
        for name, began, ended in _in_row(timings.accepted_at, phases, _names(phases)):
            yield name, began, min(ended, ended_at), ""
        return
    ends = [*(began for _, began, _ in timings.changes[1:]), ended_at]
    for (name, began, reason), ended in zip(timings.changes, ends, strict=True):
        if name == PARKED or not is_run:
            yield _DECODE if name == GENERATION else name, began, ended, reason


def _names(parts: Mapping[str, float]) -> list[str]:
    return [name for name in ("queue", "prefill", _DECODE) if name in parts or name == _DECODE]


def _in_row(at: float, parts: Mapping[str, float], names: Sequence[str]) -> Iterator[tuple[str, float, float]]:
    """Yield parts that follow each other from `at` on."""
    for name in names:
        seconds = sum(parts.get(one, 0.0) for one in _OF_DECODE) if name == _DECODE else parts[name]
        if seconds > 0.0:
            yield name, at, at + seconds
        at += seconds
