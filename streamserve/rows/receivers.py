"""A site's receivers of signals.py: who calls them, in which transaction, on which thread.

    written, without receivers    one short query, in the lane of writes as ever
    written, with receivers       a thread of its own: BEGIN, the write, each receiver in a savepoint, COMMIT
    note_refusal                  a thread of its own, no transaction; no caller waits for it

The write is guarded, so it happens once, and its receivers are called where it has happened only. A receiver that
raises is logged with its traceback, its savepoint is undone, and the row is written all the same. Where the database is
locked or lost, or has undone the transaction for another's sake, all of it is undone and done again.

Relies on, in Django 5.2 and 6.1: `Signal._live_receivers`, the sync and the async receivers of a sender.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from asgiref.sync import async_to_sync
from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db import connections, models, router, transaction
from django.dispatch import Signal

from streamserve.api.call import ANONYMOUS, Caller
from streamserve.api.logs import get_logger
from streamserve.dialects.batches import RowAnswer
from streamserve.models import BatchRow, Job, Message
from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.events import Usage
from streamserve.protocol.rates import Rates
from streamserve.rows import orm, rates, usage
from streamserve.rows.trouble import is_passing
from streamserve.signals import answer_finished, answer_refused, answer_started, job_finished, message_rated

log = get_logger(__name__)

T = TypeVar("T")

MAX_MODEL_CHARS = 200  # of a name that a client has sent


async def written(
    signal: Signal,
    sender: type[models.Model],
    write: Callable[[], T],
    tell: Callable[[], None],
    *,
    also: Callable[[], object] | None = None,
    alone: Callable[[Callable[[], T]], Awaitable[T]] = orm.write,
) -> T:
    """Return `write()`, a guarded change; where it has changed something, `also` and `tell` follow in its transaction.

    `tell` calls the receivers. With none of them the change is made `alone`.
    """
    has_receivers = signal.has_listeners(sender)
    if also is None and not has_receivers:
        return await alone(write)

    def all_of_it() -> T:
        with transaction.atomic(using=router.db_for_write(StreamRow), savepoint=False):
            value = write()
            if value and also is not None:
                also()
            if value and has_receivers:
                tell()
            return value

    if has_receivers:
        return await orm.apart(all_of_it)
    # Where rows are locked one by one, in a transaction of its own: what it locks in other tables is not held for the
    # writes that wait with it, which may lock the same in another order. SQLite has one lock.
    shares = connections[router.db_for_write(StreamRow)].vendor == "sqlite"
    return await (orm.write if shares else orm.call)(all_of_it)


def together(*writes: Callable[[], object] | None) -> Callable[[], None] | None:
    """Return what does all of these writes, in order; None where there is none."""
    given = [write for write in writes if write is not None]
    if not given:
        return None

    def write_all() -> None:
        for write in given:
            write()

    return write_all


def send(signal: Signal, sender: type[models.Model], **values: Any) -> None:
    """Call each receiver in a savepoint, in the transaction of this thread."""
    for receiver in _receivers(signal, sender):
        try:
            with transaction.atomic(using=router.db_for_write(StreamRow)):
                receiver(signal=signal, sender=sender, **values)
        except Exception as error:
            if is_passing(error):
                raise
            _log(signal, receiver, values.get("stream_id"))


def _receivers(signal: Signal, sender: object) -> Iterator[Callable[..., Any]]:
    """Yield the receivers, as functions. An async receiver runs on a loop of its own, its queries on this thread."""
    sync, asynchronous = signal._live_receivers(sender)
    yield from sync
    yield from map(async_to_sync, asynchronous)


def _log(signal: Signal, receiver: Any, stream_id: Any) -> None:
    name = getattr(receiver, "__qualname__", None) or getattr(getattr(receiver, "awaitable", None), "__qualname__", "")
    log.exception("signal_receiver_failed", signal=_NAMES.get(signal, ""), receiver=name, stream_id=stream_id)


_NAMES = {
    answer_started: "answer_started",
    answer_finished: "answer_finished",
    answer_refused: "answer_refused",
    job_finished: "job_finished",
    message_rated: "message_rated",
}


def whose(owner: str, tenant: str) -> dict[str, Any]:
    """Return whose a row is: what every signal gives."""
    of_tenant, of_owner = tenant.partition(":"), owner.partition(":")
    user = next((key for kind, _, key in (of_tenant, of_owner) if kind == "user"), None)
    return {
        "owner": owner,
        "tenant": tenant,
        "user_id": None if user is None else _user_key(user),
        "key_id": int(of_owner[2]) if of_owner[0] == "key" and of_owner[2].isdecimal() else None,
    }


def _user_key(text: str) -> Any:
    """Return a user's primary key, as its model has it."""
    try:
        return get_user_model()._meta.pk.to_python(text)
    except ValidationError:
        return None


