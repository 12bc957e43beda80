"""The billing assistant on the echo engine: it says what the passages say, cites them, or does not know."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from project.help.assistant import NO_ANSWER, NOT_FROM_PAGES
from project.help.languages import languages
from project.help.models import Passage
from project.help.review import EXAMPLE, account_review
from streamserve.protocol.events import Citation, Status, Token
from tests.support.sites.help_desk import Ask, assistant_over
from tests.support.streams.hand_made import started_echo

pytestmark = pytest.mark.usefixtures("shared_knowledge")


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    model = await started_echo()
    async with assistant_over(model) as asking:
        yield asking
    await model.aclose()


@sync_to_async
def set_value(slug: str, **values: str) -> None:
    passage = Passage.objects.get(slug=slug)
    passage.values = {**passage.values, **values}
    passage.full_clean()
    passage.save()


async def test_an_edited_price_changes_the_next_answer_and_its_citation(ask: Ask) -> None:
    """The value and the title are those of the passage as it is now."""
    question = "What does the Team plan cost?"
    first = await ask(question)
    assert first.text == "The Team plan costs $15 per seat a month, with a minimum of two seats. [1]"
    assert first.cited == ["price-team"]
    assert first.steps == ["Searching the help pages", "Choosing the passages", "Writing the answer"]
    await set_value("price-team", month="$17")
    await Passage.objects.filter(slug="price-team").aupdate(title="Team's price")
    team = await Passage.objects.aget(slug="price-team")
    await team.asave()
    second = await ask(question)
    assert second.text == "The Team plan costs $17 per seat a month, with a minimum of two seats. [1]"
    (citation,) = [event for event in second.events if isinstance(event, Citation)]
    assert (citation.id, citation.title, citation.url) == ("price-team", "Team's price", "/help/price-team/")


async def test_the_price_list_follows_an_edited_price(ask: Ask) -> None:
    """Its values are those of the plans' passages; without one of them it is not an answer any more."""
    first = await ask("What does it cost?")
    assert first.text.startswith("Solo costs $8 a month for one person, Team $15 and Business $29 per seat")
    assert first.cited == ["about-prices"]
    await set_value("price-team", month="$17")
    assert "Team $17 and" in (await ask("What does it cost?")).text
    await Passage.objects.filter(slug="price-team").adelete()
    assert "about-prices" not in (await ask("What does it cost?")).cited


@pytest.mark.parametrize(
    ("question", "declined"),
    [
        ("Who won the match?", NO_ANSWER),
        ("Wer hat das Spiel gewonnen?", languages()["de"].no_answer),
        ("Quel temps fait-il à Paris ?", languages()["fr"].no_answer),
        ("¿Quién ganó el partido?", languages()["es"].no_answer),
        ("今日の試合はどうでしたか？", languages()["ja"].no_answer),
        ("Chi ha vinto la partita?", NO_ANSWER),
    ],
)
async def test_it_declines_in_the_language_of_the_question(ask: Ask, question: str, declined: str) -> None:
    """In words that name the way to a person; in English where the language is not one of four."""
    answer = await ask(question)
    assert (answer.text, answer.cited) == (declined, [])


async def test_a_real_model_answers_below_the_threshold(ask: Ask, settings: Any) -> None:
    """The answer begins with the words that it is not from the help pages, and names no source."""
    settings.HELP_BESIDE_PAGES = True
    for question, mark in (("Who won the match?", NOT_FROM_PAGES), ("Wer hat das Spiel gewonnen?", "Nicht aus den")):
        answer = await ask(question)
        assert answer.text.startswith(f"*{mark}")
        assert len(answer.text) > len(f"*{mark}* ")
        assert answer.cited == []


async def test_the_pages_of_an_answer_without_marks_are_its_sources(ask: Ask, settings: Any) -> None:
    """A model may forget the number of a passage: readers see which pages it was given."""
    settings.HELP_ANSWERS = "quotes"
    assert (await ask("What does the Team plan cost?")).cited == ["price-team"]


async def test_a_removed_passage_leads_to_no_answer_and_no_citation(ask: Ask) -> None:
    """The answer is in no passage any more, so it is not given, whatever the model knows."""
    question = "Do you hold a webinar?"
    assert (await ask(question)).cited == ["support-training"]
    await Passage.objects.filter(slug="support-training").adelete()
    answer = await ask(question)
    assert (answer.text, answer.cited) == (NO_ANSWER, [])


async def test_a_citation_comes_before_the_sentence_ends(ask: Ask) -> None:
    """Readers see the source while the sentence is written, and no piece of text has a brace."""
    answer = await ask("How do I pause my subscription?")
    kinds = [type(event) for event in answer.events if not isinstance(event, Status)]
    assert kinds.index(Citation) <= 1
    assert kinds.count(Token) > 10
    assert not any("{" in event.text for event in answer.events if isinstance(event, Token))
    assert answer.text.count("[1]") == 1  # behind the last of its sentences


async def test_a_greeting_is_answered_freely(ask: Ask) -> None:
    """No passage, no refusal: the model answers in its own words, after a question too."""
    for turns in (("Hello!",), ("How do I pause?", "Like this. [1]", "Thanks, that helps!")):
        answer = await ask(*turns)
        assert answer.text not in ("", NO_ANSWER)
        assert answer.cited == []


async def test_a_model_that_quotes_reads_the_passages(ask: Ask, settings: Any) -> None:
    """With "quotes" the passages are in the prompt, and the answer is the model's own text."""
    settings.HELP_ANSWERS = "quotes"
    answer = await ask("What does the Team plan cost?")
    assert answer.text
    assert answer.events[-1].usage.prompt_tokens > 60  # type: ignore[union-attr]


async def test_an_account_review_computes_with_the_passages_values() -> None:
    """12 seats at $15, 3 unused, paid monthly; an edited price changes every sum. An example is named as one."""
    model = await started_echo()
    async with assistant_over(model, account_review) as ask:
        first = await ask("Review my account")
        assert first.text == EXAMPLE + (
            "Unused seats: 3 of 12; removing them saves $45 a month from the next renewal. [1] "
            "Paying yearly would save $360 a year, because two months are free. [2] "
            "The Team plan costs this account $180 a month: 12 times $15. [3] "
            "Storage is nearly full: 1,150 GB of 1,200 GB are used. [4]"
        )
        assert first.cited == ["seat-remove", "price-yearly", "price-team", "storage-limit"]
        assert [step and step.split()[0] for step in first.steps] == ["Reading", "Planning", "Checking", "Writing"]
        await set_value("price-team", month="$20")
        account = {"plan": "Team", "pays": "yearly", "seats": 3, "members": 3, "storage_gb": 10}
        second = await ask(input={"account": account})
        assert second.text == "The Team plan costs this account $60 a month: 3 times $20. [1]"
    await model.aclose()
