"""`RedisLiveness`: which workers of several hosts are alive, by a key in Redis for each.

    {prefix}:worker:<worker id>     lives for 3 s, renewed each second

A thread of its own renews the key, so that a busy event loop is not taken for a dead process. In the same pipeline it
looks at the keys of the workers that were asked about: `is_alive` only reads what the last look found. While Redis is
away, and for 3 s from its return, no other worker becomes dead. A mistake costs a pause and no word, because the log
refuses a producer that lost the fence.

The file lock of `Liveness` is still held: a worker of this host is dead as soon as its process is.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path

from streamserve.streams.lease.liveness import Liveness
from streamserve.streams.log.redis_calls import connect_blocking

logger = logging.getLogger("streamserve.streams")

LIFE_SECONDS = 3.0
_BEATS = 3  # in that time: one may fail


class RedisLiveness(Liveness):
    """See `Liveness`; `url` is the Redis that all hosts share."""

    def __init__(
        self, folder: Path, url: str, *, prefix: str = "streamserve", life_seconds: float = LIFE_SECONDS
    ) -> None:
        super().__init__(folder)
        self._life_seconds, self._beat_seconds = life_seconds, life_seconds / _BEATS
        self._client = connect_blocking(url, self._beat_seconds)
        self._prefix = prefix
        self._lock = threading.Lock()  # guards the two below; never held while Redis is asked
        self._grace: dict[str, float] = {}  # workers that were asked about → until when a missing key says nothing
        self._dead: set[str] = set()
        # Used by the thread alone; times are monotonic.
        self._beat_at = 0.0  # when Redis last answered; 0: it does not
        self._sure_at = 0.0  # from when on a missing key says something
        self._is_closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._beat_always, name="worker's key in Redis", daemon=True)
        self._thread.start()

    def is_alive(self, worker_id: str) -> bool:
        if worker_id == self.own_id:
            return True
        if self._is_locked(worker_id) is False:
            return False
        with self._lock:
            if worker_id not in self._grace:
                self._grace[worker_id] = time.monotonic() + self._life_seconds  # its first beat may be on its way
                self._wake.set()
            return worker_id not in self._dead

    def can_judge(self, worker_id: str) -> bool:
        return True

    def tidy(self) -> None:
        """Forget the dead. One that is asked about again is found dead a few seconds later."""
        super().tidy()
        with self._lock:
            for worker_id in self._dead:
                del self._grace[worker_id]
            self._dead.clear()

    def close(self) -> None:
        self._is_closing = True
        self._wake.set()
        self._thread.join(self._life_seconds)
        super().close()

    def _beat_always(self) -> None:
        while True:
            self._wake.clear()
            if self._is_closing:
                break
            try:
                self._beat()
            except Exception as error:  # the edge of a thread, which must survive whatever redis-py raises
                self._note_outage(error)
            self._wake.wait(self._beat_seconds)
        with contextlib.suppress(Exception):  # else it expires within 3 s
            self._client.delete(self._key(self.own_id))
        self._client.close()

    def _beat(self) -> None:
        """Renew this worker's key, and look at those of the others."""
        with self._lock:
            asked = list(self._grace)
        looked_at = time.monotonic()
        pipeline = self._client.pipeline(transaction=False)
        pipeline.set(self._key(self.own_id), "1", px=int(self._life_seconds * 1000))
        pipeline.mget([self._key(worker_id) for worker_id in (self.own_id, *asked)])
        _, (_, *found) = pipeline.execute()
        if looked_at - self._beat_at > self._life_seconds:
            # Redis was away, or this process stood still. Other workers get time to renew their keys.
            self._sure_at = looked_at + self._life_seconds
        self._beat_at = looked_at
        with self._lock:
            for worker_id, is_there in zip(asked, found, strict=True):
                self._judge(worker_id, is_there is not None, looked_at)

    def _judge(self, worker_id: str, is_there: bool, looked_at: float) -> None:
        if worker_id not in self._grace:
            return
        if is_there:
            self._grace[worker_id] = 0.0
            self._dead.discard(worker_id)
        elif looked_at >= max(self._grace[worker_id], self._sure_at):
            self._dead.add(worker_id)

    def _note_outage(self, error: Exception) -> None:
        if self._beat_at:
            logger.warning("liveness: the workers of other hosts cannot be looked at: %s", error)
        self._beat_at = 0.0

    def _key(self, worker_id: str) -> str:
        return f"{self._prefix}:worker:{worker_id}"
