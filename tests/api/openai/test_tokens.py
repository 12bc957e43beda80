"""`/tokenize` and `/detokenize` with vLLM's shapes, of models that answer and that embed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve.web import site
from tests.conftest import Caller, until_ready

SITE = {
    "TESTING": True,
    "MODELS": {
        "echo": {"PATH": "echo", "ANSWERS": None, "SYSTEM": "a secret of the site's"},
        "staff only": {"PATH": "echo", "PERMISSION": "staff"},
    },
    "EMBEDDING_MODELS": {"search": {"PATH": "echo"}},
    "LIMITS": {"MAX_PROMPT_CHARS": 100},
}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def alice(transactional_db: Any, alice_key: str) -> AsyncIterator[Caller]:
    with override_settings(STREAMSERVE=SITE):
        await until_ready()
        yield Caller(key=alice_key)
        await site.reset()


async def test_a_prompt_and_its_ids(alice: Caller) -> None:
    """There and back, of a model that answers and of one that embeds; each token's text beside it, if asked."""
    for model in ("echo", "search"):
        found = (await alice.post("/tokenize", {"model": model, "prompt": "héllo"})).json()
        assert found == {"count": 6, "max_model_len": 8192, "tokens": list("héllo".encode()), "token_strs": None}
        back = await alice.post("/detokenize", {"model": model, "tokens": found["tokens"]})
        assert back.json() == {"prompt": "héllo"}
        shown = await alice.post("/tokenize", {"model": model, "prompt": "ab", "return_token_strs": True})
        assert shown.json()["token_strs"] == ["a", "b"]
        bare = await alice.post("/tokenize", {"model": model, "prompt": " the", "add_special_tokens": False})
        assert bare.json()["count"] == 1  # a word's own token


async def test_a_chat_has_the_ids_of_its_template(alice: Caller) -> None:
    """Of what the caller sends: the site's own system prompt is not shown."""
    found = (await alice.post("/tokenize", {"messages": HI})).json()
    assert found["count"] == len(found["tokens"]) == 5  # role, two bytes, the end of the turn, the next role
    again = await alice.post("/tokenize", {"messages": HI, "add_generation_prompt": True, "tools": []})
    assert again.json() == found


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("tokenize", {}, 400, "missing_field", "messages"),
        ("tokenize", {"prompt": ""}, 400, "empty_prompt", "prompt"),
        ("tokenize", {"prompt": "a" * 101}, 400, "context_length_exceeded", "prompt"),
        ("tokenize", {"prompt": "a", "tools": []}, 400, "conflicting_fields", "tools"),
        ("tokenize", {"messages": HI, "add_special_tokens": True}, 400, "conflicting_fields", "add_special_tokens"),
        ("tokenize", {"model": "search", "messages": HI}, 400, "no_chat_template", None),
        ("tokenize", {"model": "staff only", "prompt": "a"}, 404, "model_not_found", "model"),
        ("detokenize", {}, 400, "missing_field", "tokens"),
        ("detokenize", {"tokens": []}, 400, "invalid_value", "tokens"),
        ("detokenize", {"tokens": [1, "a"]}, 400, "invalid_type", "tokens[1]"),
        ("detokenize", {"tokens": [1, 99_999]}, 400, "invalid_value", "tokens[1]"),
        ("detokenize", {"tokens": [1] * 101}, 400, "invalid_value", "tokens"),
        ("detokenize", {"model": "search", "tokens": [99_999]}, 400, "invalid_value", "tokens[0]"),
        ("detokenize", {"model": "staff only", "tokens": [1]}, 404, "model_not_found", "model"),
    ],
)
async def test_what_is_wrong_is_named(
    alice: Caller, path: str, body: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    """In OpenAI's shape of errors."""
    response = await alice.post(f"/{path}", body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
