"""`PAGES`: the generated pages by name. tests/docs/test_reference.py compares them with docs/reference/."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generate import commands, errors, events, metrics, routes, settings

FOLDER = Path(__file__).parents[1] / "reference"

PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings.page,
    "commands.md": commands.page,
    "routes.md": routes.page,
    "events.md": events.page,
    "errors.md": errors.page,
    "metrics.md": metrics.page,
}
