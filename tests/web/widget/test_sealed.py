"""A widget's system prompt: hidden from the visitor, opened by the site, before the visitor's messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.test import AsyncClient, override_settings

from streamserve.protocol.errors import BadRequest
from streamserve.web.site import get_site
from streamserve.web.widget.sealed import seal, unseal

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
