"""An answer that is cut within its thought or a call, over HTTP: the same tokens, in the same blocks.

The reader leaves and comes back, so that the answer parks and is admitted again; or the engine is killed under it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL
from typing import Any

import httpx
import pytest

from tests.e2e.clients.conftest import MODEL
from tests.support.checks.sse_reader import Read, read_events
from tests.support.docs.demo_site import processes_of
from tests.support.models.thinking_world import tool
from tests.support.processes import command_of
from tests.support.servers.web_servers import Server, wait_until_ready

TOOLS = [tool("set_light"), tool("get_weather"), tool("put_record")]
ASKED = "Tell me the weather in Paris, and turn the lamp red."
BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": ASKED}],
    "tools": TOOLS,
    "temperature": 0,
    "max_tokens": 120,
    "on_disconnect": "park",
}
CALLS = [("get_weather", '{"city":"Paris"}'), ("set_light", '{"color":"red"}')]
# Tokens of a block of the kind after which the answer is cut.
CUTS = [("thinking", 1), ("thinking", 12), ("tool_use", 1), ("tool_use", 3)]


@pytest.fixture
def http(site: Server, key: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=site.url, headers=headers, timeout=120, trust_env=False) as http:
        yield http


@pytest.fixture(scope="module")
def whole(site: Server, key: str) -> dict[str, Any]:
    """What an answer says that is not cut."""
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=site.url, headers=headers, timeout=120, trust_env=False) as http:
        said = said_in(read_events(http.post("/streams", json=BODY).content))
    assert [(name, text) for kind, name, text, _ in said["blocks"] if kind == "tool_use"] == CALLS
    return said


def said_in(events: list[Read]) -> dict[str, Any]:
    """Return the blocks (kind, name, text, ids), the reason and the number of tokens of a whole answer's events.

    Neighbouring tokens may be joined in one event, and are in others after a cut.
    """
    blocks: dict[int, list[Any]] = {0: ["text", None, "", []]}
    for event in events:
        data = json.loads(event.data)
        if event.event == "block_start":
            blocks[data["index"]] = [data["kind"], data.get("name"), "", []]
        elif event.event == "token":
            block = blocks[data.get("index", 0)]
            block[2] += data["text"]
            block[3] += data["token_ids"]
    assert events[-1].event == "done", events[-1]
    done = json.loads(events[-1].data)
    usage = done["usage"]  # how many tokens were tried depends on the time that steps take
    counts = usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]
    return {"blocks": [tuple(block) for block in blocks.values()], "end": done["finish_reason"], "counts": counts}


def is_at(events: list[Read], kind: str, num_tokens: int) -> bool:
    """Return whether so many tokens of the first block of the kind have come."""
    starts = [json.loads(event.data) for event in events if event.event == "block_start"]
    first = next((start["index"] for start in starts if start["kind"] == kind), None)
    tokens = [json.loads(event.data) for event in events if event.event == "token"]
    return (
        first is not None and sum(len(one["token_ids"]) for one in tokens if one.get("index", 0) == first) >= num_tokens
    )


def logged(events: list[Read]) -> list[Read]:
    """Return the events of the log, without statuses and the closing meta."""
    return [event for event in events if event.event in ("block_start", "token", "block_stop", "done", "error")]


@pytest.mark.parametrize(("kind", "num_tokens"), CUTS)
def test_a_reader_that_comes_back_reads_the_same_blocks(
    http: httpx.Client, whole: dict[str, Any], kind: str, num_tokens: int
) -> None:
    """It leaves within a thought or a call; what it read and what it gets after its last id are the whole answer."""
    read = b""
    with http.stream("POST", "/streams", json=BODY) as response:
        for chunk in response.iter_raw():
            read += chunk
            if is_at(read_events(read), kind, num_tokens):
                break
        stream_id = response.headers["x-stream-id"]
    before = read_events(read)
    rest = http.get(f"/streams/{stream_id}/events", headers={"Last-Event-ID": before[-1].id})
    assert said_in([*logged(before), *logged(read_events(rest.content))]) == whole


@pytest.mark.proof
@pytest.mark.parametrize(("kind", "num_tokens"), CUTS)
def test_a_killed_engine_goes_on_in_the_block(
    http: httpx.Client, site: Server, env: dict[str, str], whole: dict[str, Any], kind: str, num_tokens: int
) -> None:
    """The reader stays; the next engine continues the thought or the call where it was."""
    for _ in range(15):  # on a busy machine the answer may have ended before the kill
        read, is_killed = b"", False
        engine = engine_of(env, site)  # before it is asked: to look takes as long as some tokens
        with http.stream("POST", "/streams", json=BODY) as response:
            for chunk in response.iter_raw():
                read += chunk
                if not is_killed and is_at(read_events(read), kind, num_tokens):
                    os.kill(engine, SIGKILL)
                    is_killed = True
        events = read_events(read)
        assert said_in(logged(events)) == whole
        if any(json.loads(event.data).get("status") == "resumed" for event in events if event.event == "status"):
            return
    pytest.fail("no kill came in time")


def engine_of(env: dict[str, str], site: Server) -> int:
    """Return the engine's process once it serves: a process that compiles grammars may be its child.

    Right after a kill the site may not know of it yet, and says that it is ready.
    """
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        wait_until_ready(site.url)
        found = [
            pid
            for pid in processes_of(Path(env["STREAMSERVE_STATE_DIR"])) - {site.process.pid}
            if f"engine-{MODEL}" in command_of(pid)
        ]
        if len(found) == 1:
            return found[0]
    raise AssertionError("no engine serves")
