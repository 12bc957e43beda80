"""`RowClaims`: who produces which stream, in the rows of the site's database. See streams/lease/lease.py.

Each call is one query and holds no connection afterwards. Lives on the event loop.
"""

from __future__ import annotations

import structlog
from channels.db import database_sync_to_async

from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import UnmetNeeds
from streamserve.protocol.requests import GenerateRequest, decode_request
from streamserve.streams.lease.lease import Record
from streamserve.streams.lease.liveness import Workers
from streamserve.streams.quota import Group

log = structlog.get_logger("streamserve")


class RowClaims:
    """See `Claims`. `workers` says who this process is, and who is alive."""

    def __init__(self, workers: Workers) -> None:
        self.worker_id = workers.own_id
        self.is_alive = workers.is_alive

    async def find(self, stream_id: str) -> Record | None:
        row = await database_sync_to_async(StreamRow.objects.filter(pk=stream_id).first)()
        return None if row is None else record_of(row)

    async def claim(self, stream_id: str, seen_fence: int) -> bool:
        claim = database_sync_to_async(StreamRow.objects.claim)
        return bool(await claim(stream_id, seen_fence, self.worker_id))

    async def release(self, stream_id: str, fence: int) -> None:
        await database_sync_to_async(StreamRow.objects.release)(stream_id, fence, self.worker_id)


async def running_of(group: Group) -> list[tuple[str, str]]:
    """Return the group's unfinished streams: ids with their producers, oldest first."""
    query = StreamRow.objects.running_of(group.name, group.is_prefix)
    rows: list[tuple[str, str]] = await database_sync_to_async(list)(query)
    return rows


def record_of(row: StreamRow) -> Record:
    """Return what the streams need to know of a row."""
    request, refusal = _request_of(row)
    return Record(
        id=row.pk,
        log_id=row.log_id,
        owner=row.owner,
        tenant=row.tenant,
        model=row.model,
        created=row.created_at.timestamp(),
        on_disconnect=row.on_disconnect,
        request=request,
        fence=row.fence,
        producer=row.producer,
        is_finished=row.state == "finished",
        refusal=refusal,
    )


def _request_of(row: StreamRow) -> tuple[GenerateRequest | None, UnmetNeeds | None]:
    """Return the row's request, or why this release cannot serve it."""
    if row.request is None:
        return None, None
    try:
        return decode_request(row.request), None
    except UnmetNeeds as error:
        return None, error
    except ValueError:
        log.exception("stream_request_unreadable", stream_id=row.pk)
        return None, None
