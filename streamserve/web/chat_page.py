"""The chat page with its strict Content-Security-Policy, and what the chat element of any page is given.

That is addresses, model, texts, and whether the visitor may ask. Templates show it (streamserve/chat.html); the scripts
read it from `data-*` attributes. It does not depend on where the site's URLs are included: every address is made by
`reverse`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.contrib.auth import REDIRECT_FIELD_NAME
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render, resolve_url
from django.urls import Resolver404, get_script_prefix, resolve, reverse

from streamserve.clients.pipeline.client import PIPELINES
from streamserve.conf import SiteConfig, get_settings
from streamserve.conf_reader import nearest
from streamserve.web.auth import give_cookie, visitor
from streamserve.web.site import start_loading
from streamserve.web.views import non_atomic
from streamserve.web.websocket import socket_path
from streamserve.web.widget.sealed import seal
from streamserve.web.widget.words import translations

_STORAGE = "streamserve.chat"  # begins every key of the browser's storage that is ours


def widget_config(
    request: HttpRequest,
    user: Any,
    *,
    model: str = "",
    system: str = "",
    suggestions: str | Iterable[str] = (),
    title: str = "",
    name: str = "",
    figures: bool = False,
    models: str | Iterable[str] = (),
    budgets: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the variable `streamserve` of chat.html. `user` is the visitor, or None.

    `name` keeps the conversations of different widgets apart; without one those of another model or title are.
    `models` are those a visitor may choose from, the first one unless another is chosen. `budgets` has `first_token`
    and `total`, in seconds, to be shown beside what was measured.
    """
    settings = get_settings()
    offered = [model] if model else _listed(models)
    for alias in offered:
        _check_model(alias, settings)
    budgets = budgets or {}
    username = user.get_username() if user is not None and user.is_authenticated else ""
    return {
        "streams_url": reverse("streamserve:streams"),
        "ready_url": reverse("streamserve:readyz"),
        "live_url": reverse("streamserve:livez"),
        "websocket_url": get_script_prefix() + socket_path().removeprefix("/"),
        "models": offered or list(settings.models),
        "default_model": offered[0] if offered else settings.default_model,
        "first_token_budget": json.dumps(budgets.get("first_token", 0)),
        "total_budget": json.dumps(budgets.get("total", 0)),
        "request": json.dumps({"sealed_system": seal(system)} if system else {}),
        "suggestions": _listed(suggestions),
        "title": title.strip(),  # text, also where a template has it as a literal, which Django takes for HTML
        "figures": figures,
        "words": json.dumps(translations(), ensure_ascii=False),
        "signed_in_as": username,
        "storage_key": f"{_STORAGE}/{quote(username, safe='')}/{quote(name or _default_name(model, title), safe='')}",
        "needs_sign_in": not (username or settings.anonymous),
        "login_url": _login_url(request),
        "keepalive_seconds": settings.streams.keepalive_seconds,
        "csrf_cookie": django_settings.CSRF_COOKIE_NAME,
    }


def _check_model(model: str, settings: SiteConfig) -> None:
    """Raise for a model or pipeline that the site does not serve: its page would refuse every question."""
    if model and model not in settings.models and model not in PIPELINES:
        hint = nearest(model, settings.models) or f"It has {', '.join(settings.models)}."
        raise ImproperlyConfigured(f'A chat names the model {model!r}, which is not in STREAMSERVE["MODELS"]. {hint}')


def _listed(given: str | Iterable[str]) -> list[str]:
    """Return the texts; in a template they are one string, with | between them."""
    each = given.split("|") if isinstance(given, str) else given
    return [text for text in (str(one).strip() for one in each) if text]


def _default_name(model: str, title: str) -> str:
    if not (model or title):
        return "chat"
    return hashlib.sha256(json.dumps([model, title]).encode()).hexdigest()[:8]


def _login_url(request: HttpRequest) -> str:
    """Return the address of the site's login that leads back to this page; "" if there is none."""
    url = resolve_url(django_settings.LOGIN_URL)
    parts = urlsplit(url)
    if not parts.netloc:
        try:
            resolve("/" + parts.path.removeprefix(get_script_prefix()))
        except Resolver404:
            return ""
    query: Mapping[str, str] = {REDIRECT_FIELD_NAME: request.get_full_path()}
    return f"{url}{'&' if parts.query else '?'}{urlencode(query)}"


CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


@non_atomic
async def chat_page(request: HttpRequest, template_name: str = "streamserve/chat_page.html") -> HttpResponse:
    """Show the chat page. The site may require a login for it; the streams it starts are checked by themselves."""
    if hasattr(request, "scope"):  # a WSGI worker beside the ASGI server loads no model
        start_loading()
    context = await chat_context(request)
    response = await sync_to_async(render)(request, template_name, context)
    response["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
    response["Cache-Control"] = "private, no-store"
    if get_settings().anonymous:
        give_cookie(response, visitor({"cookie": request.headers.get("Cookie", "")}))
    return response


async def chat_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the chat."""
    user = await request.auser() if hasattr(request, "auser") else None
    return {"streamserve": widget_config(request, user)}
