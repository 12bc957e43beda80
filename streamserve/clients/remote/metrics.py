"""`Counts` of each upstream of a remote model, and `RemoteMetrics`, the client's own: for `stats()`, the live page and
`/metrics`. Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streamserve.clients.timings import RecentTimes


@dataclass(slots=True)
class Counts:
    """What has happened since the client was made. Each is a metric with the prefix `upstream_` (protocol/metrics.py).

    `requests` were sent, `retries` of them again because a kept connection was closed; `refused` were answered by an
    error, `lost` broke off in the middle, of which `continued` were sent again with the text so far. `moved` were given
    to another upstream before anything was shown. `holds`: how often the server was not read from because a reader was
    behind. `away`: how often it went away: it was not found, or its answers were none.
    """

    requests: int = 0
    retries: int = 0
    refused: int = 0
    lost: int = 0
    continued: int = 0
    moved: int = 0
    holds: int = 0
    away: int = 0


class RemoteMetrics:
    """Counts and recent times of all requests of one client."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.times = RecentTimes(clock)
        self.prompt_tokens = self.generation_tokens = self.num_parks = 0

    def note_tokens(self, at: float, num_tokens: int) -> None:
        """Count tokens that came at that time."""
        self.generation_tokens += num_tokens
        self.times.note(at, num_tokens)

    def note_finished(self, breakdown: Mapping[str, float], prompt_tokens: int) -> None:
        """Count a whole answer."""
        self.prompt_tokens += prompt_tokens
        self.times.note_finished(breakdown)
