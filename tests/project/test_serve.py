"""`make run`: its output, its pages, its leftovers, and that its refusals are sentences."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from project import serve as serve_module
from project.help.review import EXAMPLE
from tests.support.docs.demo_site import manage, processes_of, serve
from tests.support.servers.ports import free_port

pytestmark = pytest.mark.proof


def test_the_demo_starts_serves_and_ends(tmp_path: Path) -> None:
    """It prints its address, accepts a key of one's own, serves page and static files, and ends by SIGINT with 0.

    Of its processes only the engine and what it has started are left; the output names how to end it.
    """
    key, port = "my-demo-key-0123456789", str(free_port())
    demo = serve(tmp_path, PORT=port, STREAMSERVE_DEMO_KEY=key)
    assert processes_of(tmp_path) == {demo.pid}
    assert demo.stdout is not None
    printed = ""
    try:
        for line in demo.stdout:
            printed += line
            if "Ctrl-C" in line:
                break
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
            ask = {"prompt": "hi", "max_tokens": 5, "format": "tokens"}
            answer = client.post("/streams", json=ask, headers={"Authorization": f"Bearer {key}"})
            assert "[DONE]" in answer.text
            page = client.get("/")
            assert page.status_code == 200
            assert "script-src 'self'" in page.headers["content-security-policy"]
            assert client.get("/static/streamserve/chat.js").status_code == 200
            check_review(client, {"Authorization": f"Bearer {key}"})
    finally:
        demo.send_signal(signal.SIGINT)
        rest, errors = demo.communicate(timeout=30)
    assert demo.returncode == 0, errors
    for words in (url, "user demo", key, "curl -N", "ends by itself"):
        assert words in printed + rest
    with httpx.Client(trust_env=False) as client, pytest.raises(httpx.ConnectError):
        client.get(url)
    left = processes_of(tmp_path)
    assert "manage.py streamserve_engine echo --stop" in rest
    stopped = manage(tmp_path, "streamserve_engine", "--stop")
    assert [one for one in left if f"process {one} has ended" in stopped.stdout], stopped.stderr
    until = time.monotonic() + 10
    while processes_of(tmp_path):  # its compiler of grammars ends with it
        assert time.monotonic() < until


def test_a_killed_web_process_is_replaced(tmp_path: Path) -> None:
    """Its port answers all the while, by the other; a web process that ends by itself ends the demo."""
    port = str(free_port())
    demo = serve(tmp_path, PORT=port)
    assert demo.stdout is not None
    try:
        lines = iter(demo.stdout)
        assert any("Ctrl-C" in line for line in lines)
        url = f"http://127.0.0.1:{port}/livez"
        with httpx.Client(trust_env=False, timeout=20) as client:
            first = web_processes(tmp_path)
            assert len(first) == serve_module.NUM_WEB_PROCESSES
            killed = min(first)
            os.kill(killed, signal.SIGKILL)
            assert client.get(url).status_code == 200
            replaced = next(line for line in lines if f"Web process {killed} was killed (SIGKILL)" in line)
            new = int(replaced.rpartition("Web process ")[2].split()[0])
            until = time.monotonic() + 10
            while new not in web_processes(tmp_path):  # its environment is there a moment after it has begun
                assert time.monotonic() < until
            assert web_processes(tmp_path) == {*first, new} - {killed}
    finally:
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=30)
    assert demo.returncode == 0


def web_processes(tmp_path: Path) -> set[int]:
    """Return the daphnes of the demo site on that folder."""
    return {one for one in processes_of(tmp_path) if b"daphne" in (Path("/proc") / str(one) / "cmdline").read_bytes()}


def check_review(client: httpx.Client, key: dict[str, str]) -> None:
    """The demo runs the account review as a job: four steps, sources, and the text of its events as its result."""
    asked = {"pipeline": "account_review", "prompt": "Review my account"}
    queued = client.post("/jobs", json=asked, headers=key)
    assert queued.status_code == 202, queued.text
    address = f"/jobs/{queued.json()['job_id']}"
    events = client.get(f"{address}/events", headers=key).text
    assert [events.count(f"event: {kind}\n") for kind in ("done", "error")] == [1, 0], events
    while (job := client.get(address, headers=key).json())["status"] == "running":
        pass  # the row's end follows the last event
    assert job["status"] == "done"
    assert job["result"]["text"].startswith(EXAMPLE + "Unused seats: 3 of 12")
    assert (len(job["result"]["steps"]), len(job["result"]["citations"])) == (4, 4)


def test_the_demo_refuses_in_sentences(tmp_path: Path) -> None:
    """Port taken, a key too short, a port that is none, no model at that path: exit 1 and the way out."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = [
            ({"PORT": str(taken.getsockname()[1])}, "make run PORT="),
            ({"PORT": str(free_port()), "KEY": "short"}, "16 to 128"),
            ({"PORT": "many"}, "1 to 65535"),
            ({"PORT": str(free_port()), "MODEL": "/no/such/folder"}, "make run MODEL="),
        ]
        started = [(serve(tmp_path, **variables), words) for variables, words in cases]
        for demo, words in started:
            _said, errors = demo.communicate(timeout=60)
            assert demo.returncode == 1
            assert words in errors
            assert "Traceback" not in errors
