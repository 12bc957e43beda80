"""Laws of origins: which pages may post, read a stream or open a socket with a user's cookies, and which with a key."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import AsyncClient
from django.test.utils import override_settings

from streamserve.models import Stream as StreamRow
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.stream_checks import check_native, text_of
from tests.web.conftest import PROMPT, communicator, make_caller

pytestmark = pytest.mark.django_db(transaction=True)


async def test_a_session_needs_the_csrf_token_to_post(engine: None, alice: Any) -> None:
    """Without the token: 403 in the dialect. With the page's token: 200. A key needs none."""
    client = AsyncClient(enforce_csrf_checks=True)
    await client.aforce_login(alice)
    refused = await client.post("/streams", PROMPT, content_type="application/json")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "csrf_failed")
    page = await client.get("/")
    token = page.context["csrf_token"]
    allowed = await client.post(
        "/streams", PROMPT, content_type="application/json", headers={"X-CSRFToken": str(token)}
    )
    assert allowed.status_code == 200
    await body_of(allowed)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),  # neither a token nor an origin
        ({"origin": "http://testserver"}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "none"}, 200),  # no page at all has made it
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://evil.example", "sec-fetch-site": "same-origin"}, 403),
    ],
)
async def test_a_beacon_with_cookies_comes_from_our_own_pages(
    engine: None, alice: Any, headers: dict[str, str], status: int
) -> None:
    """`sendBeacon` has no header for the CSRF token: the origin that the browser names decides, for timings alone."""
    started = await (await make_caller(alice)).post("/streams", PROMPT)
    await body_of(started)
    client = AsyncClient(enforce_csrf_checks=True)
    await client.aforce_login(alice)
    path = f"/streams/{started['X-Stream-Id']}"
    for what, expected in (("timings", status), ("stop", 403)):
        sent = await client.post(
            f"{path}/{what}", {"headers": 0.1} if what == "timings" else {}, "application/json", headers=headers
        )
        assert sent.status_code == expected, what


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "http://testserver"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "https://testserver"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://testserver.evil.example", "sec-fetch-site": "same-origin"}, 403),
        ({"referer": "http://evil.example/page"}, 403),
        ({"referer": "http://testserver/"}, 200),
    ],
)
async def test_a_get_stream_with_cookies_comes_from_our_own_pages(
    engine: None, alice: Any, headers: dict[str, str], status: int
) -> None:
    """A GET stream with cookies is checked by Sec-Fetch-Site, Origin and Referer; without any it is no browser."""
    caller = await make_caller(alice)
    response = await caller.get("/streams/new?prompt=hi&max_tokens=2", **headers)
    assert response.status_code == status
    await body_of(response)


async def test_a_key_may_come_from_anywhere(engine: None, lonely_key: str) -> None:
    """A key may come from any origin, because a request without a cookie cannot be forged."""
    response = await Caller(key=lonely_key).get("/streams/new?prompt=hi&max_tokens=2", origin="http://elsewhere")
    assert response.status_code == 200
    await body_of(response)


async def test_trusted_origins_may_read(engine: None, alice: Any) -> None:
    """CSRF_TRUSTED_ORIGINS may read, with its wildcard too."""
    caller = await make_caller(alice)
    with override_settings(CSRF_TRUSTED_ORIGINS=["https://*.example.org"]):
        assert (await caller.get("/v1/models", origin="https://a.example.org")).status_code == 200
        assert (await caller.get("/v1/models", origin="https://example.com")).status_code == 403


async def test_named_origins_may_use_a_key_from_a_browser(engine: None, alice: Any, alice_key: str) -> None:
    """A preflight and the answer to a page of CORS_ORIGINS carry CORS headers; cookies do not count from there."""
    app = "https://app.example.org"
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    with override_settings(STREAMSERVE={"TESTING": True, "CORS_ORIGINS": [app]}):
        client = AsyncClient()
        preflight = await client.options("/streams", headers={"origin": app, **ask})
        assert (preflight.status_code, preflight["Access-Control-Allow-Origin"]) == (204, app)
        assert preflight["Access-Control-Allow-Methods"] == "POST"
        assert "Authorization" in preflight["Access-Control-Allow-Headers"]
        assert "Access-Control-Allow-Credentials" not in preflight
        answer = await Caller(key=alice_key).post("/streams", PROMPT, origin=app)
        await body_of(answer)
        refused = await Caller(key="x" * 20).post("/streams", PROMPT, origin=app)
        for response in (answer, refused):
            assert response["Access-Control-Allow-Origin"] == app
            assert "X-Stream-Id" in response["Access-Control-Expose-Headers"]
            assert "Origin" in response["Vary"]
        assert (answer.status_code, refused.status_code) == (200, 401)
        assert (await (await make_caller(alice)).get("/v1/models", origin=app)).status_code == 403
        elsewhere = await client.options("/streams", headers={"origin": "https://evil.example", **ask})
        assert elsewhere.status_code == 405
        assert "Access-Control-Allow-Origin" not in elsewhere


