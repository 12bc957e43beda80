"""`Ops`: the state of engines and streams for operators and probes; the endpoints /livez, /readyz, /metrics.

The metrics of `/metrics` and the live page are collected here. Names: protocol/metrics.py. asyncio; framework-free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from streamserve.api.answers import Answers
from streamserve.api.call import ANONYMOUS, Call, Reply, json_reply
from streamserve.api.host_figures import HostFigures
from streamserve.clients.base import EmbeddingClient, EngineClient
from streamserve.protocol.engine import ABSENT, TOO_LARGE, EngineStats, ModelDescription
from streamserve.protocol.errors import BadRequest, NotFound, Refused
from streamserve.protocol.frames import UNKNOWN_COUNT
from streamserve.protocol.measures import MCP_CALLS, RESPONSES
from streamserve.protocol.metrics import CONTENT_TYPE, Sample, render_prometheus
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream

# Messages of states for which the engine gives none.
_STATE_WORDS = {
    "paused": "The model is paused by an operator until it is resumed.",
    "asleep": "The model takes no memory. It is loaded when it is asked.",
    "draining": "The model accepts no requests: it is about to be stopped or replaced.",
    "failed": "The model cannot be used. The server's log has the reason.",
}


_ACTIONS = ("pause", "resume", "drain", "sleep", "wake")


async def _nothing() -> Mapping[str, Any]:
    return {}


class Ops:
    """Reports the state of this process; pauses, resumes and drains engines.

    Holds the engine clients and the streams; changes only the state of engines. It never shows the messages of engines
    to callers that it does not know. `health` returns the fields of `/readyz` beside the models: a `database` that is
    not "ok" is a reason. `work` returns how much durable work waits and runs: kind → state → rows. `host` knows what
    other processes of this host have counted; the engines of the models in `shared` report the same to each of them.
    """

    def __init__(
        self,
        clients: Mapping[str, EngineClient],
        streams: Streams,
        *,
        embedders: Mapping[str, EmbeddingClient] = {},
        host: HostFigures | None = None,
        shared: Collection[str] = (),
        is_debug: Callable[[], bool] = lambda: False,
        health: Callable[[], Awaitable[Mapping[str, Any]]] = _nothing,
        work: Callable[[], Awaitable[Mapping[str, Mapping[str, int]]]] = _nothing,
    ) -> None:
        self.clients, self.embedders, self.streams = clients, embedders, streams
        self.host, self.shared = host, shared
        self.is_draining = False  # the server shuts down and refuses new answers
        self.is_debug, self.health, self.work = is_debug, health, work

    @property
    def all(self) -> Mapping[str, EngineClient | EmbeddingClient]:
        """Models, pipelines and embedding models by alias."""
        return {**self.clients, **self.embedders}

    def counted(self) -> Iterator[Sample]:
        """Yield what this process has counted, without what every process of this host reports alike."""
        streams, shared = self.streams, self.shared
        yield from _engine_samples({alias: client for alias, client in self.clients.items() if alias not in shared})
        yield from _embedder_samples({alias: one for alias, one in self.embedders.items() if alias not in shared})
        yield from _process_samples(self.clients, streams)

    def common(self) -> Iterator[Sample]:
        """Yield what every process of this host reports alike: the figures of engines in processes of their own."""
        yield from _engine_samples({alias: client for alias, client in self.clients.items() if alias in self.shared})
        yield from _embedder_samples({alias: one for alias, one in self.embedders.items() if alias in self.shared})

    async def control(self, alias: str, action: str) -> str:
        """Carry out an operator's action in the engine of a model, for all processes; return its state afterwards."""
        client = self.all.get(alias)
        if client is None or action not in _ACTIONS:
            raise NotFound(f"There is no model {alias!r} to {action} here.", code="model_not_found")
        await client.control(action)
        return client.describe().state


async def livez(call: Call) -> Reply:
    """GET /livez: 200 while this process answers."""
    return json_reply({"live": True})


async def readyz(call: Call, ops: Ops, answers: Answers) -> Reply:
    """GET /readyz: 200 while every model is ready or asleep and the database can be written, else 503 with the reason.

    Callers that may chat, and every caller with DEBUG, get the models that they may use with their progress, and start
    loading; other callers get neither: a probe loads nothing that the server has not begun to load.
    """
    is_debug = ops.is_debug()
    is_known = is_debug or call.caller is not ANONYMOUS
    shown = await _shown(call, answers) if is_known else ()
    reasons = ["this process is going down"] if ops.is_draining else []
    models = []
    for alias, client in ops.all.items():
        if alias in shown:
            client.start()
        model = client.describe()
        if not model.is_served:
            state = "has no engine" if model.stage == ABSENT else f"is {model.state}"
            reasons.append(f"{alias if alias in shown else 'a model'} {state}")
        if alias in shown:
            models.append(model_state(model, shows_message=is_debug or model.stage in (ABSENT, TOO_LARGE)))
    health = await ops.health()
    if health.get("database", "ok") != "ok":
        way_out = " (manage.py migrate makes its tables)" if health["database"] == "unusable" else ""
        reasons.append(f"the database is {health['database']}{way_out}")
    body: dict[str, Any] = {"ready": not reasons, "reason": ", ".join(dict.fromkeys(reasons))}
    if is_known:
        body["models"] = models
    return json_reply({**body, **health}, status=503 if reasons else 200)


