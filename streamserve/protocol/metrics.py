"""Every metric, declared once, for `/metrics`, the live page, the `done` event and log lines.

Names are vLLM's where it has the metric, under our prefix, so that dashboards carry over by search and replace.
Pure: values in, text out; api/ops.py collects the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

PREFIX = "streamserve_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One declared metric. `kind` is counter, gauge or histogram; `labels` are the names that its values have."""

    name: str
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...] = ("model_name",)

    @property
    def adds_up(self) -> bool:
        """Whether the values of several processes add up; of the others the largest is theirs."""
        return self.kind != "gauge" or self.unit not in ("ratio", "seconds", "bool")


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Return about the value that `share` (0 to 1) of all do not exceed; None if there are none. See `Histogram`."""
    rank = share * sum(counts)
    seen = 0
    for index, count in enumerate(counts):
        if count and seen + count >= rank:
            low = bounds[index - 1] if index else 0.0
            high = bounds[index] if index < len(bounds) else low
            return low + (high - low) * max(0.0, rank - seen) / count
        seen += count
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Observed values in buckets: `counts[i]` is how many were ≤ `bounds[i]` and above the bound before it.

    `counts` has one item more than `bounds`, for the values above the last. `/metrics` shows a bound of `shown_every`.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    shown_every: int = 1

    def __add__(self, other: Histogram) -> Histogram:
        counts = tuple(one + more for one, more in zip(self.counts, other.counts, strict=True))
        return replace(self, counts=counts, total=self.total + other.total)

    def __sub__(self, before: Histogram) -> Histogram:
        counts = tuple(max(0, now - then) for now, then in zip(self.counts, before.counts, strict=True))
        return replace(self, counts=counts, total=self.total - before.total)

    def quantile(self, share: float) -> float | None:
        """Return about the value that `share` (0 to 1) of all do not exceed; None if there are none."""
        return quantile(self.bounds, self.counts, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value of a declared metric; its labels tell it apart from the metric's other values."""

    name: str
    value: float | Histogram
    labels: Mapping[str, str] = field(default_factory=dict)


