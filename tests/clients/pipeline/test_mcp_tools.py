"""Laws of MCP servers' tools in a run: offered as they are, checked by their schema, called once."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the package mcp")

from streamserve.clients.factory import echo_client
from streamserve.clients.mcp.config import McpConfig
from streamserve.clients.mcp.servers import McpServers, McpUnavailable
from streamserve.clients.pipeline.client import Pipeline, PipelineClient
from streamserve.clients.pipeline.run import Run
from streamserve.clients.pipeline.schemas import checker_of
from streamserve.clients.thread.client import ThreadClient
from streamserve.protocol.events import Approval, BlockStart, Done, Error, Event
from streamserve.protocol.requests import Resume
from tests.clients.mcp.test_servers import over_pipes
from tests.clients.pipeline.conftest import text_of
from tests.clients.pipeline.test_journal import ADMISSION, ASKED, Kept
from tests.support.streams.hand_made import until


def call(name: str, /, **arguments: Any) -> str:
    """Return a call as the echo engine writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ANSWERS = {
    "Weather report": "It is sunny.",
    "noted": "Written.",
    "no tool": "I cannot.",
    "not of type": call("weather", city="Oslo"),
    "sky": call("weather", city="Oslo"),
    "wrong": call("weather", city=5),
    "paper": call("note", text="once"),
    "hidden": call("secret"),
    "named as ours": call("function", function="f", name="n"),
    "f n": "Both came.",
}


@pytest.fixture
async def echo() -> AsyncIterator[ThreadClient]:
    client = echo_client(answers=ANSWERS, format_name="qwen3")
    client.start()
    await until(lambda: client.describe().state == "ready", "it is ready")
    yield client
    await client.aclose()


@pytest.fixture
async def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


@pytest.fixture
async def servers(notes: Path) -> AsyncIterator[McpServers]:
    """The server of tests, and a server that is away."""
    away = McpConfig(name="away", command=sys.executable, args=("-c", "pass"), tools=("a",))
    servers = McpServers({"tools": over_pipes(notes, tools=("weather", "note", "function")), "away": away})
    yield servers
    await servers.aclose()


def written(notes: Path) -> str:
    return notes.read_text()


def is_written(notes: Path) -> bool:
    return notes.exists()


def asking(question: str, *names: str) -> Any:
    async def function(run: Run) -> None:
        await run.generate(question, tools=await run.mcp("tools", *names), max_tokens=200)

    return function


async def run_of(echo: ThreadClient, servers: McpServers, function: Any, memo: Kept | None = None) -> list[Event]:
    """Return the events of one attempt of a run."""
    client = PipelineClient(
        Pipeline(name="p", function=function),
        {"echo": echo},
        default_model="echo",
        memo_of=lambda _: memo,
        mcp=servers,
    )
    resume = Resume() if memo is None else Resume(output_token_ids=((),))
    generation = await client.generate(ASKED, ADMISSION, resume)
    try:
        return [event async for event in generation]
    finally:
        generation.cancel()
        await client.aclose()


async def test_a_server_s_tool_is_called_and_the_model_goes_on(echo: ThreadClient, servers: McpServers) -> None:
    """The call and its result are blocks of the run, as of a function of the author's."""
    events = await run_of(echo, servers, asking("How is the sky?"))
    assert [e.name for e in events if isinstance(e, BlockStart) and e.kind == "server_tool_use"] == ["weather"]
    assert "Weather report of Oslo: sunny, 20 C" in text_of(events)
    assert text_of(events).endswith("It is sunny.")
    assert isinstance(events[-1], Done)


async def test_arguments_that_the_schema_refuses_do_not_reach_the_server(
    echo: ThreadClient, servers: McpServers
) -> None:
    """The model is told what is wrong, and calls again."""
    text = text_of(await run_of(echo, servers, asking("wrong")))
    assert "Error: $.city: 5 is not of type 'string'" in text
    assert text.endswith("It is sunny.")