async def _shown(call: Call, answers: Answers) -> Collection[str]:
    """Return the models that the caller may use; none where the site cannot say: a probe has an answer all the same."""
    try:
        return {*await answers.clients_of(call.caller), *await answers.embedders_of(call.caller)}
    except Refused:
        return ()


def model_state(model: ModelDescription, *, shows_message: bool) -> dict[str, Any]:
    """Return a model's state and progress. The engine's own message may name folders and libraries."""
    return {
        "alias": model.alias,
        "state": model.state,
        "stage": model.stage,
        "fraction": round(model.fraction, 3),
        "loaded_bytes": model.loaded_bytes,
        "total_bytes": model.total_bytes,
        "elapsed_seconds": round(model.elapsed_seconds, 2),
        "message": (shows_message and model.message) or _STATE_WORDS.get(model.state, ""),
    }


async def metrics(call: Call, ops: Ops) -> Reply:
    """GET /metrics: the Prometheus text format, of all processes of this host; `?process=this`: of this process."""
    process = call.query().get("process", "")
    if process not in ("", "this"):
        raise BadRequest("'process' is this, or left out for all processes of the host.", param="process")
    if process or ops.host is None:
        text = render_metrics(ops.clients, ops.streams, await ops.work(), ops.embedders)
    else:
        shared = await ops.host.read()
        text = render_prometheus([*ops.common(), *shared.figures, *_work_samples(await ops.work())])
    return Reply(body=text.encode(), headers={"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"})


def render_metrics(
    clients: Mapping[str, EngineClient],
    streams: Streams,
    work: Mapping[str, Mapping[str, int]] = {},
    embedders: Mapping[str, EmbeddingClient] = {},
) -> str:
    """Return every metric of this process in Prometheus' text format. `work`: kind → state → how many rows."""
    engines = (*_engine_samples(clients), *_embedder_samples(embedders))
    return render_prometheus([*engines, *_process_samples(clients, streams), *_work_samples(work)])


def _process_samples(clients: Mapping[str, EngineClient], streams: Streams) -> Iterator[Sample]:
    yield from _stream_samples(clients, streams.all())
    yield from streams.measures.samples()
    yield Sample(name="num_requests_queued", value=streams.num_waiting)
    yield from RESPONSES.samples()
    yield from MCP_CALLS.samples()
    yield from _log_samples()


def _engine_samples(clients: Mapping[str, EngineClient]) -> Iterator[Sample]:
    for alias, client in clients.items():
        labels = {"model_name": alias}
        stats = client.stats()
        for name, value in engine_metrics(stats).items():
            yield Sample(name=name, value=value, labels=labels)
        for latency_class in stats.classes:
            of_class = {**labels, "latency_class": latency_class}
            for name, of_all, of_drafts in (
                ("spec_decode_num_draft_tokens", stats.proposed_tokens, stats.drafted_tokens),
                ("spec_decode_num_accepted_tokens", stats.accepted_tokens, stats.accepted_drafts),
            ):
                num_drafts = of_drafts.get(latency_class, 0)
                num_found = of_all.get(latency_class, 0) - num_drafts
                for source, value in (("lookup", num_found), ("draft", num_drafts)):
                    yield Sample(name=name, value=value, labels={**of_class, "source": source})
        for upstream, figures in stats.upstreams.items():
            for name, value in figures.items():
                yield Sample(name=f"upstream_{name}", value=value, labels={**labels, "upstream": upstream})
        yield from _state_samples(client.describe(), labels)


# An embedding model's metrics → their names in `EngineStats`.
OF_EMBEDDERS: Mapping[str, str] = MappingProxyType(
    {
        "num_requests_waiting": "waiting",
        "num_inputs_waiting": "rows",
        "embedding_requests": "embedded_requests",
        "embedding_inputs": "embedded_inputs",
        "prompt_tokens": "prompt_tokens",
        "num_requests_refused": "refused",
        "engine_steps": "steps",
        "engine_busy_seconds": "busy_seconds",
        "lost_engines": "lost_engines",
    }
)


def _embedder_samples(embedders: Mapping[str, EmbeddingClient]) -> Iterator[Sample]:
    for alias, client in embedders.items():
        labels, stats = {"model_name": alias}, client.stats()
        for name, field in OF_EMBEDDERS.items():
            yield Sample(name=name, value=getattr(stats, field), labels=labels)
        yield from _state_samples(client.describe(), labels)


def _state_samples(model: ModelDescription, labels: Mapping[str, str]) -> Iterator[Sample]:
    yield Sample(name="engine_ready", value=float(model.state == "ready"), labels=labels)
    yield Sample(name="engine_paused", value=float(model.state == "paused"), labels=labels)
    yield Sample(name="engine_asleep", value=float(model.state == "asleep"), labels=labels)