# Answers


@dataclass(frozen=True, slots=True)
class _Start:
    """A new stream's row, and what it counts against limits over time; None for no limits."""

    row: StreamRow
    ask: rates.Ask | None


def _insert_all(starts: Sequence[_Start]) -> list[rates.Reserved | StreamserveError]:
    """Insert the rows of new streams, but those for which a window has no room. In a transaction."""
    found = rates.reserve_all([one.ask for one in starts])
    for one, reserved in zip(starts, found, strict=True):
        if isinstance(reserved, rates.Reserved):
            one.row.held = reserved.held
            one.row.save(force_insert=True)
    return found


async def insert_stream(
    row: StreamRow, *, ask: rates.Ask | None = None, also: Callable[[], object] | None = None
) -> Rates | None:
    """Insert the row of a new stream, and do `also` in its transaction; return what is left of its windows.

    Starts that wait together share a transaction, where nothing else is written in it. Raises RateLimited, BadRequest.
    """
    start = _Start(row, ask)
    reserved = await written(
        answer_started,
        StreamRow,
        lambda: only(_insert_all([start])),
        lambda: tell_started(row),
        also=also,
        alone=lambda write: orm.write_all(_insert_all, start),
    )
    return reserved.left


def only(found: Sequence[T | Exception]) -> T:
    """Return the one result. Raises it if it is an exception."""
    (value,) = found
    if isinstance(value, Exception):
        raise value
    return value


def tell_started(row: StreamRow) -> None:
    """Tell of an answer's start, in the transaction that inserts its row."""
    send(answer_started, StreamRow, row=row, **_of_stream(row))


@dataclass(frozen=True, slots=True)
class _End:
    """A stream's end: the columns of its row, how many of the tokens that it holds it has used, and its usage."""

    stream_id: str
    num_tokens: int
    used: usage.Entry | None
    columns: dict[str, Any]


def _finish_all(ends: Sequence[_End]) -> list[int]:
    """Write the ends that are not written yet, with what they give back and their usage; 0 for others. Transaction."""
    found = [StreamRow.objects.finish(one.stream_id, **one.columns) for one in ends]
    written = [one for one, num in zip(ends, found, strict=True) if num]
    rates.settle_all({one.stream_id: one.num_tokens for one in written})
    usage.add_all([one.used for one in written if one.used is not None])
    return found


async def finish_stream(
    stream_id: str,
    *,
    num_tokens: int = 0,
    used: usage.Entry | None = None,
    also: Callable[[], object] | None = None,
    **columns: Any,
) -> int:
    """Write a stream's end and what it has used, and do `also` in its transaction; 0 if the end is written already.

    Ends that wait together share a transaction, where nothing else is written in it.
    """
    end = _End(stream_id, num_tokens, used, columns)
    return await written(
        answer_finished,
        StreamRow,
        lambda: only(_finish_all([end])),
        lambda: _tell_finished(stream_id),
        also=also,
        alone=lambda write: orm.write_all(_finish_all, end),
    )


def _tell_finished(stream_id: str) -> None:
    """Tell of an answer's end, in the transaction that writes it."""
    row = StreamRow.objects.get(pk=stream_id)
    assert row.finished_at is not None
    send(
        answer_finished,
        StreamRow,
        row=row,
        **_of_stream(row),
        batch_id=None,
        usage=Usage(
            prompt_tokens=row.prompt_tokens,
            completion_tokens=row.completion_tokens,
            cached_tokens=row.cached_tokens,
        ),
        finish_reason=row.finish_reason,
        error_code=row.error_code,
        seconds=(row.finished_at - row.created_at).total_seconds(),
        ttft_seconds=row.ttft_seconds,
        phases=dict(row.phases or {}),
    )


