"""What is written down about a stream: its row in the database, and one log line at its end. Never prompt or answer
text in the log; the answer in the row only if STORE is on.
"""

from __future__ import annotations

from typing import Any

import structlog
from channels.db import database_sync_to_async

from streamserve.dialects.base import TextBlocks
from streamserve.models import Stream as StreamRow
from streamserve.protocol.events import BlockStart, Done, Token
from streamserve.protocol.requests import encode_request
from streamserve.streams.log.base import EventLog, LogUnavailable
from streamserve.streams.stream import Stream

log = structlog.get_logger("streamserve")


async def record_start(stream: Stream, worker_id: str) -> None:
    """Insert the row of a stream that has just been accepted, and is produced by this process."""
    row = StreamRow(
        id=stream.id,
        log_id=stream.log_id,
        owner=stream.owner,
        tenant=stream.tenant,
        model=stream.model,
        on_disconnect=stream.on_disconnect,
        fence=stream.claim.fence,
        producer=worker_id,
        request=encode_request(stream.request),
    )
    await database_sync_to_async(row.save)(force_insert=True)


async def record_finish(stream: Stream, events: EventLog | None) -> None:
    """Write the end of `stream`, once: whoever finds the row running writes the row and the log line."""
    figures = figures_of(stream)
    text = "" if events is None else await _text_to_store(stream, events)
    finish = database_sync_to_async(StreamRow.objects.finish)
    if await finish(stream.id, **figures, text=text):
        log.info("stream_finished", **line_of(stream))


async def _text_to_store(stream: Stream, events: EventLog) -> str:
    """Return the answer; nothing of one that ends while the log cannot be read."""
    try:
        return await answer_text(events, stream.log_id)
    except LogUnavailable:
        log.exception("stream_text_not_stored", stream_id=stream.id)
        return ""


def figures_of(stream: Stream) -> dict[str, Any]:
    """Return the row's figures of now."""
    summary = stream.summary()
    return {
        "finish_reason": summary.finish_reason or "",
        "error_code": summary.error_code or "",
        "prompt_tokens": summary.prompt_tokens,
        "cached_tokens": summary.cached_tokens,
        "completion_tokens": summary.completion_tokens,
        "ttft_seconds": summary.ttft,
        "last_seq": stream.last_seq,
    }


def line_of(stream: Stream) -> dict[str, Any]:
    """Return the fields of the log line: ids, counts and times, nothing anybody wrote."""
    summary = stream.summary()
    fields = ("model", "owner", "finish_reason", "error_code", "prompt_tokens", "cached_tokens", "completion_tokens")
    line = {name: getattr(summary, name) for name in fields}
    times = {f"{name}_ms": getattr(summary, name) for name in ("ttft", "itl_p50", "itl_p95")}
    return {
        "stream_id": stream.id,
        "log_id": stream.log_id,
        **line,
        **{name: None if seconds is None else round(seconds * 1000, 2) for name, seconds in times.items()},
        "age_seconds": round(summary.age_seconds, 3),
        "num_parks": summary.num_parks,
    }


async def answer_text(events: EventLog, log_id: str, choice: int = 0) -> str:
    """Return the text of one choice from the log, up to where the user stopped reading."""
    blocks, pieces = TextBlocks(), list[tuple[int, str]]()
    after, kept_seq = 0, None
    while batch := await events.read(log_id, after):
        after = batch[-1].seq
        for logged in batch:
            if isinstance(logged.event, BlockStart):
                blocks.note(logged.event)
            elif isinstance(logged.event, Token) and logged.event.choice == choice and logged.event in blocks:
                pieces.append((logged.seq, logged.event.text))
            elif isinstance(logged.event, Done):
                kept_seq = logged.event.kept_seq
    return "".join(text for seq, text in pieces if kept_seq is None or seq <= kept_seq)
