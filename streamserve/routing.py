"""The ASGI side of a site: `wrap` for one with an asgi.py, `application` for one without, `websocket_urlpatterns`.

Importing this module needs no app registry, so that an asgi.py may import it anywhere: its names are made on first use
(PEP 562).
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from django.core.asgi import get_asgi_application


def wrap(django_application: Any) -> Any:
    """Return `django_application` with streaming and WebSockets: the `application` of the site's asgi.py.

    A site with WebSocket routes of its own writes the same lines with `websocket_urlpatterns + theirs`.
    """
    from channels.auth import AuthMiddlewareStack
    from channels.routing import ProtocolTypeRouter, URLRouter
    from django.urls import re_path

    from streamserve.asgi.guard import Guard
    from streamserve.asgi.middleware import StreamMiddleware
    from streamserve.conf import SiteConfig, get_problems, get_settings
    from streamserve.web.site import begin_to_drain, reset, shut_down_streams
    from streamserve.web.websocket import deny_unknown_path

    unknown = re_path("", deny_unknown_path)  # type: ignore[arg-type]  # without it the router raises: a 500
    websocket = AuthMiddlewareStack(URLRouter([*_websocket_urlpatterns(), unknown]))
    settings = SiteConfig() if get_problems() else get_settings()  # the system checks name the problems
    hardens, limits, flow = settings.harden_event_streams, settings.limits, settings.flow
    guard = Guard(
        max_connections=limits.max_connections,
        max_per_address=limits.max_connections_per_address,
        body_seconds=flow.head_seconds,
        bound_of=_bound_of,
    )
    router = ProtocolTypeRouter({"http": django_application, "websocket": websocket})
    middleware = StreamMiddleware(router, harden=hardens, guard=guard, stall_seconds=flow.stall_seconds)
    middleware.on_shutdown(reset)
    middleware.on_drain(begin_to_drain)
    middleware.on_going_away(shut_down_streams)
    middleware.serve_while_draining("/livez", "/readyz", "/metrics")
    return middleware


def with_static_files(django_application: Any) -> Any:
    """Return `django_application` with static files while DEBUG is on, for `daphne` without runserver."""
    from django.apps import apps
    from django.conf import settings
    from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler

    if settings.DEBUG and apps.is_installed("django.contrib.staticfiles"):
        return ASGIStaticFilesHandler(django_application)
    return django_application


def _bound_of(path: str) -> Any:
    """Return the bounds of the bodies of a route, None for an address of the site's own."""
    from streamserve.asgi.guard import RouteBound
    from streamserve.conf import get_settings

    for pattern, error_json in _route_patterns():
        if pattern.fullmatch(path):
            return RouteBound(body_bytes=get_settings().limits.max_body_bytes, error_json=error_json)
    return None


@cache
def _route_patterns() -> list[tuple[re.Pattern[str], Any]]:
    """Return the paths of our routes, below the prefix under which the site includes them."""
    from django.urls import NoReverseMatch, reverse

    from streamserve.api.routes import ROUTES

    try:
        prefix = reverse("streamserve:livez").removesuffix("/livez")
    except NoReverseMatch:  # the site includes none
        return []
    return [(re.compile(re.escape(prefix) + route.pattern().pattern), route.error_json) for route in ROUTES]


@cache
def _application() -> Any:
    return wrap(with_static_files(get_asgi_application()))


@cache
def _websocket_urlpatterns() -> list[Any]:
    from django.urls import path

    from streamserve.web.websocket import StreamConsumer

    return [path("ws/streams", StreamConsumer.as_asgi())]


def __getattr__(name: str) -> Any:
    """Make `application`, the whole site, or `websocket_urlpatterns`."""
    made = {"application": _application, "websocket_urlpatterns": _websocket_urlpatterns}
    if name not in made:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return made[name]()
