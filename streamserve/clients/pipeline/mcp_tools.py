"""Tools of MCP servers as tools of a model: the server's schema goes to the model as it is, and checks its arguments.

Pure but for the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from streamserve.clients.mcp.servers import McpServers, McpUnavailable, ServerTool
from streamserve.clients.pipeline.schemas import checker_of
from streamserve.clients.pipeline.tools import FunctionTool, WrongCall, read_arguments
from streamserve.protocol.requests import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTool(FunctionTool):
    """A tool of a server. `check` raises ValueError for arguments that do not fit its schema."""

    check: Callable[[Mapping[str, Any]], None]
    kind: ClassVar[str] = "extension"

    def arguments(self, text: str) -> dict[str, Any]:
        """Return the arguments of a call. Raises WrongCall."""
        values = read_arguments(text)
        try:
            self.check(values)
        except ValueError as error:
            raise WrongCall(str(error)) from None
        return values


async def described(servers: McpServers | None, name: str) -> list[list[Any]]:
    """Return a server's tools as JSON, which a run keeps: `tools_of` reads it. Raises LookupError, McpUnavailable."""
    if servers is None or name not in servers.configs:
        known = ", ".join(servers.configs) if servers is not None else ""
        raise LookupError(f"a run asks for the MCP server {name!r}; MCP_SERVERS has: {known or 'none'}")
    return [[one.name, one.description, dict(one.schema)] for one in await servers.tools(name)]


def tools_of(servers: McpServers, server: str, listed: Sequence[Sequence[Any]], names: Sequence[str]) -> list[McpTool]:
    """Return the tools of a listing, or those of them that have these names. Raises LookupError for another name."""
    allowed = servers.configs[server].tools
    found = {one[0]: ServerTool(name=one[0], description=one[1], schema=one[2]) for one in listed if one[0] in allowed}
    unknown = [name for name in names if name not in found]
    if unknown:
        raise LookupError(f"TOOLS of the MCP server {server!r} has no {unknown[0]!r}; it has: {', '.join(found)}")
    return [_tool(servers, server, found[name]) for name in names or found]


def _tool(servers: McpServers, server: str, one: ServerTool) -> McpTool:
    async def call(**arguments: Any) -> str:
        return await servers.call(server, one.name, arguments)

    try:
        check = checker_of(one.schema)
    except ValueError as error:
        raise McpUnavailable(f"The tool {one.name} cannot be offered: {error}") from None
    tool = Tool(name=one.name, description=one.description, parameters=one.schema)
    return McpTool(tool=tool, function=call, check=check, confirm=one.name in servers.configs[server].confirm)
