"""Laws of the ready chat page at chat/: who may open it, by CHAT_PAGE, and who may ask there without a login."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import AsyncClient
from django.test.utils import override_settings
from django.urls import reverse

from streamserve.web.auth import VISITOR_COOKIE
from tests.conftest import until_ready
from tests.support.checks.stream_checks import check_native

pytestmark = pytest.mark.django_db(transaction=True)

PAGE, ELEMENT = "/chat/", b"data-streamserve-chat"
FORM = b'<form class="ss-composer" data-ss="form" autocomplete="off">'  # not hidden
AWAY = "203.0.113.7"
PROXIED = {"x-forwarded-for": AWAY}
ASK = {"prompt": "hello", "max_tokens": 3}


def at(address: str) -> AsyncClient:
    """Return a client at an address, whose requests are checked for the CSRF token as a browser's are."""
    client = AsyncClient(enforce_csrf_checks=True)
    scope = client._base_scope
    client._base_scope = lambda **request: {**scope(**request), "client": (address, 1)}
    return client


def audience(name: str | None) -> Any:
    return override_settings(STREAMSERVE={"TESTING": True} | ({} if name is None else {"CHAT_PAGE": name}))


async def ask(client: AsyncClient) -> Any:
    """Ask as the page does."""
    headers = {"x-csrftoken": client.cookies["csrftoken"].value} if "csrftoken" in client.cookies else {}
    return await client.post("/streams", ASK, content_type="application/json", headers=headers)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1"])
@override_settings(DEBUG=True)
async def test_under_debug_a_visitor_from_this_machine_may_ask_there(engine: None, address: str) -> None:
    """Without a setting and a login: the page shows its form, and the answer streams."""
    await until_ready()
    client = at(address)
    page = await client.get(PAGE)
    assert page.status_code == 200
    assert FORM in page.content
    assert "script-src 'self'" in page["Content-Security-Policy"]
    answer = await ask(client)
    assert answer.status_code == 200, answer.content
    check_native(b"".join([chunk async for chunk in answer]))


@pytest.mark.parametrize(
    ("address", "headers"), [(AWAY, {}), ("", {}), ("127.0.0.1", PROXIED), ("::ffff:10.0.0.1", {})]
)
@override_settings(DEBUG=True)
async def test_any_other_visitor_is_told_of_the_setting(address: str, headers: dict[str, str]) -> None:
    """From another machine, from a unix socket or through a proxy: 404, whose debug page names CHAT_PAGE."""
    page = await at(address).get(PAGE, headers=headers)
    assert page.status_code == 404
    assert b"CHAT_PAGE" in page.content


@override_settings(DEBUG=True)
async def test_only_the_pages_cookie_opens_the_model(engine: None) -> None:
    """No cookie, an invented cookie, the cookie at another machine or through a proxy: 401. No CSRF token: 403."""
    assert (await ask(at("127.0.0.1"))).status_code == 401
    client = at("127.0.0.1")
    client.cookies[VISITOR_COOKIE] = f"{'0' * 32}:forged"
    assert (await ask(client)).status_code == 401
    await client.get(PAGE)
    cookie = client.cookies[VISITOR_COOKIE].value
    thief = at(AWAY)
    thief.cookies[VISITOR_COOKIE] = cookie
    assert (await ask(thief)).status_code == 401
    proxied = await client.post("/streams", ASK, content_type="application/json", headers=PROXIED)
    assert proxied.status_code == 401
    assert (await client.post("/streams", ASK, content_type="application/json")).status_code == 403
    with override_settings(DEBUG=False):
        assert (await ask(client)).status_code == 401


@pytest.mark.parametrize("name", [None, "debug", "off"])
async def test_without_debug_the_page_is_off(name: str | None, alice: Any) -> None:
    """No setting, and the settings that do not name anybody: 404 for staff, too; the address is no route."""
    client = at("127.0.0.1")
    alice.is_staff = True
    await alice.asave()
    await client.aforce_login(alice)
    with audience(name):
        page = await client.get(PAGE)
    assert page.status_code == 404


@override_settings(DEBUG=True, ROOT_URLCONF="tests.support.sites.pages.own_chat_urls")
async def test_a_page_of_the_sites_own_is_found_behind_it() -> None:
    """Turned off it shadows no `chat/` that the site's urls name after the include."""
    with audience("off"):
        assert (await at("127.0.0.1").get(PAGE)).content == b"the site's own"
    assert ELEMENT in (await at("127.0.0.1").get(PAGE)).content


async def test_authenticated_visitors_are_named(engine: None, alice: Any) -> None:
    """A visitor is sent to the login and back; a user may open the page and ask."""
    await until_ready()
    with audience("authenticated"):
        away = await at(AWAY).get(PAGE)
        assert (away.status_code, away["Location"]) == (302, "/accounts/login/?next=/chat/")
        client = at(AWAY)
        await client.aforce_login(alice)
        page = await client.get(PAGE)
        assert FORM in page.content
        assert b"DEBUG" not in page.content
        assert (await ask(client)).status_code == 200


async def test_staff_is_named(alice: Any) -> None:
    """A visitor is sent to the login, a user who is not of the staff is refused."""
    client = at(AWAY)
    with audience("staff"):
        assert (await client.get(PAGE)).status_code == 302
        await client.aforce_login(alice)
        assert (await client.get(PAGE)).status_code == 403
        alice.is_staff = True
        await alice.asave()
        assert ELEMENT in (await client.get(PAGE)).content


async def test_anyone_sees_the_page_and_anonymous_decides_who_asks(engine: None) -> None:
    """Without ANONYMOUS a visitor sees the page without its form, and an answer is refused."""
    await until_ready()
    client = at(AWAY)
    with audience("anyone"):
        page = await client.get(PAGE)
        assert ELEMENT in page.content
        assert FORM not in page.content
        assert (await ask(client)).status_code == 401
    with override_settings(STREAMSERVE={"TESTING": True, "CHAT_PAGE": "anyone", "ANONYMOUS": True}):
        client = at(AWAY)
        assert FORM in (await client.get(PAGE)).content
        assert (await ask(client)).status_code == 200


def test_its_address_has_a_name() -> None:
    """Under whatever prefix the routes are included."""
    assert reverse("streamserve:chat") == PAGE
    with override_settings(ROOT_URLCONF="tests.site.prefixed_urls"):
        assert reverse("streamserve:chat") == "/ai/chat/"
