"""What requests took, in fixed buckets: `Buckets`, and `Measures`, all requests of a process. Pure but for its state.

Buckets cost the same however much was observed, add up, and give percentiles without a sort. `/metrics`, the live page
and the `done` event are made from them. Names and meanings are protocol/metrics.py's. Event loop only.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from streamserve.protocol.events import FINISH_REASONS
from streamserve.protocol.metrics import METRICS, Histogram, Sample

# Twelve to a decade from 0.1 ms to 1000 s, so a percentile is right to some per cent. Every second one is a round
# number (1, 1.5, 2, 3, 5, 7): those are `/metrics`' buckets.
_STEPS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.5)
_DECADES = range(-4, 3)
BOUNDS = tuple(round(step * 10.0**decade, 8) for decade in _DECADES for step in _STEPS)
_SHOWN_EVERY = 2

# What is measured of each answer: the metric's name → its key in the `done` event's breakdown.
_OF_BREAKDOWN = {
    "time_to_first_token_seconds": "ttft",
    "time_to_first_byte_seconds": "ttfb",
    "request_time_per_output_token_seconds": "tpot",
    "request_intake_time_seconds": "intake",
    "request_queue_time_seconds": "queue",
    "request_prefill_time_seconds": "prefill",
    "request_decode_time_seconds": "decode",
}
ITL, E2E, TTFT = "inter_token_latency_seconds", "e2e_request_latency_seconds", "time_to_first_token_seconds"
HISTOGRAMS = (*_OF_BREAKDOWN, ITL, E2E)


class Buckets:
    """Observed seconds, counted by `BOUNDS`: counts[i] is how many were ≤ BOUNDS[i] and above the bound before it."""

    __slots__ = ("counts", "total")

    def __init__(self, counts: Sequence[int] = (), total: float = 0.0) -> None:
        self.counts = array("I", counts or bytes(4 * (len(BOUNDS) + 1)))
        self.total = total

    def observe(self, seconds: float) -> None:
        """Count one value."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def add(self, other: Buckets) -> None:
        """Count all that `other` has."""
        for index, count in enumerate(other.counts):
            self.counts[index] += count
        self.total += other.total

    def since(self, before: Buckets | None) -> Buckets:
        """Return what was counted after `before`, an earlier copy of these."""
        if before is None:
            return self
        counts = [now - then for now, then in zip(self.counts, before.counts, strict=True)]
        return Buckets(counts, self.total - before.total)

    def quantile(self, share: float) -> float | None:
        """Return about the value that `share` (0 to 1) of all do not exceed; None if there are none."""
        rank = share * sum(self.counts)
        seen = 0
        for index, count in enumerate(self.counts):
            if count and seen + count >= rank:
                low = BOUNDS[index - 1] if index else 0.0
                high = BOUNDS[index] if index < len(BOUNDS) else low
                return low + (high - low) * max(0.0, rank - seen) / count
            seen += count
        return None

    def histogram(self) -> Histogram:
        """Return them as `/metrics` shows them, with half as many buckets."""
        bounds = BOUNDS[::_SHOWN_EVERY]
        starts = [0, *range(1, len(BOUNDS), _SHOWN_EVERY)]
        counts = tuple(sum(self.counts[start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True))
        return Histogram(bounds=bounds, counts=counts, total=self.total)


class ModelMeasures:
    """One model's answers that have ended: how, and what they took."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()  # by finish reason
        self.failed: Counter[str] = Counter()  # by error code
        self.buckets = {name: Buckets() for name in HISTOGRAMS}

    def note(self, end: str, *, is_error: bool, latency: float, breakdown: Mapping[str, float], gaps: Buckets) -> None:
        """Count one answer by its end; `breakdown` may lack what is not known, `gaps` are those between tokens."""
        (self.failed if is_error else self.finished)[end] += 1
        self.buckets[E2E].observe(latency)
        self.buckets[ITL].add(gaps)
        for name, key in _OF_BREAKDOWN.items():
            if key in breakdown:
                self.buckets[name].observe(breakdown[key])

    def samples(self, alias: str) -> Iterator[Sample]:
        """Yield them for `/metrics`; a finish reason that none had is 0, so that its rate has a beginning."""
        labels = {"model_name": alias}
        for reason in sorted(FINISH_REASONS | self.finished.keys()):
            count = self.finished[reason]
            yield Sample(name="request_success", value=count, labels={**labels, "finished_reason": reason})
        for code, count in sorted(self.failed.items()):
            yield Sample(name="request_errors", value=count, labels={**labels, "error_code": code})
        for name, buckets in self.buckets.items():
            yield Sample(name=name, value=buckets.histogram(), labels=labels)


class Measures:
    """The answers that this process has ended, by model."""

    def __init__(self, aliases: Sequence[str]) -> None:
        self._models = {alias: ModelMeasures() for alias in aliases}

    def of(self, alias: str) -> ModelMeasures:
        """Return a model's; one that is not served here any more has its own too."""
        return self._models.setdefault(alias, ModelMeasures())

    def samples(self) -> Iterator[Sample]:
        """Yield every model's."""
        for alias, model in self._models.items():
            yield from model.samples(alias)


class Recently:
    """The last minutes of a model's buckets: percentiles of what was observed since the oldest copy of them."""

    def __init__(self, model: ModelMeasures, names: Sequence[str], num_copies: int) -> None:
        self._model, self._names = model, names
        self._copies: deque[dict[str, Buckets]] = deque(maxlen=num_copies)
        self.turn()

    def turn(self) -> None:
        """Copy the buckets; the oldest copy is dropped. Called at equal times, one `num_copies`-th of the window."""
        self._copies.append({name: _copy(self._model.buckets[name]) for name in self._names})

    def quantile(self, name: str, share: float) -> float | None:
        """Return a percentile of the window; None if nothing was observed."""
        return self._model.buckets[name].since(self._copies[0][name]).quantile(share)


def _copy(buckets: Buckets) -> Buckets:
    return Buckets(buckets.counts, buckets.total)


class Responses:
    """HTTP responses of this process: by route and status, and errors by code. Counted where replies are made."""

    def __init__(self) -> None:
        self.by_status: Counter[tuple[str, int]] = Counter()
        self.by_code: Counter[str] = Counter()

    def samples(self) -> Iterator[Sample]:
        """Yield them for `/metrics`."""
        for (handler, status), count in sorted(self.by_status.items()):
            yield Sample(name="http_requests", value=count, labels={"handler": handler, "status": str(status)})
        for code, count in sorted(self.by_code.items()):
            yield Sample(name="http_errors", value=count, labels={"error_code": code})


# Of the whole process: a request that is refused before it has a site is counted too.
RESPONSES = Responses()

assert set(HISTOGRAMS) <= METRICS.keys()
