"""The site over the wire: real daphne, real clients, the hard settings of tests/site/settings.py."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from django.test import Client
from websockets.sync.client import connect

from streamserve.models import ApiKey
from streamserve.models import Stream as StreamRow
from streamserve.testing import DaphneServer
from tests.support.checks.stream_checks import check_native, parse_sse, text_of
from tests.support.processes import threads_of

pytestmark = pytest.mark.django_db(transaction=True)

ASK = {"prompt": "tell me", "max_tokens": 40, "seed": 7}


@pytest.fixture
def key(transactional_db: Any) -> str:
    return ApiKey.objects.make(name="wire", scopes=["chat", "ops"])[1]


@pytest.fixture
def http(hard_server: DaphneServer, key: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=hard_server.url, headers=headers, timeout=30, trust_env=False) as client:
        until(lambda: client.get("/readyz").status_code == 200)
        yield client


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Poll a server that has no event to wait for; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def openai_client(server: DaphneServer, key: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=key, http_client=openai.DefaultHttpxClient(trust_env=False)
    )


def reasons() -> list[str]:
    return list(StreamRow.objects.values_list("finish_reason", flat=True))


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"streamserve_{name}{{"))


def test_the_openai_client_gets_every_token_through_gzip(
    hard_server: DaphneServer, http: httpx.Client, key: str
) -> None:
    """With GZipMiddleware and Accept-Encoding the official client reads the same text streamed and whole."""
    client = openai_client(hard_server, key)
    with client:
        ask: Any = {"model": "echo", "messages": [{"role": "user", "content": "tell me"}], "max_tokens": 200, "seed": 7}
        whole = client.chat.completions.create(**ask)
        options = {"include_usage": True}
        chunks = list(client.chat.completions.create(**ask, stream=True, stream_options=options))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert len(chunks) > 10
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 200
        assert [model.id for model in client.models.list()] == ["echo"]
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(**{**ask, "model": "nope"})
        assert caught.value.code == "model_not_found"
        assert caught.value.request_id
    with openai_client(hard_server, "wrong" * 4) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_the_hand_over_keeps_what_middleware_adds(http: httpx.Client) -> None:
    """The response has the status and headers of Django's, our stream, and no trace of the hand-over."""
    with http.stream("POST", "/streams", json=ASK) as response:
        assert response.status_code == 200
        assert response.headers["x-sync-middleware"] == "seen"
        assert response.headers["content-encoding"] == "identity"
        assert "streamserve-handover" not in response.headers
        assert "content-length" not in response.headers
        assert "etag" not in response.headers
        check_native(response.read())


def test_a_reader_that_returns_gets_the_rest(http: httpx.Client) -> None:
    """Closing parks the answer; the blocks are free; resuming gives the text of an uninterrupted answer."""
    ask = {**ASK, "max_tokens": 400, "ignore_eos": True}
    whole = text_of(check_native(http.post("/streams", json=ask).content))
    got = b""
    with http.stream("POST", "/streams", json=ask) as response:
        stream_id = response.headers["x-stream-id"]
        for chunk in response.iter_raw():
            got += chunk
            if got.count(b"event: token") >= 3:
                break
    until(lambda: metric(http, "num_requests_running") == 0)
    assert metric(http, "kv_blocks_used") == 0
    seen = parse_sse(got)
    rest = http.get(f"/streams/{stream_id}/events", headers={"Last-Event-ID": seen[-1].id})
    assert text_of(seen) + text_of(check_native(rest.content, after=seen[-1].seq)) == whole


def test_leaving_an_openai_answer_stops_it(http: httpx.Client) -> None:
    """Streamed or whole: the connection closes, the engine drops the sequence, and the row ends as abandoned."""
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8000, "ignore_eos": True}
    with http.stream("POST", "/v1/chat/completions", json={**ask, "stream": True}) as response:
        next(response.iter_raw())
    until(lambda: reasons() == ["abandoned"])
    body = json.dumps(ask).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {http.base_url.netloc.decode()}\r\n"
        f"Authorization: {http.headers['authorization']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((http.base_url.host, http.base_url.port or 80)) as waiting:
        waiting.sendall(head.encode() + body)
        until(lambda: len(reasons()) == 2)
        until(lambda: metric(http, "num_requests_running") == 1)
    until(lambda: reasons() == ["abandoned", "abandoned"])
    assert metric(http, "kv_blocks_used") == 0


def test_a_stream_holds_no_thread_while_it_waits(http: httpx.Client, hard_server: DaphneServer) -> None:
    """Twelve answers at once cost the server no thread each."""

    http.post("/streams", json=ASK)
    before = len(threads_of(hard_server.pid))
    ask = {**ASK, "max_tokens": 8000, "ignore_eos": True}
    readers = [http.send(http.build_request("POST", "/streams", json=ask), stream=True) for _ in range(12)]
    during = len(threads_of(hard_server.pid))
    for reader in readers:
        reader.close()
    assert during <= before + 3


def test_a_websocket_streams_stops_and_resumes(hard_server: DaphneServer, http: httpx.Client, key: str) -> None:
    """The public `websockets` client gets the same events as over SSE."""
    headers = {"Authorization": f"Bearer {key}"}
    with connect(f"{hard_server.websocket_url}/ws/streams", additional_headers=headers, proxy=None) as socket:
        socket.send(json.dumps({"type": "start", "request": ASK}))
        started = json.loads(socket.recv(timeout=60))
        text, event = "", ""
        while event != "done":
            message = json.loads(socket.recv(timeout=60))
            event = message["event"]
            text += message["data"]["text"] if event == "token" else ""
    replay = http.get(f"/streams/{started['id']}/events")
    assert text_of(check_native(replay.content)) == text


def test_an_event_source_that_reconnects_starts_one_answer(http: httpx.Client) -> None:
    """GET /streams/new, cut and sent again with Last-Event-ID, makes one row and one text; after `done` it is 204."""
    path = "/streams/new?prompt=tell+me&max_tokens=300&ignore_eos=true&seed=8"
    sse = {"Accept": "text/event-stream"}
    got = b""
    with http.stream("GET", path, headers=sse) as response:
        for chunk in response.iter_raw():
            got += chunk
            if got.count(b"event: token") >= 2:
                break
    seen = parse_sse(got)
    rest = http.get(path, headers={**sse, "Last-Event-ID": seen[-1].id})
    frames = check_native(rest.content, after=seen[-1].seq)
    assert StreamRow.objects.count() == 1
    assert http.get(path, headers={**sse, "Last-Event-ID": frames[-1].id}).status_code == 204


def test_the_live_page_streams_metrics(hard_server: DaphneServer, http: httpx.Client, root: Any) -> None:
    """The live page streams through the hand-over, with a session, under every middleware of the hard site."""
    session = Client()
    session.force_login(root)
    cookies = {"sessionid": session.cookies["sessionid"].value}
    url = f"{hard_server.url}/admin/streamserve/live"
    with httpx.Client(cookies=cookies, timeout=60, trust_env=False) as browser:
        assert browser.get(f"{hard_server.url}/").status_code == 200
        assert browser.get(f"{url}/").status_code == 200
        with browser.stream("GET", f"{url}/events") as response:
            assert response.status_code == 200
            got = b""
            for chunk in response.iter_raw():
                got += chunk
                if got.count(b"event: figures") == 2:
                    break
    assert b'"kv_blocks_total"' in got
