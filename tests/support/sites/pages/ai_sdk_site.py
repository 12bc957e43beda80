"""Settings: the demo site with React pages at /react/NAME/, whose scripts lie in the folder REACT."""

from __future__ import annotations

from tests.support.sites.pages.browser_site import *  # noqa: F403
from tests.support.sites.pages.browser_site import INSTALLED_APPS, STREAMSERVE

PAY = 'I pay.<tool_call>\n{"name": "pay", "arguments": {"euros": 5}}\n</tool_call>'
PAYS = {"Paid": "It is paid.", "refused": "Then I leave it.", "bill": PAY}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.sites.ai_sdk_app"]
ROOT_URLCONF = "tests.support.sites.pages.ai_sdk_urls"
STREAMSERVE = {
    **STREAMSERVE,
    "CONVERSATIONS": True,
    "MODELS": {
        "echo": {"PATH": "echo", "ANSWERS": None},
        "caller": {"PATH": "echo", "FORMAT": "qwen3", "ANSWERS": {"Sunny": "Go out.", "weather": CALL}},
        "payer": {"PATH": "echo", "FORMAT": "qwen3", "ANSWERS": PAYS},
    },
    "ECHO_STEP_SECONDS": 0.02,
}
