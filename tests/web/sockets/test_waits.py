"""Laws of what a socket waits for: starts that take long, a shutdown, and a client that leaves meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve.asgi.drain import Drain
from streamserve.protocol.limits import Limits
from streamserve.web import site
from tests.conftest import until_ready
from tests.support.streams.hand_made import until
from tests.web.sockets.conftest import ASK, connect, receive, until_end

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]


@pytest.mark.parametrize("how", ["disconnect", "cancel"])
async def test_a_closed_socket_has_no_reader(alice_key: str, how: str) -> None:
    """A closed socket's reader has left, also one that waits for acks: its stream is parked, and no task runs on."""
    socket = connect(alice_key)
    await socket.connect()
    long = {**ASK, "max_tokens": 1000, "ignore_eos": True}
    await socket.send_json_to({"type": "start", "request": long, "credit": 1})
    started = await receive(socket)
    assert (await receive(socket))["type"] == "event"
    stream = site.get_site().streams.find(started["id"])
    assert stream is not None
    assert stream.readers.num_attached == 1
    if how == "cancel":
        socket.future.cancel()
        await asyncio.wait([socket.future])
    else:
        await socket.disconnect()
    assert stream.readers.num_attached == 0
    assert stream.state == "parked"
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "subscription"]


async def test_an_ack_says_who_looks_away(alice_key: str) -> None:
    """An ack is the reader's position, with credit and without; one with `away` says that it does not look."""
    socket = connect(alice_key)
    await socket.connect()
    for credit in ({"credit": 100}, {}):
        long = {**ASK, "max_tokens": 4000, "ignore_eos": True}
        await socket.send_json_to({"type": "start", "request": long, **credit})
        started = await receive(socket)
        shown = [await receive(socket) for _ in range(4)]
        stream = site.get_site().streams.find(started["id"])
        assert stream is not None
        (reader,) = stream.readers.attached
        for seq, is_away in ((shown[0]["seq"], True), (shown[2]["seq"], False)):
            await socket.send_json_to({"type": "ack", "id": started["id"], "seq": seq, "away": is_away})
            await until(lambda one=reader, away=is_away: one.is_away is away, "the ack is read")
            assert reader.received_seq == seq
        await socket.send_json_to({"type": "stop", "id": started["id"]})
        while (await receive(socket)).get("event") != "done":
            pass
    await socket.disconnect()


