"""`/ws/streams` on a real daphne, with a real client: credit, input, pings, close codes, floods."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import socket as RawSocket
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from streamserve.dialects.websocket import CloseCode
from streamserve.models import ApiKey
from streamserve.models import Stream as StreamRow
from streamserve.testing import DaphneServer
from tests.proofs.scale import scaled
from tests.support.servers.sockets import Socket, masked, open_raw, open_socket, text_of

pytestmark = pytest.mark.django_db(transaction=True)

ASK = {"messages": [{"role": "user", "content": "tell me"}], "max_tokens": 40, "seed": 7, "ignore_eos": True}
QUICK = [b"%064d" % number for number in range(scaled(10_000, least=2_000))]
DOC = Path(__file__).resolve().parents[2] / "docs" / "websocket.md"


@pytest.fixture
def key(transactional_db: Any) -> str:
    return ApiKey.objects.make(name="socket")[1]


@pytest.fixture(scope="module")
def server(django_db_setup: None) -> Iterator[DaphneServer]:
    """A site with narrow limits and a long ping interval."""
    site = {
        "LIMITS": {"MAX_STREAMS_PER_PRINCIPAL": 2, "MAX_QUEUED_PER_PRINCIPAL": 1},
        "STREAMS": {"PING_SECONDS": 0.05},
        "FLOW": {"CONNECTION_BYTES": 16384},
    }
    with DaphneServer(settings={"STREAMSERVE": site}) as server:
        yield server


@pytest.fixture
def socket(hard_server: DaphneServer, key: str) -> Iterator[Socket]:
    with open_socket(hard_server.websocket_url, key) as socket:
        until_ready(socket)
        yield socket


def until_ready(socket: Socket) -> None:
    """Ask for an answer until the engine has loaded."""
    while (answer := socket.ask("start", request={**ASK, "max_tokens": 1}))["type"] == "error":
        assert answer["error"]["code"] == "engine_loading", answer
    socket.events(answer["id"])
    socket.got.clear()


def whole_text(socket: Socket, **fields: Any) -> str:
    """Return an answer's text, read without a pause."""
    return text_of(socket.events(socket.ask("start", request={**ASK, **fields})["id"]))


def test_credit_bounds_what_is_sent(socket: Socket) -> None:
    """Two events come, then silence, then as many as are acknowledged; the text is that of an answer without credit."""
    reference = whole_text(socket)
    stream_id = socket.ask("start", request=ASK, credit=2)["id"]
    seen = 0
    while True:
        # Every event came before the pong: the relay had used up its credit.
        shown = socket.events(stream_id, last=seen + 2)
        if shown[-1]["event"] == "done":
            break
        assert len(shown) == seen + 2
        assert socket.ask("ping", t=seen) == {"type": "pong", "t": seen}
        seen = len(shown)
        socket.send("ack", id=stream_id, seq=shown[-1]["seq"])
    assert text_of(shown) == reference
    socket.send("ack", id=stream_id, seq=shown[-1]["seq"])
    assert socket.ask("ping")["type"] == "pong", "an ack after the end is no mistake"


def test_a_resume_has_a_credit_of_its_own(socket: Socket) -> None:
    """A resume replaces what was shown of the stream; acks count for what it sends."""
    stream_id = socket.ask("start", request=ASK, credit=1)["id"]
    (first,) = socket.events(stream_id, last=1)
    socket.got.clear()
    socket.send("resume", id=stream_id, after=first["seq"], credit=3)
    shown = socket.events(stream_id, last=3)
    socket.send("ack", id=stream_id, seq=shown[-1]["seq"] + 1)
    assert socket.error_code() == "not_sent"
    socket.send("ack", id=stream_id, seq=shown[1]["seq"])
    assert len(socket.events(stream_id, last=5)) == 5
    assert socket.ask("ping")["type"] == "pong"
    socket.send("resume", id=stream_id, after=0)
    socket.got.clear()
    events = socket.events(stream_id)
    assert events[0]["event"] == "meta"
    assert events[-1]["event"] == "done"


def test_input_interrupts_and_continues(socket: Socket) -> None:
    """The old answer ends where its reader was; the new one is that of a start with the whole conversation."""
    asked = {**ASK, "max_tokens": 400}
    old_id = socket.ask("start", request=asked, credit=4)["id"]
    seen = socket.events(old_id, last=4)
    assert seen[-1]["event"] == "token"
    answer = socket.ask("input", id=old_id, seen_seq=seen[-1]["seq"], text="No, wait.", ref="r")
    assert (answer["type"], answer["continues"], answer["ref"]) == ("started", old_id, "r")
    text = text_of(socket.events(answer["id"]))
    turns = [{"role": "assistant", "content": text_of(seen)}, {"role": "user", "content": "No, wait."}]
    assert text == whole_text(socket, **{**asked, "messages": [*ASK["messages"], *turns]})
    socket.send("resume", id=old_id, after=seen[-1]["seq"])
    socket.got.clear()
    end = socket.events(old_id)[-1]["data"]
    assert (end["finish_reason"], end["kept_seq"]) == ("cancelled", seen[-1]["seq"])


