"""Laws of the front: the site's responses do not change, and a request makes no thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from django import get_version
from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.sessions.middleware import SessionMiddleware
from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
from django.core.asgi import get_asgi_application
from django.core.handlers.asgi import ASGIHandler
from django.core.signals import request_finished, request_started
from django.dispatch import Signal
from django.middleware.csrf import CSRF_SECRET_LENGTH
from django.test import AsyncClient
from django.test.utils import override_settings

from streamserve.asgi.middleware import StreamMiddleware
from streamserve.models import Stream as StreamRow
from streamserve.web.front import Front, fronted, missing
from tests.site import settings as hard
from tests.support.apps.app_calls import ask, call
from tests.support.apps.asgi_app import Client
from tests.support.checks.stream_checks import check_native

pytestmark = pytest.mark.django_db(transaction=True)

ASK = {"prompt": "tell me", "max_tokens": 3, "seed": 7}
CHAIN = [
    "django.middleware.locale.LocaleMiddleware",
    *settings.MIDDLEWARE,
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
]
CHAINS = {"usual": CHAIN, "hard": hard.MIDDLEWARE}
_OWN = ("streamserve-stream-id", "x-stream-id", "x-request-id", "expires", "streamserve-handover", "streamserve-reader")


@pytest.fixture(params=CHAINS)
def chain(request: pytest.FixtureRequest) -> Iterator[str]:
    with override_settings(
        STREAMSERVE={"TESTING": True, "ANONYMOUS": True},
        MIDDLEWARE=CHAINS[request.param],
        ROOT_URLCONF="tests.site.urls",
    ):
        yield request.param


async def asked(app: Any, method: str, path: str, body: Any = None, **headers: str) -> Client:
    return await ask(StreamMiddleware(app), method, path, body, "", **{"host": "testserver", **headers})


def shape_of(client: Client) -> tuple[int, dict[str, str]]:
    """Return status and headers; of values that are new each time, only their names."""
    out: dict[str, str] = {}
    for raw_name, raw_value in client.headers:
        name, value = raw_name.decode().lower(), raw_value.decode()
        value = value.partition("=")[0] if name == "set-cookie" else value
        out[name] = "" if name in _OWN else value
    return client.start["status"], out


async def signed_in(user: Any) -> dict[str, str]:
    """Return the headers of a page that this user has open."""
    browser = AsyncClient()
    await browser.aforce_login(user)
    token = "t" * CSRF_SECRET_LENGTH
    cookies = {settings.CSRF_COOKIE_NAME: token, **{one.key: one.value for one in browser.cookies.values()}}
    return {"cookie": "; ".join(f"{name}={value}" for name, value in cookies.items()), "x-csrftoken": token}


async def test_responses_are_django_s(engine: None, chain: str, alice_key: str, alice: Any) -> None:
    """Status and headers are those of Django's own handler, for every kind of caller and for refusals."""
    browser = AsyncClient()
    await browser.aforce_login(alice)
    cookie = {"cookie": "; ".join(f"{one.key}={one.value}" for one in browser.cookies.values())}
    key = {"authorization": f"Bearer {alice_key}"}
    calls: list[tuple[str, str, Any, Mapping[str, str]]] = [
        ("POST", "/streams", ASK, key),
        ("POST", "/streams", {**ASK, "format": "text"}, key),
        ("POST", "/streams", {"prompt": 7}, key),
        ("POST", "/streams", ASK, {"authorization": "Bearer " + "wrong" * 5}),
        ("POST", "/streams", ASK, cookie),  # no CSRF token
        ("POST", "/streams", ASK, {}),  # a visitor gets a session
        (
            "POST",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "seed": 7},
            key,
        ),
        ("GET", "/v1/models", None, key),
        ("GET", "/v1/models", None, cookie),
        ("GET", "/v1/models", None, {**key, "accept-encoding": "gzip", "accept-language": "de"}),
        ("GET", "/v1/models", None, {**key, "host": "evil.example"}),
        ("GET", "/v1/nothing", None, {}),
        ("DELETE", "/streams", None, key),
        ("GET", "/livez", None, {}),
        ("HEAD", "/readyz", None, {}),
    ]
    django, front = ASGIHandler(), fronted(ASGIHandler())
    for method, path, body, headers in calls:
        theirs = shape_of(await asked(django, method, path, body, **headers))
        assert shape_of(await asked(front, method, path, body, **headers)) == theirs, (method, path, headers)


