"""docs/reference/routes.md: every address, from `ROUTES` and the docstrings of its functions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from docs.generate.text import head, linked, table
from streamserve.api.call import Endpoint
from streamserve.api.openapi.document import summary_of
from streamserve.api.routes import ROUTES, Access, Route

_INTRO = """
Every address that `include("streamserve.urls")` serves. [The HTTP API](../api.md) has what holds for all of them.
The name is what `reverse("streamserve:<name>")` and the label `handler` of [metrics](metrics.md) take. What takes GET
takes HEAD. The WebSocket's address is `/ws/streams`: [WebSocket](../websocket.md).

**Who** may call: *key* is an API key, *login* a signed-in session of the site, *visitor* a browser without a login,
where `ANONYMOUS` is on.
"""
# Heading, the first part of the addresses, the pages to read.
_GROUPS = (
    ("Streams", ("streams",), "[streams](../streams.md), [events](../events.md)"),
    ("Pipelines", ("pipelines",), "[pipelines](../pipelines.md)"),
    ("Jobs", ("jobs",), "[jobs](../jobs.md)"),
    ("Conversations", ("conversations", "attachments"), "[conversations](../conversations.md)"),
    ("AI SDK", ("ai/",), "[the AI SDK](../ai-sdk.md)"),
    ("AG-UI", ("ag-ui",), "[AG-UI](../ag-ui.md)"),
    ("Usage", ("usage",), "[usage](../usage.md)"),
    (
        "OpenAI",
        (
            *("v1/chat", "v1/responses", "v1/conversations", "v1/completions", "v1/embeddings"),
            *("v1/moderations", "tokenize", "detokenize", "v1/streams"),
            *("v1/models", "v1/files", "v1/batches"),
        ),
        "[chat completions](../chat-completions.md), [responses](../responses.md), "
        "[text completions](../completions.md), [embeddings](../embeddings.md), "
        "[moderations](../moderations.md), [batches](../batches.md)",
    ),
    ("Anthropic", ("v1/messages",), "[Anthropic's Messages API](../anthropic.md)"),
    ("MCP", ("mcp",), "[MCP](../mcp.md)"),
    (
        "Operations",
        ("openapi", "livez", "health", "readyz", "metrics"),
        "[OpenAPI](../openapi.md), [monitoring](../monitoring.md)",
    ),
)
_VARIABLE = re.compile(r"<\w+:(\w+)>")


def page() -> str:
    """Return the page."""
    parts = [head("Reference: routes", _INTRO, "`ROUTES` (streamserve/api/routes.py)")]
    for heading, firsts, pages in _GROUPS:
        rows = [row for route in _named() if route.path.startswith(firsts) for row in _rows(route)]
        parts.append(f"\n## {heading}\n\nRead: {pages}.\n\n{table(['address', 'name', 'who', 'what it does'], rows)}")
    return "".join(parts)


def ungrouped() -> list[str]:
    """Return the paths of routes that no group of the page takes."""
    firsts = tuple(first for _, group, _ in _GROUPS for first in group)
    return [route.path for route in _named() if not route.path.startswith(firsts)]


def _named() -> list[Route]:
    return [route for route in ROUTES if route.name]


def _rows(route: Route) -> Iterator[list[str]]:
    path = _VARIABLE.sub(r"{\1}", f"/{route.path}").replace("{stream_id}", "{id}")
    for method, endpoint in route.endpoints.items():
        if method != "HEAD":
            yield [f"`{method} {path}`", f"`{route.name}`", _who(route.access), _does(endpoint)]


def _who(access: Access) -> str:
    if access.callers == ("anyone",):
        return "anyone; callers that may chat see more" if access.identifies else "anyone"
    if access.callers == ("key",):
        return "key"
    who = "key, login" if "anonymous" not in access.callers else "key, login, visitor"
    scope = "" if access.scope == "chat" else f"; scope `{access.scope}`"
    return who + scope + ("; open with `DEBUG`" if access.open_in_debug else "")


def _does(endpoint: Endpoint) -> str:
    return linked(summary_of(endpoint))
