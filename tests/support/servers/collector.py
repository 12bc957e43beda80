"""A collector of OpenTelemetry's: takes spans by OTLP over HTTP from any process, and keeps them decoded.

Also what Sentry's SDK sends to its server: `received` has every body with its path.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Collected:
    """One span as it came over the wire."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    service: str
    kind: int
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)


class Collector:
    """`with Collector() as collector:` serves at `url`; give it to the processes as OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __init__(self) -> None:
        self.spans: list[Collected] = []
        self.received: list[tuple[str, bytes]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path.rstrip("/").endswith("/traces"):
                    collector.spans.extend(_decoded(body))
                collector.received.append((self.path, body))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        # Of the processes that send to it.
        self.variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wait(self, is_there: Callable[[list[Collected]], bool]) -> list[Collected]:
        """Return the spans once `is_there` of them."""
        until = time.monotonic() + DEADLINE_SECONDS
        while not is_there(self.spans):
            assert time.monotonic() < until, f"only {[span.name for span in self.spans]}"
            time.sleep(0.02)
        return list(self.spans)


def _decoded(body: bytes) -> list[Collected]:
    asked = ExportTraceServiceRequest.FromString(body)
    return [
        Collected(
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            service=_value({one.key: one.value for one in of_process.resource.attributes}["service.name"]),
            kind=span.kind,
            began_ns=span.start_time_unix_nano,
            ended_ns=span.end_time_unix_nano,
            attributes={one.key: _value(one.value) for one in span.attributes},
        )
        for of_process in asked.resource_spans
        for of_scope in of_process.scope_spans
        for span in of_scope.spans
    ]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
