"""Every figure streamserve shows, declared once, for `/metrics`, admin page, `done` event and log lines.

Names are vLLM's where it has the figure, under our prefix, so that dashboards carry over by search and replace.
Pure: values in, text out; who counts them lives elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

PREFIX = "streamserve_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One declared figure. `kind` is counter, gauge or histogram."""

    name: str
    kind: str
    unit: str
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Observed values in buckets: `counts[i]` is how many were ≤ `bounds[i]` and above the bound before it.

    `counts` has one item more than `bounds`, for the values above the last.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value of a declared figure, apart from others of that figure by its labels."""

    name: str
    value: float | Histogram
    labels: Mapping[str, str] = field(default_factory=dict)


def _figure(name: str, kind: str, unit: str, help: str) -> Figure:
    return Figure(name=name, kind=kind, unit=unit, help=help)


FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        _figure("num_requests_running", "gauge", "requests", "Requests in the engine's running batch."),
        _figure("num_requests_waiting", "gauge", "requests", "Requests waiting for the engine."),
        _figure("kv_blocks_total", "gauge", "blocks", "KV cache blocks the engine has."),
        _figure("kv_blocks_used", "gauge", "blocks", "KV cache blocks held by running sequences."),
        _figure("kv_blocks_cached", "gauge", "blocks", "Reclaimable KV cache blocks that hold reusable prefixes."),
        _figure("kv_blocks_free", "gauge", "blocks", "KV cache blocks that hold nothing."),
        _figure("kv_cache_usage_perc", "gauge", "ratio", "Used share of the KV cache blocks, 0 to 1."),
        _figure("prefix_cache_queries", "counter", "tokens", "Prompt tokens looked up in the prefix cache."),
        _figure("prefix_cache_hits", "counter", "tokens", "Prompt tokens found in the prefix cache."),
        _figure("prompt_tokens", "counter", "tokens", "Prompt tokens processed."),
        _figure("generation_tokens", "counter", "tokens", "Tokens generated."),
        _figure("tokens_per_second", "gauge", "tokens/s", "Tokens generated a second, of late."),
        _figure("num_preemptions", "counter", "sequences", "Sequences preempted for want of blocks."),
        _figure(
            "num_parks", "counter", "sequences", "Sequences parked by the engine: reader behind, or others waiting."
        ),
        _figure("num_tokens_waiting", "gauge", "tokens", "Tokens still to be computed for waiting requests."),
        _figure("queue_seconds", "gauge", "seconds", "How long computing those takes, by the fitted step time."),
        _figure("step_token_budget", "gauge", "tokens", "Tokens a step may compute; halved by out-of-memory."),
        _figure("num_out_of_memory", "counter", "steps", "Steps that ran out of memory and were run again in halves."),
        _figure("num_quarantines", "counter", "pools", "Block pools given up because their books did not add up."),
        _figure("num_unknown_ids", "counter", "messages", "Messages to sequences that the engine does not have."),
        _figure("engine_steps", "counter", "steps", "Forward passes of the engine."),
        _figure("lost_engines", "counter", "engines", "Engines that died, hung or did not start, seen from here."),
        _figure("engine_ready", "gauge", "bool", "1 when the model is loaded and serves."),
        _figure("engine_paused", "gauge", "bool", "1 while an operator has paused the model."),
        _figure("streams_active", "gauge", "streams", "Streams that have not ended."),
        _figure("streams_parked", "gauge", "streams", "Streams that wait for their reader and hold no engine memory."),
        _figure("request_success", "counter", "requests", "Requests ended, by finished_reason."),
        _figure("time_to_first_token_seconds", "histogram", "seconds", "Request accepted until first output token."),
        _figure("inter_token_latency_seconds", "histogram", "seconds", "Gap between two output tokens."),
        _figure("e2e_request_latency_seconds", "histogram", "seconds", "Request accepted until terminal event."),
        _figure("request_queue_time_seconds", "histogram", "seconds", "Request accepted until first scheduled."),
        _figure("request_prefill_time_seconds", "histogram", "seconds", "First scheduled until first output token."),
        _figure("request_decode_time_seconds", "histogram", "seconds", "First output token until the last."),
    )
}

# Keys of the `done` event's `breakdown` and of the log line, all in seconds → what each measures.
BREAKDOWN: Mapping[str, str] = {
    "queue": "Request accepted until first scheduled.",
    "prefill": "First scheduled until first output token.",
    "decode": "First output token until the last.",
    "ttft": "Request accepted until first output token.",
    "itl_p50": "Median gap between two output tokens.",
    "itl_p95": "95th percentile of the gap between two output tokens.",
}


def percentile(values: Iterable[float], q: float) -> float | None:
    """Return the `q` quantile (0 to 1) of `values`, linearly interpolated; None if there are none."""
    ascending = sorted(values)
    if not ascending:
        return None
    place = q * (len(ascending) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (place - below)


def render_prometheus(samples: Iterable[Sample]) -> str:
    """Return samples of declared figures in Prometheus' text format 0.0.4, grouped by figure, in declared order."""
    groups: dict[str, list[Sample]] = {name: [] for name in FIGURES}
    for sample in samples:
        groups[sample.name].append(sample)
    lines = [line for name, group in groups.items() if group for line in _group(FIGURES[name], group)]
    return "".join(f"{line}\n" for line in lines)


def _group(figure: Figure, samples: Sequence[Sample]) -> list[str]:
    name = PREFIX + figure.name + ("_total" if figure.kind == "counter" else "")
    head = [f"# HELP {name} {figure.help} Unit: {figure.unit}.", f"# TYPE {name} {figure.kind}"]
    return head + [line for sample in samples for line in _sample(name, sample)]


def _sample(name: str, sample: Sample) -> list[str]:
    if isinstance(sample.value, Histogram):
        return _histogram(name, sample.value, sample.labels)
    return [f"{name}{_labels(sample.labels)} {_number(sample.value)}"]


def _histogram(name: str, histogram: Histogram, labels: Mapping[str, str]) -> list[str]:
    lines, count = [], 0
    for bound, more in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        count += more
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
