"""`Span`: one span of OpenTelemetry's, and where it begins: `incoming`, `start`. The only module that imports it.

It uses OpenTelemetry's API alone. The site sets a tracer provider, an exporter and a sampler; until it has, and where
the package is not installed, `start` returns None and nothing is imported. Times are `time.monotonic()` seconds, as
everywhere; one offset makes wall time of them.

A span is begun when the ids of what it stands for are needed (a request to a server elsewhere, a row), and ended once,
with all that was measured by then. Any thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.trace import Trace, read_trace

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

INTERNAL, SERVER, CLIENT = "INTERNAL", "SERVER", "CLIENT"
_NAME = "streamserve"
_MAX_CHARS = 100  # of a name that an author or a caller has given
_MAX_DRIFT_NS = 50_000_000  # of wall time, as it is set or slewed; below it spans of one trace keep one offset

Attributes = Mapping[str, Any]


class _WallTime:
    """Wall time of monotonic times: one offset, so that spans of one trace fit together to the nanosecond."""

    def __init__(self) -> None:
        self._offset_ns = 0

    def __call__(self, at: float) -> int:
        """Return nanoseconds since 1970 of a moment of `time.monotonic()`."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        if abs(offset_ns - self._offset_ns) > _MAX_DRIFT_NS:
            self._offset_ns = offset_ns
        return self._offset_ns + round(at * 1e9)


_wall = _WallTime()


def incoming(headers: Mapping[str, str]) -> Trace | None:
    """Return what a request that is handled here belongs to: OpenTelemetry's current span, or else its `traceparent`.

    The current span is that of an instrumentation of Django, of ASGI or of the site's own code, which has read the
    header already. Call it in the context of the request.
    """
    otel = sys.modules.get("opentelemetry.trace")  # a site that has set a provider has imported it
    if otel is not None:
        current = _trace_of(otel.get_current_span())
        if current is not None:
            return current
    return read_trace(headers) if "traceparent" in headers else None


def start(
    name: str,
    parent: Trace | None,
    *,
    at: float,
    kind: str = INTERNAL,
    attributes: Attributes | None = None,
    links: tuple[Trace, ...] = (),
) -> Span | None:
    """Begin a span below `parent`, or a trace; None where the site records none. A name is cut to 100 characters."""
    tracer = _tracer()
    if tracer is None:
        return None
    from opentelemetry import trace as otel

    context = otel.set_span_in_context(otel.INVALID_SPAN if parent is None else _span_of(parent))
    span = tracer.start_span(
        name[:_MAX_CHARS],
        context=context,
        kind=otel.SpanKind[kind],
        attributes=_known(attributes),
        links=[otel.Link(_span_of(one).get_span_context()) for one in links],
        start_time=_wall(at),
        record_exception=False,
        set_status_on_exception=False,
    )
    trace = _trace_of(span)
    return None if trace is None else Span(span, trace, at)


def child(
    trace: Trace | None,
    name: str,
    *,
    at: float,
    kind: str = INTERNAL,
    attributes: Attributes | None = None,
    links: tuple[Trace, ...] = (),
) -> Span | None:
    """Begin a span below `trace`, if spans below it are recorded here."""
    if trace is None or not trace.is_recorded:
        return None
    return start(name, trace, at=at, kind=kind, attributes=attributes, links=links)


def here(trace: Trace | None) -> Trace | None:
    """Return OpenTelemetry's current span, if it is of the same trace; else `trace`: code may be within code."""
    current = incoming({}) if trace is not None and trace.is_recorded else None
    return current if current is not None and trace is not None and current.trace_id == trace.trace_id else trace


@contextmanager
def within(
    trace: Trace | None, name: str, *, kind: str = INTERNAL, attributes: Attributes | None = None
) -> Iterator[Span | None]:
    """Record what a `with` block does as a span, which is the current one meanwhile."""
    with running(child(here(trace), name, at=time.monotonic(), kind=kind, attributes=attributes)) as span:
        yield span