def test_input_after_the_end(socket: Socket) -> None:
    """Each turn continues the full conversation, and its fields replace the last turn's."""
    first = socket.ask("start", request=ASK)["id"]
    said = text_of(socket.events(first))
    turns = [{"role": "user", "content": "And then?"}, {"role": "user", "content": "Go on."}]
    second = socket.ask("input", id=first, messages=turns[:1])["id"]
    said_next = text_of(socket.events(second))
    third = socket.ask("input", id=second, text="Go on.", request={"max_tokens": 9, "seed": 8})["id"]
    answers = [{"role": "assistant", "content": text} for text in (said, said_next)]
    conversation = [*ASK["messages"], answers[0], turns[0], answers[1], turns[1]]
    again = whole_text(socket, messages=conversation, max_tokens=9, seed=8)
    assert text_of(socket.events(third)) == again


def test_input_that_cannot_continue_is_refused(socket: Socket, lonely_key: str, hard_server: DaphneServer) -> None:
    """The input is refused with its reason, and no answer is stopped."""
    prompt = {**{name: ASK[name] for name in ("max_tokens", "ignore_eos")}, "prompt": "once"}
    ids = {
        "no_conversation": socket.ask("start", request=prompt, credit=1)["id"],
        "conflicting_fields": socket.ask("start", request={**ASK, "n": 2}, credit=1)["id"],
        "empty_prompt": socket.ask("start", request=ASK, credit=1)["id"],
    }
    for stream_id in ids.values():
        socket.events(stream_id, last=1)
    for code, stream_id in ids.items():
        socket.send("input", id=stream_id, text="" if code == "empty_prompt" else "more")
        assert socket.error_code() == code
    with open_socket(hard_server.websocket_url, lonely_key) as other:
        for kind in ("input", "ack", "stop", "resume"):
            fields = {"text": "x"} if kind == "input" else {"seq": 1} if kind == "ack" else {}
            other.send(kind, id=ids["empty_prompt"], **fields)
            if kind != "ack":  # an ack of a stream that is not shown here is ignored
                assert other.error_code() == "stream_not_found"
    for stream_id in ids.values():
        socket.send("resume", id=stream_id)
        assert socket.events(stream_id)[-1]["data"]["finish_reason"] == "length"


@pytest.mark.parametrize("note", ["", "x" * 64, "né\u2028🙂", 0, -1.5, 10**20])
def test_a_ping_comes_back_as_it_was(socket: Socket, note: object) -> None:
    assert socket.ask("ping", t=note) == {"type": "pong", "t": note}


@pytest.mark.parametrize(
    ("kind", "fields", "code", "param"),
    [
        ("ping", {"t": "x" * 65}, "invalid_value", "t"),
        ("ping", {"t": [1]}, "invalid_type", "t"),
        ("start", {"request": {}, "credit": 0}, "invalid_value", "credit"),
        ("start", {"request": {}, "credit": 1001}, "invalid_value", "credit"),
        ("resume", {"id": "0" * 32, "credit": True}, "invalid_type", "credit"),
        ("ack", {"id": "0" * 32}, "missing_field", "seq"),
        ("ack", {"seq": 1}, "missing_field", "id"),
        ("ack", {"id": "0" * 32, "seq": -1}, "invalid_value", "seq"),
        ("input", {"id": "0" * 32}, "missing_field", "text"),
        ("input", {"text": "x"}, "missing_field", "id"),
        ("input", {"id": "0" * 32, "text": "x"}, "stream_not_found", "id"),
        ("input", {"id": "0" * 32, "text": "x", "request": {"nope": 1}}, "unknown_field", "nope"),
    ],
)
def test_a_wrong_field_is_named(
    socket: Socket, kind: str, fields: dict[str, Any], code: str, param: str | None
) -> None:
    """The error names the field, and the socket still serves."""
    answer = socket.ask(kind, **fields, **({} if kind == "ping" else {"ref": "r"} if kind != "ack" else {}))
    assert answer["type"] == "error"
    assert (answer["error"]["code"], answer["error"]["param"]) == (code, param)
    assert socket.ask("ping")["type"] == "pong"


def test_silence_is_broken_by_pings(server: DaphneServer, key: str) -> None:
    """With PING_SECONDS the server sends pings, which need no reply and may have one."""
    with open_socket(server.websocket_url, key) as socket:
        assert [socket.receive_any() for _ in range(3)] == [{"type": "ping"}] * 3
        socket.send("pong", t=1)
        assert socket.ask("ping", t=2) == {"type": "pong", "t": 2}


### Close codes


