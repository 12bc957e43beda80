"""`recall`: a stream of another process, or of one that has died, rebuilt here from its record and its log.

It begins as a follower of the log; an owner's reader has it claim the stream (claim.py) and go on. asyncio.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import cast

from streamserve.clients.base import EngineClient, Generation
from streamserve.protocol.errors import NotFound, StreamserveError
from streamserve.protocol.requests import GenerateRequest
from streamserve.streams.config import StreamConfig
from streamserve.streams.lease.lease import Claims, Lease, Record
from streamserve.streams.log.base import EventLog
from streamserve.streams.stream import Stream

# The machine's monotonic clock begins anew when it boots: a moment that far off what the calendar says is of another.
_CLOCK_SECONDS = 5.0


async def recall(
    record: Record, claims: Claims, client: EngineClient | None, log: EventLog, settings: StreamConfig
) -> Stream | None:
    """Return the stream with all that is committed noted; None if its log is gone. `run` must follow."""
    stream = Stream(
        client if client is not None and record.request is not None else _unable(record),
        log,
        settings,
        _request_of(record),
        None,
        owner=record.owner,
        on_disconnect=record.on_disconnect,
        claim=Lease(claims, record.id, fence=record.fence, is_held=False, producer=record.producer),
        log_id=record.log_id,
        created=int(record.created),
    )
    try:
        await stream.catch_up()
    except KeyError:
        return None
    # Finished, and without an end in the log: that was shown elsewhere while the log was away, and is not there (yet).
    return stream if stream.last_seq and (stream.terminal is not None or not record.is_finished) else None


def _request_of(record: Record) -> GenerateRequest:
    """Return what was asked, with its place in time; of a finished stream, which needs neither, a stand-in."""
    arrived_at = time.monotonic() - (time.time() - record.created)
    if record.request is None:
        return GenerateRequest(
            model=record.model, prompt="", tenant=record.tenant, stream_id=record.id, arrived_at=arrived_at
        )
    said = record.request.arrived_at
    if said is not None and abs(said - arrived_at) < _CLOCK_SECONDS:
        arrived_at = said
    return replace(record.request, tenant=record.tenant, stream_id=record.id, arrived_at=arrived_at)


class _Unable:
    """Stands where an engine would, and says why there is none."""

    def __init__(self, error: StreamserveError) -> None:
        self._error = error

    async def generate(self, request: GenerateRequest) -> Generation:
        raise self._error


def _unable(record: Record) -> EngineClient:
    error: StreamserveError
    if record.refusal is not None:
        error = record.refusal
    elif record.request is None:
        error = StreamserveError("The server can no longer go on with this answer. Ask again.", code="producer_lost")
    else:
        error = NotFound(f"There is no model {record.model!r} here any more.", code="model_not_found", param="model")
    return cast(EngineClient, _Unable(error))
