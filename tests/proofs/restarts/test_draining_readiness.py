"""/readyz of a draining worker answers not ready at once, while open streams continue."""

from __future__ import annotations

import os
from pathlib import Path

import httpx

from tests.support.docs.demo_site import environment, manage
from tests.support.servers.flow_driver import exit_code, terminate, until
from tests.support.servers.web_servers import ROOT, daphne, wait_until_ready

_SETTINGS = """
from tests.support.sites.workers.two_workers_site import *
STREAMSERVE = {**STREAMSERVE, "CLIENT": "thread", "FLOW": {"DRAIN_SECONDS": 600}}
"""


def test_a_draining_worker_is_alive_and_not_ready(tmp_path: Path) -> None:
    """Probes are answered to the end, new requests are refused, and the open stream continues."""
    (tmp_path / "draining_settings.py").write_text(_SETTINGS)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    variables = {"DJANGO_SETTINGS_MODULE": "draining_settings", "PYTHONPATH": path}
    assert manage(tmp_path, "migrate", "--verbosity=0", **variables).returncode == 0
    with (
        daphne("project.asgi:application", env=environment(tmp_path, **variables)) as worker,
        httpx.Client(base_url=worker.url, timeout=60, trust_env=False) as client,
    ):
        wait_until_ready(worker.url)
        question = {"prompt": "tell me", "max_tokens": 8000, "ignore_eos": True}
        with client.stream("POST", "/streams", json=question) as response:
            assert response.status_code == 200
            pieces = response.iter_raw()
            next(pieces)
            terminate(worker)
            until(lambda: client.get("/readyz").status_code == 503, "it is not ready", worker)
            body = client.get("/readyz").json()
            assert (body["ready"], body["reason"]) == (False, "this process is going down")
            assert client.get("/livez").status_code == 200
            refused = client.post("/streams", json=question)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            assert next(pieces), "the stream continues"
            terminate(worker)
            assert b"event: done" not in b"".join(pieces)
        assert exit_code(worker) == 0
