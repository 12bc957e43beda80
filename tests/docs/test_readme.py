"""README.md: its first commands, its job and its batch run on the demo site, which `make run` starts.

test_wheel.py runs the rest.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checks.stream_checks import check_native, text_of
from tests.support.docs.demo_site import end_engines, manage, serve
from tests.support.docs.doc_blocks import Block, blocks_of
from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import ROOT, wait_until_ready

pytestmark = pytest.mark.proof

KEY = "the-key-of-a-readers-first-minute"
URL, NAMED_KEY = "http://127.0.0.1:8000", "the key that make run printed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder of the demo site."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """The demo site as `make run` starts it, with the model that the repository ships."""
    port = str(free_port())
    demo = serve(folder, PORT=port, STREAMSERVE_DEMO_KEY=KEY, MODEL="")
    assert demo.stdout is not None
    try:
        assert any("Ctrl-C" in line for line in demo.stdout), "it serves"
        wait_until_ready(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=60)
        end_engines(folder)


def block_with(text: str) -> Block:
    """Return the one block before the own site's that contains `text`."""
    first = [*blocks_of("README.md", "streamserve"), *blocks_of("README.md", "Begin")]
    [found] = [block for block in first if text in block.text]
    return found


def test_the_make_targets_exist() -> None:
    """Each `make` command of the first block is a target of the Makefile."""
    for command in block_with("make test").commands:
        done = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_curl_streams_an_answer(url: str) -> None:
    """The curl command, with the key in its variable, gets a whole native stream with text."""
    [command] = block_with("curl").commands
    environ = {**os.environ, "KEY": KEY, "no_proxy": "*"}
    assert shutil.which("curl"), "curl is part of every Debian image"
    done = subprocess.run(command.replace(URL, url), shell=True, env=environ, capture_output=True, timeout=120)
    assert text_of(check_native(done.stdout)).strip(), done.stderr.decode()


def test_the_openai_client_streams_an_answer(url: str, tmp_path: Path) -> None:
    """The Python block prints the answer."""
    code = block_with("from openai").text
    assert URL in code
    assert NAMED_KEY in code
    script = tmp_path / "ask.py"
    script.write_text(code.replace(URL, url).replace(NAMED_KEY, KEY))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_job_is_done_without_a_worker(url: str) -> None:
    """The first command queues a job, the second one lists it; the demo's web process runs it."""
    queue, look = (command.replace(URL, url) for command in _background("curl")[0].commands)
    job_id = json.loads(_run(queue))["job_id"]
    events = _run(f"curl -sN {url}/jobs/{job_id}/events -H 'Authorization: Bearer {KEY}'")  # until the job has ended
    assert "event: done" in events
    assert text_of(check_native(events.encode())).strip()
    assert [job["job_id"] for job in json.loads(_run(look))["jobs"]] == [job_id]


def test_a_batch_goes_from_file_to_file(url: str, folder: Path, tmp_path: Path) -> None:
    """The line of the first command is answered by the second one, beside the demo's own processes."""
    make, run = _background("streamserve_batch")[0].commands
    _run(make, tmp_path)
    arguments = run.replace("in.jsonl", str(tmp_path / "in.jsonl")).replace("out.jsonl", str(tmp_path / "out.jsonl"))
    done = manage(folder, *arguments.split()[2:], MODEL="")
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "out.jsonl").read_text())
    assert answer["response"]["body"]["text"], answer


def _background(text: str) -> list[Block]:
    return [block for block in blocks_of("README.md", "Jobs and batches") if text in block.text]


def _run(command: str, folder: Path = ROOT) -> str:
    environ = {**os.environ, "KEY": KEY, "no_proxy": "*"}
    done = subprocess.run(command, shell=True, env=environ, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
