"""No dialect imports another: what two dialects need stands in a module that is of none."""

from __future__ import annotations

import ast
from pathlib import Path

import streamserve.dialects

ROOM = Path(streamserve.dialects.__file__).parent
# The modules of each dialect. All others are shared, and import none of these but those of their own folder.
DIALECTS = {
    "native": ("native", "websocket", "approvals"),
    "plain": ("plain",),
    "chat": ("openai.chat", "openai.request", "openai.stored_chat"),
    "responses": (
        "openai.responses.conversation",
        "openai.responses.items",
        "openai.responses.output",
        "openai.responses.request",
        "openai.responses.stored",
    ),
    "completions": ("openai.completions",),
    "plain_tokens": ("openai.plain_tokens",),
    "ai_sdk": ("ai_sdk.chunks", "ai_sdk.message", "ai_sdk.request"),
    "mcp": ("mcp",),
    "ag-ui": ("ag_ui.events", "ag_ui.request"),
    "messages": ("anthropic.message", "anthropic.request", "anthropic.conversation"),
}
OWNER = {module: dialect for dialect, modules in DIALECTS.items() for module in modules}
# `/v1/completions/stream` is the dialect `tokens` under an address of OpenAI's.
ALLOWED = {("plain_tokens", "plain")}


def imports_of(path: Path) -> set[str]:
    """Return the modules of this room that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("streamserve.dialects"):
            base = (node.module or "").removeprefix("streamserve.dialects").lstrip(".")
            found |= {base, *(f"{base}.{one.name}".lstrip(".") for one in node.names)}
    return found


def test_every_dialect_is_there() -> None:
    """The table names modules that exist."""
    for module in OWNER:
        assert (ROOM / (module.replace(".", "/") + ".py")).exists(), module


def test_no_dialect_imports_another() -> None:
    """A dialect's modules import each other and what is shared; what is shared imports no dialect."""
    wrong = []
    for path in ROOM.rglob("*.py"):
        module = ".".join(path.relative_to(ROOM).with_suffix("").parts)
        mine = OWNER.get(module)
        for other in imports_of(path):
            theirs = OWNER.get(other)
            is_batch = module.endswith("batches")  # the lines of a dialect's batches
            if theirs is not None and theirs != mine and (mine, theirs) not in ALLOWED and not is_batch:
                wrong.append(f"{module} imports {other}")
    assert wrong == []
