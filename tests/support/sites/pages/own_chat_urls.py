"""A site whose own `chat/` stands behind streamserve's routes."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import include, path


def own(request: HttpRequest) -> HttpResponse:
    """Answer as the site would."""
    return HttpResponse("the site's own")


urlpatterns = [path("", include("streamserve.urls")), path("chat/", own)]
