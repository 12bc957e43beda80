"""The demo's addresses, and a page for each script of the folder REACT."""

from __future__ import annotations

import os
from pathlib import Path

from django.http import FileResponse, HttpRequest, HttpResponse
from django.urls import include, path
from django.views.decorators.csrf import ensure_csrf_cookie

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Chat</title></head>
<body><div id="chat"></div><script src="/react/{name}.js"></script></body></html>"""


@ensure_csrf_cookie
def page(request: HttpRequest, name: str) -> HttpResponse:
    return HttpResponse(_PAGE.format(name=name))


def script(request: HttpRequest, name: str) -> FileResponse:
    return FileResponse((Path(os.environ["REACT"]) / f"{name}.js").open("rb"), content_type="text/javascript")


urlpatterns = [
    path("react/<slug:name>/", page),
    path("react/<slug:name>.js", script),
    path("", include("project.urls")),
]
