"""The prompt's log-probabilities over HTTP: natively, and in the legacy shape of `/v1/completions` with `echo`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.stream_checks import parse_sse

pytestmark = pytest.mark.django_db(transaction=True)

PROMPT = "The quiet river. " * 60
ASK: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "seed": 7, "ignore_eos": True}
PATH = "/v1/completions"


def shown_in(body: bytes) -> tuple[list[dict[str, Any]], str]:
    """Return the positions of the prompt and the answer's text, of native events."""
    tokens = [frame.json for frame in parse_sse(body) if frame.event == "token"]
    prompt = [one for token in tokens if not token["token_ids"] for one in token.get("logprobs", ())]
    return prompt, "".join(token["text"] for token in tokens)


async def test_a_park_within_the_prompt_shows_nothing_twice(engine: None, alice_key: str) -> None:
    """Its reader leaves while the prompt is scored, and returns: the whole is what it would have been."""
    caller, asked = Caller(key=alice_key), {**ASK, "prompt_logprobs": 3}
    whole = shown_in(await body_of(await caller.post("/streams", asked)))
    assert "".join(one["token"] for one in whole[0]) == PROMPT
    assert [place for place, one in enumerate(whole[0]) if one["logprob"] is None] == [0]
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.05}):
        await until_ready()
        response = await caller.post("/streams", asked)
        chunks, seen = aiter(response), b""
        while seen.count(b"event: token") < 2:
            seen += await anext(chunks)
        await chunks.aclose()
        stream = site.get_site().streams.find(response["X-Stream-Id"])
        assert stream is not None
        await until(lambda: stream.state == "parked")
        assert stream.shown_prompt is not None
        assert 0 < stream.shown_prompt.num_logprobs < len(PROMPT)
        replayed = await body_of(await caller.get(f"/streams/{stream.id}/events"))
        assert shown_in(replayed) == whole
        await site.reset()


@pytest.mark.parametrize("n", [1, 2])
async def test_echo_with_logprobs_scores_the_prompt(engine: None, alice_key: str, n: int) -> None:
    """Each choice has the prompt's tokens before its own; streamed and whole are the same."""
    caller, asked = Caller(key=alice_key), {**ASK, "prompt": "An old boat", "echo": True, "logprobs": 2, "n": n}
    whole = json.loads(await body_of(await caller.post(PATH, asked)))
    chunks = [
        json.loads(frame.data)
        for frame in parse_sse(await body_of(await caller.post(PATH, {**asked, "stream": True})))
        if frame.data != "[DONE]"
    ]
    for choice in whole["choices"]:
        legacy, text = choice["logprobs"], choice["text"]
        num_prompt = len("An old boat")
        assert legacy["tokens"][:num_prompt] == list("An old boat")
        assert text.startswith("An old boat")
        assert legacy["token_logprobs"][0] is None
        assert legacy["top_logprobs"][0] is None
        assert all(logprob < 0 for logprob in legacy["token_logprobs"][1:num_prompt])
        assert {len(column) for column in legacy.values()} == {num_prompt + 8}
        for token, offset in zip(legacy["tokens"], legacy["text_offset"], strict=True):
            assert token.startswith("bytes:") or text[offset:].startswith(token)
        mine = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == text
        for name, column in legacy.items():
            assert [one for chunk in mine for one in (chunk["logprobs"] or {name: []})[name]] == column


async def test_a_text_is_scored_without_an_answer(engine: None, alice_key: str) -> None:
    """`max_tokens` 0, as evaluation harnesses ask."""
    asked = {"prompt": ["An old boat", "A"], "max_tokens": 0, "echo": True, "logprobs": 1}
    whole = json.loads(await body_of(await Caller(key=alice_key).post(PATH, asked)))
    assert [choice["text"] for choice in whole["choices"]] == ["An old boat", "A"]
    assert [len(choice["logprobs"]["tokens"]) for choice in whole["choices"]] == [11, 1]
    assert whole["choices"][1]["logprobs"]["token_logprobs"] == [None]
    assert whole["usage"]["completion_tokens"] == 0
