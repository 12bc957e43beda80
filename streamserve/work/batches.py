"""`Batches`: the batches of tenants as rows. See `Batches` in api/batch/batches.py. batch_runs.py runs them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from streamserve.api.batch.batches import no_batch
from streamserve.api.batch.files import no_file
from streamserve.api.call import Caller
from streamserve.conf import SiteConfig
from streamserve.dialects.batches import (
    ENDED,
    PURPOSE,
    TIMES,
    WINDOW_SECONDS,
    BatchDialect,
    BatchRecord,
    LineError,
    NewBatch,
    Page,
)
from streamserve.dialects.openai.batches import OPENAI
from streamserve.models import Batch, StoredFile
from streamserve.protocol.errors import BadRequest, QuotaExceeded
from streamserve.protocol.requests import Once
from streamserve.protocol.trace import Trace
from streamserve.rows import orm
from streamserve.rows.queries import hold_limit, last_of, made_once, part_of, sent_before
from streamserve.work.files import seconds_of

_RETRY_SECONDS = 60


class Batches:
    """Any event loop of a process that has the site's settings. `wake` is called when there is work."""

    def __init__(self, settings: SiteConfig, wake: Callable[[], None]) -> None:
        self._settings, self._wake = settings, wake

    async def create(
        self,
        caller: Caller,
        batch: NewBatch,
        *,
        dialect: BatchDialect = OPENAI,
        num_rows: int = 0,
        once: Once | None = None,
        trace: Trace | None = None,
    ) -> BatchRecord:
        """Queue a batch; with `once`, return the batch that its key has queued before."""
        now = timezone.now()
        row = Batch(
            id=f"{dialect.id_prefix}{secrets.token_hex(16)}",
            api=dialect.name,
            owner=caller.owner,
            tenant=caller.tenant,
            endpoint=batch.endpoint,
            input_file_id=batch.input_file_id,
            num_rows=num_rows,
            metadata=batch.metadata,
            output_expires_seconds=batch.expires_after,
            created_at=now,
            due_at=now,
            expires_at=now + timedelta(seconds=WINDOW_SECONDS),
            request_key=None if once is None else once.key,
            request_digest=None if once is None else once.digest,
            traceparent="" if trace is None else trace.header,
        )

        async def make() -> BatchRecord:
            await orm.call(self._insert, row)
            self._wake()
            return record_of(row)

        return await made_once(lambda: self.sent_before(once), make)

    async def sent_before(self, once: Once | None) -> BatchRecord | None:
        """Return the batch that this key has queued before, or None."""
        row = None if once is None else await orm.read(sent_before, Batch.objects.all(), once)
        return None if row is None else record_of(row)

    @transaction.atomic
    def _insert(self, row: Batch) -> None:
        hold_limit(Batch.objects.all(), row.tenant)  # so that the file is not deleted before the batch is there
        file = StoredFile.objects.of(row.tenant).filter(pk=row.input_file_id).first()
        if file is None:
            raise no_file(row.input_file_id, "input_file_id")
        if file.purpose != PURPOSE:
            message = f"{file.pk} is a file of the purpose {file.purpose}. Upload a file with purpose={PURPOSE}."
            raise BadRequest(message, code="invalid_value", param="input_file_id")
        most = self._settings.limits.max_batches
        if Batch.objects.of(row.tenant).unfinished().count() >= most:
            message = f"You have {most} batches that have not ended, which is the limit. Wait, or cancel a batch."
            raise QuotaExceeded(message, code="too_many_batches", retry_after=_RETRY_SECONDS)
        row.save(force_insert=True)

    async def find(self, caller: Caller, batch_id: str, *, dialect: BatchDialect = OPENAI) -> BatchRecord:
        """Return the batch."""
        return record_of(await self._row(caller, batch_id, dialect))

    async def page(
        self, caller: Caller, page: Page, *, dialect: BatchDialect = OPENAI
    ) -> tuple[Sequence[BatchRecord], bool]:
        """Return a part of the tenant's batches."""
        rows = Batch.objects.of(caller.tenant).filter(api=dialect.name)
        found, has_more = await orm.read(lambda: part_of(rows, page, last_of(rows, page, no_batch)))
        return [record_of(row) for row in found], has_more

    async def delete(self, caller: Caller, batch_id: str, *, dialect: BatchDialect) -> None:
        """Forget the batch, if it has ended."""
        row = await self._row(caller, batch_id, dialect)
        await orm.bulk(Batch.objects.filter(pk=row.pk, status__in=ENDED).delete)

    async def cancel(self, caller: Caller, batch_id: str, *, dialect: BatchDialect = OPENAI) -> BatchRecord:
        """Have the batch run no more rows. Cancelled again, it stays as it is."""
        row = await self._row(caller, batch_id, dialect)
        if not await orm.write(Batch.objects.cancel, row.pk):
            row = await self._row(caller, batch_id, dialect)
            if row.status not in ("cancelling", "cancelled"):
                message = f"The batch is {row.status}: there is nothing left to cancel."
                raise BadRequest(message, code="batch_not_cancellable", param="batch_id")
            return record_of(row)
        self._wake()
        return record_of(await self._row(caller, batch_id, dialect))

    async def _row(self, caller: Caller, batch_id: str, dialect: BatchDialect) -> Batch:
        row = await orm.read(Batch.objects.of(caller.tenant).filter(pk=batch_id, api=dialect.name).first)
        if row is None:
            raise no_batch(batch_id)
        return row


def record_of(row: Batch) -> BatchRecord:
    """Return the row as a value."""
    has_ended = row.status in ENDED
    return BatchRecord(
        id=row.pk,
        endpoint=row.endpoint,
        status=row.status,
        input_file_id=row.input_file_id,
        output_file_id=row.output_file_id if has_ended else "",
        error_file_id=row.error_file_id if has_ended else "",
        num_rows=row.num_rows,
        num_completed=row.num_completed,
        num_failed=row.num_failed,
        metadata=row.metadata,
        errors=tuple(LineError(**error) for error in row.errors or ()),
        times={name: seconds_of(getattr(row, name)) for name in TIMES},
    )
