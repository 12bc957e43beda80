"""A Django site on every ASGI server: a stream arrives whole, a reader that leaves frees the engine, SIGTERM ends well.

docs/deploy.md has the table of what each server can do; what these tests see of it is held here.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.support.checks.stream_checks import check_native, check_native_part, going_away_of, text_of
from tests.support.docs.demo_site import end_engines, environment
from tests.support.plugins.migrated import KEY, Migrate
from tests.support.servers.flow_driver import until
from tests.support.servers.sockets import open_socket
from tests.support.servers.web_servers import ALL_SERVERS, Server, wait_until_ready

pytestmark = pytest.mark.proof

HEADERS = {"Authorization": f"Bearer {KEY}"}
SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.workers.two_workers_site", "DRAIN_SECONDS": "5"}
_SECONDS = 60.0
# What a probe sees between SIGTERM and the end: 503, or a listener that is closed or that no one serves.
PROBE_SEES = {
    "daphne": {"503"},
    "uvicorn": {"503", "refused"},
    "hypercorn": {"503", "refused", "hangs"},
    "granian": {"503", "refused"},
    "gunicorn": {"503", "refused"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> Iterator[Path]:
    """The site's folder: one engine and one log for all servers."""
    folder = tmp_path_factory.mktemp("site")
    migrated(folder, ("streamserve_key", "create", "--key", KEY, "--scope", "chat", "--scope", "ops"))
    yield folder
    end_engines(folder)


@pytest.fixture(scope="module", params=ALL_SERVERS)
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Server]:
    with ALL_SERVERS[request.param]("project.asgi:application", env=environment(folder, **SETTINGS)) as server:
        wait_until_ready(server.url)
        yield server


def question(num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": "tell me", "max_tokens": num_tokens, "ignore_eos": True, "seed": 7, **fields}


def num_running(server: Server) -> int:
    """Return how many sequences the engine's scheduler runs."""
    text = httpx.get(f"{server.url}/metrics", headers=HEADERS, timeout=_SECONDS, trust_env=False).text
    found = re.search(r'^streamserve_num_requests_running\{model_name="echo"\} (\d+)', text, re.MULTILINE)
    assert found is not None, text
    return int(found[1])


def ask(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers=HEADERS, timeout=_SECONDS, trust_env=False)


def test_a_stream_arrives_whole(server: Server) -> None:
    """In both forms, and by the WebSocket."""
    native = text_of(check_native(ask(server, "/streams", question(40)).content))
    chat = {"messages": [{"role": "user", "content": "tell me"}], "max_tokens": 40, "stream": True}
    assert ask(server, "/v1/chat/completions", chat).content.endswith(b"data: [DONE]\n\n")
    with open_socket(server.websocket_url, KEY) as socket:
        stream_id = socket.ask("start", request=question(40))["id"]
        events = socket.events(stream_id)
    assert "".join(event["data"]["text"] for event in events if event["event"] == "token") == native


def test_an_unknown_socket_is_refused_before_it_opens(server: Server) -> None:
    """404, or 403 where a server answers a handshake with nothing else."""
    with pytest.raises(InvalidStatus) as raised, connect(f"{server.websocket_url}/ws/nothing", proxy=None):
        pass
    assert raised.value.response.status_code in {403, 404}


def test_a_whole_answer_is_sent(server: Server) -> None:
    """A view waits for it, and for its client's disconnect meanwhile."""
    answer = ask(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20})
    assert answer.json()["usage"]["completion_tokens"] == 20


@pytest.mark.cut_streams("the reader leaves on purpose")
@pytest.mark.parametrize("is_whole", [False, True], ids=["a stream", "a whole answer"])
def test_a_reader_that_leaves_frees_the_engine(server: Server, is_whole: bool) -> None:
    """The scheduler's running sequence ends long before its last token."""
    until(lambda: num_running(server) == 0, "the engine rests", server)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8000, "ignore_eos": True}
    path, body = ("/v1/chat/completions", chat) if is_whole else ("/streams", question(8000, on_disconnect="abort"))
    with server.connect() as connection:
        request = httpx.Request("POST", f"{server.url}{path}", json=body, headers=HEADERS)
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        until(lambda: num_running(server) == 1, "its answer runs", server)
    until(lambda: num_running(server) == 0, "the engine rests again", server)


class Reader:
    """Reads one native stream in a thread, to an end of any kind."""

    def __init__(self, server: Server) -> None:
        self.data, self.is_cut = b"", False
        self._thread = threading.Thread(target=self._read, args=(f"{server.url}/streams",))
        self._thread.start()

    def _read(self, url: str) -> None:
        options: dict[str, Any] = {"headers": HEADERS, "timeout": _SECONDS, "trust_env": False}
        try:
            with httpx.stream("POST", url, json=question(8000), **options) as response:
                for piece in response.iter_raw():
                    self.data += piece
        except httpx.RemoteProtocolError:
            self.is_cut = True

    def ended(self) -> bytes:
        self._thread.join(_SECONDS)
        assert not self._thread.is_alive()
        return self.data


def probe(server: Server, seconds: float) -> str:
    """Return what /readyz answers: a status, or how the server is away. It hangs after `seconds`."""
    try:
        return str(httpx.get(f"{server.url}/readyz", timeout=seconds, trust_env=False).status_code)
    except httpx.ConnectError:
        return "refused"
    except httpx.TransportError:
        return "hangs"


@pytest.mark.cut_streams("the servers end them")
@pytest.mark.parametrize("name", ALL_SERVERS)
def test_sigterm_in_mid_stream_ends_in_a_farewell(name: str, folder: Path) -> None:
    """/readyz fails while the stream still runs; then its reader is told where to go on, and the server ends."""
    with ALL_SERVERS[name]("project.asgi:application", env=environment(folder, **SETTINGS)) as server:
        wait_until_ready(server.url)
        reader = Reader(server)
        until(lambda: b"event: token" in reader.data, "the answer has begun", server)
        server.process.send_signal(signal.SIGTERM)
        patience = 1.0 if "hangs" in PROBE_SEES[name] else _SECONDS
        seen = until(lambda: (answer := probe(server, patience)) != "200" and answer, "the probe fails", server)
        assert seen in PROBE_SEES[name]
        assert going_away_of(reader.data) is None, "the probe was to fail before the end"
        farewell = going_away_of(reader.ended())
        assert not reader.is_cut
        assert farewell is not None
        assert not {"done", "error"} & {frame.event for frame in check_native_part(reader.data)}
        server.process.wait(_SECONDS)
