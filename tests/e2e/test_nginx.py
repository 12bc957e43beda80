"""docs/deploy/nginx.conf in a real nginx: events pass at once, a leaving reader is noticed, nothing is held back."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from websockets.sync.client import connect

from streamserve.models import ApiKey
from streamserve.testing import DaphneServer
from tests.support.checks.stream_checks import check_native, check_native_part, text_of
from tests.support.docs.demo_site import manage
from tests.support.servers.flow_driver import flow
from tests.support.servers.nginx_server import nginx
from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import Server

_SECONDS = 60.0
WIRE_APP = "tests.support.apps.wire_app:app"


@pytest.fixture(scope="module")
def worker() -> Iterator[Server]:
    """A worker whose engine takes a step on command."""
    with flow(app=WIRE_APP) as server:
        yield server


@pytest.fixture(scope="module")
def front(worker: Server) -> Iterator[str]:
    """The nginx before it."""
    with nginx([worker.port]) as url:
        yield url


@pytest.fixture(autouse=True)
def _open_gate(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "worker" in request.fixturenames:
        get(request.getfixturevalue("worker").url, "/control?open=1")


def get(url: str, path: str) -> dict[str, Any]:
    """Return the JSON answer of a control route."""
    value = httpx.get(url + path, timeout=_SECONDS, trust_env=False).raise_for_status().json()
    assert isinstance(value, dict)
    return value


def wait_for(worker: Server, claim: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    """Ask the worker itself for its state until `claim` holds for it."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        state = get(worker.url, "/state")
        if claim(state):
            return state
        time.sleep(0.005)
    raise AssertionError(f"not within {_SECONDS:.0f} s: {what}\n{state}\n{worker.output()}")


def ask(url: str, path: str, *headers: str) -> socket.socket:
    """Ask nginx for a page on a raw connection."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=_SECONDS)
    client.sendall("\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}:{port}", *headers, "", ""]).encode())
    return client


def ask_websocket(url: str, path: str) -> socket.socket:
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    return ask(url, path, "Upgrade: websocket", "Connection: Upgrade", key, "Sec-WebSocket-Version: 13")


def read_until(client: socket.socket, claim: Callable[[bytes], bool]) -> bytes:
    """Read until the received bytes satisfy `claim`. Bytes that are held back let the connection time out."""
    data = b""
    while not claim(data):
        more = client.recv(65536)
        assert more, f"the connection ended: {data!r}"
        data += more
    return data


def test_each_event_passes_before_the_next_is_made(worker: Server, front: str) -> None:
    """The engine takes its next step only when the reader, behind nginx, has what the last one made."""
    get(worker.url, "/control?allow=0")
    with httpx.stream("GET", f"{front}/streams?max_tokens=12", timeout=_SECONDS, trust_env=False) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        got, pieces = b"", response.iter_raw()
        while b"event: meta" not in got:
            got += next(pieces)
        for num_tokens in range(1, 13):
            get(worker.url, "/control?allow=1")
            while got.count(b"event: token") < num_tokens:
                got += next(pieces)
        got += b"".join(pieces)
    frames = check_native(got)
    assert [frame.event for frame in frames if frame.event != "status"] == ["meta", *["token"] * 12, "done"]


def test_events_without_our_header_are_not_buffered() -> None:
    """A worker sends small events with no X-Accel-Buffering, each only when the reader has the one before."""
    with worker_of_ours("/events") as (worker, _, client):
        worker.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(6):
            event = b"data: %d\n\n" % number
            worker.sendall(b"%x\r\n%s\r\n" % (len(event), event))
            read_until(client, lambda data, event=event: event in data)


def test_a_stalled_reader_pauses_the_worker() -> None:
    """nginx takes from the worker what sockets hold, and neither memory nor a file full: the worker can see the lag."""
    piece, num_sent = b"10000\r\n" + b"x" * 65536 + b"\r\n", 0
    with worker_of_ours("/") as (worker, _, _reader):
        worker.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        worker.settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            while num_sent < 1000:
                worker.sendall(piece)
                num_sent += 1
    assert num_sent < 500, "of 64 KiB each"


def test_keepalives_pass(worker: Server, front: str) -> None:
    """A silent engine's reader gets keepalives."""
    get(worker.url, "/control?allow=0")
    with ask(front, "/streams") as client:
        read_until(client, lambda data: data.count(b": keepalive") >= 3)


