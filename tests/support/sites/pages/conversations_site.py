"""Settings: the demo site, which keeps its users' conversations, with a page that has the floating chat."""

from __future__ import annotations

from tests.support.sites.pages.browser_site import *  # noqa: F403
from tests.support.sites.pages.browser_site import BASE_DIR, STREAMSERVE, TEMPLATES

ROOT_URLCONF = "tests.support.sites.pages.conversations_urls"
_OURS = BASE_DIR / "tests" / "support" / "sites" / "pages" / "templates"
TEMPLATES = [{**TEMPLATES[0], "DIRS": [*TEMPLATES[0]["DIRS"], _OURS]}]
STREAMSERVE = {**STREAMSERVE, "CONVERSATIONS": True, "SHARE_LINKS": True}
