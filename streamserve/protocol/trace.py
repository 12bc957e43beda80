"""`Trace`: where in a distributed trace a piece of work stands, as the header `traceparent` carries it. Pure.

    traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
                 version  trace id                   span id          flags

W3C Trace Context (w3.org/TR/trace-context), 3.2 and 3.3. A header that is not valid counts as none. Needs no
OpenTelemetry: without it the ids stand in log lines, and go on to servers elsewhere. What records spans is
`streamserve/tracing/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# "All unknown versions": their first four fields are read as version 00's. Letters are lower case. ff is forbidden.
_HEADER = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
# "Vendors SHOULD propagate at least 512 characters of a combined header". A longer header is dropped whole.
_STATE = re.compile(r"[\x20-\x7e]{1,512}")
_MAX_CHARS = 1024
# "sampled", and level 2's "random trace id". Flags that are not known go no further.
_FLAGS = 0b11


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The parent of what is done for a request: a span, of a trace. `flags` has the caller's decision to sample.

    `state` is the header `tracestate`, which is OpenTelemetry's to read. `is_recorded`: this process records spans
    below it. `begins_anew`: what is done for it is a trace of its own, linked to it.
    """

    trace_id: str
    span_id: str
    flags: int = 0
    state: str = ""
    is_recorded: bool = False
    begins_anew: bool = False

    @property
    def header(self) -> str:
        """The header `traceparent` of what is done on its behalf."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request that is made on its behalf."""
        return {"traceparent": self.header, **({"tracestate": self.state} if self.state else {})}


def read_trace(headers: Mapping[str, str]) -> Trace | None:
    """Return the trace of a request with these headers, whose names are in lower case; None without a valid one."""
    given = headers.get("traceparent")
    return None if given is None else parse(given, headers.get("tracestate", ""))


def parse(header: str, state: str = "") -> Trace | None:
    """Return what a `traceparent` names; None for a header that is not valid."""
    match = _HEADER.fullmatch(header.strip(" \t")) if len(header) <= _MAX_CHARS else None
    if match is None or (match[1] == "00" and match[5] is not None):
        return None
    state = state.strip()
    flags = int(match[4], 16) & _FLAGS
    return Trace(trace_id=match[2], span_id=match[3], flags=flags, state=state if _STATE.fullmatch(state) else "")
