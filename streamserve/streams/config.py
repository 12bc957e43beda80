"""`StreamConfig`: times and bounds of streams, as one value. Read by conf.py; knows nothing of Django."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """How long streams wait and how finely they are cut. Seconds and tokens.

    `coalesce_tokens` or `coalesce_seconds` 0 gives every token a frame of its own. `max_finished` bounds how many
    finished streams are kept for replay, oldest dropped first; `max_expired` how many dropped ids are remembered, so
    that they can be told (410) from ids that never were (404). `max_readers` bounds who may read one stream at a time.
    `ping_seconds` of silence on a WebSocket are followed by a ping message; 0: never.
    A native reader more than `snapshot_events` behind is sent one snapshot in their place; 0 is never.
    While the log is full or away, answers wait for it for `log_outage_seconds`; then their connections end, and they
    are continued when it is back.
    """

    resume_window_seconds: float = 600.0
    first_reader_seconds: float = 5.0
    engine_wait_seconds: float = 10.0
    keepalive_seconds: float = 15.0
    coalesce_tokens: int = 5
    coalesce_seconds: float = 0.05
    retention_seconds: float = 900.0
    max_finished: int = 1000
    max_expired: int = 10_000
    max_readers: int = 64
    ping_seconds: float = 0.0
    snapshot_events: int = 512
    log_outage_seconds: float = 30.0
