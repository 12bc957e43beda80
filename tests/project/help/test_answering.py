"""What readers see of an answer from passages: whole slots, numbered sources, whatever the model's tokens are."""

from __future__ import annotations

from itertools import permutations

import pytest

from project.help.answering import Citations, Markers, SlotFiller, allowed_answers
from project.help.search import Hit
from project.help.slots import body_problems, fill, sentence_problems, value_problems


def passage(slug: str, *sentences: str, **values: str) -> Hit:
    url, each = f"/help/{slug}/", list(sentences)
    return Hit(slug=slug, title=slug.title(), url=url, sentences=each, values=values, text="", score=1.0)


TEAM = passage("team", "Team costs {price} a seat.", "It has {number}.", price="$15", number="50 seats")
SOLO = passage("solo", "Team costs less than {price}.", price="$8")  # begins as Team's does


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100])
def test_no_reader_sees_half_a_slot(size: int) -> None:
    """However the text is cut, no brace is shown, what was shown never changes, and the end is the same."""
    text = "Team costs {0.price} a seat. It has {0.number}. Team costs less than {1.price}."
    assert text in allowed_answers([TEAM, SOLO])
    events: list[str] = []
    filler = SlotFiller([TEAM, SOLO], Citations(lambda hit: events.append(f"<{hit['slug']}>")))
    for piece in cut(text, size):
        events.append(filler.feed(piece))
        assert not set(events[-1]) & set("{}")
    events.append(filler.flush())
    shown = "".join(events)
    assert "".join(one for one in events if not one.startswith("<")) == (
        "Team costs $15 a seat. It has 50 seats. [1] Team costs less than $8. [2]"
    )
    assert shown.index("<team>") < shown.index("[1]")
    assert shown.index("<solo>") < shown.index("[2]")


def test_a_passage_is_cited_as_soon_as_the_text_is_its_alone() -> None:
    """Two sentences begin alike: nothing is cited until they differ."""
    cited: list[str] = []
    filler = SlotFiller([TEAM, SOLO], Citations(lambda hit: cited.append(hit["slug"])))
    assert filler.feed("Team costs ") == "Team costs "
    assert cited == []
    assert filler.feed("l") == "l"
    assert cited == ["solo"]


def test_a_passage_that_is_cut_has_its_number_at_the_end() -> None:
    """Its number stands behind its last sentence; where that does not come, behind what came."""
    filler = SlotFiller([TEAM], Citations(lambda hit: None))
    assert filler.feed("Team costs {0.price} a seat. It has") == "Team costs $15 a seat. It has"
    assert filler.flush() == " [1]"


def test_an_answer_that_is_cut_in_a_slot_shows_nothing_of_it() -> None:
    """max_tokens may end an answer anywhere."""
    filler = SlotFiller([TEAM], Citations(lambda hit: None))
    assert filler.feed("Team costs {0.pri") + filler.flush() == "Team costs "


def test_allowed_answers_are_whole_passages_in_any_order() -> None:
    """Up to three sentences; no passage twice; one with more sentences gives its first three."""
    long = passage("long", "A.", "B.", "C.", "D.")
    assert allowed_answers([long]) == ["A. B. C."]
    ones = [passage(name, f"{name}.") for name in "xyz"]
    wanted = {" ".join(f"{name}." for name in each) for size in (1, 2, 3) for each in permutations("xyz", size)}
    assert set(allowed_answers(ones)) == wanted
    assert "A. B. C." in allowed_answers([long, *ones])
    assert not any("A." in text and "x" in text for text in allowed_answers([long, *ones]))


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_models_markers_become_citations(size: int) -> None:
    """They are numbered by first use; one without a passage is left out; brackets that are no marker stay."""
    cited: list[str] = []
    markers = Markers([TEAM, SOLO], Citations(lambda hit: cited.append(hit["slug"])))
    text = "It is $8 [2]. Team is $15 [1][2], not [x] or [9] or [123]. [3"
    shown = "".join(markers.feed(piece) for piece in cut(text, size)) + markers.flush()
    assert shown == "It is $8 [1]. Team is $15 [2][1], not [x] or or [123]. [3"
    assert cited == ["solo", "team"]


def test_slots_and_values_need_each_other() -> None:
    """The messages name the slot, the value or the brace that is wrong."""
    assert fill("{a} and {a}", {"a": "b"}) == "b and b"
    assert value_problems(["Costs {month}."], {"month": "$15"}) == []
    assert value_problems(["Costs {month}."], {}) == ["The slot {month} has no value. Add a line: month: …"]
    (unused,) = value_problems(["Costs."], {"month": "$15"})
    assert "{month}" in unused
    assert len(value_problems(["{a}"], {"a": "{b}"})) == len(value_problems(["{a}"], {"a": " "})) == 1
    assert len(value_problems(["{a}"], {"a": "x" * 201})) == 1
    assert body_problems("{a} b") == []
    for broken in ("Costs {Month}.", "Costs {month.", "Costs }.", "{0.month}"):
        (problem,) = sentence_problems([broken])
        assert "brace" in problem
    assert "one sentence" in sentence_problems([])[0]
    assert "400" in sentence_problems(["x" * 401])[0]
