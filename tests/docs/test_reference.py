"""docs/reference/ is what `python -m docs.generate` writes, and has every key, route and event of the code."""

from __future__ import annotations

import pytest

from docs.generate import events, routes, settings
from docs.generate.pages import FOLDER, PAGES
from docs.generate.text import linked, table


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_the_code_is(name: str) -> None:
    """A change of the code needs `make reference`."""
    assert (FOLDER / name).read_text() == PAGES[name](), "run: make reference"


def test_the_folder_has_no_other_page() -> None:
    """Every file there is generated."""
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(PAGES)


def test_every_setting_has_its_meaning() -> None:
    """A new field needs a string below it."""
    assert settings.keys_without_meaning() == []


def test_every_key_of_a_model_is_in_its_table() -> None:
    """Also those that the site keeps beside the model's own."""
    assert settings.entry_keys_left_out() == set()


def test_every_route_is_in_a_group() -> None:
    """A new first part of addresses needs its heading."""
    assert routes.ungrouped() == []


def test_every_event_has_an_example() -> None:
    """A new kind of event needs one."""
    assert events.kinds_without_example() == set()


def test_a_page_that_a_docstring_names_becomes_a_link() -> None:
    """Also where the words before it are those of the page."""
    assert linked("How jobs (docs/jobs.md) run.") == "How [jobs](../jobs.md) run."
    assert linked("More wait (docs/fairness.md#the-door).") == "More wait ([the door](../fairness.md#the-door))."
    assert linked("Its code (docs/reference/errors.md).") == "Its code ([errors](errors.md))."


def test_a_cell_holds_any_text() -> None:
    """Bars and line breaks do not end a cell."""
    assert table(["a"], [["x | y\nz"]]) == "| a |\n| --- |\n| x \\| y z |\n"
