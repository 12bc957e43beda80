"""`RowWriter`: stores rows that have ended. Rows that wait for one write are stored together by the next. asyncio."""

from __future__ import annotations

import asyncio

from streamserve.dialects.batch_lines import RowResult
from streamserve.durable.batches import Batch, BatchRow
from streamserve.web.rows import orm
from streamserve.web.work.kinds import Claim, LeaseLost


class RowWriter:
    """One for each claim of a batch. A slot waits for its row's write, so that a kill costs it one row at most."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._waiting: list[tuple[RowResult, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def store(self, row: RowResult) -> None:
        """Return when the row is stored. Raises LeaseLost, and the database's errors."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, stored))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write(), name=f"{self._claim.id} rows")
        await stored

    async def aclose(self) -> None:
        """Finish the writes that are under way: a row that has ended is not run again."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _write(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            error = await self._write_rows([row for row, _ in taken])
            for _, stored in taken:
                if not stored.done():
                    stored.set_exception(error) if error is not None else stored.set_result(None)

    async def _write_rows(self, results: list[RowResult]) -> Exception | None:
        claim = self._claim
        rows = [
            BatchRow(
                batch_id=claim.id,
                line=one.line,
                custom_id=one.custom_id,
                request_id=one.request_id,
                status_code=one.status_code,
                body=one.body.replace("\0", "\N{REPLACEMENT CHARACTER}"),  # PostgreSQL refuses NUL
            )
            for one in results
        ]
        try:
            is_held = await orm.write(Batch.objects.store, claim.id, claim.fence, claim.worker_id, rows)
        except Exception as error:  # each slot raises it
            return error
        return None if is_held else LeaseLost(claim.id)
