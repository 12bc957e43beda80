"""uvicorn's own shutdown: what finishes, what is cut, which readers get a notice. docs/deploy.md describes it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.support.checks.stream_checks import check_native, check_native_part, going_away_of, text_of
from tests.support.docs.demo_site import environment, manage, processes_of
from tests.support.plugins.migrated import KEY, MAKE_KEY, prepare
from tests.support.servers.flow_driver import get, printed_lines, read_all, read_until, until
from tests.support.servers.web_servers import ROOT, Server, uvicorn, wait_until_ready

HEADERS = {"Authorization": f"Bearer {KEY}"}
SETTINGS = {
    "DJANGO_SETTINGS_MODULE": "tests.support.sites.workers.two_workers_site",
    "DRAIN_SECONDS": "600",
    "RESUME_WINDOW_SECONDS": "600",  # longer than a busy machine takes to start the next process
}
FOR_LONG, AT_ONCE = ("--timeout-graceful-shutdown", "600"), ("--timeout-graceful-shutdown", "0")
_SECONDS = 60.0
# A process that ended by SIGTERM: uvicorn sends it to itself again after its shutdown. systemd treats it as clean.
BY_SIGTERM = -signal.SIGTERM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A site's folder; its engine is ended with it."""
    folder = tmp_path_factory.mktemp("site")
    prepare(folder, MAKE_KEY)
    yield folder
    manage(folder, "streamserve_engine", "--stop", **SETTINGS)
    assert processes_of(folder) == set()


def site(folder: Path, *options: str) -> Any:
    return uvicorn("project.asgi:application", *options, env=environment(folder, **SETTINGS))


def question(num_tokens: int) -> dict[str, Any]:
    return {"prompt": "tell me", "max_tokens": num_tokens, "ignore_eos": True, "seed": 7}


class Reader:
    """Reads one response in a thread, up to its end of any kind."""

    def __init__(self, server: Server, path: str, body: dict[str, Any], *, has_begun: bytes = b"token") -> None:
        self.data, self.status, self.is_cut = b"", 0, False
        self.headers = httpx.Headers()
        self._has_begun = has_begun
        self._thread = threading.Thread(target=self._read, args=(server.url + path, body))
        self._thread.start()

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=_SECONDS, trust_env=False) as response:
                self.status, self.headers = response.status_code, response.headers
                for piece in response.iter_raw():
                    self.data += piece
        except httpx.RemoteProtocolError:  # the body ended without its end
            self.is_cut = True

    def begun(self) -> Reader:
        """Wait until it has read part of the answer."""
        until(lambda: self._has_begun in self.data, "the answer has begun")
        return self

    def ended(self) -> Reader:
        self._thread.join(_SECONDS)
        assert not self._thread.is_alive()
        return self


def is_refused(server: Server) -> bool:
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_streams_that_end_in_time_are_whole_and_new_connections_refused(folder: Path) -> None:
    """Both kinds of stream end properly; new connections, also of /readyz, are refused meanwhile."""
    with site(folder, *FOR_LONG) as server:
        wait_until_ready(server.url)
        chat = {"messages": [{"role": "user", "content": "tell me"}], "max_tokens": 300, "ignore_eos": True}
        native = Reader(server, "/streams", question(300))
        openai = Reader(server, "/v1/chat/completions", {**chat, "stream": True}, has_begun=b'"content"')
        native.begun(), openai.begun()
        server.process.send_signal(signal.SIGTERM)
        until(lambda: is_refused(server), "it listens no more", server)
        assert [frame.event for frame in check_native(native.ended().data)][-1] == "done"
        assert openai.ended().data.endswith(b"data: [DONE]\n\n")
        assert (native.is_cut, openai.is_cut) == (False, False)
        assert server.process.wait(_SECONDS) == BY_SIGTERM


