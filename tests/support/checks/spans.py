"""What tests look at of spans: by name, as a tree, and whether they lie within each other."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.streams.hand_made import until


class Recorded:
    """The spans that have ended."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def all(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    async def until(self, *names: str) -> ReadableSpan:
        """Wait until there are spans of these names; return the first name's."""
        await until(lambda: set(names) <= {span.name for span in self.all()}, f"the spans {names}")
        return self.one(names[0])

    def one(self, name: str) -> ReadableSpan:
        """Return the one span of that name."""
        found = [span for span in self.all() if span.name == name]
        assert len(found) == 1, f"{len(found)} of {name!r} among {[span.name for span in self.all()]}"
        return found[0]

    def below(self, parent: ReadableSpan) -> list[ReadableSpan]:
        """Return the children of a span, by their beginning."""
        own = parent.get_span_context()
        assert own is not None
        found = [span for span in self.all() if span.parent is not None and span.parent.span_id == own.span_id]
        return sorted(found, key=lambda span: span.start_time or 0)

    def tree(self, parent: ReadableSpan, without: Sequence[str] = ()) -> list[object]:
        """Return the names below a span, each with those below it."""
        shown = [one for one in self.below(parent) if one.name not in without]
        return [(one.name, inner) if (inner := self.tree(one, without)) else one.name for one in shown]


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def lies_within(inner: ReadableSpan, outer: ReadableSpan) -> bool:
    assert inner.start_time is not None
    assert inner.end_time is not None
    assert outer.start_time is not None
    assert outer.end_time is not None
    return outer.start_time <= inner.start_time <= inner.end_time <= outer.end_time
