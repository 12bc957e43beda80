"""docs/deploy/nginx.conf before two workers, one of which drains: which requests are repeated, and which never."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.servers.flow_driver import (
    HELLO,
    exit_code,
    flow,
    get,
    printed_lines,
    read_until,
    state,
    terminate,
    until,
    websocket,
)
from tests.support.servers.nginx_server import nginx
from tests.support.servers.web_servers import ROOT, Server

FOR_LONG, AT_ONCE = "600", "0"


class Front:
    """nginx before two workers, and a client of it."""

    def __init__(self, url: str, workers: list[Server]) -> None:
        self.workers = workers
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=60)
        self._threads = ThreadPoolExecutor()

    def post(self, path: str, size: int = 100_000) -> httpx.Response:
        return self._http.post(path, content=b"x" * size)

    def begin(self, method: str, path: str) -> Future[httpx.Response]:
        """Ask in a thread."""
        return self._threads.submit(self._http.request, method, path)

    def close(self) -> None:
        self._http.close()
        self._threads.shutdown()


@contextmanager
def front(drain_seconds: str) -> Iterator[Front]:
    options = ("--drain-seconds", drain_seconds)
    with flow(*options) as first, flow(*options) as second, nginx([first.port, second.port]) as url:
        front = Front(url, [first, second])
        try:
            yield front
        finally:
            for worker in front.workers:
                if worker.process.poll() is None:
                    worker.process.kill()
            front.close()


def drain(worker: Server) -> None:
    """Send SIGTERM to a worker that a stream keeps; return when it accepts nothing new."""
    terminate(worker)
    until(lambda: "drain" in printed_lines(worker), "it drains", worker)


def taken(workers: list[Server]) -> tuple[Server, Server]:
    """Wait until one of the workers has a request; return it, and the other."""

    def busy() -> list[Server]:
        return [worker for worker in workers if state(worker)["connections"] > 1]

    (worker,) = until(busy, "a worker has it")
    return worker, next(other for other in workers if other is not worker)


def test_a_draining_worker_costs_no_request() -> None:
    """Each POST reaches the other one, whole and once, with no trace of the refusal; WebSockets too."""
    with front(FOR_LONG) as site:
        draining, other = site.workers
        with get(draining, "/wait") as kept:
            read_until(kept, HELLO)
            drain(draining)
            assert [site.post("/body").text for _ in range(10)] == ["100000"] * 10
            assert (state(draining)["bodies"], state(other)["bodies"]) == (0, 10)
            response = site.post("/body")
            assert response.status_code == 200
            assert not {"retry-after", "x-accel-redirect"} & set(response.headers)


def test_a_request_without_the_nginx_header_gets_no_redirect() -> None:
    """The redirect answers nginx's header only, with its one value."""
    with flow("--drain-seconds", FOR_LONG) as worker, get(worker, "/wait") as kept:
        read_until(kept, HELLO)
        drain(worker)
        for headers in ({}, {"Streamserve-If-Draining": "@secret"}, {"Streamserve-If-Draining": "/static/x"}):
            response = httpx.get(f"{worker.url}/fill?bytes=0", headers=headers, trust_env=False)
            assert (response.status_code, response.headers["retry-after"]) == (503, "2")
            assert "x-accel-redirect" not in response.headers
        with websocket(worker, "/wait") as late:
            assert read_until(late, b"\r\n\r\n").startswith(b"HTTP/1.1 503 ")


def test_two_draining_workers_are_a_503_with_retry_after() -> None:
    """Two draining workers end in one 503, not in a loop of retries."""
    with front(FOR_LONG) as site:
        first, second = site.workers
        with get(first, "/wait") as one, get(second, "/wait") as two:
            read_until(one, HELLO)
            read_until(two, HELLO)
            drain(first)
            drain(second)
            response = site.post("/body")
            assert (response.status_code, response.headers["retry-after"]) == (503, "2")


def test_a_worker_that_does_not_listen_costs_no_request() -> None:
    """Nothing was sent to it: any request may be sent to the other one."""
    with front(AT_ONCE) as site:
        gone, other = site.workers
        terminate(gone)
        assert exit_code(gone) == 0
        assert [site.post("/body").text for _ in range(10)] == ["100000"] * 10
        assert state(other)["bodies"] == 10


def test_a_post_that_was_begun_is_never_sent_again() -> None:
    """A POST whose worker is killed is a 502, and nginx does not send it to the other worker."""
    with front(AT_ONCE) as site:
        asking = site.begin("POST", "/wait?kind=none")
        dying, other = taken(site.workers)
        before = state(other)["called"]
        dying.process.send_signal(signal.SIGKILL)
        assert asking.result(60).status_code == 502
        assert state(other)["called"] == before + 1, "that is this asking"


def test_a_get_is_sent_again() -> None:
    """The other worker answers, as with any browser's retry."""
    with front(AT_ONCE) as site:
        asking = site.begin("GET", "/wait?kind=none")
        dying, other = taken(site.workers)
        dying.process.send_signal(signal.SIGKILL)
        until(lambda: state(other)["connections"] > 1, "the other has it", other)
        state(other)
        assert httpx.get(f"{other.url}/go", trust_env=False).text == "ok"
        assert asking.result(60).status_code == 500, "the app ends this page without a head: that is its answer"


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_request_that_a_drain_cut_off_is_not_sent_again(method: str) -> None:
    """The drain's time is over before a head was sent: that 503 is an answer, because the request was begun."""
    with front(AT_ONCE) as site:
        asking = site.begin(method, "/wait?kind=none")
        ending, other = taken(site.workers)
        before = state(other)["called"]
        terminate(ending)
        response = asking.result(60)
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        assert exit_code(ending) == 0
        assert state(other)["called"] == before + 1, "that is this asking"


_HELD_APP = """
import os, time

def hold():
    print("PRINTED drain", flush=True)
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.01)

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        scope["extensions"]["streamserve.flow"]["drain"].on_drain(hold)
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})
"""


def test_queued_connections_are_refused_when_a_worker_stops_listening(tmp_path: Path) -> None:
    """The system has accepted their connections and bytes: a reset would lose requests that nginx may not repeat."""
    (tmp_path / "held_app.py").write_text(_HELD_APP)
    env = {"GO": str(tmp_path / "go"), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with flow("--drain-seconds", AT_ONCE, app="held_app:app", env=env) as worker, ExitStack() as stack:
        assert httpx.get(worker.url, trust_env=False, timeout=60).text == "ok"
        drain(worker)  # its loop is blocked in the hook
        clients = [stack.enter_context(worker.connect()) for _ in range(10)]
        for client in clients:
            client.settimeout(60)
            client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc")
        (tmp_path / "go").touch()
        for client in clients:
            assert read_until(client, b"\r\n\r\n").startswith(b"HTTP/1.1 503 ")
        assert exit_code(worker) == 0
