"""docs/completions.md: its curl commands answer as the page says."""

from __future__ import annotations

import json
import os
import subprocess

from tests.support.docs.doc_blocks import blocks_of
from tests.support.servers.web_servers import Server


def run(site: Server, key: str, command: str) -> str:
    """Run a command of the page against the site, as a shell does; return what it prints."""
    command = command.replace("localhost:8000", site.url.removeprefix("http://"))
    environ = {**os.environ, "KEY": key, "no_proxy": "*"}
    done = subprocess.run(["bash", "-c", command], env=environ, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_curl_commands(site: Server, key: str) -> None:
    """One JSON answer with a choice for each prompt; a text that is scored; and tokens as lines, up to `[DONE]`."""
    whole, scored, plain = (block.text for block in blocks_of("docs/completions.md") if block.language == "bash")
    choices = json.loads(run(site, key, whole))["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert all(len(choice["logprobs"]["tokens"]) <= 12 for choice in choices)
    assert {len(top) for choice in choices for top in choice["logprobs"]["top_logprobs"]} <= {2, 3}
    (choice,) = json.loads(run(site, key, scored))["choices"]
    assert choice["text"] == "The quiet river"
    assert [logprob is None for logprob in choice["logprobs"]["token_logprobs"]].index(True) == 0
    assert len(choice["logprobs"]["tokens"]) > 1
    lines = [line.removeprefix("data: ") for line in run(site, key, plain).splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    assert all(isinstance(json.loads(line)["token"], str) for line in lines[:-1])
