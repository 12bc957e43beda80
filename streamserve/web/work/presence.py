"""`Presence`: this process among the workers, and which of the others live.

A worker of this host holds a file lock, and its death shows at once (streams/lease/liveness.py); so does, with Redis,
one of another host after 3 s. Where neither tells, the row counts: a worker without a beat for `LEASE_SECONDS` is dead.
A worker that was only slow is fenced. Blocking calls, on the ORM thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

from streamserve.models import Worker as WorkerRow
from streamserve.streams.lease.liveness import Liveness
from streamserve.web.rows import orm

BEAT_SECONDS = 5.0


class Presence:
    """Without a `liveness` (a log in memory) the worker has a new id, and only rows tell about others."""

    def __init__(self, liveness: Liveness | None, *, kinds: str, concurrency: int) -> None:
        self._liveness = liveness
        self.worker_id = f"memory-{secrets.token_hex(8)}" if liveness is None else liveness.own_id
        self._kinds, self._concurrency = kinds, concurrency

    async def beat(self) -> None:
        """Write this worker's beat; call it every `BEAT_SECONDS`."""
        await orm.call(WorkerRow.objects.beat, self.worker_id, self._kinds, self._concurrency)

    def alive(self, worker_ids: Collection[str]) -> Collection[str]:
        """Return the given workers that live, as far as is known."""
        judge = self._liveness
        seen = {one for one in worker_ids if judge is not None and judge.can_judge(one)}
        alive = {one for one in seen if judge is not None and judge.is_alive(one)}
        unseen = set(worker_ids) - seen
        if unseen:
            alive.update(WorkerRow.objects.alive().filter(pk__in=unseen).values_list("pk", flat=True))
        return alive

    async def leave(self) -> None:
        """Delete this worker's row."""
        await orm.call(WorkerRow.objects.filter(pk=self.worker_id).delete)
