"""The chat in German, French, Spanish and Japanese: whole catalogues, compiled, shown where a site is in them."""

from __future__ import annotations

import ast
import html
import json
import re
from gettext import GNUTranslations
from pathlib import Path

import pytest
from django.template import Context, Template
from django.test import AsyncClient, RequestFactory, override_settings
from django.utils import translation
from django.utils.translation.template import templatize

import streamserve
from streamserve.web.chat_page import WORDS

PACKAGE = Path(streamserve.__file__).parent
LANGUAGES = ["de", "es", "fr", "ja"]
TEMPLATES = ["chat.html", "chat_page.html", "conversation_list.html", "shared_page.html"]
MARKED = re.compile(r"""\b(?:gettext|_)\(u?("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""")
MESSAGE = re.compile(r'^msgid ("(?:[^"\\]|\\.)+")\nmsgstr ("(?:[^"\\]|\\.)+")$', re.MULTILINE)
PLACEHOLDER = re.compile(r"\{\w+\}|</?\w+>")


def catalogue(language: str, suffix: str) -> Path:
    return PACKAGE / "locale" / language / "LC_MESSAGES" / f"django.{suffix}"


def compiled(language: str) -> dict[str, str]:
    with catalogue(language, "mo").open("rb") as file:
        messages: dict[str, str] = GNUTranslations(file)._catalog  # type: ignore[attr-defined]
    return {text: other for text, other in messages.items() if text}


def marked(template: str) -> set[str]:
    """Return the texts of a template that are marked for translation, as `makemessages` finds them."""
    source = templatize((PACKAGE / "templates" / "streamserve" / template).read_text())
    return {ast.literal_eval(text) for text in MARKED.findall(source)}


def test_there_is_a_catalogue_for_each_language() -> None:
    assert sorted(folder.name for folder in (PACKAGE / "locale").iterdir()) == LANGUAGES


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_catalogue_has_every_text(language: str) -> None:
    """Of the templates and of the scripts, and none that is no longer used."""
    used = set(WORDS).union(*map(marked, TEMPLATES))
    assert set(compiled(language)) == used
    assert "Ask a question" in used


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_translation_keeps_values_and_tags(language: str) -> None:
    for text, other in compiled(language).items():
        assert sorted(PLACEHOLDER.findall(text)) == sorted(PLACEHOLDER.findall(other)), text


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_is_shipped_is_compiled_from_what_is_read(language: str) -> None:
    """After a change of `django.po`: make locale."""
    written = catalogue(language, "po").read_text(encoding="utf-8")
    read = {ast.literal_eval(text): ast.literal_eval(other) for text, other in MESSAGE.findall(written)}
    assert read == compiled(language)


@pytest.mark.parametrize(
    ("language", "question", "complete"),
    [
        ("de", "Ihre Frage", "Antwort fertig"),
        ("fr", "Votre question", "Réponse terminée"),
        ("es", "Su pregunta", "Respuesta completa"),
        ("ja", "質問", "回答が完了しました"),
    ],
)
def test_the_element_is_in_the_active_language(language: str, question: str, complete: str) -> None:
    """The template's texts and the scripts' texts, with nothing set but the language."""
    page = Template("{% load streamserve %}{% streamserve_chat %}")
    with translation.override(language):
        shown = page.render(Context({"request": RequestFactory().get("/")}))
    assert f'aria-label="{question}"' in shown
    words = re.search(r'data-words="([^"]*)"', shown)
    assert words is not None
    assert json.loads(html.unescape(words[1]))["Answer complete"] == complete


@pytest.mark.django_db(transaction=True)
async def test_the_chat_page_of_a_german_site_is_german() -> None:
    with override_settings(LANGUAGE_CODE="de", ROOT_URLCONF="tests.support.sites.pages.chat_urls"):
        response = await AsyncClient().get("/chat/")
    page = response.content.decode()
    assert '<html lang="de">' in page
    assert "Stellen Sie eine Frage" in page
    assert "Ask a question<" not in page
