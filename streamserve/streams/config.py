"""`StreamConfig`, `JobConfig` and `BatchConfig`: the times and bounds of streams, jobs and batches.

conf.py makes them; knows no Django.
"""

from __future__ import annotations

from dataclasses import dataclass

# The `on_disconnect` of a job's stream: no reader holds it, and only the worker that has the job produces it.
JOB = "job"


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
    engine_wait_seconds: float = 60.0  # for an engine that loads or is replaced
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """How jobs are run. Waits in seconds.

    `embedded`: web processes run jobs too, so that no worker is needed. `concurrency` holds for one process. A failed
    attempt is followed by another after `retry_seconds`, then twice that, `max_retry_seconds` at most. An attempt may
    take `timeout_seconds`, unless its request sets less. A worker that stops waits `grace_seconds` for what runs.
    """

    embedded: bool = False
    concurrency: int = 4
    max_attempts: int = 5
    retry_seconds: float = 2.0
    max_retry_seconds: float = 600.0
    timeout_seconds: float = 3600.0
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.max_attempts < 1:
            raise ValueError("CONCURRENCY and MAX_ATTEMPTS are 1 at least")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """`storage` is an alias of Django's STORAGES; "" is a private folder in STATE_DIR.

    `concurrency`: rows of one batch that run at once. `keep_days`: files, and batches after their end; 0: for ever.
    """

    storage: str = ""
    concurrency: int = 8
    keep_days: float = 30.0

    def __post_init__(self) -> None:
        if not self.concurrency:
            raise ValueError("concurrency is 0; it takes how many rows run at once")