def _of_stream(row: StreamRow) -> dict[str, Any]:
    """Return what a stream's row tells at its start and its end. Queries."""
    is_job = row.on_disconnect == "job"
    of_message = Message.objects.filter(stream_id=row.pk).values_list("conversation_id", "pk").first()
    conversation_id, message_id = of_message or (None, None)
    return {
        "stream_id": row.pk,
        "model": row.model,
        **whose(row.owner, row.tenant),
        "conversation_id": conversation_id,
        "message_id": message_id,
        "job_id": Job.objects.filter(stream_id=row.pk).values_list("pk", flat=True).first() if is_job else None,
    }


def tell_rows(ended: Sequence[tuple[BatchRow, RowAnswer | None]], owner: str, tenant: str) -> None:
    """Tell of the answers of a batch's rows, in the transaction that stores them."""
    for row, answer in ended:
        if answer is not None:
            told = {field.name: getattr(answer, field.name) for field in fields(answer)}
            none = dict.fromkeys(("conversation_id", "message_id", "job_id"))
            whose_it_is = whose(owner, tenant)
            send(answer_finished, BatchRow, row=row, batch_id=row.batch_id, **told, **whose_it_is, **none)


# Ratings


def tell_rated(message_id: str) -> None:
    """Tell of a rating, in the transaction that writes it."""
    row = Message.objects.select_related("conversation").get(pk=message_id)
    send(
        message_rated,
        Message,
        row=row,
        message_id=row.pk,
        conversation_id=row.conversation_id,
        stream_id=row.stream_id,
        model=row.model,
        **whose(row.conversation.owner, row.conversation.tenant),
        rating=row.rating,
        comment=row.comment,
    )


# Jobs


async def end_job(job_id: str, state: str, *, fence: int, **columns: Any) -> int:
    """Write a job's end; 0 if it has ended, or a claim followed `fence`."""

    def end() -> int:
        return Job.objects.end(job_id, state, fence=fence, **columns)

    return await written(job_finished, Job, end, lambda: _tell_job(job_id), alone=orm.call)


def _tell_job(job_id: str) -> None:
    row = Job.objects.get(pk=job_id)
    assert row.finished_at is not None
    send(
        job_finished,
        Job,
        row=row,
        job_id=row.pk,
        stream_id=row.stream_id,
        pipeline=row.pipeline,
        **whose(row.owner, row.tenant),
        state=row.state,
        error_code=row.error_code,
        attempts=row.attempts,
        seconds=(row.finished_at - row.created_at).total_seconds(),
    )


# Refusals


def note_refusal(error: StreamserveError, caller: Caller | None, transport: str, model: str = "") -> None:
    """Tell of a request for an answer that was refused. Returns at once; a failure of the server is no refusal.

    `caller` is None, or ANONYMOUS, where it is not known.
    """
    if error.http_status == 500:
        return
    is_known = caller is not None and caller is not ANONYMOUS
    owner, tenant = (caller.owner, caller.tenant) if caller is not None and is_known else ("", "")
    if is_known:
        usage.note_refused(usage.Whose(owner=owner, tenant=tenant), model[:MAX_MODEL_CHARS])
    if not answer_refused.has_listeners(None):
        return
    values = {
        "code": error.code,
        "param": error.param,
        "status": error.http_status,
        "message": error.message,
        "model": model[:MAX_MODEL_CHARS],
        **whose(owner, tenant),
        "transport": transport,
    }
    orm.tell(lambda: _tell_refusal(values))


@contextmanager
def telling_refusals(caller: Caller | None, transport: str, model: str) -> Iterator[None]:
    """Do what `note_refusal` does with an error of the block."""
    try:
        yield
    except StreamserveError as error:
        note_refusal(error, caller, transport, model)
        raise


def _tell_refusal(values: dict[str, Any]) -> None:
    for receiver in _receivers(answer_refused, None):
        try:
            receiver(signal=answer_refused, sender=None, **values)
        except Exception:  # the edge of a thread
            _log(answer_refused, receiver, None)
