"""Laws of the admin's page "Usage": its sums are those of the rows, by whatever they are put together."""

from __future__ import annotations

import csv
from datetime import date, timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from streamserve.models import UsageDay

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("one_day")]
PAGE = "/admin/streamserve/usageday/"


@pytest.fixture
def admin(root: Any) -> Client:
    client = Client()
    client.force_login(root)
    return client


@pytest.fixture
def rows(alice: Any) -> None:
    """Three users' days: of alice with a key, of a deleted user, and one long ago."""
    for ago, owner, model, num in (
        (0, f"user:{alice.pk}", "small", 1_000),
        (1, "key:5", "large", 200),
        (29, "user:4711", "=cmd()", 30),
        (30, "user:4711", "small", 4),
    ):
        tenant = owner if owner.startswith("user:4711") else f"user:{alice.pk}"
        day = timezone.localdate() - timedelta(days=ago)
        UsageDay.objects.create(
            day=day, owner=owner, tenant=tenant, model=model, kind="answer", requests=1, completion_tokens=num
        )


def names_of(client: Client, query: str) -> list[str]:
    page = client.get(PAGE + query)
    assert page.status_code == 200
    return [row["name"] for row in page.context["rows"]]


def test_sums_are_of_the_days_that_are_asked_for(admin: Client, rows: None) -> None:
    """Thirty days unless asked otherwise, with a bar for each day."""
    page = admin.get(PAGE)
    assert page.context["sums"]["completion_tokens"] == "1,230"
    assert len(page.context["bars"]) == 30
    assert [bar.height for bar in page.context["bars"]][-2:] == [32.0, 160.0]
    assert admin.get(f"{PAGE}?days=90").context["sums"]["completion_tokens"] == "1,234"
    assert admin.get(f"{PAGE}?days=7").context["sums"]["requests"] == "2"


def test_sums_and_bars_are_of_the_same_days(
    admin: Client, rows: None, one_day: date, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Midnight may come between them."""
    looks = iter([one_day])
    monkeypatch.setattr(timezone, "localdate", lambda: next(looks, one_day + timedelta(days=1)))
    page = admin.get(PAGE)
    assert page.context["sums"]["completion_tokens"] == "1,230"
    assert [bar.height for bar in page.context["bars"]][-2:] == [32.0, 160.0]


def test_rows_are_by_user_key_model_team_kind_or_day(admin: Client, rows: None) -> None:
    """The largest first, with names; what is asked for wrongly is the page as it begins."""
    assert names_of(admin, "") == ["alice", "user 4711, deleted"]
    assert names_of(admin, "?by=key") == ["alice", "key 5, deleted", "user 4711, deleted"]
    assert names_of(admin, "?by=model&days=90") == ["small", "large", "=cmd()"]
    assert names_of(admin, "?by=team") == ["no team"]
    assert names_of(admin, "?by=kind") == ["answer"]
    assert len(names_of(admin, "?by=day")) == 3
    assert names_of(admin, "?by=nothing&days=5") == names_of(admin, "")


def test_the_file_has_plain_numbers_and_no_formula(admin: Client, rows: None) -> None:
    """A model's name is a caller's text."""
    response = admin.get(f"{PAGE}?by=model&format=csv")
    head, *lines = csv.reader(response.content.decode().splitlines())
    assert head[:3] == ["model", "name", "requests"]
    assert [line[0] for line in lines] == ["small", "large", "'=cmd()"]
    assert lines[0][head.index("completion_tokens")] == "1000"


def test_the_page_takes_few_queries(admin: Client, rows: None) -> None:
    """As many with a hundred users as with three."""

    def num_queries() -> int:
        with CaptureQueriesContext(connection) as queries:
            admin.get(PAGE)
        return len(queries)

    before = num_queries()
    for number in range(100):
        owner = f"user:{get_user_model().objects.create_user(f'u{number}').pk}"
        UsageDay.objects.create(day=timezone.localdate(), owner=owner, tenant=owner, model="m", kind="answer")
    assert num_queries() == before


def test_an_empty_page_says_what_will_be_there(admin: Client) -> None:
    """And staff without the permission sees none."""
    assert "Each answer is added when it ends" in admin.get(PAGE).content.decode()
    staff = Client()
    staff.force_login(get_user_model().objects.create_user("staff", is_staff=True))
    assert staff.get(PAGE).status_code == 403


def test_a_row_has_a_page(admin: Client, rows: None) -> None:
    """It shows all columns, and changes none."""
    pk = UsageDay.objects.earliest("pk").pk
    page = admin.get(f"{PAGE}{pk}/change/").content.decode()
    assert "engine seconds" in page.lower()
    assert 'name="_save"' not in page
