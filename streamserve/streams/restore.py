"""`restore`: a stream of another process, or of one that has died, rebuilt from its record and its log.

It begins as a replica, which follows the log; an owner's reader has it claim the stream (lease.py) and resume. asyncio.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import cast

from streamserve.clients.base import EngineClient, Generation
from streamserve.protocol.errors import NotFound, StreamserveError
from streamserve.protocol.requests import GenerateRequest
from streamserve.streams.config import StreamConfig
from streamserve.streams.lease.lease import Lease
from streamserve.streams.log.base import EventLog
from streamserve.streams.store import Record, StreamStore
from streamserve.streams.stream import Stream

# The monotonic clock restarts when the machine boots: a time further off wall time than this is of another boot.
_CLOCK_SECONDS = 5.0


async def restore(
    record: Record, store: StreamStore, client: EngineClient | None, log: EventLog, settings: StreamConfig
) -> Stream | None:
    """Return the stream with all that is committed counted; None if its log is gone. `run` must follow."""
    stream = Stream(
        client if client is not None and record.request is not None else _unable(record),
        log,
        settings,
        _request_of(record),
        None,
        owner=record.owner,
        on_disconnect=record.on_disconnect,
        claim=Lease(store, record.id, fence=record.fence, is_held=False, producer=record.producer),
        log_id=record.log_id,
        created=int(record.created),
    )
    try:
        await stream.catch_up()
    except KeyError:
        return None
    # A finished record without an end in the log: the end was shown elsewhere while the log was away.
    return stream if stream.last_seq and (stream.terminal is not None or not record.is_finished) else None


def _request_of(record: Record) -> GenerateRequest:
    """Return the request with its arrival on this machine's clock; a stand-in for a finished stream's."""
    arrived_at = time.monotonic() - (time.time() - record.created)
    if record.request is None:
        return GenerateRequest(
            model=record.model, prompt="", tenant=record.tenant, stream_id=record.id, arrived_at=arrived_at
        )
    kept = record.request.arrived_at
    if kept is not None and abs(kept - arrived_at) < _CLOCK_SECONDS:
        arrived_at = kept
    return replace(record.request, tenant=record.tenant, stream_id=record.id, arrived_at=arrived_at)


class _Unable:
    """Stands in for an engine, and raises why there is none."""

    def __init__(self, error: StreamserveError) -> None:
        self._error = error

    async def generate(self, request: GenerateRequest) -> Generation:
        raise self._error


def _unable(record: Record) -> EngineClient:
    if record.request is None:
        error = StreamserveError("The server can no longer go on with this answer. Ask again.", code="producer_lost")
    else:
        error = NotFound(f"There is no model {record.model!r} here any more.", code="model_not_found", param="model")
    return cast(EngineClient, _Unable(error))
