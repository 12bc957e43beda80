"""`record_of` and `restore`: a stream as its record, and the stream rebuilt from record and log in another process.

A restored stream begins as a follower of the log; when an owner's reader attaches it takes the lease
(lease.py) and resumes. asyncio.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import cast

from streamserve.clients.base import EngineClient, Generation
from streamserve.protocol.errors import NotFound, ProducerLost, StreamserveError
from streamserve.protocol.requests import NO_CALLER, START, Admission, GenerateRequest, Resume
from streamserve.streams.config import StreamConfig
from streamserve.streams.lease.lease import Lease
from streamserve.streams.store import Record, StreamStore
from streamserve.streams.stream import Stream
from streamserve.streams.writer import LogWriter


def record_of(stream: Stream, producer: str) -> Record:
    """Return the record of a new stream."""
    return Record(
        admission=stream.admission,
        log_id=stream.log_id,
        model=stream.model,
        created=stream.created_at,
        request=stream.request,
        fence=stream.lease.fence,
        producer=producer,
        num_prompt_tokens=stream.transcript.usage.prompt_tokens,
    )


# The monotonic clock restarts at boot: a time that differs more than this from wall time belongs to another boot.
_CLOCK_SECONDS = 5.0


async def restore(
    record: Record, store: StreamStore, client: EngineClient | None, writer: LogWriter, settings: StreamConfig
) -> Stream | None:
    """Return the stream with every committed event counted; None if its log is gone. The caller must run it."""
    arrived_at = time.monotonic() - (time.time() - record.created)  # on this machine's clock
    admission = record.admission
    if admission.arrived_at is None or abs(admission.arrived_at - arrived_at) >= _CLOCK_SECONDS:
        admission = replace(admission, arrived_at=arrived_at)
    stream = Stream(
        client if client is not None and record.request is not None else _unable(record),
        writer,
        settings,
        record.request or GenerateRequest(model=record.model, prompt=""),
        admission,
        None,
        lease=Lease(store, record.id, fence=record.fence, is_held=False, producer=record.producer),
        log_id=record.log_id,
        created_at=record.created,
    )
    try:
        await stream.follower.catch_up()
    except KeyError:
        return None
    # A finished record without an end in the log means that the log has lost the end.
    return stream if stream.last_seq and (stream.terminal is not None or not record.is_finished) else None


class _Unable:
    """An engine client that only raises `error`."""

    def __init__(self, error: StreamserveError) -> None:
        self._error = error

    async def generate(
        self, request: GenerateRequest, admission: Admission = NO_CALLER, resume: Resume = START
    ) -> Generation:
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
