"""The demo site: the chat page at /, the lab, the help pages, the admin, and streamserve's routes."""

from __future__ import annotations

from django.conf import settings
from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView

from streamserve.web.chat_page import chat_page

admin.site.site_header = admin.site.site_title = "streamserve, the demo"

urlpatterns = [
    path("favicon.ico", RedirectView.as_view(url=f"{settings.STATIC_URL}streamserve/icon.svg")),  # the admin names none
    path("", chat_page, {"template_name": "home.html"}, name="home"),
    path("lab/", include("project.lab.urls")),
    path("help/", include("project.help.urls")),
    path("admin/", admin.site.urls),
    path("", include("streamserve.urls")),
]
