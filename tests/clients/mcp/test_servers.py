"""Laws of calls to MCP servers: what comes back, what is refused, and what follows a server's end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the package mcp")

from streamserve.clients.mcp.config import McpConfig
from streamserve.clients.mcp.servers import MAX_RESULT_CHARS, McpServers, McpUnavailable
from streamserve.protocol.measures import MCP_CALLS
from tests.support.servers.ports import free_port
from tests.support.streams.hand_made import until

SERVER = Path(__file__).parents[2] / "support" / "servers" / "mcp_tools_server.py"
TOOLS = ("weather", "note", "wait", "large", "fail", "crash", "function", "pid")


def over_pipes(notes: Path, **options: Any) -> McpConfig:
    """Return the config of the server of tests, as a program."""
    given = {"args": (str(SERVER),), "tools": TOOLS, "env": {"NOTES": str(notes)}, "connect_seconds": 60.0} | options
    return McpConfig(name="tools", command=sys.executable, **given)


@pytest.fixture
async def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


@pytest.fixture
async def servers(notes: Path) -> AsyncIterator[McpServers]:
    servers = McpServers({"tools": over_pipes(notes)})
    yield servers
    await servers.aclose()


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The same server over streamable HTTP."""
    port = free_port()
    program = subprocess.Popen(
        [sys.executable, str(SERVER), str(port)],
        env={**os.environ, "NOTES": str(tmp_path / "notes")},
        stderr=subprocess.DEVNULL,
    )
    yield f"http://127.0.0.1:{port}/mcp"
    program.kill()
    program.wait()


def calls(tool: str, outcome: str) -> int:
    return MCP_CALLS.by_outcome["tools", tool, outcome]


async def test_no_program_is_started_before_the_first_use(notes: Path) -> None:
    """Servers that no run uses cost no thread and no process, and are closed."""
    before = set(threading.enumerate())
    servers = McpServers({"tools": over_pipes(notes)})
    assert set(threading.enumerate()) <= before
    await servers.aclose()


async def test_only_listed_tools_are_offered(notes: Path) -> None:
    """Of a server's tools those in TOOLS are offered, in that order, with the server's own schemas."""
    servers = McpServers({"tools": over_pipes(notes, tools=("pid", "weather"))})
    listed = await servers.tools("tools")
    await servers.aclose()
    assert [one.name for one in listed] == ["pid", "weather"]
    schema = listed[1].schema
    assert schema["properties"]["unit"]["enum"] == ["C", "F"]
    assert schema["required"] == ["city"]
    assert listed[1].description == "Return the weather of a city."


async def test_a_tool_that_the_server_lacks_is_an_error(notes: Path) -> None:
    """A listed tool that is not there is not left out in silence."""
    servers = McpServers({"tools": over_pipes(notes, tools=("weather", "typo"))})
    with pytest.raises(McpUnavailable, match="typo"):
        await servers.tools("tools")
    await servers.aclose()


async def test_a_call_gives_text_and_is_counted(servers: McpServers) -> None:
    """A result is the server's text; /metrics counts the call by its outcome."""
    before = calls("weather", "ok")
    assert await servers.call("tools", "weather", {"city": "Oslo"}) == "Weather report of Oslo: sunny, 20 C"
    assert calls("weather", "ok") == before + 1


async def test_calls_run_side_by_side_on_one_program(servers: McpServers) -> None:
    """Two calls share the connection, and the slow call does not hold the other up."""
    slow = asyncio.create_task(servers.call("tools", "wait", {"seconds": 60}))
    first, second = await asyncio.gather(servers.call("tools", "pid", {}), servers.call("tools", "pid", {}))
    assert first == second
    assert not slow.done()
    slow.cancel()


async def test_failures_are_texts_for_the_model(servers: McpServers) -> None:
    """A tool that raises, an unknown tool and wrong arguments are results that begin with Error."""
    assert "the disk is full" in (failed := await servers.call("tools", "fail", {}))
    assert failed.startswith("Error: ")
    assert (await servers.call("tools", "missing", {})).startswith("Error: ")
    assert (await servers.call("tools", "weather", {"city": 5})).startswith("Error: ")


