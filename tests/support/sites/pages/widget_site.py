"""Settings: a site with pages of its own, which hold chat elements under a prefix and require a login."""

from __future__ import annotations

from tests.support.sites.pages.browser_site import *  # noqa: F403
from tests.support.sites.pages.browser_site import BASE_DIR, STREAMSERVE, TEMPLATES

ROOT_URLCONF = "tests.support.sites.pages.widget_urls"
LANGUAGES = [("en", "English"), ("de", "Deutsch")]
TEMPLATES = [{**TEMPLATES[0], "DIRS": [BASE_DIR / "tests" / "support" / "sites" / "pages" / "templates"]}]
STREAMSERVE = {**STREAMSERVE, "ANONYMOUS": False}
