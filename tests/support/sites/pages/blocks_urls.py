"""A page whose chat is a model, and one whose chat is a pipeline."""

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import include, path

from streamserve.web.chat_page import widget_config


def page(request: HttpRequest, model: str) -> HttpResponse:
    user = request.user if request.user.is_authenticated else None
    return render(request, "streamserve/chat_page.html", {"streamserve": widget_config(request, user, model=model)})


urlpatterns = [
    path("model/", page, {"model": "echo"}),
    path("pipeline/", page, {"model": "bills"}),
    path("invoices/", page, {"model": "invoices"}),
    path("admin/", admin.site.urls),
    path("", include("streamserve.urls")),
]
