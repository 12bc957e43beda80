"""The admin's delivery page in Chromium: the browser measures its own way to the site, also through nginx."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.checks.axe import axe_violations
from tests.support.servers.browser import ADMIN_NAME, ADMIN_PASSWORD, ANSWER_MS, Watched, watching
from tests.support.servers.proxies import run

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]


def open_page(staff: Watched) -> Page:
    """Log in as staff."""
    staff.expect_complaint("404")  # the admin's login page names no icon
    staff.page.goto(f"{staff.origin}/admin/login/?next=/admin/streamserve/live/delivery/")
    staff.page.get_by_label("Username").fill(ADMIN_NAME)
    staff.page.get_by_label("Password").fill(ADMIN_PASSWORD)
    staff.page.get_by_role("button", name="Log in").click()
    return staff.page


def measure(page: Page) -> dict[str, str]:
    """Press the button; return what each check saw, by its name, when all have."""
    page.get_by_role("button", name="Measure").click()
    expect(page.get_by_role("button", name="Measure again")).to_be_enabled(timeout=ANSWER_MS)
    rows = page.locator("[data-ss=verdicts] tr").all()
    return {row.locator("th").inner_text(): row.locator(".ss-verdict").inner_text() for row in rows}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_found_without_a_proxy(browser: Browser, site: str, scheme: str) -> None:
    """Each event is drawn as it arrives; nothing is wider than a phone, and axe finds nothing."""
    with watching(browser, site, viewport={"width": 390, "height": 844}, color_scheme=scheme) as staff:
        page = open_page(staff)
        verdicts = measure(page)
        assert verdicts == dict.fromkeys(("buffering", "compression", "http", "request", "response", "websocket"), "ok")
        expect(page.get_by_role("status")).to_have_text("Nothing found.")
        assert page.locator(".ss-arrived").count() == 13
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert axe_violations(page) == []


def test_what_nginx_holds_back_is_seen(browser: Browser, site: str) -> None:
    """The faults have the doctor's names, and the page names the command that names the proxy."""
    changes = {
        "proxy_buffering off;": "proxy_buffering on; proxy_ignore_headers X-Accel-Buffering;",
        "proxy_http_version 1.1;": "",
        "alias /srv/mysite/static/;": "proxy_pass http://workers;",  # the demo serves them
    }
    with run("nginx", urlsplit(site).port or 80, changes) as url, watching(browser, url) as staff:
        page = open_page(staff)
        assert [check for check, state in measure(page).items() if state == "found"] == ["buffering", "http"]
        expect(page.locator("[data-ss=verdicts] code")).to_have_text(["buffered", "http10"])
        expect(page.get_by_role("status")).to_contain_text(
            f"2 found. To name the proxy and the line to change, run: manage.py streamserve_doctor {url}"
        )