def _metric(name: str, kind: str, unit: str, help: str, labels: tuple[str, ...] = ("model_name",)) -> Metric:
    return Metric(name=name, kind=kind, unit=unit, help=help, labels=labels)


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        _metric("num_requests_running", "gauge", "requests", "Requests in the engine's running batch."),
        _metric("num_rows_running", "gauge", "requests", "Rows of batches in the running batch: they have no readers."),
        _metric("num_requests_waiting", "gauge", "requests", "Requests waiting for the engine."),
        _metric("num_inputs_waiting", "gauge", "inputs", "Inputs of requests for embeddings that wait."),
        _metric("embedding_requests", "counter", "requests", "Requests for embeddings that were computed."),
        _metric("embedding_inputs", "counter", "inputs", "Inputs whose vector was computed."),
        _metric("kv_blocks_total", "gauge", "blocks", "KV cache blocks the engine has."),
        _metric("kv_blocks_used", "gauge", "blocks", "KV cache blocks held by running sequences."),
        _metric("kv_blocks_cached", "gauge", "blocks", "Reclaimable KV cache blocks that hold reusable prefixes."),
        _metric("kv_blocks_free", "gauge", "blocks", "KV cache blocks that hold nothing."),
        _metric("kv_cache_usage_perc", "gauge", "ratio", "Used share of the KV cache blocks, 0 to 1."),
        _metric("prefix_cache_queries", "counter", "tokens", "Prompt tokens looked up in the prefix cache."),
        _metric("prefix_cache_hits", "counter", "tokens", "Prompt tokens found in the prefix cache."),
        _metric("prompt_tokens", "counter", "tokens", "Prompt tokens processed."),
        _metric("generation_tokens", "counter", "tokens", "Tokens generated."),
        _metric("tokens_per_second", "gauge", "tokens/s", "Tokens generated per second, recently."),
        _metric("num_preemptions", "counter", "sequences", "Sequences preempted for want of blocks."),
        _metric(
            "num_parks",
            "counter",
            "sequences",
            "Sequences parked by the engine: their reader is behind, or requests wait.",
        ),
        _metric("num_tokens_waiting", "gauge", "tokens", "Tokens still to be computed for waiting requests."),
        _metric(
            "queue_seconds",
            "gauge",
            "seconds",
            "Time until the waiting requests are computed, by the fitted step time.",
        ),
        _metric("step_token_budget", "gauge", "tokens", "Tokens a step may compute; halved by out-of-memory."),
        _metric("num_out_of_memory", "counter", "steps", "Steps that ran out of memory and were run again in halves."),
        _metric("num_quarantines", "counter", "pools", "Block pools given up because their counts did not add up."),
        _metric("num_unknown_ids", "counter", "messages", "Messages to sequences that the engine does not have."),
        _metric(
            "num_grammar_waits", "counter", "steps", "Steps that left out a sequence whose mask was not known yet."
        ),
        _metric(
            "num_unknown_events", "counter", "events", "Events of kinds unknown to this release, at each reading.", ()
        ),
        _metric(
            "num_unknown_fields", "counter", "fields", "Event fields unknown to this release, at each reading.", ()
        ),
        _metric("engine_steps", "counter", "steps", "Forward passes of the engine."),
        _metric("lost_engines", "counter", "engines", "Engines that died, hung or did not start, as this process saw."),
        *(
            _metric(f"upstream_{name}", kind, unit, help, ("model_name", "upstream"))
            for name, kind, unit, help in (
                ("requests", "counter", "requests", "Requests sent to a server that runs the model."),
                ("retries", "counter", "requests", "Requests sent again: a kept connection was closed."),
                ("refused", "counter", "requests", "Requests answered by an error status."),
                ("lost", "counter", "requests", "Requests whose connection broke or fell silent."),
                ("moved", "counter", "requests", "Requests that another server got before the first token."),
                ("continued", "counter", "requests", "Requests that continued a partial answer."),
                ("holds", "counter", "holds", "How often the server was not read from: a reader was behind."),
                ("away", "counter", "times", "How often the server could not be used from then on."),
                ("up", "gauge", "ratio", "1 while the server gets requests like any other, else 0."),
                ("running", "gauge", "requests", "Requests to the server that run now."),
                ("weight", "gauge", "ratio", "The server's weight among those of the model."),
                ("max_concurrent", "gauge", "requests", "Requests to the server that may run at once."),
                ("max_waiting", "gauge", "requests", "What it adds to the requests that may wait for a place."),
            )
        ),
        _metric("num_readers_away", "gauge", "readers", "Readers of running answers that look at something else."),
        _metric("num_readers_late", "gauge", "readers", "Readers that have waited over a second for their next token."),
        _metric("num_readers_hungry", "gauge", "readers", "Readers that run out of tokens soon: these go first."),
        _metric("num_readers_ahead", "gauge", "readers", "Readers that have tokens to read for a while."),
        _metric(
            "readers_tokens_per_second",
            "gauge",
            "tokens/s",
            "Tokens that the readers of running answers read per second, without those that are away.",
        ),
        _metric("num_requests_refused", "counter", "requests", "Requests refused at once: they would wait too long."),
        _metric("num_requests_expired", "counter", "requests", "Requests that waited too long for their first step."),
        _metric("computed_tokens", "counter", "tokens", "Tokens that steps have computed, of prompts and answers."),
        _metric("recomputed_tokens", "counter", "tokens", "Tokens computed again after a preemption or park."),
        _metric(
            "spec_decode_num_draft_tokens",
            "counter",
            "tokens",
            "Tokens that steps have proposed after another token, by latency_class and source: lookup or draft.",
            ("model_name", "latency_class", "source"),
        ),
        _metric(
            "spec_decode_num_accepted_tokens",
            "counter",
            "tokens",
            "Proposed tokens that were accepted: answers got them in one step.",
            ("model_name", "latency_class", "source"),
        ),
        _metric(
            "spec_decode_acceptance_rate", "gauge", "ratio", "The share of all proposed tokens that were accepted."
        ),
        _metric("engine_busy_seconds", "counter", "seconds", "Seconds in which the engine computed."),
        _metric("engine_ready", "gauge", "bool", "1 when the model is loaded and serves."),
        _metric("engine_paused", "gauge", "bool", "1 while an operator has paused the model."),
        _metric("engine_asleep", "gauge", "bool", "1 while the model sleeps: it is loaded when it is asked."),
        _metric("streams_active", "gauge", "streams", "Streams that have not ended."),
        _metric("num_requests_queued", "gauge", "requests", "Requests waiting for a place of their caller.", ()),
        _metric("streams_parked", "gauge", "streams", "Streams that wait for their reader and hold no engine memory."),
        _metric(
            "work_queued",
            "gauge",
            "rows",
            "Jobs, batches, webhook messages that wait, in all processes, by kind.",
            ("kind",),
        ),
        _metric("work_running", "gauge", "rows", "Rows of durable work that a worker runs, by kind.", ("kind",)),
        _metric(
            "http_requests",
            "counter",
            "requests",
            "HTTP requests answered, by handler (`other`: no route) and status.",
            ("handler", "status"),
        ),
        _metric(
            "http_errors", "counter", "requests", "HTTP requests refused or failed, by error_code.", ("error_code",)
        ),
        _metric(
            "mcp_calls",
            "counter",
            "calls",
            "Calls of MCP servers' tools: outcome ok, error, timeout, unavailable or cancelled.",
            ("server", "tool", "outcome"),
        ),
        _metric(
            "request_success",
            "counter",
            "requests",
            "Answers that ended in `done`, by finished_reason.",
            ("model_name", "finished_reason"),
        ),
        _metric(
            "request_errors",
            "counter",
            "requests",
            "Answers that ended in `error`, by error_code.",
            ("model_name", "error_code"),
        ),
        _metric("reader_disconnects", "counter", "connections", "Readers' connections that ended before their answer."),
        _metric("stream_resumes", "counter", "readers", "Readers that came back to an answer, on a new connection."),
        _metric("time_to_first_token_seconds", "histogram", "seconds", "Request's arrival until first output token."),
        _metric("time_to_first_byte_seconds", "histogram", "seconds", "Request's arrival until its response begins."),
        _metric("inter_token_latency_seconds", "histogram", "seconds", "Gap between two output tokens."),
        _metric(
            "request_time_per_output_token_seconds",
            "histogram",
            "seconds",
            "Mean gap after the first output token, of each answer.",
        ),
        _metric("e2e_request_latency_seconds", "histogram", "seconds", "Request's arrival until terminal event."),
        _metric("request_intake_time_seconds", "histogram", "seconds", "Request's arrival until the engine accepts."),
        _metric("request_queue_time_seconds", "histogram", "seconds", "Request accepted until first scheduled."),
        _metric("request_prefill_time_seconds", "histogram", "seconds", "First scheduled until first output token."),
        _metric("request_decode_time_seconds", "histogram", "seconds", "First output token until the last."),
        _metric("reader_reports", "counter", "reports", "Answers whose reader has reported its own times."),
        _metric(
            "reader_reconnects", "counter", "connections", "Connections after the first, of readers that have reported."
        ),
        _metric(
            "reader_gap_budget",
            "counter",
            "answers",
            "Reported answers whose gaps kept or missed the budget of their class, by outcome.",
            ("model_name", "latency_class", "outcome"),
        ),
        _metric(
            "reader_time_to_first_token_seconds",
            "histogram",
            "seconds",
            "Request sent until the first delta came, by the reader's clock.",
        ),
        _metric(
            "reader_first_paint_seconds",
            "histogram",
            "seconds",
            "Request sent until the first delta was painted, by the reader's clock.",
        ),
        _metric(
            "reader_inter_token_latency_p95_seconds",
            "histogram",
            "seconds",
            "95th percentile of the gaps between deltas as they came to the reader, of each answer.",
        ),
        _metric(
            "reader_network_seconds",
            "histogram",
            "seconds",
            "The reader's time to the first delta without the server's time to the first token, of each answer.",
        ),
        _metric(
            "reader_render_seconds", "histogram", "seconds", "First delta came until it was painted, of each answer."
        ),
    )
}

