"""Laws of a site's receivers of signals: in the transaction of their row, once, on threads of their own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.db import OperationalError, connection, transaction

from streamserve.models import ApiKey, Conversation, Job, Message
from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import DatabaseUnavailable
from streamserve.rows import orm
from streamserve.rows.receivers import end_job, finish_stream, insert_stream, tell_rated, whose, written
from streamserve.signals import answer_finished, answer_started, job_finished, message_rated
from tests.conftest import until
from tests.rows.conftest import NUM_TOKENS, asked
from tests.support.sites.connected import connected
from tests.support.sites.rows import in_row
from tests.support.sites.two_workers import Worker

pytestmark = pytest.mark.django_db(transaction=True)

ID = "5" * 32


def bill(**told: Any) -> None:
    """Insert a row that names the stream and its tokens, as a bill does: its name is unique."""
    Group.objects.create(name=f"{told['stream_id']} {told['usage'].completion_tokens}")


def a_row(**columns: Any) -> StreamRow:
    return StreamRow(id=ID, log_id="5" * 12, owner="user:5", tenant="user:5", model="echo", **columns)


async def finished(**columns: Any) -> int:
    return await finish_stream(ID, finish_reason="stop", completion_tokens=7, **columns)


async def bills() -> list[str]:
    return [name async for name in Group.objects.values_list("name", flat=True)]


async def state() -> str:
    return (await StreamRow.objects.aget(pk=ID)).state


@pytest.fixture
async def running() -> StreamRow:
    """The row of a stream that runs."""
    row = a_row()
    await insert_stream(row)
    return row


def has_thread(name: str) -> bool:
    return any(thread.name.startswith(name) for thread in threading.enumerate())


async def test_without_receivers_nothing_changes(one: Worker) -> None:
    """An answer's start and end are two transactions in the lane of writes, and no thread is made."""
    orm.close()
    lane = orm._door.writes
    stream = await one.start(asked())
    await one.read(stream.id)
    await in_row(stream.id, state="finished")
    assert lane.num_transactions == 2
    assert not has_thread("streamserve receivers")


async def test_an_answer_is_told_of_at_its_start_and_its_end(one: Worker) -> None:
    """Once each, off the loop, with what its row has; `answer_finished` has the usage that its readers were told."""
    told: list[tuple[str, dict[str, Any]]] = []

    def note(kind: str) -> Callable[..., None]:
        def receiver(**values: Any) -> None:
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            assert connection.in_atomic_block
            assert threading.current_thread().name.startswith("streamserve receivers")
            told.append((kind, values))

        return receiver

    with connected(answer_started, note("started")), connected(answer_finished, note("finished")):
        stream = await one.start(asked())
        await one.read(stream.id)
        row = await in_row(stream.id, state="finished")
    (first, start), (last, end) = told
    assert (first, last) == ("started", "finished")
    assert start["stream_id"] == end["stream_id"] == stream.id
    assert (start["model"], start["owner"], start["tenant"], start["user_id"]) == ("echo", "user:1", "user:1", 1)
    assert start["row"].state == "running"
    assert end["row"].state == "finished"
    assert end["usage"] == stream.usage
    assert end["usage"].completion_tokens == NUM_TOKENS == row.completion_tokens
    assert (end["finish_reason"], end["error_code"], end["ttft_seconds"]) == ("length", "", row.ttft_seconds)
    assert end["phases"] == row.phases
    assert end["conversation_id"] is end["message_id"] is end["job_id"] is end["batch_id"] is end["key_id"] is None


async def test_an_end_is_told_of_once(running: StreamRow) -> None:
    """The second write of an end, as by a process that has come late, calls no receiver."""
    with connected(answer_finished, bill):
        assert [await finished(), await finished()] == [1, 0]
    assert await bills() == [f"{ID} 7"]


