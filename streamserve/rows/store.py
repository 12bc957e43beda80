"""`RowStore`: streams' records as rows of the site's database, and a log line when a stream ends. See streams/store.py.

Each call is one query through the door to the ORM (orm.py); with receivers of the site's at its start and its end
(receivers.py). Neither prompt nor answer is logged; the row has the answer
only if STORE is on. Runs on the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from django.db import IntegrityError, transaction

from streamserve.api.logs import get_logger
from streamserve.conf import get_settings
from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import UnmetNeeds
from streamserve.protocol.glass import ReaderTimes
from streamserve.protocol.limits import Limits
from streamserve.protocol.rates import RateLimited, Rates
from streamserve.protocol.requests import Admission, Once, decode_request, encode_request, size_of
from streamserve.rows import orm, rates, usage
from streamserve.rows.answer_messages import AnswerMessages, Write
from streamserve.rows.completions import CompletionRows
from streamserve.rows.receivers import finish_stream, insert_stream
from streamserve.rows.responses import ResponseRows
from streamserve.rows.threads import note_thread
from streamserve.rows.titles import Titles
from streamserve.rows.turns import insert_turn, withdraw
from streamserve.streams.lease.liveness import Liveness
from streamserve.streams.log.base import LogUnavailable
from streamserve.streams.store import Group, KeyTaken, Record
from streamserve.streams.transcript import StreamSummary

log = get_logger(__name__)


class RowStore:
    """See `StreamStore`. Without a `liveness` streams are not shared between processes, and rows are a record only."""

    has_records = True

    def __init__(
        self,
        liveness: Liveness | None,
        *,
        keeps_text: bool = False,
        chats: CompletionRows | None = None,
        messages: AnswerMessages | None = None,
        titles: Titles | None = None,
        max_conversations: int = Limits().max_conversations,
        responses: ResponseRows | None = None,
    ) -> None:
        self.is_shared = liveness is not None
        self.keeps_text = keeps_text
        self.own_id = "" if liveness is None else liveness.own_id
        self._liveness, self._messages, self._titles = liveness, messages, titles
        self._stored = [one for one in (chats, responses) if one is not None]  # what keeps whole answers
        self._max_conversations = max_conversations

    def refuse_early(self, admission: Admission) -> None:
        rates.refuse_early(admission)

    async def insert(self, record: Record) -> Rates | None:
        ask = rates.Ask(record.admission, partial(needs_of, record)) if get_settings().rates else None
        try:
            return await insert_stream(row_of(record), ask=ask, also=_with_record(record, self._max_conversations))
        except RateLimited as error:
            rates.remember(error)
            raise
        except IntegrityError as error:
            if record.once is not None and await self.find(request_key=record.once.key) is not None:
                raise KeyTaken from error
            raise

    async def find(self, *, stream_id: str = "", log_id: str = "", request_key: str = "") -> Record | None:
        if stream_id:
            rows = StreamRow.objects.filter(pk=stream_id)
        elif request_key:
            rows = StreamRow.objects.filter(request_key=request_key)
        else:
            rows = StreamRow.objects.filter(log_id=log_id)
        row = await orm.read(rows.first)
        return None if row is None else record_of(row)

    async def forget_key(self, stream_id: str) -> None:
        await orm.write(_forget_key, stream_id)

    async def claim(self, stream_id: str, seen_fence: int) -> bool:
        return bool(await orm.write(StreamRow.objects.claim, stream_id, seen_fence, self.own_id))

    async def release(self, stream_id: str, fence: int) -> None:
        await orm.write(StreamRow.objects.release, stream_id, fence, self.own_id)

    async def finish(self, summary: StreamSummary, *, last_seq: int, text: str) -> None:
        write_message = await self._message_of(summary, has_begun=last_seq > 0)
        is_written = await finish_stream(
            summary.id,
            num_tokens=summary.usage.prompt_tokens + summary.usage.completion_tokens,
            used=_usage_of(summary),
            also=write_message,
            finish_reason=summary.finish_reason or "",
            error_code=summary.error_code or "",
            prompt_tokens=summary.prompt_tokens,
            cached_tokens=summary.cached_tokens,
            completion_tokens=summary.completion_tokens,
            ttft_seconds=summary.ttft,
            phases={name: round(seconds, 4) for name, seconds in summary.phases.items()},
            last_seq=last_seq,
            text=text.replace("\0", "\N{REPLACEMENT CHARACTER}"),  # PostgreSQL refuses NUL
        )
        if is_written:
            log.info("stream_finished", **line_of(summary))
        if is_written and write_message is not None and self._titles is not None:
            self._titles.note(summary.id, summary.trace)
        if self.keeps_text:
            for kept in self._stored:
                await kept.fill(summary.id)

    async def _message_of(self, summary: StreamSummary, *, has_begun: bool) -> Write | None:
        """Return what writes the answer's message. While its log cannot be read that is left to the reaper."""
        if self._messages is None:
            return None
        error_code = summary.error_code or ""
        try:
            return await self._messages.end_of(summary.id, summary.log_id, error_code, has_begun=has_begun)
        except LogUnavailable as error:
            log.warning("message_not_written", stream_id=summary.id, error=error.message)
            return None

    async def keep_reader(self, stream_id: str, times: ReaderTimes) -> bool:
        return bool(await orm.write(StreamRow.objects.keep_reader, stream_id, times.as_json()))

    async def running(self, group: Group) -> list[tuple[str, str]]:
        return await orm.read(StreamRow.objects.running_of, group.name, group.is_prefix, self.own_id)

    def is_alive(self, producer: str) -> bool:
        return self._liveness is not None and self._liveness.is_alive(producer)


