"""`/streams/{id}/log` read by `@durable-streams/client`, and by the protocol's own tests, on a site under daphne."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.docs.demo_site import end_engines
from tests.support.docs.doc_blocks import blocks_of
from tests.support.plugins.migrated import KEY, MAKE_KEY, Migrate
from tests.support.servers.node import FRONT_ENDS, run_script
from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import Server, daphne, wait_until_ready

pytestmark = pytest.mark.proof

READER = FRONT_ENDS / "durable" / "reader.mjs"
ASK = {"model": "echo", "prompt": "tell me", "seed": 7, "ignore_eos": True}
APP = "project.asgi:application"

# The parts of the suite that read. Its tests of writing, forks, lifetimes and other types of content are not for us:
# answers are written by their models, and are JSON.
READS = [
    "Read Operations", "Long-Poll Edge Cases", "Browser Security Headers", "HEAD Metadata should",
    "Offset Validation and Resumability", "Caching and ETag",
    "Protocol Edge Cases should (generate|reject .* offset|ignore)",
    "SSE Mode should (return|accept|require|stream|send|generate|handle cursor|have|NOT|support)", "SSE Mode JSON",
    "Property-Based Tests .fast-check. Offset",
    "Stream Closure (HEAD|Read Closed|Long-poll|SSE)",
]  # fmt: skip
_OTHER_BODY = "it compares the body with the text that it wrote; ours is an array of events, and never empty"
_OTHER_TYPE = "it wants the text/plain that it wrote"
_WRITES = "it is about the response to a write"
_CORS = "it wants CORS for every origin; ours is the site's own"
# Of these, what cannot hold for streams that a site has made, and why.
NOT_OURS = {
    "Browser Security Headers should include X-Content-Type-Options: nosniff on PUT responses": _WRITES,
    "Browser Security Headers should include X-Content-Type-Options: nosniff on POST responses": _WRITES,
    "HEAD Metadata should return metadata without body": _OTHER_TYPE,
    "Caching and ETag should allow If-None-Match in CORS preflight responses": _CORS,
    **dict.fromkeys(
        (
            "Read Operations should read empty stream",
            "Read Operations should read stream with data",
            "Read Operations should read from offset",
            "Offset Validation and Resumability should accept -1 as sentinel for stream beginning",
            "Offset Validation and Resumability should return same data for offset=-1 and no offset",
            "Offset Validation and Resumability should accept offset=now as sentinel for current tail position",
            "Offset Validation and Resumability should be able to resume from offset=now result",
            "Offset Validation and Resumability should work with offset=now on empty stream",
            "Offset Validation and Resumability should return empty body for offset=now on non-JSON streams",
            "Offset Validation and Resumability should support offset=now with long-poll on empty stream",
            "Offset Validation and Resumability should support resumable reads (no duplicate data)",
            "Offset Validation and Resumability should return empty response when reading from tail offset",
            "Protocol Edge Cases should ignore unknown query parameters",
            "Long-Poll Edge Cases should return immediately with Stream-Up-To-Date when data exists at offset",
            "Caching and ETag should return 200 for non-matching If-None-Match",
            "SSE Mode JSON SSE catch-up pairs every data event with a control event",
            "Stream Closure Read Closed Streams (Catch-up) read-closed-stream-at-tail: "
            "Returns Stream-Closed: true at tail of closed stream",
            "Stream Closure Read Closed Streams (Catch-up) read-closed-stream-empty-body-eof: "
            "At tail of closed stream: 200 OK, empty body, Stream-Closed: true",
        ),
        _OTHER_BODY,
    ),
}


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate, node: str) -> Iterator[dict[str, str]]:
    """The variables of the site, with a state folder of its own."""
    state = tmp_path_factory.mktemp("state")
    migrated(state, MAKE_KEY)
    yield {"DJANGO_SETTINGS_MODULE": "tests.support.sites.tape_site", "STREAMSERVE_STATE_DIR": str(state)}
    end_engines(state)


@pytest.fixture(scope="module")
def site(env: dict[str, str]) -> Iterator[Server]:
    with daphne(APP, env=env) as server:
        wait_until_ready(server.url)
        yield server


@pytest.fixture(scope="module")
def key() -> str:
    return KEY


def begin(client: httpx.Client, **fields: Any) -> str:
    """Start an answer; return the address of its log, once its first event is there."""
    with client.stream("POST", "/streams", json={**ASK, **fields}) as response:
        assert response.status_code == 200
        return f"{str(client.base_url).rstrip('/')}/streams/{response.headers['x-stream-id']}/log"


@pytest.fixture
def client(site: Server, key: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=site.url, headers=headers, trust_env=False, timeout=60) as client:
        yield client


def test_every_offset_is_a_place_to_read_on(client: httpx.Client, key: str) -> None:
    """A whole answer, read to its end, and from each of its offsets."""
    url = begin(client, max_tokens=12)
    run_script(READER, "live", url, "long-poll", env={"KEY": key})  # until it has ended
    whole = run_script(READER, "whole", url, env={"KEY": key})
    assert whole["isClosed"] is whole["upToDate"] is True
    assert [item["seq"] for item in whole["items"]] == list(range(1, len(whole["items"]) + 1))
    every = run_script(READER, "every", url, env={"KEY": key})
    assert every["rests"] == [list(range(seq + 1, every["num"] + 1)) for seq in range(every["num"] + 1)]


@pytest.mark.parametrize("mode", ["long-poll", "sse"])
def test_an_answer_is_followed_to_its_end(client: httpx.Client, key: str, mode: str) -> None:
    """The client alone reads it, and gets each event once."""
    url = begin(client, max_tokens=60)
    live = run_script(READER, "live", url, mode, env={"KEY": key})
    assert live["isClosed"] is True
    assert live["items"] == client.get(url).json()
    assert live["items"][-1]["data"]["finish_reason"] == "length"


def test_the_page_s_reader_prints_an_answer(client: httpx.Client, site: Server, key: str, node: str) -> None:
    """docs/durable-streams.md: its program, as it stands there."""
    url = begin(client, max_tokens=12)
    (program,) = [block.text for block in blocks_of("docs/durable-streams.md") if block.language == "js"]
    variables = {"SITE": site.url, "STREAM_ID": url.split("/")[-2], "KEY": key, "NO_PROXY": "*"}
    command = [node, "--input-type=module", "-"]
    done = subprocess.run(
        command, input=program, env={**os.environ, **variables}, cwd=FRONT_ENDS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(item["data"]["text"] for item in client.get(url).json() if item["type"] == "token")


@pytest.mark.cut_streams("the web process is killed with -9")
def test_a_killed_web_process_is_a_pause(env: dict[str, str], key: str, node: str) -> None:
    """The process that serves the answer dies under its reader; another at its address continues, without a gap."""
    port = free_port()
    with daphne(APP, env=env, port=port) as first:
        wait_until_ready(first.url)
        with httpx.Client(
            base_url=first.url, headers={"Authorization": f"Bearer {key}"}, trust_env=False, timeout=60
        ) as client:
            url = begin(client, max_tokens=120)
        command, variables = [node, str(READER), "live", url, "long-poll"], {"NO_PROXY": "*", "KEY": key}
        with subprocess.Popen(
            command, env={**os.environ, **variables}, cwd=FRONT_ENDS, stdout=subprocess.PIPE, text=True
        ) as reader:
            assert reader.stdout is not None
            lines = [reader.stdout.readline() for _ in range(20)]
            first.process.kill()
            first.process.wait()
            with daphne(APP, env=env, port=port):
                lines += reader.stdout
        assert reader.returncode == 0
    items = json.loads(lines[-1])["items"]
    assert [item["seq"] for item in items] == list(range(1, len(items) + 1))
    assert [json.loads(line)["seq"] for line in lines[:-1]] == [item["seq"] for item in items]
    assert items[-1]["data"]["finish_reason"] == "length"
    assert items[-1]["data"]["totalTokens"] == 120


def test_the_protocols_own_tests(site: Server, env: dict[str, str], key: str, tmp_path: Path) -> None:
    """The parts of the conformance suite that read, but those that NOT_OURS has a reason for."""
    out = tmp_path / "report.json"
    suite = [str(FRONT_ENDS / "node_modules" / ".bin" / "vitest"), "run", "durable/conformance.test.mjs"]
    options = ["--reporter=json", f"--outputFile={out}", "--testTimeout=60000", "-t", f"^({'|'.join(READS)})"]
    variables = {"SITE": site.url, "STATE": env["STREAMSERVE_STATE_DIR"], "KEY": key, "NO_PROXY": "*"}
    done = subprocess.run(
        [*suite, *options], cwd=FRONT_ENDS, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300
    )
    assert out.exists(), done.stdout + done.stderr
    results = json.loads(out.read_text())["testResults"]
    tests = [test for result in results for test in result["assertionResults"]]
    failures = {test["fullName"]: test["failureMessages"] for test in tests if test["status"] == "failed"}
    passed = [test["fullName"] for test in tests if test["status"] == "passed"]
    assert {name: failures[name][0][:300] for name in failures.keys() - NOT_OURS.keys()} == {}
    assert failures.keys() == NOT_OURS.keys()
    assert len(passed) >= 50