@pytest.mark.cut_streams("uvicorn cuts what does not end in time")
def test_an_unfinished_stream_is_cut_and_continues_at_another_worker(folder: Path) -> None:
    """A cut response ends in a farewell, or unterminated if it cannot be resumed; the next worker has the rest."""
    with site(folder, *AT_ONCE) as server:
        wait_until_ready(server.url)
        cut = Reader(server, "/streams", {**question(8000), "on_disconnect": "abort"}).begun()
        let_go = Reader(server, "/streams", question(400)).begun()  # last: its answer must not have ended
        server.process.send_signal(signal.SIGTERM)
        let_go.ended(), cut.ended()
        assert server.process.wait(_SECONDS) == BY_SIGTERM
    assert (let_go.is_cut, cut.is_cut) == (False, True)
    assert going_away_of(let_go.data) is not None
    assert going_away_of(cut.data) is None
    frames = check_native_part(let_go.data)
    assert not {"done", "error"} & {frame.event for frame in [*frames, *check_native_part(cut.data)]}
    status = manage(folder, "streamserve_engine", "--status", **SETTINGS).stdout
    assert "0 running, 0 waiting" in status
    with site(folder) as server:
        wait_until_ready(server.url)
        url = f"{server.url}/streams/{let_go.headers['x-stream-id']}/events"
        last = {**HEADERS, "Last-Event-ID": frames[-1].id}
        rest = httpx.get(url, headers=last, timeout=_SECONDS, trust_env=False)
        whole = httpx.post(
            f"{server.url}/streams", json=question(400), headers=HEADERS, timeout=_SECONDS, trust_env=False
        )
    assert text_of(frames) + text_of(check_native(rest.content, after=frames[-1].seq)) == text_of(
        check_native(whole.content)
    )


def test_a_whole_answer_that_is_not_ready_in_time_is_an_error(folder: Path) -> None:
    """Never half an answer."""
    with site(folder, *AT_ONCE) as server:
        wait_until_ready(server.url)
        chat = {"messages": [{"role": "user", "content": "tell me"}], "max_tokens": 8000, "ignore_eos": True}
        waiting = Reader(server, "/v1/chat/completions", chat)

        def num_running() -> str:
            return manage(folder, "streamserve_engine", "--status", **SETTINGS).stdout

        until(lambda: "1 running" in num_running(), "the engine works on it", server)
        server.process.send_signal(signal.SIGTERM)
        assert waiting.ended().status in {500, 503}
        assert server.process.wait(_SECONDS) == BY_SIGTERM
        assert "0 running, 0 waiting" in num_running()


def test_a_websocket_is_closed_at_once(folder: Path) -> None:
    """With 1012 "service restart", however long the grace: its client comes back and resumes."""
    with site(folder, *FOR_LONG) as server:
        wait_until_ready(server.url)
        with connect(f"{server.websocket_url}/ws/streams", additional_headers=HEADERS, proxy=None) as client:
            client.send(json.dumps({"type": "start", "request": question(2000)}))
            while json.loads(client.recv(timeout=_SECONDS)).get("event") != "token":
                pass
            server.process.send_signal(signal.SIGTERM)
            events: list[str] = []
            with contextlib.suppress(ConnectionClosed):
                while True:
                    events.append(json.loads(client.recv(timeout=_SECONDS))["event"])
            assert client.close_code == 1012
        assert "done" not in events
        assert server.process.wait(_SECONDS) == BY_SIGTERM


_APPS = """
import asyncio
from streamserve.asgi.middleware import StreamMiddleware

async def bare(scope, receive, send):
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b": hello", "more_body": True})
    try:
        await asyncio.Event().wait()
    finally:
        print("PRINTED finally", flush=True)
        await asyncio.Event().wait()

wrapped = StreamMiddleware(bare)
"""


@pytest.mark.parametrize(("app", "printed"), [("bare", []), ("wrapped", ["finally"])])
def test_cleanup_code_when_the_grace_is_over(tmp_path: Path, app: str, printed: list[str]) -> None:
    """uvicorn cancels and does not wait: a `finally` runs while the app's own lifespan shuts down, which ours does.

    Without a lifespan it does not run, and a long await in it is cut off. FlowServer waits for all.
    """
    (tmp_path / "apps.py").write_text(_APPS)
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with uvicorn(f"apps:{app}", *AT_ONCE, cwd=tmp_path, env=path) as server, get(server, "/") as client:
        read_until(client, b": hello")
        server.process.send_signal(signal.SIGTERM)
        assert b"0\r\n\r\n" not in read_all(client)[0]
        assert server.process.wait(_SECONDS) == BY_SIGTERM
        assert printed_lines(server) == printed
