"""`McpConfig`: one entry of MCP_SERVERS, a server whose tools pipelines may offer to models. Values only.

Addresses and commands are the operator's: no caller and no model names them. (Model Context Protocol,
modelcontextprotocol.io/specification.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class McpConfig:
    """A server that is started here and spoken to over its pipes (`command`), or that is elsewhere (`url`)."""

    name: str
    command: str = ""
    """The program that is started, without a shell. It gets `PATH`, `HOME`, `USER`, `SHELL` and `ENV`, and no other
    variable of the web process. `COMMAND` or `URL` is needed.
    """
    args: tuple[str, ...] = ()
    """The program's arguments, a list of texts."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further variables of its environment."""
    url: str = ""
    """The address of a server elsewhere that speaks streamable HTTP, as `https://tools.example.org/mcp`."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of every request to it, as `{"Authorization": "Bearer …"}`."""
    tools: tuple[str, ...] = ()
    """The tools that a model may be offered, by the server's names. No other tool of the server is."""
    confirm: tuple[str, ...] = ()
    """Those of them that the user is asked about before each call (docs/pipelines.md#tools-that-ask-first)."""
    timeout_seconds: float = 30.0
    """How long a call may take. Then the model is told so."""
    connect_seconds: float = 10.0
    """How long starting the program, or connecting, may take."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError("it takes COMMAND or URL, one of them")
        if not self.tools:
            raise ValueError("TOOLS names no tool, so none could be offered")
        unknown = set(self.confirm) - set(self.tools)
        if unknown:
            raise ValueError(f"CONFIRM has {min(unknown)!r}, which is not in TOOLS")
        if not (self.timeout_seconds > 0 and self.connect_seconds > 0):
            raise ValueError("TIMEOUT_SECONDS and CONNECT_SECONDS are more than 0")