async def test_a_tool_that_is_not_listed_is_not_called(echo: ThreadClient, servers: McpServers) -> None:
    """A model that names another tool of the server gets an error, not the tool."""
    text = text_of(await run_of(echo, servers, asking("hidden")))
    assert "There is no tool 'secret'" in text
    assert "not to be seen" not in text


async def test_arguments_may_have_any_name(echo: ThreadClient, servers: McpServers) -> None:
    """`function` and `name` are arguments of the server's tool, not of ours."""
    assert text_of(await run_of(echo, servers, asking("named as ours"))).endswith("Both came.")


async def test_a_run_may_take_some_of_the_tools(echo: ThreadClient, servers: McpServers) -> None:
    """Only the named tools are offered; a name that is not in TOOLS is the author's mistake."""
    assert "There is no tool 'weather'" in text_of(await run_of(echo, servers, asking("sky", "note")))
    for function in (asking("sky", "secret"), asking("sky", "typo")):
        (error,) = [e for e in await run_of(echo, servers, function) if isinstance(e, Error)]
        assert error.code == "pipeline_failed"


async def test_a_server_that_is_away_ends_the_run_with_its_code(echo: ThreadClient, servers: McpServers) -> None:
    """The error can be tried again; a run that catches it goes on without the tools."""

    async def plain(run: Run) -> None:
        await run.mcp("away")

    async def careful(run: Run) -> None:
        try:
            tools = await run.mcp("away")
        except McpUnavailable:
            tools = []
        await run.generate("Weather report", tools=tools, max_tokens=50)

    (error,) = [e for e in await run_of(echo, servers, plain) if isinstance(e, Error)]
    assert (error.code, error.retryable) == ("mcp_unavailable", True)
    assert text_of(await run_of(echo, servers, careful)) == "It is sunny."


async def test_a_finished_call_is_not_made_again(echo: ThreadClient, servers: McpServers, notes: Path) -> None:
    """A run that another process continues has the call's result from the journal, and asks no server for tools."""
    memo = Kept([], {}, None)
    first = await run_of(echo, servers, asking("paper"), memo)
    assert written(notes) == "once\n"
    closed = McpServers(servers.configs)
    await closed.aclose()
    second = await run_of(echo, closed, asking("paper"), Kept([], memo.kept, memo.begun))
    assert written(notes) == "once\n"
    assert text_of(second) == text_of(first)
    assert text_of(second).endswith("Written.")


async def test_a_tool_of_confirm_asks_its_user_first(echo: ThreadClient, notes: Path) -> None:
    """The run ends at the call, which the server has not had; the other tools just run."""
    servers = McpServers({"tools": over_pipes(notes, tools=("weather", "note"), confirm=("note",))})
    events = await run_of(echo, servers, asking("paper"))
    (asked,) = [event for event in events if isinstance(event, Approval)]
    assert (asked.name, json.loads(asked.arguments)) == ("note", {"text": "once"})
    assert not is_written(notes)
    assert text_of(await run_of(echo, servers, asking("sky"))).endswith("It is sunny.")
    await servers.aclose()


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/s.json"}}}, {"a": 1}),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, {"a": 1}),
        ({"type": "object", "allOf": [{"$ref": "#"}]}, {}),
        ({"type": "object", "additionalProperties": False}, {"a": 1}),
        ({"type": "object", "properties": {"a": {"enum": [1, 2]}}}, {"a": 3}),
    ],
)
def test_a_check_follows_nothing_elsewhere(schema: dict[str, Any], wrong: dict[str, Any]) -> None:
    """A `$ref` that leads nowhere, elsewhere or into a circle is an error for the model, as a wrong value is."""
    check = checker_of(schema)
    with pytest.raises(ValueError):
        check(wrong)


def test_a_pattern_is_the_server_s_to_check() -> None:
    """A schema's regular expression is not run here: it might never end."""
    checker_of({"type": "object", "properties": {"a": {"pattern": "^(a+)+$"}}})({"a": "a" * 60 + "!"})


def test_a_schema_that_is_none_is_refused() -> None:
    """A tool whose schema is wrong is not offered."""
    with pytest.raises(ValueError, match="no JSON Schema"):
        checker_of({"type": "object", "properties": 5})
