"""The ready chat page of `streamserve.urls`, at `chat/`, and who may open it: the setting CHAT_PAGE.

Without the setting it is there while DEBUG is on, for visitors from this machine. They may ask there without a login:
the page gives them the visitor's cookie, and `authenticate` (auth.py) takes it. A request without that
cookie is refused as everywhere, and pages of other sites are stopped by the same checks as for every cookie
(access.py). A page with other rules is a route of the site's own to `chat_page`.
"""

from __future__ import annotations

from typing import Any

from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponseBase
from django.urls.resolvers import RoutePattern, URLPattern

from streamserve.conf import get_settings
from streamserve.web.chat_page import render_chat
from streamserve.web.local import is_local
from streamserve.web.views import non_atomic

_TEMPLATE = "streamserve/ready_page.html"
_NOT_LOCAL = (
    "The chat page is for visitors from this machine while DEBUG is on. "
    'STREAMSERVE["CHAT_PAGE"] names who else may open it: "staff", "authenticated" or "anyone".'
)


@non_atomic
async def ready_page(request: HttpRequest) -> HttpResponseBase:
    """Show the chat to those whom CHAT_PAGE names; send the others to the login, or away."""
    audience = get_settings().chat_page
    if audience == "debug":
        if not is_local(request.headers, request.META.get("REMOTE_ADDR") or ""):
            raise Http404(_NOT_LOCAL)
        return await render_chat(request, _TEMPLATE, is_open=True)
    if audience != "anyone":
        user = await request.auser() if hasattr(request, "auser") else None
        if user is None or not user.is_authenticated:
            return redirect_to_login(request.get_full_path())
        if audience == "staff" and not user.is_staff:
            raise PermissionDenied
    return await render_chat(request, _TEMPLATE)


ready_page.login_required = False  # type: ignore[attr-defined]  # of LoginRequiredMiddleware: it decides by itself


class ReadyRoute(RoutePattern):
    """Matches nothing while the page is off, so that a `chat/` of the site's own is found behind it."""

    def match(self, path: str) -> Any:
        found = super().match(path)
        return found if found is not None and get_settings().chat_page != "off" else None


def ready_route(route: str, name: str) -> URLPattern:
    """Return the page's URL pattern."""
    return URLPattern(ReadyRoute(route, name=name, is_endpoint=True), ready_page, name=name)
