"""Laws of limits over time at the routes: a 429 in each dialect with its headers, and what is left with each answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve import Run, pipeline
from streamserve.clients.pipeline.client import forget
from streamserve.rows import rates
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready

pytestmark = pytest.mark.django_db(transaction=True)

ASK = {"prompt": "tell me", "max_tokens": 8}
MESSAGES = {"model": "echo", "max_tokens": 8, "messages": [{"role": "user", "content": "tell me"}]}
ONE = {"owner": {"REQUESTS_PER_MINUTE": 1, "TOKENS_PER_MINUTE": 5_000}}


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Each test begins without subjects that are known to be out of requests."""
    rates._full.clear()
    yield
    rates._full.clear()


async def test_each_dialect_says_when_to_come_back(alice_key: str) -> None:
    """The second request of the minute is a 429 with `Retry-After`, by each dialect's names and codes."""
    with override_settings(STREAMSERVE={"TESTING": True, "RATES": ONE}):
        await until_ready()
        alice = Caller(key=alice_key)
        first = await alice.post("/v1/chat/completions", MESSAGES)
        assert first.status_code == 200
        assert (first["x-ratelimit-limit-requests"], first["x-ratelimit-remaining-requests"]) == ("1", "0")
        assert int(first["x-ratelimit-remaining-tokens"]) < 5_000 == int(first["x-ratelimit-limit-tokens"])
        native = await alice.post("/streams", ASK)
        openai = await alice.post("/v1/chat/completions", MESSAGES)
        anthropic = await alice.post("/v1/messages", MESSAGES, **{"anthropic-version": "2023-06-01"})
        for response in (native, openai, anthropic):
            assert response.status_code == 429
            assert 1 <= int(response["Retry-After"]) <= 60
        assert native.json()["error"]["code"] == openai.json()["error"]["code"] == "rate_limit_exceeded"
        assert native["x-ratelimit-remaining-requests"] == openai["x-ratelimit-remaining-requests"] == "0"
        assert anthropic.json()["error"]["type"] == "rate_limit_error"
        assert anthropic["anthropic-ratelimit-requests-remaining"] == "0"
        assert anthropic["anthropic-ratelimit-requests-reset"].endswith("Z")
        await site.reset()


async def test_embeddings_say_what_is_left(alice_key: str) -> None:
    """With the vectors, and with the refusal of the next request, which the database is not asked for."""
    embedding = {"search": {"PATH": "echo"}}
    with override_settings(STREAMSERVE={"TESTING": True, "RATES": ONE, "EMBEDDING_MODELS": embedding}):
        alice = Caller(key=alice_key)
        ask = {"model": "search", "input": "x" * 40}
        first = await alice.post("/v1/embeddings", ask)
        assert first.status_code == 200
        assert (first["x-ratelimit-remaining-requests"], first["x-ratelimit-remaining-tokens"]) == ("0", "4990")
        for _ in range(2):
            refused = await alice.post("/v1/embeddings", ask)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert 1 <= int(refused["Retry-After"]) <= 60
            assert refused["x-ratelimit-remaining-requests"] == "0"
        await site.reset()


async def test_what_is_sent_again_or_resumed_is_not_counted(alice_key: str) -> None:
    """An Idempotency-Key's repeat gets the same answer, and a reader that comes back the rest, without a request."""
    with override_settings(STREAMSERVE={"TESTING": True, "RATES": ONE}):
        await until_ready()
        alice = Caller(key=alice_key)
        first = await alice.post("/streams", ASK, **{"Idempotency-Key": "one"})
        text = await body_of(first)
        again = await alice.post("/streams", ASK, **{"Idempotency-Key": "one"})
        assert (again.status_code, again["X-Stream-Id"]) == (200, first["X-Stream-Id"])
        assert await body_of(again) == text
        assert (await alice.get(f"/streams/{first['X-Stream-Id']}/events?after=0")).status_code == 200
        assert (await alice.post("/streams", ASK, **{"Idempotency-Key": "two"})).status_code == 429
        await site.reset()


async def test_jobs_have_limits_of_their_own(alice_key: str) -> None:
    """A job counts in the scope `work`: it is refused at its door while answers begin, and the other way round."""
    work = {"work": {"REQUESTS_PER_MINUTE": 1}}
    with override_settings(STREAMSERVE={"TESTING": True, "RATES": work}):

        @pipeline("numbers")
        async def numbers(run: Run) -> None:
            await run.say("one")

        try:
            await site.reset()
            await until_ready()
            alice = Caller(key=alice_key)
            job = {"pipeline": "numbers", "input": {}}
            assert (await alice.post("/jobs", job)).status_code == 202
            refused = await alice.post("/jobs", job)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert (await alice.post("/streams", ASK)).status_code == 200
            await site.reset()
        finally:
            forget("numbers")


async def test_a_prompt_over_a_limit_is_a_400(alice_key: str) -> None:
    """It names the limit and the field; nothing is begun."""
    with override_settings(STREAMSERVE={"TESTING": True, "RATES": {"key": {"TOKENS_PER_MINUTE": 5}}}):
        await until_ready()
        response = await Caller(key=alice_key).post("/streams", {"prompt": "word " * 20, "max_tokens": 2})
        error: Any = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "prompt_over_limit")
        assert "5 a minute" in error["message"]
        await site.reset()
