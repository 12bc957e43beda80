"""`StreamConfig`, `JobConfig` and `BatchConfig`: the times and bounds of streams, jobs and batches.

conf.py makes them; knows no Django.
"""

from __future__ import annotations

from dataclasses import dataclass

# The `on_disconnect` of a job's stream: no reader holds it, and only the worker that has the job produces it.
JOB = "job"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Waits in seconds, sizes in tokens or events."""

    resume_window_seconds: float = 600.0
    """How long a parked answer waits for its reader."""
    first_reader_seconds: float = 5.0
    """No reader by then counts as a disconnect."""
    engine_wait_seconds: float = 60.0
    """How long a new request waits for an engine that loads or is being replaced, before it is refused with 503. A
    native stream does not hold its response meanwhile: it shows `status: loading`, and ends in an `error`.
    """
    keepalive_seconds: float = 15.0
    """How long a connection may be silent before a comment is sent."""
    coalesce_tokens: int = 5
    """How many tokens may share a frame. 0: each token has its own."""
    coalesce_seconds: float = 0.05
    """How long tokens may wait to share a frame. 0: each token has its own."""
    retention_seconds: float = 900.0
    """How long a finished answer can be replayed; its events go some minutes later."""
    approval_seconds: float = 86_400.0
    """How long a run that waits for its user's answer (docs/pipelines.md#tools-that-ask-first) can be continued; a day
    at most.
    """
    max_finished: int = 1000
    """How many finished answers a process keeps in memory. The oldest go first, the newest stays. With `LOG` `"memory"`
    they are what can be replayed.
    """
    max_finished_bytes: int = 64 * 1024 * 1024
    """About how many bytes they may take (64 MiB); a long prompt counts with its answer."""
    max_expired: int = 10_000
    """How many ids of dropped streams are remembered, which answer 410 instead of 404."""
    max_readers: int = 64
    """Readers of its owner that may follow one stream at a time, and as many watchers."""
    ping_seconds: float = 0.0
    """How long a WebSocket may be silent before a `{"type": "ping"}` message is sent; 0: never (servers send pings of
    the protocol's own).
    """
    snapshot_events: int = 512
    """A native reader more events behind than this is sent the text so far in one `snapshot`; 0: never."""
    log_outage_seconds: float = 30.0
    """How long answers wait for a stream log that is full or cannot be reached; then they stop being made and their
    connections end, and they are resumed when the log is back.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """How jobs are run. Waits in seconds."""

    embedded: bool = False
    """Web processes are workers too, from their start, or from the first request to jobs, files or batches under a
    server without lifespan events: for small sites and demos. With `LOG` `"memory"` they always are.
    """
    concurrency: int = 4
    """Jobs that a process runs at once."""
    max_attempts: int = 5
    """How often a job is tried before it is failed; an attempt whose worker was killed counts."""
    retry_seconds: float = 2.0
    """The wait after the first failed attempt; it doubles after each further attempt, with jitter."""
    max_retry_seconds: float = 600.0
    """The longest wait between two attempts."""
    timeout_seconds: float = 3600.0
    """How long an attempt may take, where its request has no `timeout_seconds`."""
    grace_seconds: float = 30.0
    """How long a worker that stops waits for what runs; then another worker continues it."""

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.max_attempts < 1:
            raise ValueError("CONCURRENCY and MAX_ATTEMPTS are 1 at least")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachmentConfig:
    """Where the files are that questions of conversations bring."""

    storage: str = ""
    """Alias of Django's `STORAGES` for files, which must be private; `""`: the folder `attachments/` in `STATE_DIR`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Where the files of batches are, and how their rows run."""

    storage: str = ""
    """Alias of Django's `STORAGES` for files, which must be private; `""`: the folder `files/` in `STATE_DIR`."""
    concurrency: int = 8
    """Rows of a batch that run at once. All of them yield to any other request."""
    keep_days: float = 30.0
    """Days that files are kept, and batches after their end; 0: for ever."""

    def __post_init__(self) -> None:
        if not self.concurrency:
            raise ValueError("concurrency is 0; it takes how many rows run at once")
