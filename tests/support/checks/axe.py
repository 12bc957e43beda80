"""axe-core on an open page: what a machine can tell of its accessibility, by WCAG 2.2 A and AA and best practice."""

from __future__ import annotations

from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

_AXE = Axe()  # axe-core comes with the package


def axe_violations(page: Page, context: Any = None) -> list[str]:
    """Return a line for each element that breaks a rule: the rule, its impact, the element. [] is good.

    `context`: which part of the page, in axe's form ({"include", "exclude"}); all of it by default.

    The page's Content-Security-Policy stays: Playwright evaluates axe outside of it.
    """
    found = _AXE.run(page, context=context).response["violations"]
    return [f"{rule['id']} ({rule['impact']}): {node['html'][:160]}" for rule in found for node in rule["nodes"]]
