"""The same site with streamserve's routes under "ai/"."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

from streamserve.web.chat_page import chat_page

urlpatterns = [
    path("chat/", chat_page),
    path("admin/", admin.site.urls),
    path("ai/", include("streamserve.urls")),
]
