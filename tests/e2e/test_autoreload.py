"""runserver reloads while an answer runs: its processes end in order, with no traceback."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.support.docs.doc_site import DocSite
from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import run_server, wait_until_listening, wait_until_ready

SLOW = 'STREAMSERVE |= {"ECHO_STEP_SECONDS": 0.02, "MODELS": {"chat": {"PATH": "echo", "ANSWERS": None}}}\n'
KEY = "a-key-of-the-tests-0001"
SECONDS = 60.0


@pytest.mark.proof
def test_a_reload_during_an_answer_prints_no_traceback(tmp_path: Path) -> None:
    """The stream is released while threads and database still work: "cannot schedule new futures" is not printed."""
    site = DocSite(tmp_path)
    settings = site.project / "mysite" / "settings.py"
    settings.write_text(settings.read_text() + SLOW)
    site.run(f"python manage.py streamserve_key create --key {KEY}")
    port = free_port()
    command = [sys.executable, "manage.py", "runserver", str(port)]
    try:
        with run_server(command, port, site.project, site.environ) as server:
            wait_until_ready(server.url)
            headers = {"Authorization": f"Bearer {KEY}"}
            body = {"prompt": "a", "max_tokens": 2000}
            with httpx.stream("POST", f"{server.url}/streams", json=body, headers=headers, timeout=60) as answer:
                lines = answer.iter_lines()
                while "token" not in next(lines):
                    pass
                os.utime(settings)
                deadline = time.monotonic() + SECONDS
                while server.output().count("Quit the server") < 2:
                    assert time.monotonic() < deadline, server.output()
                    time.sleep(0.1)
            wait_until_listening(server)
            wait_until_ready(server.url)
            assert "Traceback" not in server.output(), server.output()
    finally:
        site.close()
