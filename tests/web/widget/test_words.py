"""The texts of the scripts: all of them can be translated, and reach the page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from django.template import Context, Template
from django.test import RequestFactory, override_settings
from django.utils import translation
from django.utils.translation import trans_real

import streamserve
from streamserve.web.widget.words import WORDS, translations

SCRIPTS = Path(streamserve.__file__).parent / "static" / "streamserve"
USED = re.compile(r'\bwords\(\s*"((?:[^"\\]|\\.)*)"')
PO = """msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

msgid "Answer complete"
msgstr "Antwort fertig"

msgid "Your question"
msgstr "Ihre Frage"

msgid "{count} tokens"
msgstr "{count} \\"Token\\""
"""


def test_every_text_of_the_scripts_is_known_to_gettext() -> None:
    used = {text for script in SCRIPTS.glob("*.js") for text in USED.findall(script.read_text())}
    assert used == set(WORDS)


def test_english_brings_nothing() -> None:
    with translation.override("en"):
        assert translations() == {}


@pytest.fixture
def german(tmp_path: Path) -> Path:
    """A site's own translation, compiled as `compilemessages` does."""
    msgfmt = shutil.which("msgfmt")
    if msgfmt is None:
        pytest.skip("msgfmt is missing: apt-get install -y gettext")
    folder = tmp_path / "de" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    (folder / "django.po").write_text(PO, encoding="utf-8")
    subprocess.run([msgfmt, "-o", folder / "django.mo", folder / "django.po"], check=True)
    return tmp_path


def test_a_translation_reaches_template_and_scripts(german: Path) -> None:
    """`LOCALE_PATHS` of the site is enough."""
    request = RequestFactory().get("/")
    with override_settings(LOCALE_PATHS=[str(german)], LANGUAGES=[("en", "English"), ("de", "Deutsch")]):
        trans_real._translations.clear()
        with translation.override("de"):
            html = Template("{% load streamserve %}{% streamserve_chat %}").render(Context({"request": request}))
            assert translations()["Answer complete"] == "Antwort fertig"
    trans_real._translations.clear()
    assert 'aria-label="Ihre Frage"' in html
    words = re.search(r'data-words="([^"]*)"', html)
    assert words is not None
    assert json.loads(words[1].replace("&quot;", '"'))["{count} tokens"] == '{count} "Token"'