async def test_prompts_in_urls_are_off_by_default(engine: None, alice_key: str) -> None:
    """GET /streams/new is a 403 that names the way out, before anything is started; with an id it still resumes."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True}):
        await until_ready()
        caller = Caller(key=alice_key)
        refused = await caller.get("/streams/new?prompt=hi")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "prompt_in_url_off")
        assert "POST" in refused.json()["error"]["message"]
        assert await StreamRow.objects.acount() == 0
        started = await caller.post("/streams", PROMPT)
        whole = check_native(await body_of(started))
        resumed = await caller.get("/streams/new?prompt=hi", **{"last-event-id": whole[0].id})
        assert resumed.status_code == 200
        rest = check_native(await body_of(resumed), after=whole[0].seq)
        assert (text_of(rest), rest[-1]) == (text_of(whole), whole[-1])


PROXY = {"USE_X_FORWARDED_HOST": True, "SECURE_PROXY_SSL_HEADER": ("HTTP_X_FORWARDED_PROTO", "https")}
SHOP = {"x-forwarded-host": "shop.example", "x-forwarded-proto": "https", "origin": "https://shop.example"}


@pytest.mark.parametrize(
    ("settings", "headers", "may"),
    [
        (PROXY, SHOP, True),
        ({}, SHOP, False),
        (PROXY, {**SHOP, "origin": "https://testserver"}, False),
        (PROXY, {**SHOP, "x-forwarded-proto": "http"}, False),
        (PROXY, {**SHOP, "x-forwarded-host": "evil.example", "origin": "https://evil.example"}, False),
        (PROXY, {**SHOP, "x-forwarded-host": "shop.example:8443", "origin": "https://shop.example:8443"}, True),
        (PROXY, {**SHOP, "x-forwarded-host": "shop.example, evil.example"}, False),
        (PROXY, {"origin": "http://testserver"}, True),
        ({"USE_X_FORWARDED_HOST": True, "USE_X_FORWARDED_PORT": True}, {**SHOP, "x-forwarded-port": "8443"}, False),
    ],
)
async def test_a_page_behind_a_proxy_has_the_host_that_django_gives_it(
    engine: None, alice: Any, settings: dict[str, Any], headers: dict[str, str], may: bool
) -> None:
    """By USE_X_FORWARDED_HOST and SECURE_PROXY_SSL_HEADER, for a GET with cookies and a WebSocket alike."""
    caller = await make_caller(alice)
    cookie = f"sessionid={caller.client.cookies['sessionid'].value}"
    with override_settings(ALLOWED_HOSTS=["testserver", "shop.example"], **settings):
        response = await caller.get("/v1/models", **headers)
        given = {**headers, "cookie": cookie}
        socket = communicator([(name.encode(), value.encode()) for name, value in given.items()])
        connected, _code = await socket.connect()
        await socket.disconnect()
    assert ((response.status_code == 200), connected) == (may, may)
    if not may and "evil.example" not in headers["x-forwarded-host"]:
        assert (response.status_code, response.json()["error"]["code"]) == (403, "cross_origin")


@pytest.mark.parametrize(
    ("headers", "may"),
    [
        ([], False),
        ([(b"authorization", b"Bearer wrong-wrong-wrong-wrong")], False),
        ([(b"origin", b"http://testserver")], False),
        ([(b"key", b""), (b"origin", b"http://evil.example")], True),
        ([(b"key", b"")], True),
        ([(b"cookie", b""), (b"origin", b"http://testserver")], True),
        ([(b"cookie", b"")], False),
        ([(b"cookie", b""), (b"origin", b"http://evil.example")], False),
        ([(b"cookie", b""), (b"origin", b"null")], False),
        ([(b"cookie", b""), (b"origin", b"http://evil.example"), (b"authorization", b"Basic YTpi")], False),
        ([(b"cookie", b""), (b"authorization", b"Basic YTpi")], False),
        ([(b"cookie", b""), (b"origin", b"http://testserver"), (b"authorization", b"Basic YTpi")], True),
        ([(b"cookie", b""), (b"origin", b"http://testserver"), (b"host", b"evil.example")], False),
    ],
)
async def test_a_websocket_handshake_is_checked(
    engine: None, alice: Any, alice_key: str, headers: list[tuple[bytes, bytes]], may: bool
) -> None:
    """A key may come from anywhere; a cookie needs a trusted Origin; the Host must be in ALLOWED_HOSTS."""
    caller = await make_caller(alice)
    session = caller.client.cookies["sessionid"].value
    real = {b"key": (b"authorization", f"Bearer {alice_key}".encode())}
    real[b"cookie"] = (b"cookie", f"sessionid={session}".encode())
    socket = communicator([real.get(name, (name, value)) for name, value in headers])
    connected, _code = await socket.connect()
    assert connected is may
    await socket.disconnect()
