"""An MCP server of the official package: `python mcp_tools_server.py` over pipes, `… PORT` over streamable HTTP.

It writes each call of `note` into the file NOTES, and serves tools that are slow, large, wrong, or fatal.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Literal

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tools of tests")


@server.tool()
def weather(city: str, unit: Literal["C", "F"] = "C") -> str:
    """Return the weather of a city."""
    return f"Weather report of {city}: sunny, 20 {unit}"


@server.tool()
def note(text: str) -> str:
    """Write a text down."""
    path = Path(os.environ["NOTES"])
    with path.open("a") as file:
        file.write(text + "\n")
    return f"noted {text}"


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    try:
        _write("waiting\n")
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        _write("cancelled\n")
        raise
    return "waited"


def _write(text: str) -> None:
    Path(os.environ["NOTES"]).write_text(text)


@server.tool()
def large(num_chars: int) -> str:
    """Return so many characters."""
    return "x" * num_chars


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("the disk is full")


@server.tool()
def crash() -> str:
    """End the process."""
    os._exit(3)


@server.tool(name="function")
def with_odd_names(self_: str = "", function: str = "", name: str = "") -> str:
    """Take arguments that are named as a caller's own."""
    return f"{function} {name}"


@server.tool()
def pid() -> str:
    """Return the process's id."""
    return str(os.getpid())


@server.tool()
def secret() -> str:
    """Return what no site lists."""
    return "not to be seen"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