async def test_a_large_result_is_cut(servers: McpServers) -> None:
    """A model gets no more than the limit, and a sign that there was more."""
    text = await servers.call("tools", "large", {"num_chars": 200_000})
    assert text == "x" * MAX_RESULT_CHARS + "…"


async def test_a_slow_call_ends_in_time(notes: Path) -> None:
    """A call longer than TIMEOUT_SECONDS is a result that says so, and the server is told to stop."""
    servers = McpServers({"tools": over_pipes(notes, timeout_seconds=1.0)})
    await servers.tools("tools")
    assert await servers.call("tools", "wait", {"seconds": 600}) == "Error: wait took longer than 1 seconds."
    await until(lambda: notes.read_text() == "cancelled\n", "the server's tool has ended")
    await servers.aclose()


async def test_a_cancelled_call_is_cancelled_at_the_server(servers: McpServers, notes: Path) -> None:
    """A run that is stopped does not leave its tool running."""
    call = asyncio.create_task(servers.call("tools", "wait", {"seconds": 600}))
    await until(lambda: notes.exists() and notes.read_text() == "waiting\n", "the tool runs")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: notes.read_text() == "cancelled\n", "the server's tool has ended")


async def test_a_program_that_crashes_in_a_call_is_started_again(servers: McpServers) -> None:
    """The call that it died in is an error, which is not tried again; the next call has a new program."""
    before = await servers.call("tools", "pid", {})
    assert await servers.call("tools", "crash", {}) == "Error: crash is not available now."
    after = await servers.call("tools", "pid", {})
    assert after.isdigit()
    assert after != before


async def test_a_program_that_is_killed_between_calls_is_not_noticed(servers: McpServers) -> None:
    """After kill -9 the next call is answered by a new program: nothing was sent to the dead one."""
    before = int(await servers.call("tools", "pid", {}))
    os.kill(before, signal.SIGKILL)
    connection = servers._servers["tools"]._connection
    await until(lambda: connection is not None and connection.is_over, "the end is noticed")
    assert int(await servers.call("tools", "pid", {})) != before


async def test_a_program_that_cannot_start_is_an_error_at_once(notes: Path) -> None:
    """The error has a code and names no path; a second use right after does not start it again."""
    servers = McpServers({"tools": over_pipes(notes, args=("-c", "raise SystemExit(1)"))})
    for _ in range(2):
        with pytest.raises(McpUnavailable) as raised:
            await servers.tools("tools")
        assert sys.executable not in raised.value.message
    assert await servers.call("tools", "weather", {"city": "Oslo"}) == "Error: weather is not available now."
    await servers.aclose()


async def test_closing_ends_the_program_and_the_thread(notes: Path) -> None:
    """A site that is closed leaves no process and no thread, and takes no further call."""
    servers = McpServers({"tools": over_pipes(notes)})
    pid = int(await servers.call("tools", "pid", {}))
    await servers.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not [one for one in threading.enumerate() if one.name == "mcp"]
    with pytest.raises(McpUnavailable):
        await servers.tools("tools")


async def test_a_server_elsewhere_is_called_over_http(address: str, tmp_path: Path) -> None:
    """The same tools over streamable HTTP: results, errors, cut texts; a server that is away is an error."""
    given = {"tools": TOOLS, "timeout_seconds": 30.0, "connect_seconds": 30.0}
    servers = McpServers(
        {
            "tools": McpConfig(name="tools", url=address, headers={"X-Key": "k"}, **given),
            "away": McpConfig(name="away", url="http://127.0.0.1:9/mcp", **given),
        }
    )
    for _ in range(300):
        try:
            listed = await servers.tools("tools")
            break
        except McpUnavailable:
            await asyncio.sleep(0.2)
    assert [one.name for one in listed] == list(TOOLS)
    assert await servers.call("tools", "weather", {"city": "Oslo"}) == "Weather report of Oslo: sunny, 20 C"
    assert "the disk is full" in await servers.call("tools", "fail", {})
    with pytest.raises(McpUnavailable):
        await servers.tools("away")
    await servers.aclose()
