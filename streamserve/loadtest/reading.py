"""One reader's progress, and whether it was served at its own pace.

Pure: times are arguments. A reader begins with the first token and reads `pace` tokens a second, each no earlier than
it came. It is served at its own pace if the first token came within the class's TTFT budget plus `FIRST_SLACK_SECONDS`,
and if its waits after that sum up to `STALL_SECONDS` at most until the end of the answer. (Idea: Andes, arXiv
2404.16283.)
"""

from __future__ import annotations

from bisect import bisect_right

from streamserve.loadtest.visits import Visit

FIRST_SLACK_SECONDS = 2.0
STALL_SECONDS = 1.0


class Reading:
    """The progress of one reader."""

    def __init__(self, visit: Visit) -> None:
        self.visit = visit
        self.came_at: list[float] = []
        self.read_at: list[float] = []
        self.is_whole = False  # the answer is complete

    def take(self, now: float, num_tokens: int = 1) -> None:
        """Note that tokens came, and when each of them is read."""
        for _ in range(num_tokens):
            ready_at = self.read_at[-1] + 1 / self.visit.pace if self.read_at else now
            self.came_at.append(now)
            self.read_at.append(max(now, ready_at))

    def num_read(self, now: float) -> int:
        """Return how many tokens are read by `now`."""
        return bisect_right(self.read_at, now)

    @property
    def stall_seconds(self) -> float:
        """How long the reader waited for tokens after the first."""
        return self.read_at[-1] - self.read_at[0] - (len(self.read_at) - 1) / self.visit.pace if self.read_at else 0.0

    @property
    def first_seconds(self) -> float:
        """How long after the request the first token came; infinity if none did."""
        return self.came_at[0] - self.visit.arrives_at if self.came_at else float("inf")

    @property
    def is_first_in_time(self) -> bool:
        """Whether the first token came when due, slack included."""
        return bool(self.came_at) and self.came_at[0] <= self.visit.first_due_at + FIRST_SLACK_SECONDS

    @property
    def is_served(self) -> bool:
        """Whether the reader was served at its own pace."""
        return self.is_whole and self.is_first_in_time and self.stall_seconds <= STALL_SECONDS

    @property
    def area(self) -> float:
        """Tokens read over time ÷ the same for a reader that never waits, 0 to 1; 0 for an incomplete answer.

        Both areas lie under the curve "tokens read by t", up to when the later of the two has read everything.
        """
        if not self.is_whole:
            return 0.0
        due_at = [self.visit.first_due_at + index / self.visit.pace for index in range(len(self.read_at))]
        end = max(due_at[-1], self.read_at[-1]) + 1 / self.visit.pace
        return min(1.0, sum(end - at for at in self.read_at) / sum(end - at for at in due_at))
