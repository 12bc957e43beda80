"""The addresses of the help pages."""

from __future__ import annotations

from django.urls import path

from project.help import views

app_name = "help"
urlpatterns = [
    path("", views.index, name="index"),
    path("support/talk-to-a-human/", views.human, name="human"),
    path("<slug:slug>/", views.passage, name="passage"),
]
