"""The prompt's log-probabilities over HTTP: natively, and in the legacy shape of `/v1/completions` with `echo`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.checks.stream_checks import parse_sse
from tests.support.streams.hand_made import Gate

pytestmark = pytest.mark.django_db(transaction=True)

PROMPT = "The quiet river. " * 60
ASK: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "seed": 7, "ignore_eos": True}
PATH = "/v1/completions"


def shown_in(body: bytes) -> tuple[list[dict[str, Any]], str]:
    """Return the positions of the prompt and the answer's text, of native events."""
    tokens = [frame.json for frame in parse_sse(body) if frame.event == "token"]
    prompt = [one for token in tokens if not token["token_ids"] for one in token.get("logprobs", ())]
    return prompt, "".join(token["text"] for token in tokens)


async def test_a_park_within_the_prompt_shows_nothing_twice(engine: None, alice_key: str, site_gate: Gate) -> None:
    """Its reader leaves while the prompt is scored, and returns: the whole is what it would have been."""
    caller, asked = Caller(key=alice_key), {**ASK, "prompt_logprobs": 3}
    whole = shown_in(await body_of(await caller.post("/streams", asked)))
    assert "".join(one["token"] for one in whole[0]) == PROMPT
    assert [place for place, one in enumerate(whole[0]) if one["logprob"] is None] == [0]
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True}):
        await until_ready()
        site_gate.allow(2)  # of the steps that the prompt takes
        response = await caller.post("/streams", asked)
        chunks, seen = aiter(response), b""
        while b"event: token" not in seen:
            seen += await anext(chunks)
        await chunks.aclose()
        stream = site.get_site().streams.find(response["X-Stream-Id"])
        assert stream is not None
        await until(lambda: stream.state == "parked")
        assert stream.transcript.shown_prompt is not None
        assert 0 < stream.transcript.shown_prompt.num_logprobs < len(PROMPT)
        site_gate.open()
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


async def native_positions(caller: Caller, prompt: str, top: int) -> list[dict[str, Any]]:
    body = await body_of(await caller.post("/streams", {**ASK, "prompt": prompt, "prompt_logprobs": top}))
    return shown_in(body)[0]


@pytest.mark.parametrize("top", [0, 3])
async def test_vllms_field_of_a_completion(engine: None, alice_key: str, top: int) -> None:
    """Each choice of each prompt has it: the prompt's token, then the likeliest; the legacy lists have no prompt."""
    caller, prompts = Caller(key=alice_key), ["An old boat", "A"]
    asked = {**ASK, "prompt": prompts, "n": 2, "prompt_logprobs": top, "logprobs": 1}
    plain = json.loads(await body_of(await caller.post(PATH, {**asked, "prompt_logprobs": None})))
    whole = json.loads(await body_of(await caller.post(PATH, asked)))
    for choice, without in zip(whole["choices"], plain["choices"], strict=True):
        shown = choice.pop("prompt_logprobs")
        assert choice == without
        expected = await native_positions(caller, prompts[choice["index"] // 2], top)
        assert shown[0] is None
        assert len(shown) == len(expected)
        for entry, position in zip(shown[1:], expected[1:], strict=True):
            ranks = {one["token"]: rank for rank, one in enumerate(position["top_logprobs"], start=1)}
            first = next(iter(entry.values()))
            assert (first["decoded_token"], first["logprob"]) == (position["token"], position["logprob"])
            assert {one["decoded_token"]: one["rank"] for one in entry.values()} == {position["token"]: None, **ranks}


async def test_vllms_field_beside_echo(engine: None, alice_key: str) -> None:
    """The legacy lists show as many candidates of the prompt as `logprobs` asks for, the field as it asks for."""
    asked = {"prompt": "An old boat", "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 4}
    [choice] = json.loads(await body_of(await Caller(key=alice_key).post(PATH, asked)))["choices"]
    assert choice["text"] == "An old boat"
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} <= {1, 2}
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} <= {4, 5}
    scored = {"prompt": "An old boat", "max_tokens": 0, "prompt_logprobs": 4}
    [alone] = json.loads(await body_of(await Caller(key=alice_key).post(PATH, scored)))["choices"]
    assert (alone["text"], alone["logprobs"]) == ("", None)
    assert alone["prompt_logprobs"] == choice["prompt_logprobs"]


async def test_vllms_field_of_a_chat(engine: None, alice_key: str) -> None:
    """Beside the choices, of the prompt as the model's template makes it; retrieved again it is there too."""
    caller = Caller(key=alice_key)
    asked = {**ASK, "messages": [{"role": "user", "content": "An old boat"}], "logprobs": True, "n": 2}
    del asked["prompt"]
    plain = json.loads(await body_of(await caller.post("/v1/chat/completions", asked)))
    response = await caller.post("/v1/chat/completions", {**asked, "prompt_logprobs": 2})
    whole = json.loads(await body_of(response))
    assert whole["choices"] == plain["choices"]
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    tokens = [next(iter(entry.values()))["decoded_token"] for entry in whole["prompt_logprobs"][1:]]
    assert "n old boat" in "".join(tokens)
    assert "prompt_logprobs" not in plain
    assert json.loads(await body_of(await caller.get(f"/v1/chat/completions/{whole['id']}"))) == whole
    chunks = await body_of(await caller.get(f"/v1/streams/{response['X-Stream-Id']}/events"))
    content = [
        json.loads(frame.data)["choices"][0]["logprobs"] for frame in parse_sse(chunks) if frame.data != "[DONE]"
    ]
    assert sum(len(one["content"]) for one in content if one) == sum(
        len(choice["logprobs"]["content"]) for choice in plain["choices"]
    )


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
async def test_vllms_field_is_of_whole_answers(engine: None, alice_key: str, path: str) -> None:
    """A stream of them is a 400, as in vLLM."""
    for top in (0, 2):
        response = await Caller(key=alice_key).post(path, {**ASK, "prompt_logprobs": top, "stream": True})
        error = json.loads(await body_of(response))["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "prompt_logprobs", "conflicting_fields")


async def test_a_chat_with_the_servers_own_system_prompt(engine: None, alice_key: str) -> None:
    """Its tokens would be shown: a 400. The caller's own system prompt is no secret."""
    models = {"echo": {"PATH": "echo", "SYSTEM": "The password is swordfish."}}
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "MODELS": models}):
        await until_ready()
        caller, turns = Caller(key=alice_key), [{"role": "user", "content": "Hi"}]
        response = await caller.post("/v1/chat/completions", {"messages": turns, "prompt_logprobs": 1})
        body = await body_of(response)
        assert (response.status_code, json.loads(body)["error"]["param"]) == (400, "prompt_logprobs")
        assert b"swordfish" not in body
        turns = [{"role": "system", "content": "Be kind."}, *turns]
        shown = await body_of(await caller.post("/v1/chat/completions", {"messages": turns, "prompt_logprobs": 1}))
        assert len(json.loads(shown)["prompt_logprobs"]) > 1
        assert b"swordfish" not in shown
        await site.reset()
