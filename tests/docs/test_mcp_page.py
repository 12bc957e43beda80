"""docs/mcp.md: its settings and its pipeline give a model the tool of a real MCP server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings

from streamserve.api.ops import render_metrics
from streamserve.clients.pipeline.client import forget
from streamserve.web import site
from tests.conftest import Caller, until_ready
from tests.support.docs.doc_blocks import blocks_of

pytest.importorskip("mcp", reason="needs the package mcp")
pytestmark = pytest.mark.django_db(transaction=True)

PAGE = "docs/mcp.md"
SERVER = Path(__file__).parents[1] / "support" / "servers" / "mcp_tools_server.py"
CALL = f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': {'city': 'Oslo'}})}\n</tool_call>"
ANSWERS = {"Weather report": "Sunglasses.", "Oslo": CALL}


async def test_the_page_s_pipeline_calls_the_page_s_server(transactional_db: Any, alice_key: str) -> None:
    """The settings name the server and its tool; the run's text is the answer to the tool's result."""
    conf, pipeline = [block.code for block in blocks_of(PAGE, "Tools from MCP servers") if block.language == "python"]
    names: dict[str, Any] = {}
    exec(conf, names)  # noqa: S102  (the page is ours)
    servers = names["STREAMSERVE"]["MCP_SERVERS"]
    servers["forecast"] |= {"COMMAND": sys.executable, "ARGS": [str(SERVER)], "CONNECT_SECONDS": 60}
    model = {"PATH": "echo", "ANSWERS": ANSWERS, "FORMAT": "qwen3"}
    with override_settings(STREAMSERVE={**settings.STREAMSERVE, "MODELS": {"chat": model}, "MCP_SERVERS": servers}):
        try:
            exec(pipeline, {"__name__": "trips.pipelines"})  # noqa: S102  (ours)
            await until_ready()
            body = {"messages": [{"role": "user", "content": "What to pack for Oslo?"}]}
            run = (await Caller(key=alice_key).post("/pipelines/trip", body)).json()
            assert run["text"] == "Sunglasses."
            here = site.get_site()
            counts = render_metrics(here.clients, here.streams)
            await site.reset()
        finally:
            forget("trip")
    assert 'server="forecast",tool="weather",outcome="ok"' in counts


async def test_the_page_s_tool_is_listed_and_called(transactional_db: Any, alice_key: str) -> None:
    """The pipeline of the second half is a tool with the page's schema, at a site with the page's setting."""
    conf, shop = [
        block.code
        for block in blocks_of(PAGE, "Your pipelines as tools")
        if block.language == "python" and block.file_name != "client.py"
    ]
    names: dict[str, Any] = {}
    exec(conf, names)  # noqa: S102  (the page is ours)
    given = {**settings.STREAMSERVE, "MODELS": {"chat": {"PATH": "echo"}}}
    with override_settings(STREAMSERVE={**given, "MCP_ENDPOINT": names["STREAMSERVE"]["MCP_ENDPOINT"]}):
        try:
            exec(shop, {"__name__": "shop.pipelines"})  # noqa: S102  (ours)
            await until_ready()
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
            listed = (await Caller(key=alice_key).post("/mcp", body)).json()["result"]["tools"]
            (tool,) = [one for one in listed if one["name"] == "invoices"]
            assert (tool["name"], tool["inputSchema"]["required"]) == ("invoices", ["year"])
            call = {"name": "invoices", "arguments": {"year": 2024}}
            result = (await Caller(key=alice_key).post("/mcp", {**body, "method": "tools/call", "params": call})).json()
            assert result["result"]["content"][0]["text"] == "There are none in 2024."
            await site.reset()
        finally:
            forget("invoices")
