"""Laws of the door to the ORM: kept connections, one transaction for the writes that wait together, and deadlines."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.db import IntegrityError, OperationalError, connection, connections, transaction

from streamserve.protocol.errors import DatabaseUnavailable
from streamserve.rows import orm
from streamserve.rows.orm import MAX_HUNG, Door, Lane
from streamserve.rows.trouble import Trouble
from tests.conftest import until
from tests.support.servers.write_lock import on_sqlite, write_lock

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def door() -> Iterator[Door]:
    one = Door()
    yield one
    one.close()


@pytest.fixture
def thread(door: Door) -> Lane:
    """The lane of writes."""
    return door.writes


def handle() -> Any:
    """Open the connection of this thread, and return it as its driver has it."""
    Group.objects.exists()
    return connection.connection


async def occupied(run: Callable[[Callable[[], Any]], Any], go: threading.Event) -> asyncio.Task[Any]:
    """Have a lane's thread wait for `go`. It waits on return: a thread that starts late would take the next job too."""
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        go.wait()

    busy = asyncio.create_task(run(wait))
    await until(begun.is_set)
    return busy


async def while_it_is_busy(thread: Lane, *works: Any) -> list[Any]:
    """Put `works` as writes while the thread does something else; return their results and errors."""
    go = threading.Event()
    busy = await occupied(thread.run, go)
    writes = [asyncio.create_task(thread.run(work, can_share=True)) for work in works]
    await asyncio.sleep(0)  # each is queued in the first step of its task
    go.set()
    await busy
    return await asyncio.gather(*writes, return_exceptions=True)


def make(name: str) -> Any:
    return lambda: Group.objects.create(name=name).name


async def test_a_connection_is_kept(thread: Lane) -> None:
    """Calls use one connection, although CONN_MAX_AGE is 0: no request owns it."""
    first = await thread.run(handle)
    assert first is not None
    assert await thread.run(handle) is first


