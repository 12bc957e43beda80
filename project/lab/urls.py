"""The lab's routes."""

from __future__ import annotations

from django.urls import path

from project.lab import views

app_name = "lab"

urlpatterns = [
    path("", views.page, name="page"),
    path("compare/", views.compare, name="compare"),
    path("token/", views.token, name="token"),
    path("guide.svg", views.guide, name="guide"),
    path("<slug:stream_id>/state/", views.state, name="state"),
    path("<slug:stream_id>/kill/web/", views.kill, {"what": "web"}, name="kill_web"),
    path("<slug:stream_id>/kill/engine/", views.kill, {"what": "engine"}, name="kill_engine"),
]
