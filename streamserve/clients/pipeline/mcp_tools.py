"""Tools of MCP servers as tools of a model: the server's schema goes to the model as it is, and checks its arguments.

Pure but for the call. The check fetches nothing: a `$ref` to elsewhere is an error, and `pattern`, by which a schema
could keep this process busy for ever, is the server's to check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamserve.clients.mcp.servers import EXTRA, McpServers, McpUnavailable, ServerTool
from streamserve.clients.pipeline.tools import FunctionTool, WrongCall, read_arguments
from streamserve.protocol.requests import Tool

_MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTool(FunctionTool):
    """A tool of a server. `check` raises WrongCall for arguments that do not fit its schema."""

    check: Callable[[Mapping[str, Any]], None]

    def arguments(self, text: str) -> dict[str, Any]:
        """Return the arguments of a call. Raises WrongCall."""
        values = read_arguments(text)
        self.check(values)
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

    return McpTool(
        tool=Tool(name=one.name, description=one.description, parameters=one.schema),
        function=call,
        check=checker_of(one.schema),
    )


def checker_of(schema: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], None]:
    """Return what checks arguments by a JSON Schema, and raises WrongCall. Raises McpUnavailable for a wrong schema."""
    try:
        from jsonschema import exceptions, validators
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    except ImportError:
        raise RuntimeError(f"tools of MCP servers need packages that are not installed: {EXTRA}") from None

    base = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        base.check_schema(schema)
    except (exceptions.SchemaError, RecursionError):
        raise McpUnavailable("The tool's schema is no JSON Schema.") from None
    validator = validators.extend(base, {"pattern": None})(schema, registry=Registry())

    def check(values: Mapping[str, Any]) -> None:
        try:
            wrong = exceptions.best_match(validator.iter_errors(values))
        except (Unresolvable, RecursionError) as error:
            raise WrongCall(f"The tool's schema cannot be followed: {type(error).__name__}.") from None
        if wrong is not None:
            raise WrongCall(f"{wrong.json_path}: {wrong.message}"[:_MAX_REASON_CHARS])

    return check
