"""`Answers`: the service of every route that starts or finds an answer. asyncio; knows no HTTP and no database.

A site makes its `Answers` from its streams: Django's, with a row for each stream (web/site.py), the ASGI app's, without
a database (asgi/site.py), and a worker's, for the rows of batches (`rows_config`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from streamserve.api.call import Call, Caller
from streamserve.api.caller_rules import CallerRules, NoRules
from streamserve.api.embedders import Embedders
from streamserve.api.fitting import fit
from streamserve.api.history import shorten
from streamserve.api.idempotency import StartOnce, continuation_of
from streamserve.clients.base import EmbeddingClient, EngineClient
from streamserve.clients.pipeline.client import PipelineClient
from streamserve.dialects.asked import Asked
from streamserve.dialects.openai.chat import REASONING_FIELDS
from streamserve.protocol.embeddings import Embedded, EmbedRequest
from streamserve.protocol.errors import Answered, BadRequest, KeyReused, NotFound, no_model, no_stream
from streamserve.protocol.glass import ReaderTimes
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import (
    BATCH,
    LATENCY_CLASSES,
    ROUTES_WITH_CLASSES,
    Admission,
    GenerateRequest,
    Once,
    ThreadKey,
    Turn,
    with_system,
)
from streamserve.protocol.trace import Trace
from streamserve.streams.quota import Places
from streamserve.streams.registry import Streams
from streamserve.streams.store import Record
from streamserve.streams.stream import Stream
from streamserve.tracing.answers import EMBEDDINGS, embedded, without_stream
from streamserve.tracing.spans import Span, incoming

TEAM = "team:"  # begins what a team's callers are counted as


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What requests get that do not bring it.

    `systems`: alias → system prompt of every chat whose caller sends none; it is computed once for all callers.
    `latency_classes`: alias → class. `route_classes`: route → class, which goes before the model's. Raises ValueError.
    """

    systems: Mapping[str, str] = field(default_factory=dict)
    latency_classes: Mapping[str, str] = field(default_factory=dict)
    route_classes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = self.route_classes.keys() - set(ROUTES_WITH_CLASSES)
        if unknown:
            raise ValueError(f"route_classes has {min(unknown)!r}; routes are {', '.join(ROUTES_WITH_CLASSES)}")
        unknown = {*self.latency_classes.values(), *self.route_classes.values()} - set(LATENCY_CLASSES)
        if unknown:
            raise ValueError(f"{min(unknown)!r} is no latency class; they are {', '.join(LATENCY_CLASSES)}")

    def check_models(self, models: Collection[str]) -> None:
        """Raise ValueError for an alias that is not in `models`."""
        unknown = (self.systems.keys() | self.latency_classes.keys()) - set(models)
        if unknown:
            raise ValueError(f"defaults name the model {min(unknown)!r}; models are {', '.join(models)}")

    def class_of(self, route: str, model: str) -> str:
        """Return the class of a request that names none: the route's, the model's, or the class of chats."""
        return self.route_classes.get(route) or self.latency_classes.get(model) or LATENCY_CLASSES[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerConfig:
    """How the routes of a site answer; it does not change while the site lives.

    `takes_prompt_in_url`: whether `GET /streams/new?prompt=` starts answers; servers write addresses into their access
    logs. `takes_timings`: whether readers may report what they measured; `gap_budgets`: latency class → the budget of
    its gaps, in seconds. `reasoning_field`: where chat completions show thinking, one of REASONING_FIELDS. `unseal`
    opens the system prompt of a chat element's page; None where there are no such pages. `only_class` and
    `only_on_disconnect`, where set, apply to every answer, whatever its request asks.
    """

    limits: Limits
    default_model: str
    defaults: Defaults = Defaults()
    takes_prompt_in_url: bool = False
    takes_timings: bool = True
    gap_budgets: Mapping[str, float] = field(default_factory=dict)
    reasoning_field: str = REASONING_FIELDS[0]
    unseal: Callable[[str], str] | None = None
    only_class: str = ""
    only_on_disconnect: str = ""


def rows_config(config: AnswerConfig) -> AnswerConfig:
    """Return how the rows of batches are answered: in the latency class `batch`; each answer ends with its reader."""
    return replace(config, takes_prompt_in_url=False, unseal=None, only_class=BATCH, only_on_disconnect="abort")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A stream that the caller may read. `stream` is None once its events are dropped, `record` without a database."""

    stream: Stream | None
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Looked:
    """A stream of the caller's as it was found, without a hold on it."""

    id: str
    model: str
    latency_class: str  # "" where the row of an earlier release has none
    ttft: float | None  # the server's time to the first token, where it is known
    has_times: bool  # its reader has reported


NO_EMBEDDERS = "There is no embedding model here: EMBEDDING_MODELS in STREAMSERVE has none that you may use."


def _listed(what: str, names: Iterable[str]) -> str:
    """Return a sentence with the models that give it; "" where there are none."""
    known = ", ".join(names)
    return f"{what} come from: {known}." if known else ""


def _ignore(stream: Stream, caller: Caller) -> None:
    """Note nothing."""


@contextmanager
def _as_asked(turn: Turn | None) -> Iterator[None]:
    """Name a refusal's field as a conversation's body has it: `continue`."""
    try:
        yield
    except BadRequest as error:
        if turn is None or error.param != "continue_final_message":
            raise
        message = "This model's server cannot go on with an answer. Ask for another answer to the question."
        raise BadRequest(message, code=error.code, param="continue") from error


class Answers:
    """Starts answers for callers, within their limits, and finds those that a caller may read.

    Holds the streams and the config; changes nothing but streams. Another tenant's stream
    is not found, like an id that no stream has; a model that `rules` hide from a caller is not found either, here and
    nowhere else. `salt_of(tenant)` is the prefix-cache salt of a tenant or a team: a secret, so that blocks of two
    tenants never match. `on_start` is called with each answer that has started.
    `embedders` has the embedding models.
    """

    def __init__(
        self,
        streams: Streams,
        config: AnswerConfig,
        *,
        salt_of: Callable[[str], str],
        rules: CallerRules | None = None,
        on_start: Callable[[Stream, Caller], None] = _ignore,
        embedders: Embedders | None = None,
    ) -> None:
        self.streams, self.config, self.rules = streams, config, rules or NoRules()
        self._salt_of, self._on_start = salt_of, on_start
        self._start_once = StartOnce(streams)
        self.embedders = embedders or Embedders({}, config.limits, wait_seconds=0.0)

    @property
    def limits(self) -> Limits:
        """The bounds of requests."""
        return self.config.limits

    @property
    def clients(self) -> Mapping[str, EngineClient]:
        """All models and pipelines, by alias, whoever may use them."""
        return self.streams.clients

    async def clients_of(self, caller: Caller) -> Mapping[str, EngineClient]:
        """Return the models and pipelines that the caller may use, by alias."""
        hidden = await self.rules.hidden_from(caller)
        if not hidden:
            return self.clients
        return {alias: client for alias, client in self.clients.items() if alias not in hidden}

    async def pipelines_of(self, caller: Caller) -> Mapping[str, PipelineClient]:
        """Return the pipelines among them."""
        clients = await self.clients_of(caller)
        return {name: client for name, client in clients.items() if isinstance(client, PipelineClient)}

    async def client(self, caller: Caller, alias: str) -> EngineClient:
        """Return the client of a model. Raises NotFound for a model that the caller may not use as for none."""
        clients = await self.clients_of(caller)
        if alias in clients:
            return clients[alias]
        if alias in await self.embedders_of(caller):
            message = f"The model {alias!r} makes embeddings and no answers: send it to /v1/embeddings. "
            raise BadRequest(message + _listed("Answers", clients), code="wrong_kind_of_model", param="model")
        raise no_model(alias, clients)

    async def embedders_of(self, caller: Caller) -> Mapping[str, EmbeddingClient]:
        """Return the embedding models that the caller may use, by alias."""
        hidden = await self.rules.hidden_from(caller) if self.embedders.clients else ()
        return {alias: client for alias, client in self.embedders.clients.items() if alias not in hidden}

    async def embedder(self, caller: Caller, alias: str) -> EmbeddingClient:
        """Return the client of an embedding model. Raises NotFound for a model that the caller may not use."""
        embedders = await self.embedders_of(caller)
        if alias in embedders:
            return embedders[alias]
        if alias and alias in await self.clients_of(caller):
            message = f"The model {alias!r} gives answers and no embeddings. "
            message += _listed("Embeddings", embedders) or NO_EMBEDDERS
            raise BadRequest(message, code="wrong_kind_of_model", param="model")
        if not embedders:
            raise NotFound(NO_EMBEDDERS, code="model_not_found", param="model")
        raise no_model(alias, embedders)

    async def default_embedder(self, caller: Caller) -> str:
        """Return the embedding model of a request that names none: the first that the caller may use."""
        return next(iter(await self.embedders_of(caller)), "")

    async def embed(
        self,
        caller: Caller,
        request: EmbedRequest,
        *,
        received_at: float | None = None,
        trace: Trace | None = None,
    ) -> Embedded:
        """Return the vectors of a request of the caller's. `trace` as of `start`. Raises StreamserveError."""
        with self.recorded(EMBEDDINGS, request.model, trace, received_at) as span:
            await self.embedder(caller, request.model)
            request = replace(request, is_batch=self.config.only_class == BATCH)
            vectors = await self.embedders.embed(request, await self.admission(caller))
            if span is not None:
                span.describe(embedded(request, vectors))
        return vectors

    def recorded(
        self, operation: str, model: str, trace: Trace | None, received_at: float | None = None
    ) -> AbstractContextManager[Span | None]:
        """Record a request without a stream as a span, where the site records spans."""
        if not self.streams.traces:
            return nullcontext()
        return without_stream(operation, model, trace or incoming({}), received_at or time.monotonic())

    async def default_model(self, caller: Caller) -> str:
        """Return the model of a request that names none: the site's default, else the first that the caller may use."""
        default = self.config.default_model
        clients = await self.clients_of(caller)
        models = (alias for alias, client in clients.items() if not isinstance(client, PipelineClient))
        return default if default in clients else next(models, "")

    async def admission(self, caller: Caller, **decided: Any) -> Admission:
        """Return what is decided about a request of the caller's: whose it is, and what it is counted and cached with.

        `decided` are the other fields.
        """
        team = await self.rules.team_of(caller)
        shared = f"{TEAM}{team}" if team else ""
        return Admission(
            owner=caller.owner,
            tenant=caller.tenant,
            counted_as=shared or caller.counted_as,
            salt=self._salt_of(shared or caller.tenant),
            **decided,
        )

    def with_class(
        self, request: GenerateRequest, asked: Asked, caller: Caller, route: str, default: str = ""
    ) -> GenerateRequest:
        """Return the request in its latency class: what its body asked for, or what key, route or model have.

        `default` goes before the class of route and model.
        """
        config = self.config
        own = asked.latency_class or caller.latency_class or default
        own = own or config.defaults.class_of(route, request.model)
        name = config.only_class or own
        return request if name == request.latency_class else replace(request, latency_class=name)

    def with_own_system(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request as its model gets it: with the site's own system prompt, unless it has a system prompt."""
        return with_system(request, self.config.defaults.systems.get(request.model, ""))

    async def start(
        self,
        caller: Caller,
        request: GenerateRequest,
        on_disconnect: str = "park",
        *,
        received_at: float | None = None,
        once: Once | None = None,
        begins_unloaded: bool = False,
        places: Places | None = None,
        turn: Turn | None = None,
        thread: ThreadKey | None = None,
        shortens: bool = False,
        trace: Trace | None = None,
    ) -> Stream:
        """Start an answer for `caller`, within its limits; its times count from `received_at`.

        With `once` return the answer that its key has started before, without a wait. Beyond the caller's places this
        waits, and while the model loads, but for an answer that `begins_unloaded`: endpoints call `begin`. A request
        that `continues` an interrupted run starts its one continuation. `places`: of several answers that begin
        together. `turn` is added to its conversation with the start, and `thread` has this as its last stream from then
        on. The oldest turns of a conversation, and of a request that `shortens`, are left out where it is too long.
        `trace`: what it belongs to; None: OpenTelemetry's current span, if there is one. Raises StreamserveError.
        """
        client = await self.client(caller, request.model)
        if request.continues:
            once = continuation_of(request.continues, once)
        admission = await self.admission(
            caller,
            on_disconnect=self.config.only_on_disconnect or on_disconnect,
            received_at=received_at,
            once=once,
            begins_unloaded=begins_unloaded,
            turn=turn,
            thread=thread,
            trace=trace or incoming({}),
        )
        client.wake()
        start = self.streams.start if once is None else self._start_once
        request = self.with_own_system(request)
        with _as_asked(turn):
            seconds, has_all = self.streams.settings.engine_wait_seconds, bool(request.continues)
            if (turn is not None or shortens) and not has_all:
                request, admission = await shorten(client, request, admission, loading_seconds=seconds)
            if turn is not None and not has_all:
                most = self.limits.max_prompt_chars
                request, admission = await fit(client, request, admission, loading_seconds=seconds, most_chars=most)
            try:
                stream = await start(request, admission, places)
            except KeyReused as error:
                if not request.continues:
                    raise
                raise Answered("This approval was given or refused before.", param="id") from error
        self._on_start(stream, caller)
        return stream

    async def begin(
        self,
        call: Call,
        request: GenerateRequest,
        on_disconnect: str,
        *,
        once: Once | None = None,
        begins_unloaded: bool = False,
        places: Places | None = None,
        turn: Turn | None = None,
        thread: ThreadKey | None = None,
        shortens: bool = False,
    ) -> Stream:
        """Do what `start` does for the call's caller, for as long as the client stays."""
        starting = self.start(
            call.caller,
            request,
            on_disconnect,
            received_at=call.received_at,
            once=once,
            begins_unloaded=begins_unloaded,
            places=places,
            turn=turn,
            thread=thread,
            shortens=shortens,
            trace=call.trace,
        )
        stream = await call.wait(starting)
        call.started.append(stream)
        return stream

    async def earlier(self, once: Once) -> Stream | None:
        """Return the answer that a key has started before. Raises KeyReused."""
        return await self._start_once.find(once)

    async def find(self, caller: Caller, *, stream_id: str = "", log_id: str = "") -> Found:
        """Return the stream of that id or log id, with one query at most.

        Raises NotFound for another tenant's stream, and for a model's that the caller may not use, as for an unknown
        id; LogUnavailable.
        """
        store = self.streams.store
        if not store.has_records:
            return await self._find_here(caller, stream_id, log_id)
        record = await store.find(stream_id=stream_id, log_id=log_id)
        if record is None or record.admission.tenant != caller.tenant:
            raise no_stream()
        await self._check_stream(caller, record.model)
        return Found(stream=await self.streams.reach(record.id, record), record=record)

    async def look(self, caller: Caller, stream_id: str) -> Looked:
        """Return what is known of a stream, and reach for nothing: it is not restored, and stays no longer for this.

        Raises NotFound as `find` does, and for a stream that its only process has dropped.
        """
        stream, streams = self.streams.find(stream_id), self.streams
        record = await streams.store.find(stream_id=stream_id) if stream is None and streams.store.has_records else None
        if stream is None and record is None:
            raise no_stream()
        if stream is not None:
            tenant, ttft = stream.tenant, stream.transcript.timings.ttft
            has_times = stream.readers.reported is not None
            found = Looked(stream.id, stream.model, stream.request.latency_class, ttft, has_times)
        else:
            assert record is not None
            tenant, has_times = record.admission.tenant, record.reader is not None
            found = Looked(record.id, record.model, record.latency_class, record.ttft, has_times)
        if tenant != caller.tenant:
            raise no_stream()
        await self._check_stream(caller, found.model)
        return found

    async def keep_times(self, stream_id: str, times: ReaderTimes) -> bool:
        """Keep what a stream's reader measured; return False, and keep nothing, if a report came before."""
        stream, store = self.streams.find(stream_id), self.streams.store
        if stream is not None:
            if stream.readers.reported is not None:
                return False
            stream.readers.reported = times  # at once: two reports may come together
        return await store.keep_reader(stream_id, times) if store.has_records else stream is not None

    async def _find_here(self, caller: Caller, stream_id: str, log_id: str) -> Found:
        """Return a stream of this process, which alone knows it."""
        stream = self.streams.find(stream_id) if stream_id else self.streams.find_log(log_id)
        if stream is None and self.streams.is_expired(stream_id or log_id):
            return Found(stream=None)
        if stream is None or stream.tenant != caller.tenant:
            raise no_stream()
        await self._check_stream(caller, stream.model)
        return Found(stream=stream)

    async def _check_stream(self, caller: Caller, model: str) -> None:
        """Raise NotFound for a stream of a model that is hidden from the caller."""
        if model in await self.rules.hidden_from(caller):
            raise no_stream()
