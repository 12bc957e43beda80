"""`Figures`: values of metrics that add up, of one process or of several; `Past`: those of processes that have ended,
and how much there was at the beginning of each minute. Pure.

    process A ─ samples ─┐
    process B ─ samples ─┼─► Figures of the host ── − Past.at(ten minutes ago) ──► Figures of the last ten minutes
    Past.ended ──────────┘

Counters and histograms never fall, so that what they gained since a moment is a subtraction. Names are those of
protocol/metrics.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec

from streamserve.protocol.history import WINDOW_SECONDS
from streamserve.protocol.measures import BOUNDS, Buckets
from streamserve.protocol.metrics import METRICS, Histogram, Sample

MINUTE_SECONDS = 60
# What is packed by another release, with other buckets, is not read.
_FORMAT = 1
_KEPT_MINUTES = WINDOW_SECONDS // MINUTE_SECONDS

_Labels = tuple[tuple[str, str], ...]  # in the order of their metric


class _Counts(msgspec.Struct, frozen=True, array_like=True):
    """A histogram with the bounds of measures.py, without its empty buckets."""

    counts: dict[int, int]
    total: float


class _Row(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float
    counts: _Counts | None = None


class _Packed(msgspec.Struct, frozen=True, kw_only=True):
    """What is written of a process, or of the past: `ids` and `marks` are the past's."""

    format: int = _FORMAT
    rows: list[_Row] = []
    ids: list[str] = []
    marks: dict[int, list[_Row]] = {}


class Figures:
    """Values by name and labels. Iterating gives them as samples, for `/metrics`."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self._values: dict[str, dict[_Labels, float | Histogram]] = {}
        self.add(samples)

    def __iter__(self) -> Iterator[Sample]:
        for name, values in self._values.items():
            for labels, value in values.items():
                yield Sample(name=name, value=value, labels=dict(labels))

    def has_same(self, other: Figures) -> bool:
        """Return whether the values are equal."""
        return self._values == other._values

    def add(self, samples: Iterable[Sample]) -> None:
        """Join the values of another process: they add up, or the larger value counts (`Metric.adds_up`)."""
        for sample in samples:
            values, labels = self._values.setdefault(sample.name, {}), tuple(sample.labels.items())
            before = values.get(labels)
            values[labels] = sample.value if before is None else _joined(sample.name, before, sample.value)

    def counted(self) -> Figures:
        """Return counters and histograms: what stays when its process has ended."""
        return Figures(sample for sample in self if METRICS[sample.name].kind != "gauge")

    def since(self, before: Figures) -> Figures:
        """Return what counters and histograms have gained since an earlier moment."""
        out = self.counted()
        for name, values in out._values.items():
            then = before._values.get(name, {})
            for labels in values.keys() & then.keys():
                values[labels] = _gained(values[labels], then[labels])
        return out

    def total(self, name: str, **labels: str | Collection[str]) -> float:
        """Return the sum of a metric's numbers whose labels have one of the given values."""
        found = self._matching(name, labels)
        return sum(value for value in found if not isinstance(value, Histogram))

    def histogram(self, name: str, **labels: str | Collection[str]) -> Histogram:
        """Return the sum of a metric's histograms."""
        total = Buckets().histogram()
        for value in self._matching(name, labels):
            if isinstance(value, Histogram):
                total += value
        return total

    def _matching(self, name: str, wanted: dict[str, Any]) -> Iterator[float | Histogram]:
        texts = {label: {one} if isinstance(one, str) else set(one) for label, one in wanted.items()}
        for labels, value in self._values.get(name, {}).items():
            if all(text in texts[label] for label, text in labels if label in texts):
                yield value


class Past:
    """`ended`: what processes counted that have ended; `ids`, of those whose own file may still be there.

    `marks`: by number of the minute, what all had counted when it began; none for a minute that changed nothing.
    """

    def __init__(self) -> None:
        self.ended = Figures()
        self.ids: set[str] = set()
        self.marks: dict[int, Figures] = {}

    def at(self, minute: int) -> Figures:
        """Return what all had counted when that minute began. Without an earlier mark that is nothing."""
        return self.marks.get(max((one for one in self.marks if one <= minute), default=-1), Figures())

    def mark(self, minute: int, figures: Figures) -> bool:
        """Note what all have counted as that minute begins; return whether that is news. Marks of the future go."""
        if minute in self.marks:
            return False
        counted = figures.counted()
        marks = {one: mark for one, mark in self.marks.items() if one < minute}
        if marks and marks[max(marks)].has_same(counted):
            return False
        marks[minute] = counted
        first = max((one for one in marks if one <= minute - _KEPT_MINUTES), default=0)
        self.marks = {one: mark for one, mark in marks.items() if one >= first}
        return True


def pack(figures: Figures) -> bytes:
    """Return what a process writes of itself."""
    return msgspec.msgpack.encode(_Packed(rows=_rows(figures)))


def unpack(data: bytes) -> Figures:
    """Return what a process has written; nothing of another release."""
    return _figures(_decoded(data).rows)


def pack_past(past: Past) -> bytes:
    """Return what is written of the past."""
    marks = {minute: _rows(mark) for minute, mark in past.marks.items()}
    return msgspec.msgpack.encode(_Packed(rows=_rows(past.ended), ids=sorted(past.ids), marks=marks))


def unpack_past(data: bytes) -> Past:
    """Return the past that was written; none of another release."""
    packed, past = _decoded(data), Past()
    past.ended, past.ids = _figures(packed.rows), set(packed.ids)
    past.marks = {minute: _figures(rows) for minute, rows in packed.marks.items()}
    return past


def _joined(name: str, one: float | Histogram, other: float | Histogram) -> float | Histogram:
    if isinstance(one, Histogram) or isinstance(other, Histogram):
        assert isinstance(one, Histogram)
        assert isinstance(other, Histogram)
        return one + other
    return one + other if METRICS[name].adds_up else max(one, other)


def _gained(now: float | Histogram, then: float | Histogram) -> float | Histogram:
    if isinstance(now, Histogram) or isinstance(then, Histogram):
        assert isinstance(now, Histogram)
        assert isinstance(then, Histogram)
        return now - then
    return max(0.0, now - then)


def _rows(figures: Figures) -> list[_Row]:
    return [_row(sample) for sample in figures]


def _row(sample: Sample) -> _Row:
    value = sample.value
    if not isinstance(value, Histogram):
        return _Row(sample.name, dict(sample.labels), float(value))
    assert value.bounds == BOUNDS
    counts = {index: count for index, count in enumerate(value.counts) if count}
    return _Row(sample.name, dict(sample.labels), 0.0, _Counts(counts, value.total))


def _figures(rows: Iterable[_Row]) -> Figures:
    """Return the rows of metrics that this release has."""
    return Figures(_sample(row) for row in rows if row.name in METRICS)


def _sample(row: _Row) -> Sample:
    if row.counts is None:
        return Sample(name=row.name, value=row.value, labels=row.labels)
    buckets = Buckets(total=row.counts.total)
    for index, count in row.counts.counts.items():
        buckets.counts[index] = count
    return Sample(name=row.name, value=buckets.histogram(), labels=row.labels)


def _decoded(data: bytes) -> _Packed:
    try:
        packed = msgspec.msgpack.decode(data, type=_Packed)
    except msgspec.MsgspecError:
        return _Packed()
    return packed if packed.format == _FORMAT else _Packed()