# Keys of the `done` event's `breakdown` and of the log line, all in seconds → what each measures.
BREAKDOWN: Mapping[str, str] = {
    "intake": "Request's arrival until the engine accepts: parsing, permissions, the wait for a place, tokenising.",
    "ttfb": "Request's arrival until its response begins.",
    "queue": "Request accepted until first scheduled.",
    "prefill": "First scheduled until first output token.",
    "decode": "First output token until the last.",
    "first_decode": "First output token until the next, a part of decode.",
    "ttft": "Request's arrival until the first output token is in the log.",
    "tpot": "Mean gap after the first output token.",
    "itl_p50": "Median gap between two output tokens; tokens that come together share their gap equally.",
    "itl_p95": "95th percentile of those gaps.",
}

# Keys of the `done` event's `phases`, in seconds. All but the first add up to the latency; a pipeline may add its own.
PHASES: Mapping[str, str] = {
    "network_in": "The client's sending until the request's arrival, where the client says when it sent it.",
    "auth": "Request's arrival until its caller is known, and may make it.",
    "intake": "From then until the engine, or the pipeline, accepts it: the body, the quota, tokenising.",
    "loading": "The engine was loaded, or replaced, before it could accept.",
    "retrieval": "A step of a pipeline with that phase: passages are looked up.",
    "rerank": "A step with that phase: they are put in order.",
    "context": "A step with that phase, and `trim`: the prompt is made of them.",
    "tools": "Functions that a pipeline's model has called.",
    "queue": "Accepted until first scheduled.",
    "prefill": "First scheduled until the first output token.",
    "first_decode": "The first output token until the next.",
    "generation": "From then until the last.",
    "first_token": "Accepted, or continued, until the next output token: of an answer that was parked or stopped.",
    "parked": "No engine works on it: its reader is behind or away, or the engine is.",
    "other": "What is left: messages between processes, the log, a pipeline's own code.",
}


