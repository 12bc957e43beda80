"""Everything under /under/: the pages, the login, streamserve's routes."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path
from django.views.generic import TemplateView

everything = [
    path("light/", TemplateView.as_view(template_name="light.html")),
    path("dark/", TemplateView.as_view(template_name="light.html", extra_context={"scheme": "dark"})),
    path("two/", TemplateView.as_view(template_name="two.html")),
    path("admin/", admin.site.urls),
    path("", include("streamserve.urls")),
]
urlpatterns = [path("under/", include(everything))]
