"""Engine and streams inside Starlette and FastAPI, without Django, under uvicorn and FlowServer, over the wire."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

from tests.support.apps.control_routes import get, wait_for
from tests.support.checks.stream_checks import check_native, check_native_part, check_openai, text_of
from tests.support.servers.flow_driver import flow
from tests.support.servers.web_servers import Server, uvicorn, wait_until_ready

_DEADLINE_SECONDS = 60.0
GOOD = {"prompt": "still there?", "max_tokens": 60, "seed": 7}


def serve(host: str, server: str) -> AbstractContextManager[Server]:
    name = f"tests.support.apps.host_apps:{host}"
    return uvicorn(name, "--no-access-log") if server == "uvicorn" else flow(app=name)


@pytest.fixture(
    scope="module",
    params=[("starlette", "uvicorn"), ("starlette_wrapped", "flow"), ("fastapi", "uvicorn"), ("fastapi", "flow")],
    ids="-".join,
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """One host on one server; ended by SIGTERM, its lifespan must have closed everything."""
    with serve(*request.param) as server:
        wait_until_ready(f"{server.url}/ai")
        yield server
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(_DEADLINE_SECONDS) in (0, -signal.SIGTERM)  # uvicorn sends it to itself again
        assert "CLOSED failed 0" in server.output()
        assert "Task was destroyed" not in server.output()


@pytest.fixture(autouse=True)
def _open_gate(server: Server) -> Iterator[None]:
    yield
    get(server, "/control?open=1")


def is_wrapped(server: Server) -> bool:
    return "tests.support.apps.host_apps:starlette_wrapped" in server.process.args


def test_the_mounted_routes(server: Server) -> None:
    """Mounted routes start, resume from the middle and serve OpenAI, wherever the mount leaves its prefix."""
    with httpx.Client(base_url=f"{server.url}/ai", timeout=_DEADLINE_SECONDS) as client:
        whole = client.post("/streams", json=GOOD)
        frames = check_native(whole.content)
        middle = frames[len(frames) // 2]
        path = f"/streams/{whole.headers['x-stream-id']}/events"
        rest = client.get(path, headers={"Last-Event-ID": middle.id})
        seen = frames[: frames.index(middle) + 1]
        assert text_of(seen) + text_of(check_native(rest.content, after=middle.seq)) == text_of(frames)
        assert check_openai(client.post("/v1/chat/completions", json={**GOOD, "stream": True}).content)
        assert client.get("/readyz").json()["ready"] is True
        assert client.get("/nowhere").json()["error"]["code"] == "unknown_url"


def test_an_endpoint_of_the_hosts_own(server: Server) -> None:
    """It streams with our headers and the host's, can be resumed at the mounted routes, and shows our errors."""
    whole = httpx.get(f"{server.url}/ask?prompt=hello", timeout=_DEADLINE_SECONDS)
    frames = check_native(whole.content)
    assert (whole.headers["x-accel-buffering"], whole.headers["set-cookie"]) == ("no", "a=1")
    assert whole.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in whole.headers
    path = f"/ai/streams/{whole.headers['x-stream-id']}/events?after={frames[0].seq}"
    rest = httpx.get(server.url + path, timeout=_DEADLINE_SECONDS)
    assert check_native(rest.content, after=frames[0].seq)[-1] == frames[-1]
    wrong = httpx.get(f"{server.url}/ask?prompt=")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")


def test_a_response_by_hand_over(server: Server) -> None:
    """Any framework that can set a header streams, inside StreamMiddleware."""
    if is_wrapped(server):
        whole = httpx.get(f"{server.url}/handed?prompt=hello", timeout=_DEADLINE_SECONDS)
        assert check_native(whole.content)[-1].event == "done"
        assert "streamserve-handover" not in whole.headers


def test_a_body_that_is_too_large(server: Server) -> None:
    """The body is refused while it comes, and the client reads the response."""

    def pieces() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 100_000

    answer = httpx.post(f"{server.url}/ai/streams", content=pieces(), headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("path", ["/ai/streams/new?prompt=a&max_tokens=90&seed=1", "/ask?prompt=b"])
def test_a_reader_that_leaves_is_absent_from_the_next_step(server: Server, path: str) -> None:
    """A reader that leaves during a held step is noticed; no later plan has its sequence; the rest can be resumed."""
    get(server, "/control?allow=3")
    with httpx.stream("GET", server.url + path, timeout=_DEADLINE_SECONDS) as answer:
        stream_id, data, chunks = answer.headers["x-stream-id"], b"", answer.iter_raw()
        while b"event: token" not in data:
            data += next(chunks)
        held = wait_for(server, lambda state: state["is_holding"], "a step is held")
        (seq_id,) = held["plans"][-1]
    wait_for(server, lambda state: {"id": stream_id, "state": "parked"} in state["streams"], "its leaving is seen")
    get(server, "/control?open=1")
    wait_for(server, lambda state: state["stats"]["blocks_used"] == 0, "its blocks are free")
    assert check_native(httpx.get(f"{server.url}/ask?prompt=other", timeout=_DEADLINE_SECONDS).content)
    after = wait_for(
        server, lambda state: not state["tasks"] or is_only_waiting(state), "no task of a delivery is left"
    )
    later = after["plans"][len(held["plans"]) :]
    assert later
    assert all(seq_id not in plan for plan in later)
    seen = check_native_part(data[: data.rindex(b"\n\n") + 2])
    events = f"{server.url}/ai/streams/{stream_id}/events"
    rest = httpx.get(events, headers={"Last-Event-ID": seen[-1].id}, timeout=_DEADLINE_SECONDS)
    assert check_native(rest.content, after=seen[-1].seq)[-1].event == "done"


def is_only_waiting(state: dict[str, Any]) -> bool:
    """Return whether only a stream's own task is left, which lasts as long as the stream can be read."""
    return all(name.startswith("stream ") for name in state["tasks"])


def test_a_failing_generator_of_the_host_costs_only_itself(server: Server) -> None:
    """The failing generator is cut and its `finally` runs, and the library's streams continue."""
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url}/broken", timeout=_DEADLINE_SECONDS)
    assert "FINALLY broken" in server.output()
    assert check_native(httpx.get(f"{server.url}/ask?prompt=next", timeout=_DEADLINE_SECONDS).content)