async def test_a_start_in_progress_at_shutdown_is_answered(alice_key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that is being accepted comes to its end before its socket is closed; an idle socket is closed at once."""
    drain, log = Drain(), site.get_site().log
    is_in_hand, go_on, commit = asyncio.Event(), asyncio.Event(), log.commit

    async def stall(batches: Any) -> Any:
        is_in_hand.set()
        await go_on.wait()
        return await commit(batches)

    busy, idle = connect(alice_key), connect(alice_key)
    for socket in (busy, idle):
        socket.scope["extensions"] = {"streamserve.flow": {"drain": drain}}
        await socket.connect()
    monkeypatch.setattr(log, "commit", stall)
    await busy.send_json_to({"type": "start", "request": ASK})
    await is_in_hand.wait()
    await drain.conduct(_Target(), 0)
    assert (await idle.receive_output(timeout=30))["code"] == 1012
    await idle.send_json_to({"type": "ping"})
    go_on.set()
    assert (await receive(busy))["type"] == "started"
    assert (await until_end(busy))[-1]["data"]["finish_reason"] == "length"
    assert (await busy.receive_output(timeout=30))["code"] == 1012
    late = connect(alice_key)
    late.scope["extensions"] = {"streamserve.flow": {"drain": drain}}
    await late.connect()
    assert (await late.receive_output(timeout=30))["code"] == 1012
    for socket in (busy, idle, late):
        await socket.disconnect()
    assert site.get_site().on_drain == set()


class _Target:
    """A drain target that waits for no response and only announces the shutdown."""

    def is_busy(self) -> bool:
        return False

    is_running = has_unsent = has_newcomers = is_busy

    def stop_listening(self) -> None:
        pass

    end_all = cancel_all = stop_listening


async def test_a_start_that_waits_blocks_no_other_message(alice_key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the engine does not answer a start: acks count, pongs come, a stop ends its stream."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.005}):
        await until_ready()
        socket = connect(alice_key)
        await socket.connect()
        long = {**ASK, "max_tokens": 4000, "ignore_eos": True}
        await socket.send_json_to({"type": "start", "request": long, "credit": 2})
        started = await receive(socket)
        shown = [await receive(socket), await receive(socket)]
        client = site.get_site().clients["echo"]
        accept, is_asked, go_on = client.generate, asyncio.Event(), asyncio.Event()

        async def held(*asked: Any) -> Any:
            is_asked.set()
            await go_on.wait()
            return await accept(*asked)

        monkeypatch.setattr(client, "generate", held)
        for ref in ("second", "third"):
            await socket.send_json_to({"type": "start", "request": ASK, "ref": ref})
        await is_asked.wait()
        await socket.send_json_to({"type": "ping", "t": 1})
        assert await receive(socket) == {"type": "pong", "t": 1}
        await socket.send_json_to({"type": "ack", "id": started["id"], "seq": shown[-1]["seq"]})
        assert (await receive(socket))["seq"] > shown[-1]["seq"]
        await socket.send_json_to({"type": "stop", "id": started["id"]})
        stream = site.get_site().streams.find(started["id"])
        assert stream is not None
        await asyncio.wait_for(stream.ended.wait(), 60)
        assert stream.terminal is not None
        assert stream.terminal.payload()["finish_reason"] == "cancelled"
        go_on.set()
        refs, num_done = set(), 0
        while num_done < 2:
            message = await receive(socket)
            refs |= {message["ref"]} if message["type"] == "started" else set()
            num_done += message.get("event") == "done" and message["id"] != started["id"]
        assert refs == {"second", "third"}
        await socket.disconnect()
        await site.reset()


async def test_a_client_that_leaves_ends_its_start_and_not_its_stop(
    alice_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that still waits is given up with its socket; a stop that was sent before takes effect."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.005}):
        await until_ready()
        socket = connect(alice_key)
        await socket.connect()
        long = {**ASK, "max_tokens": 4000, "ignore_eos": True}
        await socket.send_json_to({"type": "start", "request": long})
        started = await receive(socket)
        client = site.get_site().clients["echo"]
        is_asked, is_given_up = asyncio.Event(), asyncio.Event()

        async def held(*asked: Any) -> Any:
            is_asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                is_given_up.set()

        monkeypatch.setattr(client, "generate", held)
        await socket.send_json_to({"type": "start", "request": ASK})
        await is_asked.wait()
        await socket.send_json_to({"type": "stop", "id": started["id"]})
        await socket.disconnect()
        assert is_given_up.is_set()
        stream = site.get_site().streams.find(started["id"])
        assert stream is not None
        await asyncio.wait_for(stream.ended.wait(), 60)
        assert stream.terminal is not None
        assert stream.terminal.payload()["finish_reason"] == "cancelled"
        await site.reset()


async def test_starts_that_wait_have_places(alice_key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start beyond its caller's places and queue is refused while those before it still wait."""
    client = site.get_site().clients["echo"]

    async def held(*asked: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(client, "generate", held)
    socket = connect(alice_key)
    await socket.connect()
    limits = Limits()
    most = limits.max_streams_per_principal + limits.max_queued_per_principal
    for number in range(most + 1):
        await socket.send_json_to({"type": "start", "request": ASK, "ref": str(number)})
    refused = await receive(socket)
    assert (refused["error"]["code"], refused["ref"]) == ("too_many_on_socket", str(most))
    assert (await socket.receive_output(timeout=30))["code"] == 4429
    await socket.disconnect()