@contextmanager
def running(span: Span | None) -> Iterator[Span | None]:
    """Make a span the current one while a `with` block runs, and end it then: in error if the block raises."""
    if span is None:
        yield None
        return
    error = ""
    try:
        with entered(span.trace):
            yield span
    except Exception as raised:
        error = error_type(raised)
        raise
    finally:
        span.end(time.monotonic(), error=error)


def error_type(error: BaseException) -> str:
    """Return the `error.type` of an error: the code of one of ours. To be cancelled is none."""
    if not isinstance(error, Exception):
        return ""
    return error.code if isinstance(error, StreamserveError) else type(error).__name__


def enter(trace: Trace | None) -> None:
    """Make a span the current one for the rest of this task: log lines and reports of errors name its trace."""
    if trace is not None and trace.is_recorded:
        from opentelemetry import context
        from opentelemetry import trace as otel

        context.attach(otel.set_span_in_context(_span_of(trace)))


@contextmanager
def entered(trace: Trace | None) -> Iterator[None]:
    """Make a span the current one of OpenTelemetry: what other code records in this context stands below it."""
    if trace is None or not trace.is_recorded:
        yield
        return
    from opentelemetry import context
    from opentelemetry import trace as otel

    token = context.attach(otel.set_span_in_context(_span_of(trace)))
    try:
        yield
    finally:
        context.detach(token)


class Span:
    """A span that has begun here, at `began`. `trace` is the parent of what is done within it."""

    is_of_run = False  # of a pipeline
    is_taken = False  # an answer that has begun ends it
    is_over = False

    def __init__(self, span: Any, trace: Trace, began: float) -> None:
        self._span, self.trace, self.began = span, trace, began

    @property
    def is_sampled(self) -> bool:
        """Whether it is kept: else what would describe it need not be made."""
        return bool(self._span.is_recording())

    def part(self, name: str, began: float, ended: float, attributes: Attributes | None = None) -> None:
        """Add a child that is over."""
        span = start(name, self.trace, at=began, attributes=attributes)
        if span is not None:
            span.end(ended)

    def note(self, event: str, at: float, attributes: Attributes | None = None) -> None:
        """Add an event."""
        self._span.add_event(event, _known(attributes), timestamp=_wall(at))

    def describe(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._span.set_attributes(_known(attributes))

    def end(self, at: float, attributes: Attributes | None = None, *, error: str = "") -> None:
        """End the span, once. `error` is a code: texts may have words of users."""
        from opentelemetry.trace import Status, StatusCode

        self.is_over = True
        self.describe(attributes or {})
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(_wall(at))


def is_in_use() -> bool:
    """Return whether this process has imported OpenTelemetry, as a site does that sets a tracer provider."""
    return "opentelemetry.trace" in sys.modules


def _tracer() -> Tracer | None:
    """Return the site's tracer; None while OpenTelemetry is not in use."""
    otel = sys.modules.get("opentelemetry.trace")
    if otel is None:
        return None
    from streamserve import __version__

    return otel.get_tracer(_NAME, __version__)  # type: ignore[no-any-return]


def _known(attributes: Attributes | None) -> dict[str, Any]:
    """Return the attributes that have a value: OpenTelemetry logs a warning of None."""
    return {name: value for name, value in (attributes or {}).items() if value is not None}


def _trace_of(span: Any) -> Trace | None:
    """Return where one of OpenTelemetry's spans stands; None for a span of no provider."""
    context = span.get_span_context()
    if not context.is_valid:
        return None
    return Trace(
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        flags=int(context.trace_flags),
        state=context.trace_state.to_header(),
        is_recorded=True,
    )


def _span_of(trace: Trace) -> Any:
    """Return a span of OpenTelemetry's that stands for `trace`."""
    from opentelemetry import trace as otel

    context = otel.SpanContext(
        trace_id=int(trace.trace_id, 16),
        span_id=int(trace.span_id, 16),
        is_remote=not trace.is_recorded,
        trace_flags=otel.TraceFlags(trace.flags),
        trace_state=otel.TraceState.from_header([trace.state]) if trace.state else None,
    )
    return otel.NonRecordingSpan(context)
