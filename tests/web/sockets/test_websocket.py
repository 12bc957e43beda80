"""Laws of `/ws/streams`: start, stop, resume; a wrong message gets an error, and the socket stays open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator
from django.db import connections
from django.test import AsyncClient
from django.test.utils import override_settings

from streamserve import routing
from streamserve.models import ApiKey
from streamserve.rows import orm
from streamserve.web import site
from tests.conftest import until_ready
from tests.web.sockets.conftest import ASK, connect, receive, text_of, until_end

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]


async def test_start_streams_an_answer(socket: WebsocketCommunicator) -> None:
    """A start is answered by `started` with the ref, then dense events to `done`."""
    await socket.send_json_to({"type": "start", "request": ASK, "ref": "q1"})
    started = await receive(socket)
    assert (started["type"], started["ref"]) == ("started", "q1")
    messages = await until_end(socket)
    assert {message["id"] for message in messages} == {started["id"]}
    [closing] = [message for message in messages if "seq" not in message]
    assert closing is messages[-2]
    assert (closing["event"], closing["data"]["latency"]) == ("meta", messages[-1]["data"]["latency"])
    assert closing["data"] == {**messages[0]["data"], **closing["data"]}
    seqs = [message["seq"] for message in messages if message is not closing]
    assert seqs == sorted(set(seqs))
    assert messages[-1]["data"]["finish_reason"] == "length"


async def test_the_prompts_log_probabilities(socket: WebsocketCommunicator) -> None:
    """They come before the answer, one for each token; a reader that resumes among them gets the rest."""
    await socket.send_json_to({"type": "start", "request": {**ASK, "prompt": "tell me " * 20, "prompt_logprobs": 20}})
    started = await receive(socket)
    whole = await until_end(socket)
    shown = [one for one in whole if one.get("event") == "token" and not one["data"]["token_ids"]]
    assert len(shown) > 2
    assert whole.index(shown[-1]) < next(
        place for place, one in enumerate(whole) if (one["data"] or {}).get("token_ids")
    )
    positions = [position for one in shown for position in one["data"]["logprobs"]]
    assert "".join(position["token"] for position in positions) == "tell me " * 20
    assert [place for place, one in enumerate(positions) if one["logprob"] is None] == [0]
    await socket.send_json_to({"type": "resume", "id": started["id"], "after": shown[0]["seq"]})
    rest = await until_end(socket)
    again = [one for one in rest if one.get("event") == "token" and not one["data"]["token_ids"]]
    # Not event by event: a reader that is behind gets several joined in one.
    assert [position for one in again for position in one["data"]["logprobs"]] == [
        position for one in shown[1:] for position in one["data"]["logprobs"]
    ]
    assert text_of(rest) == text_of(whole)
    await socket.send_json_to(
        {"type": "start", "request": {"messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 1}}
    )
    refused = await receive(socket)
    assert (refused["type"], refused["error"]["param"]) == ("error", "prompt_logprobs")


async def test_two_answers_share_a_socket(socket: WebsocketCommunicator) -> None:
    """Each answer has its id; neither waits for the other's end."""
    for ref in ("a", "b"):
        await socket.send_json_to({"type": "start", "request": ASK, "ref": ref})
    messages: list[dict[str, Any]] = []
    while sum(message.get("event") == "done" for message in messages) < 2:
        messages.append(await receive(socket))
    ids = {message["id"] for message in messages}
    texts = {text_of([message for message in messages if message["id"] == one]) for one in ids}
    assert (len(ids), len(texts)) == (2, 1)


async def test_resume_continues_after_an_event(socket: WebsocketCommunicator) -> None:
    """A resume gives the same text, from that event on."""
    await socket.send_json_to({"type": "start", "request": {**ASK, "max_tokens": 20}})
    started = await receive(socket)
    whole = await until_end(socket)
    middle = whole[2]
    await socket.send_json_to({"type": "resume", "id": started["id"], "after": middle["seq"]})
    assert text_of(whole[:3]) + text_of(await until_end(socket)) == text_of(whole)


