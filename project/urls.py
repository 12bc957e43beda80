"""The demo site: the chat page at /, the help pages that it cites, the admin, and streamserve's routes."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

from streamserve.web.chat_page import chat_page

urlpatterns = [
    path("", chat_page, {"template_name": "home.html"}, name="home"),
    path("help/", include("project.help.urls")),
    path("admin/", admin.site.urls),
    path("", include("streamserve.urls")),
]
