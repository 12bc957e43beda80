"""The chat page: the texts of its scripts can all be translated, and the system prompt that it carries is sealed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from django.template import Context, Template
from django.test import AsyncClient, RequestFactory, override_settings
from django.utils import translation
from django.utils.translation import trans_real

import streamserve
from streamserve.protocol.errors import BadRequest
from streamserve.web.chat_page import WORDS, translations
from streamserve.web.sealed import seal, unseal
from streamserve.web.site import get_site

SCRIPTS = Path(streamserve.__file__).parent / "static" / "streamserve"
USED = re.compile(r'\bwords\(\s*"((?:[^"\\]|\\.)*)"')
PO = """msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

msgid "Answer complete"
msgstr "Fertig!"

msgid "Your question"
msgstr "Was ist?"

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
    """`LOCALE_PATHS` of the site is enough, and goes before the texts that we ship."""
    request = RequestFactory().get("/")
    with override_settings(LOCALE_PATHS=[str(german)], LANGUAGES=[("en", "English"), ("de", "Deutsch")]):
        trans_real._translations.clear()
        with translation.override("de"):
            html = Template("{% load streamserve %}{% streamserve_chat %}").render(Context({"request": request}))
            assert translations()["Answer complete"] == "Fertig!"
    trans_real._translations.clear()
    assert 'aria-label="Was ist?"' in html
    words = re.search(r'data-words="([^"]*)"', html)
    assert words is not None
    assert json.loads(words[1].replace("&quot;", '"'))["{count} tokens"] == '{count} "Token"'


SECRET = "You are a pirate. Ünïcödé."
ASK = [{"role": "user", "content": "Hello"}]


def test_only_the_site_opens_it() -> None:
    """The text is not in the sealed form, in no common encoding; two pages have different forms of it."""
    sealed = seal(SECRET)
    assert unseal(sealed) == SECRET
    assert seal(SECRET) != sealed
    assert "pirate" not in sealed


@pytest.mark.parametrize("wrong", ["", "x", "ä", "eyJhIjoxfQ:1abc:def"])
def test_other_text_is_refused(wrong: str) -> None:
    with pytest.raises(BadRequest, match="sealed_system is not from a page of this site"):
        unseal(wrong)


def test_a_changed_letter_is_refused() -> None:
    sealed = seal(SECRET)
    middle = len(sealed) // 2
    changed = sealed[:middle] + ("A" if sealed[middle] != "A" else "B") + sealed[middle + 1 :]
    with pytest.raises(BadRequest):
        unseal(changed)


def test_an_open_page_survives_a_new_secret_key() -> None:
    """With the old key in SECRET_KEY_FALLBACKS, as Django's own signatures."""
    with override_settings(SECRET_KEY="old"):
        sealed = seal(SECRET)
    with override_settings(SECRET_KEY="new", SECRET_KEY_FALLBACKS=["old"]):
        assert unseal(sealed) == SECRET
    with override_settings(SECRET_KEY="new"), pytest.raises(BadRequest):
        unseal(sealed)


async def post(alice: Any, **fields: Any) -> Any:
    client = AsyncClient()
    await client.aforce_login(alice)
    body = {"messages": ASK, "max_tokens": 3, **fields}
    return await client.post("/streams", json.dumps(body), content_type="application/json")


@pytest.mark.django_db(transaction=True)
async def test_the_model_is_given_it_first(engine: None, alice: Any) -> None:
    """The request begins with it, and the visitor's answer never shows it."""
    response = await post(alice, sealed_system=seal(SECRET))
    assert response.status_code == 200
    stream = get_site().streams.find(response["X-Stream-Id"])
    body = b"".join([chunk async for chunk in response])
    assert stream is not None
    assert stream.request.messages is not None
    assert [(one.role, one.content) for one in stream.request.messages] == [("system", SECRET), ("user", "Hello")]
    assert b"pirate" not in body


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"sealed_system": "forged"}, "invalid_value"),
        ({"sealed_system": ""}, "invalid_value"),
        ({"sealed_system": 1}, "invalid_type"),
        ({"messages": None, "prompt": "Hello"}, "conflicting_fields"),
        ({"messages": [{"role": "system", "content": "Mine"}, *ASK]}, "conflicting_fields"),
        ({"messages": [{"role": "developer", "content": "Mine"}, *ASK]}, "conflicting_fields"),
    ],
)
async def test_a_visitor_neither_forges_nor_overrides_it(alice: Any, fields: dict[str, Any], code: str) -> None:
    response = await post(alice, **{"sealed_system": seal(SECRET), **fields})
    assert response.status_code == 400
    assert json.loads(response.content)["error"]["code"] == code