async def test_a_receiver_that_raises_leaves_the_row_and_the_other_receivers(
    running: StreamRow, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own writes are undone and its traceback is logged; the end is written, and the others' writes are kept."""

    def wrong(**told: Any) -> None:
        Group.objects.create(name="half")
        raise ValueError("no such tariff")

    def broken(**told: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT * FROM no_such_table")

    def also(**told: Any) -> None:
        Group.objects.create(name="also")

    with caplog.at_level(logging.ERROR), connected(answer_finished, wrong, broken, bill, also):
        assert await finished() == 1
    assert await state() == "finished"
    assert sorted(await bills()) == sorted([f"{ID} 7", "also"])
    failed = [record for record in caplog.records if "signal_receiver_failed" in record.getMessage()]
    assert len(failed) == 2
    assert failed[0].exc_info is not None
    assert "wrong" in failed[0].getMessage()


async def test_the_database_s_trouble_undoes_and_repeats_all_of_it(running: StreamRow) -> None:
    """A lock that a receiver meets undoes the row and every receiver's writes; all is done again, and kept once."""
    with connected(answer_finished, bill, fails_once := FailsOnce()):
        assert await finished() == 1
    assert fails_once.num_calls == 2
    assert await bills() == [f"{ID} 7"]


class FailsOnce:
    """A receiver that meets a locked database at its first call."""

    def __init__(self, num: float = 1) -> None:
        self.num_calls, self._num = 0, num

    def __call__(self, **told: Any) -> None:
        self.num_calls += 1
        if self.num_calls <= self._num:
            error = OperationalError("locked")
            error.__cause__ = Locked()
            raise error


class Locked(Exception):
    """As SQLite's and PostgreSQL's drivers have it."""

    sqlite_errorcode, sqlstate = 5, "55P03"
    if connection.vendor == "postgresql":
        del sqlite_errorcode


async def test_trouble_that_does_not_pass_is_the_caller_s(running: StreamRow, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its deadline the write is refused, and nothing of it is there: the caller asks again later."""
    monkeypatch.setattr(orm, "DEADLINE_SECONDS", 0.0)
    with connected(answer_finished, bill, FailsOnce(float("inf"))):
        with pytest.raises(DatabaseUnavailable):
            await finished()
        assert (await state(), await bills()) == ("running", [])


async def test_an_error_after_the_commit_is_logged_and_no_more(
    running: StreamRow, caplog: pytest.LogCaptureFixture
) -> None:
    """What is committed is done: a locked database that `on_commit` meets does not do it again."""
    called: list[str] = []

    def mail() -> None:
        called.append("mail")
        FailsOnce(1)()

    with connected(answer_finished, bill, lambda **told: transaction.on_commit(mail)):
        assert await finished() == 1
    assert (called, await bills(), await state()) == (["mail"], [f"{ID} 7"], "finished")
    assert "on_commit failed" in caplog.text


async def test_an_async_receiver_is_in_the_transaction_too(running: StreamRow) -> None:
    """It runs on a loop of its own, not on the site's; what it writes is undone and done again with the row."""
    here, loops = asyncio.get_running_loop(), []

    async def bill_async(**told: Any) -> None:
        loops.append(asyncio.get_running_loop())
        await Group.objects.acreate(name=f"{told['stream_id']} async")

    def locked_after(**told: Any) -> None:
        if len(loops) == 1:
            assert not Group.objects.exists()

    fails_once = FailsOnce()

    async def fail_async(**told: Any) -> None:
        assert await Group.objects.acount() == 1
        fails_once()

    with connected(answer_finished, locked_after, bill_async, fail_async):
        assert await finished() == 1
    assert len(loops) == 2
    assert here not in loops
    assert await bills() == [f"{ID} async"]


async def test_a_slow_receiver_holds_up_nobody_else(running: StreamRow) -> None:
    """Meanwhile the loop, reads and the site's functions run on; so do all writes, where a write locks no database."""
    go, slow = threading.Event(), threading.Event()

    def waits(**told: Any) -> None:
        if told["stream_id"] == ID:
            slow.set()
            go.wait()
        else:
            bill(**told)

    with connected(answer_finished, waits):
        finishing = asyncio.create_task(finished())
        await until(slow.is_set)
        assert await orm.of_site(lambda: "served") == "served"
        assert await orm.read(StreamRow.objects.count) == 1
        if connection.vendor != "sqlite":
            other = StreamRow(id="6" * 32, log_id="6" * 12, owner="user:6", tenant="user:6", model="echo")
            await insert_stream(other)
            assert await orm.write(ApiKey.objects.make, name="key")
            assert await finish_stream(other.pk, completion_tokens=3) == 1
            assert await bills() == [f"{other.pk} 3"]
        assert await state() == "running"
        go.set()
        assert await finishing == 1


def test_a_site_s_own_tests_see_what_receivers_write() -> None:
    """Inside a transaction of synchronous code, as a TestCase's, all of it is on that code's thread, and in it."""
    here = threading.current_thread()

    def bill_here(**told: Any) -> None:
        assert threading.current_thread() is here
        bill(**told)

    with transaction.atomic(), connected(answer_finished, bill_here):
        async_to_sync(insert_stream)(a_row())
        assert async_to_sync(finished)() == 1
        assert [one.name for one in Group.objects.all()] == [f"{ID} 7"]
        transaction.set_rollback(True)
    assert not Group.objects.exists()


async def test_what_goes_with_the_end_is_in_its_transaction(running: StreamRow) -> None:
    """`also` is done once, with or without receivers; if it fails, so does the end."""

    def fail() -> None:
        raise ValueError("not now")

    with pytest.raises(ValueError, match="not now"):
        await finished(also=fail)
    assert await state() == "running"
    assert [await finished(also=lambda: Group.objects.create(name="also")) for _ in range(2)] == [1, 0]
    assert await bills() == ["also"]


async def test_a_job_s_end_is_told_of_once(transactional_db: Any) -> None:
    """With its state, its attempts and whose it is; not for a claim that another has followed."""
    told: list[dict[str, Any]] = []
    await Job.objects.acreate(id=ID, stream_id=ID, pipeline="report", owner="key:3", tenant="user:5", attempts=2)
    with connected(job_finished, lambda **values: told.append(values)):
        assert [await end_job(ID, "done", fence=fence) for fence in (1, 0, 0)] == [0, 1, 0]
    (end,) = told
    assert (end["job_id"], end["pipeline"], end["state"], end["attempts"]) == (ID, "report", "done", 2)
    assert (end["owner"], end["tenant"], end["user_id"], end["key_id"]) == ("key:3", "user:5", 5, 3)


async def test_a_rating_is_told_of(alice: Any) -> None:
    """With whose conversation it is; and when it is taken back."""
    told: list[dict[str, Any]] = []
    owner = f"user:{alice.pk}"
    talk = await Conversation.objects.acreate(owner=owner, tenant=owner, user=alice)
    answer = await Message.objects.acreate(conversation=talk, role="assistant", stream_id=ID, model="echo", rating=-1)

    def rate(rating: int | None) -> int:
        return Message.objects.filter(pk=answer.pk).update(rating=rating, comment="late")

    with connected(message_rated, lambda **values: told.append(values)):
        for rating in (-1, None):
            write = partial(rate, rating)
            assert await written(message_rated, Message, write, partial(tell_rated, answer.pk), alone=orm.call) == 1
    assert [one["rating"] for one in told] == [-1, None]
    names = ("message_id", "conversation_id", "stream_id", "model", "user_id", "comment")
    assert [told[0][name] for name in names] == [answer.pk, talk.pk, ID, "echo", alice.pk, "late"]


@pytest.mark.parametrize(
    ("owner", "tenant", "user_id", "key_id"),
    [
        ("user:5", "user:5", 5, None),
        ("key:3", "user:5", 5, 3),
        ("key:3", "key:3", None, 3),
        ("user:5", "team:red", 5, None),
        ("anon:@127.0.0.1/x", "anon:@127.0.0.1/x", None, None),
        ("site:reports", "site:reports", None, None),
    ],
)
def test_whose_it_is(owner: str, tenant: str, user_id: int | None, key_id: int | None) -> None:
    """The user of a login or of a user's key, and the key; None where there is none."""
    told = whose(owner, tenant)
    assert (told["user_id"], told["key_id"]) == (user_id, key_id)
