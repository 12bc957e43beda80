"""Settings: a site whose model thinks and answers in JSON, as the words of the question tell it."""

from __future__ import annotations

from tests.support.sites.pages.browser_site import *  # noqa: F403
from tests.support.sites.pages.browser_site import BASE_DIR, INSTALLED_APPS, STREAMSERVE, TEMPLATES

THOUGHT = " ".join(f"thought{number}" for number in range(90))
JSON = '{"id": 12345678901234567890, "rate": 1.50, "tags": ["<b>a</b>", "b"], "none": []}'
CANCEL = '<tool_call>\n{"name": "cancel_invoice", "arguments": {"number": 7, "why": "<b>twice</b>"}}\n</tool_call>'
ANSWERS = {
    "is cancelled": "It is done.",
    "has refused": "Then I leave it.",
    "invoice please": f"I cancel it. {CANCEL}",
    "think": f"<think>\n{THOUGHT}\n</think>\n\nTwo and two make four.",
    "json": JSON,
    "billing": "See the prices.",
}
INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.sites.blocks_app"]
ROOT_URLCONF = "tests.support.sites.pages.blocks_urls"
TEMPLATES = [{**TEMPLATES[0], "DIRS": [BASE_DIR / "tests" / "support" / "sites" / "pages" / "templates"]}]
STREAMSERVE = {
    **STREAMSERVE,
    "MODELS": {"echo": {"PATH": "echo", "FORMAT": "qwen3", "ANSWERS": ANSWERS}},
    "ECHO_STEP_SECONDS": 0.008,
}
