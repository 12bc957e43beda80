"""`{% streamserve_chat %}` in a page of the site's own."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import ImproperlyConfigured
from django.template import Context, Template
from django.test import Client, RequestFactory, override_settings

from streamserve.clients.pipeline.client import forget, pipeline
from streamserve.clients.pipeline.run import Run
from streamserve.web import site
from streamserve.web.sealed import unseal

pytestmark = pytest.mark.django_db(transaction=True)


def render(tag: str, user: Any = None, **context: Any) -> str:
    request = RequestFactory().get("/page/?a=b")
    request.user = user or AnonymousUser()
    variables = {"request": request, "user": request.user, **context}
    return Template(f"{{% load streamserve %}}{{% streamserve_chat {tag} %}}").render(Context(variables))


@pytest.fixture
def desk() -> Iterator[None]:
    """A pipeline beside the site's model."""

    async def bills(run: Run) -> None:
        """Answer."""

    pipeline(bills)
    yield
    forget("bills")


def data(page: str, name: str) -> str:
    found = re.search(rf'data-{name}="([^"]*)"', page)
    assert found is not None
    return html.unescape(found[1])


@pytest.mark.parametrize("signed_in", [True, False])
def test_the_tag_renders_the_chat(alice: Any, signed_in: bool) -> None:
    """With its addresses and a CSRF token, and no inline script."""
    page = render("", alice if signed_in else None)
    assert data(page, "streams-url") == "/streams"
    assert data(page, "live-url") == "/livez"
    assert "csrfmiddlewaretoken" in page
    assert ("alice" in page) is signed_in
    assert "<script>" not in page


def test_its_arguments_are_shown(alice: Any) -> None:
    """A title, questions as one text or as a list, figures on demand, and nothing of the demo."""
    page = render('title="Ask <us>" suggestions="One? | Two?" figures=True', alice)
    assert "<h2>Ask &lt;us&gt;</h2>" in page
    assert re.findall(r'data-question="([^"]*)"', page) == ["One?", "Two?"]
    assert data(page, "figures") == "true"
    assert re.findall(r'data-question="([^"]*)"', render("suggestions=asked", alice, asked=["A|B?"])) == ["A|B?"]
    plain = render("", alice)
    assert data(plain, "figures") == "false"
    assert "data-question" not in plain
    assert "subscription" not in plain


def test_the_system_prompt_is_sealed() -> None:
    page = render('system="You are a pirate."')
    assert "pirate" not in page
    assert unseal(json.loads(data(page, "request"))["sealed_system"]) == "You are a pirate."
    assert json.loads(data(render(""), "request")) == {}


def test_conversations_are_kept_apart_by_visitor_and_name(alice: Any) -> None:
    keys = [data(render(tag), "storage-key") for tag in ("", 'title="A"', 'title="B"', 'name="x/y"', 'model="echo"')]
    keys.append(data(render("", alice), "storage-key"))
    assert len(set(keys)) == len(keys)
    assert all(key.count("/") == 2 for key in keys)


def test_a_model_of_its_own_leaves_no_choice() -> None:
    page = render('model="echo"')
    assert data(page, "model") == "echo"
    assert "<select" not in page
    with pytest.raises(ImproperlyConfigured, match="Did you mean 'echo'"):
        render('model="ecco"')


def test_several_models_are_a_choice(desk: None) -> None:
    """The first one answers unless another is chosen; a pipeline is shown by its title; an unknown one is named."""
    page = render('models="bills | echo"')
    assert data(page, "model") == "bills"
    assert re.findall(r'<option value="(\w+)"(?: selected)?>(\w+)<', page) == [("bills", "Bills"), ("echo", "echo")]
    assert '<option value="bills" selected>Bills' in page
    assert json.loads(data(page, "pipelines")) == ["bills"]
    with pytest.raises(ImproperlyConfigured, match="Did you mean 'echo'"):
        render("models=offered", offered=["bills", "ecco"])


def test_a_form_is_one_of_two() -> None:
    """The floating form brings its button and is a dialog that is closed; another form is named with the way out."""
    floating = render('form="corner" title="Ask us"')
    assert re.search(r'<section[^>]* role="dialog"[^>]* hidden', floating)
    assert "ss-launch" in floating
    assert "<h2>Ask a question</h2>" in floating  # its title is in its bar
    assert "ss-launch" not in render("")
    with pytest.raises(ImproperlyConfigured, match="The forms are fill, corner"):
        render('form="middle"')


def test_formulas_are_typeset_on_demand() -> None:
    assert data(render("math=True"), "math") == "true"
    assert data(render(""), "math") == "false"


def test_models_may_have_titles_and_the_chat_an_intro(desk: None) -> None:
    """What visitors read is the title; what is asked is the alias. Both are text."""
    page = render("models=offered intro=intro", offered={"bills": "All <bills>", "echo": "Echo"}, intro="Ask & see")
    assert data(page, "model") == "bills"
    assert '<option value="bills" selected>All &lt;bills&gt;</option>' in page
    assert '<option value="echo">Echo</option>' in page
    assert "<p>Ask &amp; see</p>" in page
    assert "<p></p>" not in render('models="bills"')


def test_budgets_reach_the_page() -> None:
    """In seconds; 0 is none."""
    page = render("first_token_budget=0.5 total_budget=5")
    assert (data(page, "first-token-budget"), data(page, "total-budget")) == ("0.5", "5")
    assert (data(render(""), "first-token-budget"), data(render(""), "total-budget")) == ("0", "0")


@pytest.mark.parametrize("login_url", ["admin:login", "/nowhere/", "https://login.example/?x=1"])
def test_a_visitor_who_may_not_ask_is_told_so(login_url: str, alice: Any) -> None:
    """With the login, and the way back, where the site has one."""
    with override_settings(LOGIN_URL=login_url):
        page = render("")
        assert re.search(r"<form class=.ss-composer.[^>]* hidden>", page)
        assert "Sign in to ask a question." in page
        assert ("<a href" in page) is (login_url != "/nowhere/")
        if login_url == "admin:login":
            assert 'href="/admin/login/?next=%2Fpage%2F%3Fa%3Db"' in page
        assert not re.search(r"<form class=.ss-composer.[^>]* hidden>", render("", alice))


def test_without_a_request_the_error_has_the_remedy() -> None:
    with pytest.raises(ImproperlyConfigured, match=r"context_processors\.request"):
        Template("{% load streamserve %}{% streamserve_chat %}").render(Context({}))


def test_under_wsgi_the_page_makes_no_runtime() -> None:
    """A site may serve its pages by gunicorn: a worker's lock and clients for each page would pile up there."""
    before = site._site
    assert Client().get("/").status_code == 200
    assert site._site is before