# An engine's metrics → their names in `EngineStats`.
OF_STATS: Mapping[str, str] = MappingProxyType(
    {
        "num_requests_running": "running",
        "num_requests_waiting": "waiting",
        "num_rows_running": "rows",
        "kv_blocks_total": "blocks_total",
        "kv_blocks_used": "blocks_used",
        "kv_blocks_cached": "blocks_cached",
        "kv_blocks_free": "blocks_free",
        "prefix_cache_queries": "prefix_queries",
        "prefix_cache_hits": "prefix_hits",
        "prompt_tokens": "prompt_tokens",
        "generation_tokens": "generation_tokens",
        "tokens_per_second": "tokens_per_second",
        "num_preemptions": "preemptions",
        "num_parks": "parks",
        "num_tokens_waiting": "queued_tokens",
        "queue_seconds": "queued_seconds",
        "step_token_budget": "token_budget",
        "num_out_of_memory": "out_of_memory",
        "num_quarantines": "quarantines",
        "num_unknown_ids": "unknown_ids",
        "num_grammar_waits": "grammar_waits",
        "engine_steps": "steps",
        "lost_engines": "lost_engines",
        "num_readers_away": "readers_away",
        "num_readers_late": "readers_late",
        "num_readers_hungry": "readers_hungry",
        "num_readers_ahead": "readers_ahead",
        "readers_tokens_per_second": "readers_pace",
        "num_requests_refused": "refused",
        "num_requests_expired": "expired",
        "computed_tokens": "computed_tokens",
        "recomputed_tokens": "recomputed_tokens",
        "engine_busy_seconds": "busy_seconds",
    }
)


def engine_metrics(stats: EngineStats) -> dict[str, float]:
    """Return an engine's metrics, for `/metrics` and the live page."""
    num_accepted, num_proposed = sum(stats.accepted_tokens.values()), sum(stats.proposed_tokens.values())
    return {
        **{name: getattr(stats, field) for name, field in OF_STATS.items()},
        "kv_cache_usage_perc": stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0,
        "spec_decode_acceptance_rate": num_accepted / num_proposed if num_proposed else 0.0,
    }


def _stream_samples(clients: Mapping[str, EngineClient], streams: Iterable[Stream]) -> Iterator[Sample]:
    """Yield how many streams run here; a stream that is only read here is another process's."""
    here = (stream for stream in streams if stream.is_live and not stream.lease.is_elsewhere)
    states = Counter((stream.model, stream.state) for stream in here)
    for alias in clients:
        labels = {"model_name": alias}
        parked = states[alias, "parked"]
        yield Sample(name="streams_active", value=states[alias, "running"] + parked, labels=labels)
        yield Sample(name="streams_parked", value=parked, labels=labels)


def _log_samples() -> Iterator[Sample]:
    yield Sample(name="num_unknown_events", value=UNKNOWN_COUNT.num_events)
    yield Sample(name="num_unknown_fields", value=UNKNOWN_COUNT.num_fields)


def _work_samples(work: Mapping[str, Mapping[str, int]]) -> Iterator[Sample]:
    for kind, counts in work.items():
        for state in ("queued", "running"):
            yield Sample(name=f"work_{state}", value=counts.get(state, 0), labels={"kind": kind})


def readers_of(stats: EngineStats) -> dict[str, int]:
    """Return how many of the running sequences are in each state of their readers; they add up to `running`."""
    readers = {
        "late": stats.readers_late,
        "hungry": stats.readers_hungry,
        "ahead": stats.readers_ahead,
        "away": stats.readers_away,
    }
    return {**readers, "starting": stats.running - sum(readers.values()) - stats.rows, "rows": stats.rows}


def load_metrics(model: ModelDescription) -> dict[str, Any]:
    """Return a model's state and how far it has been loaded, for the live page."""
    return {
        "state": model.state,
        "stage": model.stage,
        "fraction": round(model.fraction, 3),
        "loaded_bytes": model.loaded_bytes,
        "total_bytes": model.total_bytes,
        "elapsed_seconds": round(model.elapsed_seconds, 1),
        "message": model.message,
        "dtype": model.dtype,
        "linears": model.linears,
    }


def stream_metrics(stream: Stream) -> dict[str, Any]:
    """Return what the live page shows of a stream of this process."""
    summary = stream.summary()
    return {
        "id": summary.id,
        "model": summary.model,
        "state": "starting" if summary.state == "running" and not summary.completion_tokens else summary.state,
        "park_reason": summary.park_reason,
        "lead": summary.lead,
        "owner": summary.owner,
        "age_seconds": round(summary.age_seconds, 1),
        "tokens": summary.completion_tokens,
        "tokens_per_second": round(summary.tokens_per_second, 1),
        "ttft": None if summary.ttft is None else round(summary.ttft, 4),
        "transport": summary.transport,
        "is_away": stream.readers.are_away,
    }
