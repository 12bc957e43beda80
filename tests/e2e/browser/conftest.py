"""One Chromium and one site for all tests of this folder; each test has a context, hence cookies, of its own."""

from __future__ import annotations

from tests.support.servers.browser import browser, site, watched

__all__ = ["browser", "site", "watched"]