@pytest.mark.parametrize(
    ("frame", "code"),
    [(b"\x00", 1003), ("x" * 300_000, 1009), ("x" * 2_000_000, 1006)],
    ids=["binary", "over our limit", "over the server's"],
)
def test_frames_that_are_not_read_end_the_socket(socket: Socket, frame: str | bytes, code: int) -> None:
    """What was sent behind such a frame is ignored."""
    num_rows = StreamRow.objects.count()
    with contextlib.suppress(ConnectionClosed):  # the server may be quicker
        socket.connection.send(frame)
        socket.send("start", request=ASK)
    assert socket.close_code() == code
    assert socket.got == []
    assert StreamRow.objects.count() == num_rows


def test_a_lost_permission_ends_the_socket(socket: Socket) -> None:
    """A socket whose permission was lost gets 4401 at its next request; acks and pings are no requests."""
    ApiKey.objects.all().revoke()
    assert socket.ask("ping")["type"] == "pong"
    socket.send("start", request=ASK)
    assert socket.error_code() == "rights_lost"
    assert socket.close_code() == 4401


def test_a_start_beyond_the_places_waits(server: DaphneServer, key: str) -> None:
    """Other messages are handled meanwhile; it begins when one of the socket's answers ends."""
    with open_socket(server.websocket_url, key) as socket:
        until_ready(socket)
        ids = []
        for _ in range(2):
            ids.append(socket.ask("start", request=ASK, credit=1)["id"])
            socket.events(ids[-1], last=1)
        socket.send("start", request=ASK, ref="third")
        assert socket.ask("ping")["type"] == "pong"
        socket.send("stop", id=ids[0])
        third = socket.answer()
        assert (third["type"], third["ref"]) == ("started", "third")
        assert socket.events(third["id"])[-1]["event"] == "done"


def test_too_many_streams_end_the_socket(server: DaphneServer, key: str) -> None:
    """Of two places and one in the queue, a third stream waits, and a fourth closes with 4429.

    The answers that are there can be read on another socket.
    """
    with open_socket(server.websocket_url, key) as socket:
        until_ready(socket)
        ids = []
        for _ in range(2):
            ids.append(socket.ask("start", request=ASK, credit=1)["id"])
            socket.events(ids[-1], last=1)
        for _ in range(2):
            socket.send("start", request={**ASK, "max_tokens": 4000}, credit=1)
        while (answer := socket.answer())["type"] == "started":  # an answer that is ahead of its reader may have ended
            pass
        assert answer["error"]["code"] == "too_many_on_socket"
        assert socket.close_code() == 4429
    with open_socket(server.websocket_url, key) as socket:
        for stream_id in ids:
            socket.send("resume", id=stream_id)
            assert socket.events(stream_id)[-1]["event"] == "done"


def test_the_doc_lists_the_codes() -> None:
    """Every code of ours, and those of servers and proxies, has its line."""
    listed = {int(code) for code in re.findall(r"^\| (\d{4}) \|", DOC.read_text(), flags=re.MULTILINE)}
    assert listed == {*CloseCode, 1000, 1001, 1006, 1011}


### Floods


def test_quick_messages_are_answered_in_order(hard_server: DaphneServer, socket: Socket, key: str) -> None:
    """Each of thousands of messages has its reply; another socket is served meanwhile."""
    with open_raw(hard_server.websocket_url, key) as connection, pings(connection):
        assert len(whole_text(socket)) > 40
        assert pongs(connection) == QUICK


@pytest.mark.proof
def test_a_client_that_only_sends_is_paused(server: DaphneServer, key: str) -> None:
    """When unread replies fill the connection, the server takes no further message, and loses none."""
    with open_raw(server.websocket_url, key) as connection, pings(connection, num_spaces=16_000) as sent:
        until_still(lambda: len(sent))
        assert len(sent) < len(QUICK)
        with open_socket(server.websocket_url, key) as other:
            until_ready(other)
        assert pongs(connection) == QUICK


@contextlib.contextmanager
def pings(connection: RawSocket, num_spaces: int = 0) -> Iterator[list[bytes]]:
    """Send pings as fast as they are taken, padded with spaces; return the numbers that were sent."""
    sent: list[bytes] = []

    def send_all() -> None:
        for note in QUICK:
            connection.sendall(masked(b'{"type": "ping", "t": "%b"}' % note + b" " * num_spaces))
            sent.append(note)

    sending = threading.Thread(target=send_all)
    sending.start()
    yield sent
    sending.join()


def pongs(connection: RawSocket) -> list[bytes]:
    """Read until the last ping's reply has come; return their numbers."""
    data, deadline = bytearray(), time.monotonic() + 120
    while data.find(QUICK[-1], max(0, len(data) - 2 * 65536)) < 0:
        assert time.monotonic() < deadline, f"{len(data)} bytes of answers"
        more = connection.recv(65536)
        assert more, f"the server closed after {len(data)} bytes of answers"
        data += more
    return re.findall(rb'"t": "(\d+)"', data)


def until_still(value: Callable[[], int]) -> None:
    """Wait until `value` has not changed for a second. Too early an end does no harm where nothing moves."""
    before, now = -1, value()
    while before != now:
        time.sleep(1.0)
        before, now = now, value()
