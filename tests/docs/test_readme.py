"""README.md: its first commands run against the demo site, which `make run` starts. test_wheel.py runs the rest."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.demo_site import free_port, manage, serve
from tests.support.doc_blocks import Block, blocks_of
from tests.support.servers import ROOT, wait_until_ready
from tests.support.stream_checks import check_native, text_of

KEY = "the-key-of-a-readers-first-minute"
URL, NAMED_KEY = "http://127.0.0.1:8000", "the key that make run printed"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo site as `make run` starts it, with the model that the repository ships."""
    port, folder = free_port(), tmp_path_factory.mktemp("demo")
    demo = serve(folder, PORT=port, STREAMSERVE_DEMO_KEY=KEY, MODEL="")
    assert demo.stdout is not None
    try:
        assert any("Ctrl-C" in line for line in demo.stdout), "it serves"
        wait_until_ready(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=60)
        manage(folder, "streamserve_engine", "--stop", MODEL="")


def block_with(text: str) -> Block:
    """Return the one block under README's title that contains `text`."""
    [found] = [block for block in blocks_of("README.md", "streamserve") if text in block.text]
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
