"""Which language a question is in, what it is in English, and what is said in it."""

from __future__ import annotations

import pytest

from project.help.index import current_index
from project.help.languages import in_english, language_of, languages
from project.help.questions.dev import ANSWERED, UNANSWERED
from project.help.search import candidates, choose

pytestmark = pytest.mark.usefixtures("knowledge")

ASKED = [
    ("de", "Wo finde ich meine Rechnungen?", "invoice-where"),
    ("de", "Passwort vergessen", "login-forgot"),
    ("fr", "Comment annuler mon abonnement ?", "cancel-how"),
    ("fr", "Y a-t-il une remise pour les étudiants ?", "discount-student"),
    ("es", "¿Cuánto almacenamiento tengo?", "storage-limit"),
    ("es", "Mi paquete no llega", None),
    ("ja", "学割はありますか", "discount-student"),
    ("ja", "オフラインで使えますか？", "app-offline"),
]


@pytest.mark.parametrize(("code", "question", "slug"), ASKED)
def test_a_question_is_searched_in_english(code: str, question: str, slug: str | None) -> None:
    """Its language is known by its words, and its terms find the page."""
    found = candidates(question)
    assert found["language"] == code
    if slug:
        assert choose(found)[0]["slug"] == slug


def test_an_english_question_is_english() -> None:
    """None of the questions that the search was tuned on is taken for another language."""
    knows = current_index().knows
    asked = [*(question for _, question in ANSWERED), *UNANSWERED, "die", "Team", "", "?!", "12"]
    assert {question for question in asked if language_of(question, knows) != "en"} == set()


def test_each_language_has_all_texts() -> None:
    """The four languages, each with its words and sentences; terms are in lower case, as they are compared."""
    assert set(languages()) == {"de", "fr", "es", "ja"}
    for code, language in languages().items():
        assert all((language.no_answer, language.in_english, language.not_from_pages, language.terms))
        assert "help@quillbox.example" in language.no_answer
        assert "Talk to a human" in language.no_answer
        assert [term for term in language.terms if term != term.lower()] == []
        assert bool(language.small_words) == (code != "ja")


def test_words_that_no_term_begins_stay() -> None:
    """Names are the same in every language."""
    assert in_english("Gibt es Webhooks in Quillbox?", "de").split() == ["webhooks", "in", "quillbox"]
    assert in_english("Webhooks are there", "en") == "Webhooks are there"
    assert "API" in in_english("APIの料金", "ja").split()