def percentile(values: Iterable[float], q: float) -> float | None:
    """Return the `q` quantile (0 to 1) of `values`, linearly interpolated; None if there are none."""
    ascending = sorted(values)
    if not ascending:
        return None
    position = q * (len(ascending) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (position - below)


def render_prometheus(samples: Iterable[Sample]) -> str:
    """Return samples of declared metrics in Prometheus' text format 0.0.4, grouped by metric, in declared order."""
    groups: dict[str, list[Sample]] = {name: [] for name in METRICS}
    for sample in samples:
        groups[sample.name].append(sample)
    lines = [line for name, group in groups.items() if group for line in _group(METRICS[name], group)]
    return "".join(f"{line}\n" for line in lines)


def _group(metric: Metric, samples: Sequence[Sample]) -> list[str]:
    name = PREFIX + metric.name + ("_total" if metric.kind == "counter" else "")
    head = [f"# HELP {name} {metric.help} Unit: {metric.unit}.", f"# TYPE {name} {metric.kind}"]
    return head + [line for sample in samples for line in _sample(name, sample)]


def _sample(name: str, sample: Sample) -> list[str]:
    if isinstance(sample.value, Histogram):
        return _histogram(name, sample.value, sample.labels)
    return [f"{name}{_labels(sample.labels)} {_number(sample.value)}"]


def _histogram(name: str, histogram: Histogram, labels: Mapping[str, str]) -> list[str]:
    lines, count, last = [], 0, len(histogram.bounds)
    for index, (bound, more) in enumerate(zip((*histogram.bounds, math.inf), histogram.counts, strict=True)):
        count += more
        if index % histogram.shown_every and index < last:
            continue
        lines.append(f"{name}_bucket{_labels({**labels, 'le': _number(bound)})} {count}")
    total, num = f"{name}_sum{_labels(labels)}", f"{name}_count{_labels(labels)}"
    return [*lines, f"{total} {_number(histogram.total)}", f"{num} {count}"]


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escape(text)}"' for name, text in labels.items()) + "}" if labels else ""


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    """Return a number as Prometheus reads it."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else str(int(value)) if value == int(value) else repr(float(value))