async def test_a_connection_is_kept_as_long_as_its_age_allows(thread: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CONN_MAX_AGE that is over closes it before the next call."""
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", 1e-9)
    first = await thread.run(handle)
    assert await thread.run(handle) is not first


async def test_a_broken_connection_is_not_used_again(thread: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error the connection is checked, and the next call has a new one if its server has closed it."""
    first = await thread.run(handle)
    monkeypatch.setattr(type(connections["default"]), "is_usable", lambda self: False)
    assert await thread.run(handle) is first
    await thread.run(lambda: setattr(connections["default"], "errors_occurred", True))
    assert await thread.run(handle) is not first


async def test_an_unused_connection_is_closed() -> None:
    """CONN_MAX_AGE 0 closes the connection once there is nothing to do."""
    door = Door(idle_seconds=0.001)
    at_rest: list[Any] = []
    await door.writes.run(lambda: at_rest.append(connections["default"]) or handle())
    await until(lambda: at_rest[0].connection is None)
    door.close()


async def test_writes_that_wait_are_one_transaction(thread: Lane) -> None:
    """Twenty writes that come while the thread is busy are committed together."""
    names = [f"group {number}" for number in range(20)]
    assert await while_it_is_busy(thread, *map(make, names)) == names
    assert thread.num_transactions == 1
    assert await Group.objects.acount() == 20


async def test_a_write_that_fails_fails_alone(thread: Lane, caplog: pytest.LogCaptureFixture) -> None:
    """One duplicate among others raises for its caller only; the log has a line, as callers expect some errors."""
    caplog.set_level("INFO", "streamserve")
    results = await while_it_is_busy(thread, make("a"), make("b"), make("a"), make("c"))
    assert [type(one) for one in results] == [str, str, IntegrityError, str]
    assert await Group.objects.acount() == 3
    (line,) = caplog.records
    assert "4 writes are done again one by one: " in line.getMessage()
    assert line.exc_info is None


async def all_at_once(function: Any, *arguments: Any) -> list[Any]:
    """Ask a function for each argument, while the thread does something else; return its results and errors."""
    go = threading.Event()
    busy = await occupied(orm.call, go)
    asked = [asyncio.create_task(orm.write_all(function, argument)) for argument in arguments]
    await asyncio.sleep(0)  # each is queued in the first step of its task
    go.set()
    await busy
    return await asyncio.gather(*asked, return_exceptions=True)


async def test_what_is_asked_of_one_function_is_one_call() -> None:
    """What it returns as an error is raised for that caller, and undoes nothing."""
    calls: list[list[str]] = []

    def make_all(names: Sequence[str]) -> list[str | Exception]:
        calls.append(list(names))
        return [ValueError("no") if name == "bad" else make(name)() for name in names]

    results = await all_at_once(make_all, "a", "bad", "b")
    assert [one if isinstance(one, str) else type(one) for one in results] == ["a", ValueError, "b"]
    assert calls == [["a", "bad", "b"]]
    with pytest.raises(ValueError, match="no"):
        await orm.write_all(make_all, "bad")
    assert await Group.objects.acount() == 2


async def test_a_call_for_many_that_raises_is_made_for_each() -> None:
    """In transactions of their own: all that one of them wrote is undone with it."""

    def make_twice(names: Sequence[str]) -> list[str]:
        return [make(f"{name} {part}")() for name in names for part in ("first", "second")][1::2]

    await Group.objects.acreate(name="b second")
    results = await all_at_once(make_twice, "a", "b", "c")
    assert [one if isinstance(one, str) else type(one) for one in results] == ["a second", IntegrityError, "c second"]
    names = [one.name async for one in Group.objects.order_by("name")]
    assert names == ["a first", "a second", "b second", "c first", "c second"]


def test_a_call_for_many_in_a_transaction_of_synchronous_code() -> None:
    """It is in that transaction."""
    with transaction.atomic():
        ask = async_to_sync(orm.write_all)
        assert ask(lambda names: [make(name)() for name in names], "a") == "a"
        assert Group.objects.count() == 1
        transaction.set_rollback(True)
    assert not Group.objects.exists()


async def test_writes_on_a_connection_that_was_lost_are_done_on_a_new_one(
    thread: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group that finds it lost is done again one by one, and those must not all fail as well."""
    await thread.run(handle)
    monkeypatch.setattr(type(connections["default"]), "is_usable", lambda self: False)
    await thread.run(lambda: connection.connection.close())
    assert await while_it_is_busy(thread, make("a"), make("b")) == ["a", "b"]


async def test_an_error_of_a_call_is_its_callers(thread: Lane) -> None:
    """The thread goes on after an error."""

    def fail() -> None:
        raise OperationalError("no")

    with pytest.raises(OperationalError, match="no"):
        await thread.run(fail)
    assert await thread.run(threading.get_ident) != threading.get_ident()


@on_sqlite
async def test_a_locked_database_refuses_the_whole_group(door: Door) -> None:
    """Six writes fail together while the lock is held, and reads are done beside them."""
    with write_lock() as other:
        writes = [asyncio.create_task(door.writes.run(make(f"group {one}"), can_share=True)) for one in range(6)]
        assert await door.reads.run(Group.objects.count) == 0
        assert not any(one.done() for one in writes)
        refused = await asyncio.gather(*writes, return_exceptions=True)
        assert other.in_transaction
    assert {type(one) for one in refused} == {DatabaseUnavailable}
    assert door.trouble is Trouble.LOCKED
    assert await door.writes.run(make("after"), can_share=True) == "after"
    assert door.trouble is None
    assert await Group.objects.acount() == 1, "what was refused is not done"


@on_sqlite
async def test_a_lock_that_ends_in_time_fails_nothing(door: Door) -> None:
    """Writes and calls wait for it, and what came meanwhile is done with them."""
    with write_lock() as other:
        waiting = [asyncio.create_task(door.writes.run(make("a"), can_share=True))]
        waiting.append(asyncio.create_task(door.writes.run(make("b"))))
        await until(lambda: door.writes.num_transactions >= 2)
        waiting.append(asyncio.create_task(door.writes.run(make("c"), can_share=True)))
        await asyncio.sleep(0)
        other.execute("ROLLBACK")
        assert sorted(await asyncio.gather(*waiting)) == ["a", "b", "c"]
    assert await Group.objects.acount() == 3


@on_sqlite
async def test_posted_writes_are_kept_in_order(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    """They wait for the lock, those posted later behind them; a write with a caller is refused meanwhile."""
    await Group.objects.acreate(name="0")

    def rename(before: str, after: str) -> Any:
        return lambda: done.append(Group.objects.filter(name=before).update(name=after))

    done: list[int] = []
    with write_lock():
        door.writes.post(rename("0", "1"))
        await until(lambda: door.writes.num_transactions >= 1)
        door.writes.post(rename("1", "2"))
        with pytest.raises(DatabaseUnavailable):
            await door.writes.run(make("refused"), can_share=True)
        door.writes.post(rename("2", "3"))
        assert done == []
    await until(lambda: len(done) == 3)
    await until(lambda: door.writes._posted.num == 0)
    assert done == [1, 1, 1]
    assert [one.name async for one in Group.objects.all()] == ["3"]
    assert "the site's database is back" in caplog.text


@on_sqlite
async def test_posted_writes_are_flushed_at_the_end(door: Door) -> None:
    """A server that stops tries once more what waits for the database."""
    with write_lock():
        door.writes.post(make("a"))
        await until(lambda: door.writes.num_transactions >= 1)
        await asyncio.sleep(0)
    await asyncio.to_thread(door.close)
    assert await Group.objects.acount() == 1


@on_sqlite
async def test_posted_writes_that_cannot_be_done_are_named_at_the_end(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says how many are lost, and the server stops."""
    with write_lock():
        for name in "abc":
            door.writes.post(make(name))
        await asyncio.to_thread(door.close)
    assert "3 writes that were posted are lost" in caplog.text
    assert await Group.objects.acount() == 0


async def test_posted_writes_have_a_bound(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is posted beyond it is dropped and logged."""
    monkeypatch.setattr(orm, "MAX_POSTED", 2)
    go = threading.Event()
    busy = await occupied(door.writes.run, go)
    for name in "abc":
        door.writes.post(make(name))
    go.set()
    await busy
    await door.writes.run(int)
    assert sorted([one.name async for one in Group.objects.all()]) == ["a", "b"]
    assert "a write that was posted is dropped" in caplog.text


async def test_a_read_whose_caller_has_left_is_not_begun(door: Door) -> None:
    """A write is: its caller may have left after it was asked for."""
    for lane, is_done in ((door.reads, False), (door.writes, True)):
        go, done = threading.Event(), threading.Event()
        busy = await occupied(lane.run, go)
        left = asyncio.create_task(lane.run(done.set))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        go.set()
        await busy
        await lane.run(int)
        assert done.is_set() == is_done


async def hung(lane: Lane, until: threading.Event) -> threading.Thread:
    """Have the lane's thread hang until the event; return it. A busy machine may not begin the job within its time."""
    threads: list[threading.Thread] = []

    def hang() -> None:
        threads.append(threading.current_thread())
        until.wait()

    while not threads:
        with pytest.raises(DatabaseUnavailable, match="does not answer"):
            await lane.run(hang)
    return threads[0]


async def test_a_thread_that_hangs_is_replaced() -> None:
    """Its caller is refused, the next job is done by another thread, and the first ends when it returns."""
    door = Door(deadline_seconds=0.1)
    go, threads = threading.Event(), []
    for lane in (door.reads, door.writes):
        threads.append(await hung(lane, go))
        lane._deadline_seconds = 60.0  # of a job that does not hang
        assert await lane.run(threading.current_thread) is not threads[-1]
        assert threads[-1].is_alive()
    go.set()
    await until(lambda: not any(one.is_alive() for one in threads))
    door.close()


async def test_the_threads_that_hang_are_bounded() -> None:
    """Then a job is refused at once, and the first thread that returns takes the lane again."""
    door = Door(deadline_seconds=0.1)
    gates = [threading.Event() for _ in range(MAX_HUNG)]
    for gate in gates:
        await hung(door.reads, gate)
    begun = threading.Event()
    with pytest.raises(DatabaseUnavailable):
        await door.reads.run(begun.set)
    assert not begun.is_set()
    assert sum(one.name == "streamserve orm reads" for one in threading.enumerate()) >= MAX_HUNG
    gates[0].set()
    await until(lambda: door.reads._thread is not None)
    door.reads._deadline_seconds = 60.0  # of a job that does not hang
    assert await door.reads.run(int) == 0
    assert door.trouble is None
    for gate in gates:
        gate.set()
    door.close()


async def test_a_job_that_comes_during_a_close_is_done() -> None:
    """The close waits for what was asked before it, and for nothing that comes later."""
    go, begun = threading.Event(), threading.Event()

    def busy() -> str:
        begun.set()
        go.wait()
        return threading.current_thread().name

    before = asyncio.create_task(orm.call(busy))
    await until(begun.is_set)
    closing = asyncio.create_task(asyncio.to_thread(orm.close))
    await until(lambda: orm._door.writes._thread is None)
    assert await orm.call(make("meanwhile")) == "meanwhile"
    assert not closing.done()
    go.set()
    await closing
    assert await before == "streamserve orm"
    orm.close()


def test_synchronous_code_keeps_its_thread() -> None:
    """Inside async_to_sync a query runs where its caller's transaction is."""

    async def ask() -> int:
        return await orm.call(threading.get_ident)

    assert async_to_sync(ask)() == threading.get_ident()


@pytest.mark.parametrize("ask", [orm.read, orm.write, orm.call, orm.of_site, orm.bulk])
def test_a_transaction_of_synchronous_code_goes_on(ask: Any) -> None:
    """A query inside async_to_sync is in its caller's transaction, and does not close its connection."""
    with transaction.atomic():
        Group.objects.create(name="before")
        assert async_to_sync(ask)(Group.objects.count) == 1
        Group.objects.create(name="after")
        transaction.set_rollback(True)
    assert not Group.objects.exists()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_a_thread_of_its_own() -> None:
    """A child of a process that has asked before asks by itself: its parent's thread does not exist there."""

    async def thread_name() -> str:
        return await orm.call(lambda: threading.current_thread().name)

    assert asyncio.run(thread_name()) == "streamserve orm"
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # ends a child that hangs
        name = ""
        with suppress(BaseException):  # the child does not continue its parent's tests
            name = asyncio.run(thread_name())
        os._exit(0 if name == "streamserve orm" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