def test_each_message_of_a_websocket_passes_before_the_next_is_made(worker: Server, front: str) -> None:
    """Over a WebSocket, with the public `websockets` client, each message passes before the next is made."""
    get(worker.url, "/control?allow=0")
    with connect(f"{front.replace('http', 'ws', 1)}/streams", proxy=None) as client:

        def next_token() -> int:
            while (message := json.loads(client.recv(timeout=_SECONDS)))["event"] != "token":
                pass
            return int(message["seq"])

        seqs = []
        for _ in range(6):
            get(worker.url, "/control?allow=1")
            seqs.append(next_token())
        assert seqs == sorted(set(seqs))


@contextlib.contextmanager
def worker_of_ours(path: str, *headers: str) -> Iterator[tuple[socket.socket, str, socket.socket]]:
    """Ask nginx for a page; yield its connection to the worker, the head that came over it, and the asker's."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(_SECONDS)
        url = stack.enter_context(nginx([listener.getsockname()[1]]))
        client = stack.enter_context(ask(url, path, *headers))
        worker = stack.enter_context(listener.accept()[0])
        worker.settimeout(_SECONDS)
        yield worker, read_until(worker, lambda data: b"\r\n\r\n" in data).decode(), client


def test_a_worker_gets_the_right_headers() -> None:
    """nginx passes on the address it sees, no address a caller claims, and no upgrade but a WebSocket's."""
    claims = ["X-Forwarded-For: 6.6.6.6", "X-Forwarded-Proto: https", "Streamserve-If-Draining: @x", "Upgrade: h2c"]
    with worker_of_ours("/x?y=%20", *claims, "Connection: Upgrade") as (_, head, client):
        line, *lines = head.strip().split("\r\n")
        host = "{}:{}".format(*client.getpeername())
    assert line == "GET /x?y=%20 HTTP/1.1"
    assert dict(one.split(": ", 1) for one in lines) == {
        "Host": host,
        "X-Forwarded-For": "127.0.0.1",
        "X-Forwarded-Proto": "http",
        "X-Forwarded-Host": host,
        "Connection": "close",
        "Streamserve-If-Draining": "@another_worker",
    }


def fin(connection: socket.socket) -> None:
    connection.close()


