"""The checks of an account review: arithmetic on values that somebody may have edited."""

from __future__ import annotations

from decimal import Decimal

import pytest

from project.help.review import SAMPLE, account_of, dollars, execute, number_in, plan
from project.help.search import Hit
from streamserve.protocol.errors import BadRequest


def passage(slug: str, **values: str) -> Hit:
    return Hit(slug=slug, title=slug, url="/", sentences=[], values=values, text="", score=0.0)


PASSAGES = [
    passage("price-team", month="$15"),
    passage("price-yearly", free="two months"),
    passage("seat-remove"),
    passage("storage-limit", team="100 GB"),
]


@pytest.mark.parametrize(
    ("text", "number"),
    [("$15", "15"), ("$1,250.50", "1250.50"), ("100 GB", "100"), ("two months", "2"), ("Three seats", "3")],
)
def test_a_value_begins_with_its_number(text: str, number: str) -> None:
    """Prices, sizes and small numbers in words."""
    assert number_in(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "ask us", "about $15"])
def test_a_value_without_a_number_gives_no_finding(text: str) -> None:
    """The review leaves that check out, and goes on with the others."""
    with pytest.raises(ValueError):
        number_in(text)
    edited = [passage("price-team", month=text), *PASSAGES[1:]]
    found = execute(SAMPLE, ["price", "yearly", "seats", "storage"], edited)
    assert [one["check"] for one in found] == ["storage"]


def test_only_checks_that_concern_the_account_are_planned() -> None:
    """And of these only such whose passages are there."""
    slugs = [hit["slug"] for hit in PASSAGES]
    assert plan(SAMPLE, slugs) == ["price", "yearly", "seats", "storage"]
    assert plan({**SAMPLE, "pays": "yearly", "members": 12}, slugs) == ["price", "storage"]
    assert plan({**SAMPLE, "plan": "Business"}, slugs) == []
    assert plan(SAMPLE, slugs[1:]) == ["storage"]


def test_amounts_are_written_as_prices_are() -> None:
    """Cents only where there are any."""
    assert [dollars(Decimal(one)) for one in ("8", "1020", "7.5")] == ["$8", "$1,020", "$7.50"]


@pytest.mark.parametrize(
    ("account", "param"),
    [
        ("Team", "input.account"),
        ({**SAMPLE, "plan": "Gold"}, "input.account.plan"),
        ({**SAMPLE, "seats": -1}, "input.account.seats"),
        ({**SAMPLE, "seats": True}, "input.account.seats"),
        ({**SAMPLE, "pays": "daily"}, "input.account.pays"),
        ({**SAMPLE, "colour": "red"}, "input.account.colour"),
        ({}, "input.account.plan"),
        ({"plan": "Solo", "pays": "yearly", "members": 1, "storage_gb": 2}, "input.account.seats"),
    ],
)
def test_a_wrong_account_is_named(account: object, param: str) -> None:
    """The error names the field. One that is not given is not taken from the example."""
    with pytest.raises(BadRequest) as caught:
        account_of({"account": account})
    assert caught.value.param == param
