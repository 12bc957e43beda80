"""The chat page: a whole page with a strict Content-Security-Policy, and the context of its element in other pages."""

from __future__ import annotations

from typing import Any

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from streamserve.conf import get_settings
from streamserve.web.auth import give_cookie, visitor
from streamserve.web.site import start_loading
from streamserve.web.views import non_atomic
from streamserve.web.widget.config import widget_config

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