@pytest.mark.parametrize("caller", ["key", "session"])
async def test_a_request_makes_no_thread(
    engine: None, alice_key: str, alice: Any, caller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once everything is warm, twenty answers start no thread; with Django's own handler each starts one."""
    headers = {"authorization": f"Bearer {alice_key}"} if caller == "key" else await signed_in(alice)
    num_started = 0
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        nonlocal num_started
        num_started += 1
        start(thread)

    async def answers(app: Any, num: int) -> int:
        before = num_started
        for _ in range(num):
            client = await asked(app, "POST", "/streams", ASK, **headers)
            check_native(client.body)
        return num_started - before

    front = fronted(ASGIHandler())
    monkeypatch.setattr(threading.Thread, "start", counted)
    for _ in range(10):  # a pool has all its threads, a few, once they have been busy at the same time
        if (num := await answers(front, 20)) == 0:
            break
    assert num == 0
    assert await answers(ASGIHandler(), 5) >= 5


async def test_a_visitor_keeps_the_tenant(engine: None, anonymous_site: None) -> None:
    """The session that a first request makes is saved before its response, and the second request has it."""
    front = fronted(ASGIHandler())
    first = await asked(front, "POST", "/streams", ASK)
    [cookie] = [value.decode() for name, value in first.headers if name.lower() == b"set-cookie"]
    path = f"/streams/{dict(first.headers)[b'x-stream-id'].decode()}"
    again = await asked(front, "GET", path, cookie=cookie.partition(";")[0])
    stranger = await asked(front, "GET", path)
    assert (again.start["status"], stranger.start["status"]) == (200, 404)


async def test_the_signals_of_a_request_are_sent(engine: None) -> None:
    """A site that listens to Django's handler gets beginning and end of requests, on a thread where it may query."""
    seen: list[str] = []

    def note(signal: Any, **kwargs: Any) -> None:
        get_user_model().objects.exists()
        seen.append("started" if signal is request_started else "finished")

    request_started.connect(note, sender=ASGIHandler)
    request_finished.connect(note, sender=ASGIHandler)
    try:
        await asked(fronted(ASGIHandler()), "GET", "/livez")
    finally:
        request_started.disconnect(note, sender=ASGIHandler)
        request_finished.disconnect(note, sender=ASGIHandler)
    assert seen == ["started", "finished"]


async def test_a_view_is_cancelled_when_its_client_leaves(engine: None, alice_key: str) -> None:
    """A whole answer that no client waits for is ended."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1000, "ignore_eos": True}
    headers = {"host": "testserver", "authorization": f"Bearer {alice_key}"}
    client = call(StreamMiddleware(fronted(ASGIHandler())), "POST", "/v1/chat/completions", body, "", **headers)
    while not await StreamRow.objects.aexists():
        pass
    client.leave()
    await client.task
    assert client.messages == []


async def test_a_request_that_the_server_cancels_is_cancelled(engine: None, alice_key: str) -> None:
    """Its server sees that, as with any app; only a client that leaves ends it quietly."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1000, "ignore_eos": True}
    headers = {"host": "testserver", "authorization": f"Bearer {alice_key}"}
    client = call(StreamMiddleware(fronted(ASGIHandler())), "POST", "/v1/chat/completions", body, "", **headers)
    while not await StreamRow.objects.aexists():
        pass
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert client.messages == []


def test_this_django_has_all_it_needs() -> None:
    """The installed Django has every undocumented name that we call, replace or read."""
    assert missing() == []


@pytest.mark.parametrize(
    ("owner", "name", "shown"),
    [
        (ASGIHandler, "read_body", "django.core.handlers.asgi.ASGIHandler.read_body"),
        (
            SessionMiddleware,
            "process_response",
            "django.contrib.sessions.middleware.SessionMiddleware.process_response",
        ),
        (Signal, "_live_receivers", "django.dispatch.Signal._live_receivers"),
    ],
)
def test_a_django_that_lacks_a_name_serves_by_itself(
    owner: Any, name: str, shown: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning has the version and the name; no request fails for it."""
    monkeypatch.delattr(owner, name)
    django_s = get_asgi_application()
    assert fronted(django_s) is django_s
    [record] = [one for one in caplog.records if one.name == "streamserve.asgi"]
    assert f"{get_version()}, which lacks {shown}." in record.message


def test_only_django_itself_is_fronted() -> None:
    """An app around Django's handler may do something with each request: it is not passed by."""
    django = get_asgi_application()

    async def traced(scope: Any, receive: Any, send: Any) -> None: ...

    assert isinstance(fronted(django), Front)
    assert isinstance(fronted(ASGIStaticFilesHandler(django)), Front)
    assert fronted(traced) is traced
    assert fronted(ASGIStaticFilesHandler(traced)) is not django


async def test_other_addresses_are_django_s() -> None:
    """A page of the site is answered by its own handler, also where its address looks like one of ours."""
    seen: list[str] = []

    class Handler(ASGIHandler):
        async def handle(self, scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["path"])
            await super().handle(scope, receive, send)

    front = Front(Handler())
    for path in ("/", "/admin/v1/models", "/nothing/livez", "/livez", "/v1/models"):
        await asked(front, "GET", path)
    assert seen == ["/", "/admin/v1/models", "/nothing/livez"]


async def test_too_many_parameters_are_a_bad_request(chain: str) -> None:
    """Also where the charset of the body makes Django read them before it has a request."""
    path = "/streams?" + "&".join(f"a{number}=1" for number in range(1_100))
    client = await asked(
        fronted(get_asgi_application()), "POST", path, b"x=1", **{"content-type": "text/plain; charset=utf-16"}
    )
    assert client.start["status"] == 400
