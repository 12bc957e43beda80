"""The ASGI side of a site: `wrap` for its asgi.py, `application` for a site without an asgi.py,
`websocket_urlpatterns`.

Importing this module needs no app registry, so that an asgi.py may import it anywhere: its names are made on first use
(PEP 562).
"""

from __future__ import annotations

import logging
import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from django.core.asgi import get_asgi_application

if TYPE_CHECKING:
    from streamserve.asgi.guard import RouteBound
    from streamserve.conf import SiteConfig
    from streamserve.protocol.limits import Limits

logger = logging.getLogger("streamserve.asgi")


def wrap(application: Any, *, websocket: Any = None) -> Any:
    """Return the site's ASGI `application` with streaming and our WebSocket: the last line of its asgi.py.

    `application` is Django's own, a ProtocolTypeRouter, or any ASGI app. WebSockets at other paths than ours reach
    `websocket` (an app, for example a URLRouter), else the router's own entry, else the app. While DEBUG is on,
    Django's application also serves static files, as runserver does. A wrapped application is returned as it is.
    """
    from channels.auth import AuthMiddlewareStack
    from channels.routing import ProtocolTypeRouter

    from streamserve.asgi.middleware import StreamMiddleware
    from streamserve.conf import SiteConfig, get_problems, get_settings
    from streamserve.web.front import Front
    from streamserve.web.site import begin_to_drain, begin_to_serve, reset, shut_down_streams
    from streamserve.web.websocket import SocketRouter, StreamConsumer, deny_unknown_path

    if isinstance(application, StreamMiddleware):
        return application
    apps = _apps_of(application)
    others = websocket or apps.get("websocket") or deny_unknown_path
    apps["websocket"] = SocketRouter(AuthMiddlewareStack(StreamConsumer.as_asgi()), others)
    problems = get_problems()
    for problem in problems:  # servers other than runserver run no system checks; pages of the site's own are served
        logger.error("%s %s The site's answers are refused: `manage.py check`.", problem.message, problem.hint)
    settings = SiteConfig() if problems else get_settings()
    middleware = StreamMiddleware(
        ProtocolTypeRouter(apps),
        harden=settings.harden_event_streams,
        guard=_guard(settings, is_fronted=isinstance(apps.get("http"), Front)),
        stall_seconds=settings.flow.stall_seconds,
        drain_seconds=settings.flow.drain_seconds,
    )
    middleware.on_startup(begin_to_serve)
    middleware.on_shutdown(reset)
    middleware.on_drain(begin_to_drain)
    middleware.on_drain(lambda: middleware.serve_while_draining(*_probe_paths()))
    middleware.on_going_away(shut_down_streams)
    return middleware


def _apps_of(application: Any) -> dict[str, Any]:
    """Return the app of each protocol. Django's own serves HTTP alone, behind our front; any other serves all."""
    from channels.routing import ProtocolTypeRouter
    from django.core.handlers.asgi import ASGIHandler

    from streamserve.web.front import fronted

    if isinstance(application, ProtocolTypeRouter):
        apps = dict(application.application_mapping)
    elif isinstance(application, ASGIHandler):
        apps = {"http": application}
    else:
        apps = dict.fromkeys(("http", "websocket", "lifespan"), application)
    if isinstance(apps.get("http"), ASGIHandler):
        apps["http"] = fronted(with_static_files(apps["http"]))
    return apps


def with_static_files(django_application: Any) -> Any:
    """Return `django_application` with static files while DEBUG is on, for servers other than runserver."""
    from django.apps import apps
    from django.conf import settings
    from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler

    has_them = isinstance(django_application, ASGIStaticFilesHandler)
    if settings.DEBUG and not has_them and apps.is_installed("django.contrib.staticfiles"):
        return ASGIStaticFilesHandler(django_application)
    return django_application


def _guard(settings: SiteConfig, *, is_fronted: bool) -> Any:
    """Return the bounds of connections and bodies. Behind `Front` uploads are bounded when their caller is known."""
    from streamserve.asgi.guard import Guard

    return Guard(
        max_connections=settings.limits.max_connections,
        max_per_address=settings.limits.max_connections_per_address,
        max_uploads=0 if is_fronted else settings.limits.max_uploads,
        body_seconds=settings.flow.head_seconds,
        bound_of=_bound_of,
    )


def _bound_of(path: str) -> RouteBound | None:
    """Return the bounds of the bodies of a route, None for an address of the site's own."""
    from django.conf import settings as django_settings
    from django.core.exceptions import ImproperlyConfigured

    from streamserve.conf import get_settings

    try:
        fixed, patterns = _bounds(get_settings().limits)
    except ImproperlyConfigured:  # our views raise it; the site's own pages are served
        return None
    path = path.removeprefix((django_settings.FORCE_SCRIPT_NAME or "").rstrip("/"))
    bound = fixed.get(path)
    if bound is None:
        bound = next((one for pattern, one in patterns if pattern.fullmatch(path)), None)
    return bound


@lru_cache(maxsize=8)  # each request asks
def _bounds(limits: Limits) -> tuple[dict[str, RouteBound], list[tuple[re.Pattern[str], RouteBound]]]:
    """Return the bounds of our routes below the prefix under which the site includes them: by path, and by pattern."""
    from streamserve.api.batch.files import FORM_BYTES
    from streamserve.api.routes import PROBES, ROUTES
    from streamserve.asgi.guard import RouteBound
    from streamserve.web.websocket import path_of

    prefix = path_of("livez").removesuffix("/livez")
    fixed: dict[str, RouteBound] = {}
    patterns: list[tuple[re.Pattern[str], RouteBound]] = []
    for route in ROUTES:
        file_bytes = limits.max_file_bytes if route.takes_file else 0
        bound = RouteBound(
            body_bytes=file_bytes + FORM_BYTES if file_bytes else limits.max_body_bytes,
            file_bytes=file_bytes,
            error_json=route.error_json,
            is_probe=route.name in PROBES,
        )
        if "<" in route.path:
            patterns.append((re.compile(re.escape(prefix) + route.pattern().pattern), bound))
        else:
            fixed.setdefault(f"{prefix}/{route.path}", bound)
    return fixed, patterns


@cache
def _application() -> Any:
    return wrap(get_asgi_application())


@cache
def _websocket_urlpatterns() -> list[Any]:
    from django.urls import path

    from streamserve.web.websocket import StreamConsumer

    return [path("ws/streams", StreamConsumer.as_asgi())]


def _probe_paths() -> list[str]:
    """Return the paths that are answered while the server drains, under the prefix of the site's urls.py."""
    from django.conf import settings

    from streamserve.api.routes import PROBES
    from streamserve.web.websocket import path_of

    paths = [path_of(name) for name in PROBES]
    return [f"{script}{path}" for script in ("", (settings.FORCE_SCRIPT_NAME or "").rstrip("/")) for path in paths]


def __getattr__(name: str) -> Any:
    """Make `application`, the whole site, or `websocket_urlpatterns`."""
    made = {"application": _application, "websocket_urlpatterns": _websocket_urlpatterns}
    if name not in made:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return made[name]()
