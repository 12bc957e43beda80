"""Settings: the demo site, which keeps its users' conversations, with a page that has the floating chat.

STEP_SECONDS: how long a step of its echo engine takes.
"""

from __future__ import annotations

import os

from tests.support.sites.pages.browser_site import *  # noqa: F403
from tests.support.sites.pages.browser_site import BASE_DIR, STREAMSERVE, TEMPLATES

ROOT_URLCONF = "tests.support.sites.pages.conversations_urls"
_OURS = BASE_DIR / "tests" / "support" / "sites" / "pages" / "templates"
TEMPLATES = [{**TEMPLATES[0], "DIRS": [*TEMPLATES[0]["DIRS"], _OURS]}]
STEP_SECONDS = float(os.environ.get("STEP_SECONDS") or STREAMSERVE["ECHO_STEP_SECONDS"])
STREAMSERVE = {**STREAMSERVE, "CONVERSATIONS": True, "SHARE_LINKS": True, "ECHO_STEP_SECONDS": STEP_SECONDS}