def _usage_of(summary: StreamSummary) -> usage.Entry:
    """Return what an answer has used."""
    return usage.Entry(
        whose=usage.whose_is(summary.owner, summary.tenant, summary.counted_as),
        model=summary.model,
        kind=usage.kind_of(summary.on_disconnect),
        used=usage.used_by(
            summary.usage,
            finish_reason=summary.finish_reason or "",
            error_code=summary.error_code or "",
            phases=summary.phases,
        ),
    )


def _forget_key(stream_id: str) -> None:
    """Free the key of an answer whose events are gone, and drop its messages: its question is asked again."""
    with transaction.atomic(using=StreamRow.objects.db):
        StreamRow.objects.filter(pk=stream_id).update(request_key=None)
        withdraw(stream_id)


def _with_record(record: Record, max_conversations: int) -> Callable[[], None] | None:
    """Return what a stream's start writes beside its row: its thread, its turn in a conversation; None for none."""
    admission = record.admission
    turn, thread = admission.turn, admission.thread
    if turn is None and thread is None:
        return None

    def write() -> None:
        if thread is not None:
            note_thread(thread, admission)
        if turn is not None:
            insert_turn(
                turn,
                admission,
                model=record.model,
                created_at=datetime.fromtimestamp(record.created, UTC),
                max_conversations=max_conversations,
            )

    return write


def needs_of(record: Record) -> rates.Needs:
    """Return what a new stream is taken to need: its prompt, and RESERVE_TOKENS or less of each answer."""
    request = record.request
    if request is None:
        return rates.Needs()
    prompt = record.num_prompt_tokens or size_of(request) // rates.CHARS_A_TOKEN
    most = get_settings().reserve_tokens
    asked = request.sampling.max_tokens
    return rates.Needs(prompt=prompt, answer=request.n * (most if asked is None else min(asked, most)))


def row_of(record: Record) -> StreamRow:
    """Return a new stream's record as a row."""
    admission = record.admission
    return StreamRow(
        id=record.id,
        log_id=record.log_id,
        owner=admission.owner,
        tenant=admission.tenant,
        counted_as=admission.counted_as or None,
        model=record.model,
        on_disconnect=admission.on_disconnect,
        fence=record.fence,
        producer=record.producer,
        request=None if record.request is None else _column_of(encode_request(record.request, admission)),
        latency_class=None if record.request is None else record.request.latency_class,
        created_at=datetime.fromtimestamp(record.created, UTC),
        request_key=None if record.once is None else record.once.key,
        request_digest=None if record.once is None else record.once.digest,
    )


def _column_of(request: dict[str, Any]) -> dict[str, Any] | str:
    """Return a request as its column has it: as text where it holds NUL, which PostgreSQL's JSON refuses."""
    text = json.dumps(request)
    return text if "\\u0000" in text else request


def record_of(row: StreamRow) -> Record:
    """Return a row as a record. A request that this release cannot decode becomes None."""
    request, refusal = None, None
    admission = Admission(
        owner=row.owner,
        tenant=row.tenant,
        counted_as=row.counted_as or "",
        on_disconnect=row.on_disconnect,
        stream_id=row.pk,
        once=None if row.request_key is None else Once(key=row.request_key, digest=row.request_digest or ""),
    )
    if row.request is not None:
        try:
            kept = json.loads(row.request) if isinstance(row.request, str) else row.request
            request, admission = decode_request(kept, admission)
        except UnmetNeeds as error:
            refusal = error
        except ValueError:
            log.exception("stream_request_unreadable", stream_id=row.pk)
    return Record(
        admission=admission,
        log_id=row.log_id,
        model=row.model,
        created=row.created_at.timestamp(),
        request=request,
        refusal=refusal,
        fence=row.fence,
        producer=row.producer,
        is_finished=row.state == "finished",
        finish_reason=row.finish_reason,
        error_code=row.error_code,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        completion_tokens=row.completion_tokens,
        phases=row.phases,
        ttft=row.ttft_seconds,
        latency_class=row.latency_class or "",
        reader=None if row.reader is None else ReaderTimes.of_json(row.reader),
        last_seq=row.last_seq,
        text=row.text,
    )


def line_of(summary: StreamSummary) -> dict[str, Any]:
    """Return the fields of the log line: ids, counts and times, no text."""
    fields = ("model", "owner", "finish_reason", "error_code", "prompt_tokens", "cached_tokens", "completion_tokens")
    times = {name: getattr(summary, name) for name in ("intake", "ttfb", "ttft", "itl_p50", "itl_p95")}
    return {
        "stream_id": summary.id,
        "log_id": summary.log_id,
        **{name: getattr(summary, name) for name in fields},
        **{f"{name}_ms": None if seconds is None else round(seconds * 1000, 2) for name, seconds in times.items()},
        "age_seconds": round(summary.age_seconds, 3),
        "phases_ms": {name: round(seconds * 1000, 2) for name, seconds in summary.phases.items()},
        "num_parks": summary.num_parks,
        **({"trace_id": summary.trace.trace_id} if summary.trace is not None else {}),
    }
