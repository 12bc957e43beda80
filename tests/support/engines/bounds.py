"""`Bounds`: an `AdmissionControl` before an engine whose backlog is written by hand."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from streamserve.clients.thread.admission import AdmissionControl
from streamserve.clients.timings import RecentTimes
from streamserve.engine.config import EngineConfig
from streamserve.engine.policy.backlog import Backlog, Patience, Ticket
from streamserve.engine.policy.waiting import WaitingQueue
from tests.support.engines.cores import request
from tests.support.engines.runners import FakeClock


class Bounds:
    """What the engine has taken on is added, started and removed by tests; the door's answers are the real ones."""

    def __init__(self, *, seconds_per_token: float = 0.0, cold_share: float = 1.0, **config: Any) -> None:
        self.clock = FakeClock()
        self.times = RecentTimes(self.clock)
        self.blocks = (0, 0)  # used, and in all
        engine_config = EngineConfig(**config)
        self.patience = Patience(engine_config.classes).noted(self.clock(), has_in_time=False)
        self._control = AdmissionControl(engine_config, self.times, self.clock)
        self._queue = WaitingQueue(engine_config)
        self._seconds_per_token, self._cold_share = seconds_per_token, cold_share
        self._waiting: dict[int, Ticket] = {}
        self._running: dict[int, tuple[Ticket, float]] = {}

    def add(self, seq_id: int, num_tokens: int, latency_class: str = "chat", tenant: str = "", **fields: Any) -> None:
        """A sequence waits from now on."""
        one = request(
            seq_id,
            range(num_tokens),
            latency_class=latency_class,
            tenant=tenant,
            **{"arrived_at": self.clock(), **fields},
        )
        self._waiting[seq_id] = self._queue.ticket(one, self.clock())

    def start(self, seq_id: int, at: float = 100.0) -> None:
        """It has begun at that time."""
        self._running[seq_id] = self._waiting.pop(seq_id), at

    def remove(self, seq_id: int) -> None:
        """It has ended."""
        self._waiting.pop(seq_id, None)
        self._running.pop(seq_id, None)

    @property
    def backlog(self) -> Backlog:
        """What was added and has not ended."""
        return Backlog(
            waiting=tuple(self._waiting.values()),
            running=tuple(self._running.values()),
            patience=self.patience,
            seconds_per_token=self._seconds_per_token,
            cold_share=self._cold_share,
            blocks_used=self.blocks[0],
            blocks_total=self.blocks[1],
        )

    def note_refusal(self) -> None:
        """Like `EngineCore`'s."""
        self.patience = self.patience.refused(self.clock())

    @property
    def num_in_preparation(self) -> int:
        """The door's."""
        return self._control.num_in_preparation

    def reserve(self, *what: Any, **how: Any) -> AbstractContextManager[None]:
        """The door's, before this engine."""
        return self._control.reserve(self, *what, **how)

    def check_wait(self, *what: Any, **how: Any) -> tuple[int, float]:
        """The door's, before this engine."""
        return self._control.check_wait(self, *what, **how)

    def predict(self, *what: Any, **how: Any) -> tuple[float, float]:
        """The door's, before this engine."""
        return self._control.predict(self.backlog, *what, **how)
