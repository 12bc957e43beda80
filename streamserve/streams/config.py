"""`StreamConfig`: the times and bounds of streams, as one value. conf.py makes it; knows no Django."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Waits in seconds, sizes in tokens or events.

    `coalesce_tokens` or `coalesce_seconds` 0 sends every token in its own frame. `max_finished` and
    `max_finished_bytes` bound the finished streams that are kept for replay, the oldest dropped first; `max_expired`
    bounds the dropped ids that are remembered to answer 410 instead of 404. `max_readers` bounds the concurrent readers
    of one stream.
    After `ping_seconds` of silence a WebSocket gets a ping message; 0: never.
    A native reader more than `snapshot_events` behind gets one snapshot in their place; 0: never.
    While the log is full or unreachable, answers wait for it for `log_outage_seconds`; then their connections end, and
    they can be resumed when it is back.
    """

    resume_window_seconds: float = 600.0
    first_reader_seconds: float = 5.0
    engine_wait_seconds: float = 10.0
    keepalive_seconds: float = 15.0
    coalesce_tokens: int = 5
    coalesce_seconds: float = 0.05
    retention_seconds: float = 900.0
    max_finished: int = 1000
    max_finished_bytes: int = 64 * 1024 * 1024
    max_expired: int = 10_000
    max_readers: int = 64
    ping_seconds: float = 0.0
    snapshot_events: int = 512
    log_outage_seconds: float = 30.0
