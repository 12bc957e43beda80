"""The help pages: a page for each passage, which citations link to, a page with all, and the way to a person."""

from __future__ import annotations

from itertools import groupby

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render

from project.help.models import Passage


def index(request: HttpRequest) -> HttpResponse:
    """Show all passages by topic."""
    passages = Passage.objects.select_related("topic")
    topics = [(topic, list(each)) for topic, each in groupby(passages, key=lambda passage: passage.topic)]
    return render(request, "help/index.html", {"topics": topics})


def human(request: HttpRequest) -> HttpResponse:
    """Show the page of the link "Talk to a human", which an answer names: the demo's help desk has no staff."""
    return render(request, "help/human.html")


def passage(request: HttpRequest, slug: str) -> HttpResponse:
    """Show one passage, and the others of its topic."""
    found = get_object_or_404(Passage.objects.select_related("topic"), slug=slug)
    others = Passage.objects.filter(topic=found.topic).exclude(pk=found.pk)
    return render(request, "help/passage.html", {"passage": found, "others": others})
