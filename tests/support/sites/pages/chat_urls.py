"""The chat page at /chat/, and streamserve's routes."""

from __future__ import annotations

from django.urls import include, path

from streamserve.web.chat_page import chat_page

urlpatterns = [path("chat/", chat_page), path("", include("streamserve.urls"))]
