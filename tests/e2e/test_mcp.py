"""The official MCP client against a daphne-served site, in both eras: tools, calls, progress, cancels, cuts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streamserve.models import ApiKey
from streamserve.models import Stream as StreamRow
from streamserve.testing import DaphneServer
from tests import settings
from tests.docs.test_mcp_page import PAGE
from tests.support.docs.doc_blocks import blocks_of
from tests.support.servers.cutting_relay import cutting

mcp = pytest.importorskip("mcp", reason="needs the package mcp")
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.parametrize("mode", ["auto", "legacy"])]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(django_db_setup: None) -> Iterator[DaphneServer]:
    """A site that offers its pipelines, with an engine that takes its time."""
    given = {
        "STREAMSERVE": {"ECHO_STEP_SECONDS": 0.02, "MCP_ENDPOINT": True},
        "INSTALLED_APPS": [*settings.INSTALLED_APPS, "tests.support.sites.mcp_app"],
    }
    with DaphneServer(settings=given) as server:
        yield server


@pytest.fixture
def key(transactional_db: Any) -> str:
    return ApiKey.objects.make(name="mcp")[1]


@asynccontextmanager
async def connected(url: str, key: str, mode: str) -> AsyncIterator[Any]:
    """Yield the official client, connected."""
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    headers = {"Authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=120, trust_env=False) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


async def ended(name: str) -> StreamRow:
    """Return the row of the newest run of that pipeline, once it has ended."""
    async with asyncio.timeout(60):
        while True:
            row = await StreamRow.objects.filter(model=name, state="finished").order_by("-created_at").afirst()
            if row is not None:
                return row
            await asyncio.sleep(0.05)


async def test_tools_are_listed_and_called(server: DaphneServer, key: str, mode: str) -> None:
    """Schemas and descriptions; a result, a failed run, wrong arguments, an unknown tool."""
    from mcp.shared.exceptions import MCPError

    async with connected(server.url, key, mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"story", "invoices", "broken"} <= tools.keys()
        assert tools["invoices"].input_schema["required"] == ["year"]
        assert tools["story"].description == "Tell a story."
        result = await client.call_tool("invoices", {"year": 2024})
        assert (result.is_error, result.content[0].text) == (False, "None in 2024.")
        failed = await client.call_tool("broken", {"question": "?"})
        assert failed.is_error
        assert "a reason" not in failed.content[0].text
        for name, arguments in (("invoices", {"year": "x"}), ("missing", {})):
            with pytest.raises(MCPError) as raised:
                await client.call_tool(name, arguments)
            assert raised.value.error.code == -32602


async def test_steps_are_progress(server: DaphneServer, key: str, mode: str) -> None:
    """The client's callback gets each step, in order, before the result."""
    seen: list[Any] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, total, message))

    async with connected(server.url, key, mode) as client:
        result = await client.call_tool("story", {"question": "Once"}, progress_callback=note)
    assert seen == [(1, 3, "Part 1"), (2, 3, "Part 2"), (3, 3, "Part 3")]
    assert len(result.content[0].text) > 100


async def test_a_cancelled_call_ends_its_run(server: DaphneServer, key: str, mode: str) -> None:
    """In the older era by a notification, in the newer by the end of the response."""
    begun = asyncio.Event()

    async def note(*progress: Any) -> None:
        begun.set()

    async with connected(server.url, key, mode) as client:
        call = asyncio.create_task(client.call_tool("story", {"question": "Once"}, progress_callback=note))
        await begun.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        row = await ended("story")
    assert row.finish_reason == ("cancelled" if mode == "legacy" else "abandoned")


@pytest.mark.parametrize("num_bytes", [550, 700])
@pytest.mark.cut_streams("a relay breaks the connection")
async def test_a_cut_response_comes_whole(server: DaphneServer, key: str, mode: str, num_bytes: int) -> None:
    """In the older era the client resumes by itself: one run, all its steps, once. In the newer the call is lost."""
    from mcp.shared.exceptions import MCPError

    seen: list[float] = []

    async def note(progress: float, *rest: Any) -> None:
        seen.append(progress)

    with cutting(server.url, '"tools/call"', num_bytes=num_bytes) as relay:
        async with connected(relay.url, key, mode) as client:
            if mode == "legacy":
                result = await client.call_tool("story", {"question": "Once"}, progress_callback=note)
                assert len(result.content[0].text) > 100
                assert seen == [1, 2, 3]
            else:
                with pytest.raises(MCPError):
                    await client.call_tool("story", {"question": "Once"}, progress_callback=note)
    assert relay.num_cut == 1
    assert await StreamRow.objects.filter(model="story").acount() == 1


async def test_the_page_s_client_runs(server: DaphneServer, key: str, mode: str, monkeypatch: Any, capsys: Any) -> None:
    """docs/mcp.md's client lists the tools; its pipeline is not here, which is an error that names those that are."""
    (code,) = [block.code for block in blocks_of(PAGE) if block.file_name == "client.py"]
    monkeypatch.setenv("KEY", key)
    monkeypatch.setenv("URL", f"{server.url}/mcp")
    names: dict[str, Any] = {}
    source = code.replace("asyncio.run(main())\n", "").replace('"billing"', '"story"')
    exec(source, names)  # noqa: S102  (the page is ours)
    await names["main"]()
    listed, text = capsys.readouterr().out.splitlines()[:2]
    assert "'story'" in listed
    assert text
