"""`StreamSpans`: the span of what this process makes of a stream, and a span for each of its readers.

One answer may have several, one after another: of each process that produces it, and of each attempt of a job. All are
children of what its request came with. Nothing is recorded where the site records no spans. Lives on the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from streamserve.protocol.events import Done, Error
from streamserve.protocol.measures import Timings
from streamserve.protocol.trace import Trace
from streamserve.streams.readers import Attachment
from streamserve.streams.transcript import StreamSummary
from streamserve.tracing.answers import add_phases, used
from streamserve.tracing.spans import Span, child, incoming


class StreamSpans:
    """At most one span is open: it is begun by the caller's request (`take`), or here.

    `new` begins a span below a parent; None where the site records none.
    """

    def __init__(self, parent: Trace | None) -> None:
        self.new: Callable[[Trace | None, float], Span | None] | None = None
        self._parent = parent
        self._open: Span | None = None

    @property
    def is_open(self) -> bool:
        """Whether a span waits for its end."""
        return self._open is not None

    def take(self, span: Span) -> None:
        """Own the span that the request has begun."""
        self._open, span.is_taken = span, True

    def begin(self) -> Trace | None:
        """Begin the span of an answer that this process continues, or of a job's attempt; None: none is begun now."""
        if self._open is not None or self.new is None:
            return None
        self._open = self.new(self._parent, time.monotonic())
        return None if self._open is None else self._open.trace

    def end(self, summary: StreamSummary, timings: Timings, end: Done | Error | None, failure: Error | None) -> None:
        """End the open span, with a child for each phase. `failure`: why the attempt of a job is over."""
        span, self._open = self._open, None
        if span is None:
            return
        ended_at = timings.started_at + summary.latency
        add_phases(span, timings, ended_at, summary.phases)
        values = {
            **used(summary.usage, summary.finish_reason),
            "gen_ai.response.id": summary.id,
            "streamserve.stream_id": summary.id,
            "gen_ai.response.time_to_first_chunk": end.breakdown.get("ttft") if isinstance(end, Done) else None,
            "streamserve.num_parks": summary.num_parks,
            "streamserve.network_in_seconds": summary.phases.get("network_in"),
            "streamserve.has_ended": end is not None,
        }
        span.end(ended_at, values, error=summary.error_code or (failure.code if failure is not None else ""))


def begin_delivery(reader: Attachment, trace: Trace | None, *, is_return: bool) -> None:
    """Begin the span of a reader of the answer with this trace, linked to the request that it comes with."""
    if trace is None or not trace.is_recorded:
        return
    came_with = incoming({})
    values = {
        "streamserve.transport": reader.transport,
        "streamserve.deliver.from_seq": reader.received_seq,
        "streamserve.deliver.is_return": is_return,
    }
    links = () if came_with is None else (came_with,)
    reader.span = child(trace, "deliver", at=time.monotonic(), attributes=values, links=links)


def end_delivery(reader: Attachment) -> None:
    """End it where the reader leaves."""
    if reader.span is not None:
        reader.span.end(time.monotonic(), {"streamserve.deliver.to_seq": reader.received_seq})
