"""Every list and page of the admin's rows in Chromium: nothing scrolls sideways, nor on a phone, and axe is content."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.support.checks.axe import axe_violations
from tests.support.plugins.migrated import Migrate
from tests.support.servers.browser import ADMIN_NAME, ADMIN_PASSWORD, Watched, echo_site, watching
from tests.support.servers.web_servers import ROOT

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]
SETTINGS = "tests.support.sites.pages.browser_site"
# The page's width, and what can be scrolled sideways inside it.
SIDEWAYS = """() => [document.documentElement.scrollWidth, ...[...document.querySelectorAll('body *')]
  .filter((each) => each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 2)
  .filter((each) => /auto|scroll/.test(getComputedStyle(each).overflowX)).map((each) => each.id || each.className)]"""


BEYOND = """() => [...document.querySelectorAll('body *')]
  .filter((each) => each.scrollWidth > each.clientWidth && each.clientWidth)
  .map((each) => each.outerHTML.slice(0, 120))"""
UNFOLD = "() => document.querySelectorAll('fieldset details').forEach((each) => (each.open = true))"


@pytest.fixture(scope="module")
def office(browser: Browser, tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> Iterator[Watched]:
    """A site of long names and ids, and a page on which an administrator is logged in; `rows` are an id of each."""
    state = tmp_path_factory.mktemp("office")
    with echo_site(SETTINGS, state, migrated) as url, watching(browser, url) as staff:
        staff.expect_complaint("404")  # the admin's pages name no icon
        staff.page.goto(f"{url}/admin/login/?next=/admin/")
        staff.page.get_by_label("Username").fill(ADMIN_NAME)
        staff.page.get_by_label("Password").fill(ADMIN_PASSWORD)
        staff.page.get_by_role("button", name="Log in").click()
        expect(staff.page.get_by_role("link", name="Log out").or_(staff.page.get_by_text("Log out"))).to_be_visible()
        env = {**os.environ, "DJANGO_SETTINGS_MODULE": SETTINGS, "STREAMSERVE_STATE_DIR": str(state)}
        command = [sys.executable, "-m", "tests.support.sites.admin_rows"]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        staff.rows = json.loads(done.stdout)  # type: ignore[attr-defined]
        yield staff


def addresses(office: Watched) -> list[str]:
    """Return the list, and the page of a row, of every model."""
    rows = office.rows.items()  # type: ignore[attr-defined]
    found = [f"{name}/{path}" for name, pk in rows for path in ("", f"{pk}/change/")]
    return [f"{office.origin}/admin/streamserve/{path}" for path in (*found, "stream/glass/?hours=168&until=whole")]


# Django's own are left out: the breadcrumbs, the search's field, and empty heads of rows inside a row's page.
OURS = {"include": [["#content"]], "exclude": [["#searchbar"], [".tabular thead"]]}


def test_nothing_scrolls_sideways(office: Watched) -> None:
    """With the longest names of models, people and files that are met, and with what is folded opened."""
    wide = {}
    for address in addresses(office):
        office.page.goto(address)
        office.page.evaluate(
            "() => document.querySelectorAll('fieldset details').forEach((each) => (each.open = true))"
        )
        width, *sideways = office.page.evaluate(SIDEWAYS)
        if width > 1280 or sideways:
            wide[address] = (width, sideways)
    assert wide == {}


def test_a_phone_shows_pages_of_rows_and_the_live_page_whole(office: Watched) -> None:
    """At 360 px no page is wider than the screen, but for tables that scroll; the name of a model is on one line."""
    wide = {}
    office.page.set_viewport_size({"width": 360, "height": 800})
    try:
        for address in addresses(office):
            office.page.goto(address)
            width = office.page.evaluate("document.documentElement.scrollWidth")
            if "/change/" in address and width > 360:
                wide[address] = width, office.page.evaluate(BEYOND)
        office.page.goto(f"{office.origin}/admin/streamserve/live/")
        heading = office.page.locator(".ss-card h2").first
        lines = heading.evaluate("(one) => one.clientHeight / parseFloat(getComputedStyle(one).fontSize)")
        assert lines < 2
    finally:
        office.page.set_viewport_size({"width": 1280, "height": 800})
    assert wide == {}


def test_every_page_can_be_read_by_all(office: Watched) -> None:
    """Light and dark."""
    found = {}
    for scheme in ("light", "dark"):
        office.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        for address in addresses(office):
            office.page.goto(address)
            if lines := axe_violations(office.page, OURS):
                found[scheme, address] = lines
    assert found == {}


def test_filters_are_chosen_by_keyboard(office: Watched) -> None:
    """A filter opens, its choices are links, and what is chosen stands on it; Clear takes all back."""
    page = office.page
    page.goto(f"{office.origin}/admin/streamserve/stream/")
    num_rows = page.locator("#result_list tbody tr").count()
    page.locator(".ss-filter summary", has_text="Finish reason").press("Enter")
    page.get_by_role("link", name="content_filter").press("Enter")
    expect(page.locator(".ss-filter summary", has_text="Finish reason")).to_have_text("Finish reason: content_filter")
    assert page.locator("#result_list tbody tr").count() < num_rows
    page.get_by_role("link", name="Clear", exact=True).press("Enter")
    expect(page.locator("#result_list tbody tr")).to_have_count(num_rows)
