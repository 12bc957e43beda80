"""Laws of the ORM thread: one thread, kept connections, and one transaction for the writes that wait together."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.db import IntegrityError, OperationalError, connection, connections

from streamserve.web.rows import orm
from streamserve.web.rows.orm import Door, Lane
from tests.conftest import until

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


async def while_it_is_busy(thread: Lane, *works: Any) -> list[Any]:
    """Put `works` as writes while the thread does something else; return their results and errors."""
    go = threading.Event()
    busy = asyncio.create_task(thread.run(go.wait))
    await asyncio.sleep(0)
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


def test_synchronous_code_keeps_its_thread() -> None:
    """Inside async_to_sync a query runs where its caller's transaction is."""

    async def ask() -> int:
        return await orm.call(threading.get_ident)

    assert async_to_sync(ask)() == threading.get_ident()


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
