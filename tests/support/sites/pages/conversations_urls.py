"""The demo's addresses, and the floating form of the chat at /corner/."""

from __future__ import annotations

from django.urls import include, path

from tests.support.sites.pages.element_urls import corner

urlpatterns = [path("corner/", corner), path("", include("project.urls"))]
