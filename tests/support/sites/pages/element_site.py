"""Settings: pages with the chat element in each of its forms, in the language that the browser asks for."""

from __future__ import annotations

from tests.support.sites.pages.browser_site import *  # noqa: F403
from tests.support.sites.pages.browser_site import BASE_DIR, MIDDLEWARE, TEMPLATES

MIDDLEWARE = [*MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]
ROOT_URLCONF = "tests.support.sites.pages.element_urls"
LANGUAGES = [("en", "English"), ("de", "Deutsch"), ("ar", "العربية")]
TEMPLATES = [{**TEMPLATES[0], "DIRS": [BASE_DIR / "tests" / "support" / "sites" / "pages" / "templates"]}]
