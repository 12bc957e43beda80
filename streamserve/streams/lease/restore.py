"""`record_of` and `restore`: a stream as its record, and the stream rebuilt from record and log in another process.

A restored stream begins as a replica, which follows the log; when an owner's reader attaches it takes the lease
(lease.py) and resumes. asyncio.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import cast

from streamserve.clients.base import EngineClient, Generation
from streamserve.protocol.errors import NotFound, ProducerLost, StreamserveError
from streamserve.protocol.requests import GenerateRequest
from streamserve.streams.config import StreamConfig
from streamserve.streams.lease.lease import Lease
from streamserve.streams.store import Admission, Record, StreamStore
from streamserve.streams.stream import Stream
from streamserve.streams.writer import LogWriter


def record_of(stream: Stream, worker_id: str) -> Record:
    """Return the record of a new stream."""
    return Record(
        id=stream.id,
        log_id=stream.log_id,
        owner=stream.owner,
        tenant=stream.tenant,
        counted_as=stream.admission.counted_as,
        model=stream.model,
        created=time.time(),
        on_disconnect=stream.on_disconnect,
        request=stream.request,
        fence=stream.lease.fence,
        producer=worker_id,
        once=stream.admission.once,
    )


# The monotonic clock restarts at boot: a time that differs more than this from wall time belongs to another boot.
_CLOCK_SECONDS = 5.0


async def restore(
    record: Record, store: StreamStore, client: EngineClient | None, writer: LogWriter, settings: StreamConfig
) -> Stream | None:
    """Return the stream with every committed event counted; None if its log is gone. The caller must run it."""
    arrived_at = time.monotonic() - (time.time() - record.created)  # on this machine's clock
    request = record.request
    if request is None:
        request = GenerateRequest(model=record.model, prompt="")
    elif request.arrived_at is not None and abs(request.arrived_at - arrived_at) < _CLOCK_SECONDS:
        arrived_at = request.arrived_at
    stream = Stream(
        client if client is not None and record.request is not None else _unable(record),
        writer,
        settings,
        replace(
            request,
            tenant=record.tenant,
            counted_as=record.counted_as,
            stream_id=record.id,
            arrived_at=arrived_at,
        ),
        None,
        admission=Admission(
            owner=record.owner,
            tenant=record.tenant,
            counted_as=record.counted_as,
            on_disconnect=record.on_disconnect,
        ),
        lease=Lease(store, record.id, fence=record.fence, is_held=False, producer=record.producer),
        log_id=record.log_id,
        created=int(record.created),
    )
    try:
        await stream.catch_up()
    except KeyError:
        return None
    # A finished record without an end in the log means that the log has lost the end.
    return stream if stream.last_seq and (stream.terminal is not None or not record.is_finished) else None


class _Unable:
    """An engine client that only raises `error`."""

    def __init__(self, error: StreamserveError) -> None:
        self._error = error

    async def generate(self, request: GenerateRequest) -> Generation:
        raise self._error


def _unable(record: Record) -> EngineClient:
    error: StreamserveError
    if record.refusal is not None:
        error = record.refusal
    elif record.request is None:
        error = ProducerLost("The server can no longer continue this answer. Ask again.")
    else:
        error = NotFound(f"There is no model {record.model!r} here any more.", code="model_not_found", param="model")
    return cast(EngineClient, _Unable(error))
