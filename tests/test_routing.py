"""Laws of `routing.wrap`: what it is given, and whose WebSocket gets which path. Prefixes: tests/e2e/test_prefix.py."""

from __future__ import annotations

from typing import Any

import pytest
from channels.routing import ProtocolTypeRouter, URLRouter
from channels.testing import HttpCommunicator, WebsocketCommunicator
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.test.utils import override_settings
from django.urls import path

from streamserve.api.routes import PROBES
from streamserve.asgi.drain import Drain
from streamserve.asgi.types import Receive, Scope, Send
from streamserve.routing import _bound_of, wrap
from streamserve.web import site

HEADERS = [(b"host", b"testserver")]


class IdleServer:
    """A `DrainTarget` without connections."""

    def is_busy(self) -> bool:
        return False

    is_running = has_newcomers = has_unsent = is_busy

    def stop_listening(self) -> None:
        """It has none."""

    end_all = cancel_all = stop_listening


async def site_socket(scope: Scope, receive: Receive, send: Send) -> None:
    """The site's own WebSocket: says hello and closes."""
    await receive()
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.send", "text": f"hello from {scope['path']}"})
    await send({"type": "websocket.close", "code": 1000})


async def first_message(app: Any, address: str) -> Any:
    """Return what the socket at `address` says first, or the code with which it is closed."""
    socket = WebsocketCommunicator(app, address, headers=HEADERS)
    is_open, code = await socket.connect()
    if not is_open:
        return code
    out = await socket.receive_output()
    await socket.disconnect()
    return out.get("text") or out.get("code")


def given(kind: str) -> Any:
    """Return what a site passes to `wrap` to keep its own WebSockets."""
    django, router = get_asgi_application(), URLRouter([path("mine/<name>", site_socket)])
    return {
        "router": lambda: wrap(ProtocolTypeRouter({"http": django, "websocket": router})),
        "argument": lambda: wrap(django, websocket=router),
        "app": lambda: wrap(site_socket),
    }[kind]()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", ["router", "argument", "app"])
async def test_other_sockets_reach_the_sites_own_router(kind: str, anonymous_site: None, engine: None) -> None:
    """/ws/streams is ours, every other path the site's."""
    app = given(kind)
    assert await first_message(app, "/mine/a") == "hello from /mine/a"
    socket = WebsocketCommunicator(app, "/ws/streams", headers=HEADERS)
    assert (await socket.connect())[0]
    await socket.send_json_to({"type": "ping"})
    assert (await socket.receive_json_from())["type"] == "pong"
    await socket.disconnect()


async def test_without_a_router_an_unknown_path_is_refused() -> None:
    """Django's own application has no WebSockets: the handshake itself is refused."""
    socket = WebsocketCommunicator(wrap(get_asgi_application()), "/mine/a", headers=HEADERS)
    assert not (await socket.connect())[0]


@pytest.mark.parametrize("script", ["", "/shop"])
async def test_probes_are_answered_while_draining_under_a_prefix(script: str) -> None:
    """A server that goes down still answers /ai/readyz, and refuses /ai/streams."""
    drain = Drain()
    with override_settings(ROOT_URLCONF="tests.site.prefixed_urls", FORCE_SCRIPT_NAME=script or None):
        scope = {"extensions": {"streamserve.flow": {"drain": drain}}}
        http = HttpCommunicator(wrap(get_asgi_application()), "GET", f"{script}/ai/livez", headers=HEADERS)
        http.scope.update(scope)
        assert (await http.get_response(10))["status"] == 200
        await http.wait(10)
        await drain.conduct(IdleServer(), 0)
        served = [drain.serves(f"{script}/ai/{name}") for name in (*PROBES, "streams")]
    await site.reset()
    assert served == [True, True, True, True, False]


def test_a_wrapped_application_is_not_wrapped_again() -> None:
    """The line in asgi.py may stand twice."""
    app = wrap(get_asgi_application())
    assert wrap(app) is app


@pytest.mark.parametrize(("debug", "is_found"), [(True, True), (False, False)])
async def test_static_files_are_served_while_debug_is_on(debug: bool, is_found: bool) -> None:
    """Under daphne and uvicorn as under runserver; in production a web server does it."""
    with override_settings(DEBUG=debug):
        app = wrap(get_asgi_application())
        http = HttpCommunicator(app, "GET", "/static/streamserve/chat.js", headers=HEADERS)
        await http.send_input({"type": "http.request", "body": b""})
        start = await http.receive_output(10)
        while (await http.receive_output(10)).get("more_body"):
            pass
        await http.wait(10)
    assert (start["status"] == 200) is is_found


@pytest.mark.parametrize(
    ("path", "is_ours"),
    [("/streams", True), ("/v1/files", True), (f"/streams/{'0' * 32}/stop", True), ("/cart", False)],
)
def test_bodies_are_bounded_at_our_addresses(path: str, is_ours: bool) -> None:
    """By path and by pattern; another limit is seen at once."""
    for most in (1_000, 2_000):
        with override_settings(STREAMSERVE={**settings.STREAMSERVE, "LIMITS": {"MAX_BODY_BYTES": most}}):
            bound = _bound_of(path)
        assert (bound is not None) is is_ours
        if bound is not None:
            assert (bound.body_bytes == most) is not bool(bound.file_bytes)


def test_wrong_settings_bound_no_page_of_the_site() -> None:
    """Its other pages are served; our views name the problem."""
    with override_settings(STREAMSERVE={"LIMIT": {}}):
        assert _bound_of("/cart") is None