def rst(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("leave", [fin, rst])
@pytest.mark.parametrize("connect", [ask, ask_websocket], ids=["http", "websocket"])
def test_a_reader_that_leaves_is_absent_from_the_next_step(
    worker: Server, front: str, connect: Callable[[str, str], socket.socket], leave: Callable[[socket.socket], None]
) -> None:
    """A step is held while the reader leaves nginx; its sequence is in no later step, and no block is held."""
    get(worker.url, "/control?allow=3")
    client = connect(front, "/streams")
    read_until(client, lambda data: b"token" in data)
    held = wait_for(worker, lambda state: state["is_holding"], "a step is held")
    (seq_id,) = held["plans"][-1]
    leave(client)
    wait_for(worker, lambda state: state["streams"][-1]["state"] == "parked", "the disconnect is seen")
    get(worker.url, "/control?open=1")
    wait_for(worker, lambda state: state["stats"]["blocks_used"] == 0, "its blocks are free")
    other = httpx.get(f"{front}/streams?prompt=other&max_tokens=4", timeout=_SECONDS, trust_env=False)
    check_native(other.content)
    later = get(worker.url, "/state")["plans"][len(held["plans"]) :]
    assert later
    assert all(seq_id not in plan for plan in later)


# The site itself


@pytest.fixture
def key(transactional_db: Any) -> str:
    return ApiKey.objects.make(name="nginx")[1]


@pytest.fixture
def site(hard_server: DaphneServer, key: str) -> Iterator[httpx.Client]:
    """The hard site of tests/site behind nginx."""
    headers = {"Authorization": f"Bearer {key}"}
    with (
        nginx([int(hard_server.url.rpartition(":")[2])]) as url,
        httpx.Client(base_url=url, headers=headers, timeout=_SECONDS, trust_env=False) as client,
    ):
        deadline = time.monotonic() + _SECONDS
        while client.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield client


def test_the_openai_client_streams_through_nginx(site: httpx.Client, key: str) -> None:
    """Streamed and whole are the same text; an error is the client's own exception."""
    question: Any = {"model": "echo", "messages": [{"role": "user", "content": "tell me"}], "max_tokens": 60, "seed": 7}
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{site.base_url}/v1", api_key=key, http_client=http, max_retries=0) as client:
        whole = client.chat.completions.create(**question).choices[0].message.content
        chunks = list(client.chat.completions.create(**question, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
        assert chunks[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**{**question, "model": "nope"})


def test_a_reader_resumes_through_nginx(site: httpx.Client) -> None:
    """A reader that leaves and resumes by Last-Event-ID has the same text as one that never left."""
    question = {"prompt": "tell me", "max_tokens": 300, "ignore_eos": True, "seed": 7}
    whole = text_of(check_native(site.post("/streams", json=question).content))
    got = b""
    with site.stream("POST", "/streams", json=question) as response:
        stream_id = response.headers["x-stream-id"]
        for piece in response.iter_raw():
            got += piece
            if got.count(b"event: token") >= 3:
                break
    seen = check_native_part(got)
    rest = site.get(f"/streams/{stream_id}/events", headers={"Last-Event-ID": seen[-1].id})
    assert rest.headers["streamserve-from"] == str(seen[-1].seq + 1)
    assert text_of(seen) + text_of(check_native(rest.content, after=seen[-1].seq)) == whole


def test_a_body_over_the_limit_gets_a_json_413(site: httpx.Client) -> None:
    """One byte more than LIMITS allows: nginx refuses it, as JSON; at the limit the site reads it."""
    limit = 1024 * 1024
    refused = site.post("/streams", content=b" " * (limit + 1), headers={"Content-Type": "application/json"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    read = site.post("/streams", content=b" " * limit, headers={"Content-Type": "application/json"})
    assert (read.status_code, read.json()["error"]["code"]) == (400, "invalid_json")


def test_a_file_of_a_batch_may_be_larger(site: httpx.Client) -> None:
    """It passes unbuffered; one over the limit is refused by its length, as JSON."""
    content = b"x" * (5 * 1024 * 1024)
    up = site.post("/v1/files", files={"file": content}, data={"purpose": "batch"})
    assert up.json()["bytes"] == len(content)
    assert site.get(f"/v1/files/{up.json()['id']}/content").content == content
    assert_refused(site, "/v1/files", 300)


def test_a_file_of_a_question_may_be_larger(site: httpx.Client) -> None:
    """The site reads it, and says itself what is wrong with it; one over the limit is refused by its length."""
    read = site.post("/attachments", files={"file": ("a.exe", b"x" * (5 * 1024 * 1024))})
    assert read.json()["error"]["code"] == "unsupported_file"
    assert_refused(site, "/attachments", 22)


def assert_refused(site: httpx.Client, path: str, megabytes: int) -> None:
    """Assert that a file of this length is refused before it is sent, as JSON."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {megabytes * 2**20}\r\nConnection: close\r\n\r\n"
    with socket.create_connection((site.base_url.host, site.base_url.port or 80), timeout=_SECONDS) as client:
        client.sendall(head.encode())
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 413")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["code"], error["param"]) == ("file_too_large", "file")


def test_the_websocket_of_the_site(site: httpx.Client, key: str) -> None:
    """An answer runs from start to done; the page's Origin is nginx's address, which the site must trust."""
    url, headers = str(site.base_url), {"Authorization": f"Bearer {key}"}
    with connect(
        f"{url.replace('http', 'ws', 1)}/ws/streams", additional_headers=headers, origin=url, proxy=None
    ) as client:
        client.send(json.dumps({"type": "start", "request": {"prompt": "tell me", "max_tokens": 20}}))
        events = []
        while "done" not in events:
            events.append(json.loads(client.recv(timeout=_SECONDS)).get("event"))
        assert events.count("token") >= 2


def test_nginx_serves_the_static_files(tmp_path: Path) -> None:
    """Static files come from `collectstatic` without a worker; a page is then a 502."""
    done = manage(tmp_path, "collectstatic", "--noinput", "--verbosity=0")
    assert done.returncode == 0, done.stderr
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(nginx([free_port()], static_root=tmp_path / "static"))
        client = stack.enter_context(httpx.Client(base_url=url, trust_env=False))
        script = client.get("/static/streamserve/chat.js")
        assert (script.status_code, script.headers["content-encoding"]) == (200, "gzip")
        assert script.text == (tmp_path / "static" / "streamserve" / "chat.js").read_text()
        assert client.get("/static/streamserve/chat.css").headers["content-type"] == "text/css"
        assert client.get("/").status_code == 502