async def test_stop_is_seen_while_an_answer_runs(alice_key: str) -> None:
    """The consumer relays and does not generate inside `receive`; a closed socket parks its stream."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.02}):
        await until_ready()
        socket = connect(alice_key)
        await socket.connect()
        long = {**ASK, "max_tokens": 1000, "ignore_eos": True}
        await socket.send_json_to({"type": "start", "request": long})
        started = await receive(socket)
        await socket.send_json_to({"type": "stop", "id": started["id"]})
        assert (await until_end(socket))[-1]["data"]["finish_reason"] == "cancelled"
        await socket.send_json_to({"type": "start", "request": long})
        second = await receive(socket)
        await receive(socket)
        await socket.disconnect()
        stream = site.get_site().streams.find(second["id"])
        assert stream is not None
        assert stream.state == "parked"
        await site.reset()


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ("no json", "invalid_json", None),
        ("[1]", "invalid_json", None),
        ("{}", "unknown_type", "type"),
        ('{"type": "launch"}', "unknown_type", "type"),
        ('{"type": 7}', "unknown_type", "type"),
        ('{"type": "start"}', "missing_field", "request"),
        ('{"type": "start", "request": 3}', "invalid_type", "request"),
        ('{"type": "start", "request": {"prompt": "x", "top_p": 7}}', "invalid_value", "top_p"),
        ('{"type": "start", "request": {"prompt": "x", "model": "nope"}}', "model_not_found", "model"),
        ('{"type": "start", "request": {"prompt": "x"}, "extra": 1}', "unknown_field", "extra"),
        ('{"type": "stop"}', "missing_field", "id"),
        ('{"type": "stop", "id": "' + "0" * 32 + '"}', "stream_not_found", None),
        ('{"type": "stop", "id": "' + "0" * 32 + '", "seen_seq": -1}', "invalid_value", "seen_seq"),
        ('{"type": "resume", "id": "' + "0" * 32 + '"}', "stream_not_found", None),
        ('{"type": "resume", "id": "short"}', "stream_not_found", "id"),
        ("[" * 5000, "invalid_json", None),
        ('{"zz": [' + "[]," * 20_000 + "0]}", "too_many_containers", None),
        ('{"type": "start", "request": {"prompt": "\\ud800"}}', "invalid_json", None),
    ],
)
async def test_a_wrong_message_is_answered(
    socket: WebsocketCommunicator, message: str, code: str, param: str | None
) -> None:
    """A wrong message gets an error that names the field; then the socket still serves."""
    await socket.send_to(text_data=message)
    answer = await receive(socket)
    assert answer["type"] == "error"
    assert answer["error"]["code"] == code, answer
    if param is not None:
        assert answer["error"]["param"] == param
    await socket.send_json_to({"type": "start", "request": ASK})
    assert (await receive(socket))["type"] == "started"
    await until_end(socket)


@pytest.mark.parametrize(
    ("frame", "code"), [({"bytes_data": b"\x00"}, 1003), ({"text_data": "x" * 300_000}, 1009)], ids=["binary", "big"]
)
async def test_unsupported_frames_close_the_socket(
    socket: WebsocketCommunicator, frame: dict[str, Any], code: int
) -> None:
    """A binary frame closes the socket with 1003, one that is too big with 1009."""
    await socket.send_to(**frame)
    closed = await socket.receive_output(timeout=5)
    assert (closed["type"], closed["code"]) == ("websocket.close", code)


async def test_another_tenants_stream_is_unknown(socket: WebsocketCommunicator, lonely_key: str) -> None:
    """The error is the same as for an id that never was."""
    await socket.send_json_to({"type": "start", "request": ASK})
    started = await receive(socket)
    await until_end(socket)
    other = connect(lonely_key)
    await other.connect()
    for kind in ("resume", "stop"):
        await other.send_json_to({"type": kind, "id": started["id"]})
        assert (await receive(other))["error"]["code"] == "stream_not_found"
    await other.disconnect()


async def test_a_socket_outlives_its_rights_by_no_message(alice_key: str) -> None:
    """A socket whose key was revoked gets an error and 4401 at its next message."""
    socket = connect(alice_key)
    await socket.connect()
    await sync_to_async(ApiKey.objects.all().revoke)()
    await socket.send_json_to({"type": "start", "request": ASK})
    assert (await receive(socket))["error"]["code"] == "rights_lost"
    closed = await socket.receive_output(timeout=5)
    assert (closed["type"], closed["code"]) == ("websocket.close", 4401)


@pytest.mark.parametrize(
    ("proto", "origin", "is_let_in"),
    [
        ("https", "https://testserver", True),
        ("https", "http://testserver", False),
        ("http", "https://testserver", False),
        (None, "http://testserver", True),
    ],
)
async def test_behind_a_proxy_with_tls_the_page_is_https(
    alice: Any, proto: str | None, origin: str, is_let_in: bool
) -> None:
    """The server sees plain HTTP; SECURE_PROXY_SSL_HEADER names the browser's scheme, as it does for Django."""
    client = AsyncClient()
    await sync_to_async(client.force_login)(alice)
    cookie = f"sessionid={client.cookies['sessionid'].value}"
    headers = [(b"host", b"testserver"), (b"cookie", cookie.encode()), (b"origin", origin.encode())]
    if proto is not None:
        headers.append((b"x-forwarded-proto", proto.encode()))
    with override_settings(SECURE_PROXY_SSL_HEADER=("HTTP_X_FORWARDED_PROTO", "https")):
        communicator = WebsocketCommunicator(routing.application, "/ws/streams", headers=headers)
        connected, _ = await communicator.connect()
        await communicator.disconnect()
    assert connected == is_let_in


