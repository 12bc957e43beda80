"""`POST /v1/moderations`: the verdict of the site's function, synchronous or async; without it a 404."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve.web import site
from tests.conftest import Caller, until_ready

SITE = {"TESTING": True, "LIMITS": {"MAX_PROMPT_CHARS": 100, "MAX_EMBEDDING_INPUTS": 3}}


def scores_of(texts: list[str]) -> list[dict[str, float]]:
    """Return what a text says of itself: "violence 0.7"."""
    return [{text.split()[0]: float(text.split()[1])} for text in texts]


async def scores_of_later(texts: list[str]) -> list[dict[str, float]]:
    return scores_of(texts)


@pytest.fixture(params=["scores_of", "scores_of_later"])
async def asker(request: pytest.FixtureRequest, transactional_db: Any, alice_key: str) -> AsyncIterator[Caller]:
    with override_settings(STREAMSERVE={**SITE, "MODERATION": f"{__name__}.{request.param}"}):
        await until_ready()
        yield Caller(key=alice_key)
        await site.reset()


async def test_each_text_has_a_verdict(asker: Caller) -> None:
    """In order, with OpenAI's categories and the site's own."""
    body = {"model": "omni-moderation-latest", "input": ["violence 0.4", "secrets 0.5"]}
    found = (await asker.post("/v1/moderations", body)).json()
    mild, secret = found["results"]
    assert (found["model"], mild["flagged"], secret["flagged"]) == ("omni-moderation-latest", False, True)
    assert (mild["category_scores"]["violence"], mild["categories"]["sexual/minors"]) == (0.4, False)
    assert (secret["categories"]["secrets"], secret["category_scores"]["violence"]) == (True, 0.0)
    parts = {"input": [{"type": "text", "text": "violence"}, {"type": "text", "text": "0.9"}]}
    (one,) = (await asker.post("/v1/moderations", parts)).json()["results"]
    assert one["flagged"]


@pytest.mark.parametrize(
    ("given", "code", "param"),
    [
        ({}, "missing_field", "input"),
        ({"input": ""}, "empty_prompt", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": 3}, "invalid_type", "input"),
        ({"input": ["a", 3]}, "invalid_type", "input[1]"),
        ({"input": ["a"] * 4}, "invalid_value", "input"),
        ({"input": ["a" * 60] * 2}, "invalid_value", "input"),
        ({"input": [{"type": "text"}]}, "missing_field", "input[0].text"),
        ({"input": [{"type": "image_url", "image_url": {"url": "x"}}]}, "unsupported_content", "input[0]"),
    ],
)
async def test_a_wrong_body_is_a_400(asker: Caller, given: dict[str, Any], code: str, param: str) -> None:
    """It names the field; the function is not called."""
    response = await asker.post("/v1/moderations", given)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)


@pytest.mark.parametrize("text", ["violence", "violence 7", "violence nan"])
async def test_a_function_that_fails_lets_nothing_through(asker: Caller, text: str) -> None:
    """It raises, or its score is none: a 503."""
    response = await asker.post("/v1/moderations", {"input": text})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "rule_failed")


async def test_without_a_function_the_setting_is_named(engine: None, alice_key: str) -> None:
    """A 404."""
    response = await Caller(key=alice_key).post("/v1/moderations", {"input": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "moderation_off")
    assert "MODERATION" in response.json()["error"]["message"]
