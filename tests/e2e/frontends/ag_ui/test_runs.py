"""What `@ag-ui/client` makes of our runs: its schemas and its verifier pass, and its page is what our tests expect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dialects.ag_ui.test_events import logs, shown
from tests.support.checks.run_checks import Page, events_of
from tests.support.servers.node import run_script

READER = Path(__file__).parent / "read_runs.mjs"

pytestmark = pytest.mark.usefixtures("node")


def as_told(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as both pages have them, results after their calls."""
    out = []
    for one in messages:
        told = {name: value for name, value in one.items() if name != "toolCalls"}
        told["content"] = one.get("content", "")
        calls = [call.get("function", call) for call in one.get("toolCalls", ())]
        out.append({**told, "calls": [(call["name"], call["arguments"]) for call in calls]})
    return sorted(out, key=lambda one: str(one["id"]))


def test_every_run_passes_the_package_s_verifier(tmp_path: Path) -> None:
    """All kinds of runs, whole, failed, stopped and interrupted, and nothing of them is stripped."""
    bodies = [shown(answer, joined) for answer in logs() for joined in (1, 64)]
    bodies = [body for body in bodies if events_of(body)[-1]["type"] in ("RUN_FINISHED", "RUN_ERROR")]
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([body.decode() for body in bodies]))
    found = run_script(READER, str(file))
    assert len(found) == len(bodies) > 120
    for body, one in zip(bodies, found, strict=True):
        events = events_of(body)
        page = Page().read(events)
        assert one["types"] == [event["type"] for event in events]
        assert as_told(one["messages"]) == as_told(page.messages)
        assert one["state"] == ({} if page.state is None else page.state)
        assert [tuple(custom) for custom in one["customs"]] == page.customs
        assert (one["steps"], one["end"]) == (page.steps, page.end)
        assert one["interrupts"] == page.end.get("outcome", {}).get("interrupts", [])
        assert one["warnings"] == []