def at_unknown_path(**scope: Any) -> WebsocketCommunicator:
    socket = WebsocketCommunicator(routing.application, "/ws/nothing", headers=[(b"host", b"testserver")])
    socket.scope |= scope
    return socket


async def test_an_unknown_path_is_refused_before_it_is_open() -> None:
    """Where a server cannot answer a handshake with a status of ours it is a 403, never a socket."""
    socket = at_unknown_path()
    assert not (await socket.connect())[0]
    await socket.wait()


async def test_an_unknown_path_is_a_404_where_the_server_can() -> None:
    """With ASGI's denial response the handshake itself is answered with 404."""
    socket = at_unknown_path(extensions={"websocket.http.response": {}})
    await socket.send_input({"type": "websocket.connect"})
    start, body = await socket.receive_output(), await socket.receive_output()
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 404)
    assert body["type"] == "websocket.http.response.body"
    await socket.wait()


@pytest.mark.parametrize("can_deny", [False, True])
async def test_a_caller_who_cannot_be_looked_up_now_is_told_so(alice_key: str, tmp_path: Path, can_deny: bool) -> None:
    """While the database is away a handshake is a 503 with Retry-After where the server can send that, else a 403."""
    socket = connect(alice_key)
    with database_away(tmp_path):
        if not can_deny:
            assert not (await socket.connect())[0]
            await socket.disconnect()
            return
        socket.scope["extensions"] = {"websocket.http.response": {}}
        await socket.send_input({"type": "websocket.connect"})
        start = await socket.receive_output(timeout=30)
        assert (start["type"], start["status"]) == ("websocket.http.response.start", 503)
        assert (b"retry-after", b"2") in start["headers"]
        assert b"database" in (await socket.receive_output())["body"]
        await socket.disconnect()


@contextmanager
def database_away(folder: Path) -> Iterator[None]:
    """Have the site's short queries find no database: their next connections cannot be opened."""
    settings = connections.settings["default"]
    name = settings["NAME"]
    orm.close()
    settings["NAME"] = str(folder / "nowhere" / "db.sqlite3")
    try:
        yield
    finally:
        settings["NAME"] = name
        orm.close()


@pytest.mark.parametrize("kind", ["resume", "stop", "input"])
@pytest.mark.parametrize("stream_id", ["abc", "0" * 32, "G" * 32, ""])
async def test_an_unknown_stream_is_named(socket: WebsocketCommunicator, kind: str, stream_id: str) -> None:
    """Whatever its id looks like, and never as an empty one."""
    text = {"text": "x"} if kind == "input" else {}
    await socket.send_json_to({"type": kind, "id": stream_id, "ref": "r", **text})
    message = await receive(socket)
    assert (message["type"], message["ref"], message["error"]["code"]) == ("error", "r", "stream_not_found")


async def test_a_position_beyond_a_stream_is_named(socket: WebsocketCommunicator) -> None:
    await socket.send_json_to({"type": "start", "request": ASK})
    started = await receive(socket)
    await until_end(socket)
    await socket.send_json_to({"type": "resume", "id": started["id"], "after": 99999})
    error = (await receive(socket))["error"]
    assert (error["code"], error["param"]) == ("unknown_event_id", "after")
