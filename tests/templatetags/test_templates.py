"""`{% streamserve_chat %}` in a page of the site's own."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser
from django.template import Context, Template
from django.test import Client, RequestFactory

from streamserve.web import site

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("signed_in", [True, False])
def test_the_tag_renders_the_chat(alice: Any, signed_in: bool) -> None:
    """With its addresses and a CSRF token, and no inline script."""
    request = RequestFactory().get("/")
    request.user = alice if signed_in else AnonymousUser()
    context = Context({"request": request, "user": request.user})
    html = Template("{% load streamserve %}{% streamserve_chat %}").render(context)
    assert 'data-streams-url="/streams"' in html
    assert "csrfmiddlewaretoken" in html
    assert ("alice" in html) is signed_in
    assert "<script>" not in html


def test_under_wsgi_the_page_makes_no_runtime() -> None:
    """A site may serve its pages by gunicorn: a worker's lock and clients for each page would pile up there."""
    before = site._site
    assert Client().get("/").status_code == 200
    assert site._site is before
