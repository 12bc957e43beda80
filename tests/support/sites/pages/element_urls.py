"""The chat page at /chat/, the floating form at /corner/ and /other/, and streamserve's routes."""

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import include, path

from streamserve.web.chat_page import CONTENT_SECURITY_POLICY, widget_config


def chat(request: HttpRequest) -> HttpResponse:
    """Show LaTeX typeset."""
    config = widget_config(request, None, title="Ask us", figures=True, math=True)
    return strict(render(request, "streamserve/chat_page.html", {"streamserve": config}))


def corner(request: HttpRequest) -> HttpResponse:
    return strict(render(request, "corner.html"))


def strict(response: HttpResponse) -> HttpResponse:
    response["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
    return response


urlpatterns = [
    path("chat/", chat),
    path("corner/", corner),
    path("other/", corner),
    path("admin/", admin.site.urls),
    path("", include("streamserve.urls")),
]
