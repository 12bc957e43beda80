"""`/v1/completions` as the official client calls it, on both sites that serve `ROUTES`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from django.test.utils import override_settings

from streamserve import routing
from streamserve.asgi import anyone, app
from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.echo import EchoTokenizer
from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.checks.joined import with_joined_text
from tests.support.checks.stream_checks import parse_sse
from tests.support.streams.hand_made import Gate

pytestmark = pytest.mark.django_db(transaction=True)

ASK: dict[str, Any] = {"model": "echo", "prompt": "The quiet river", "max_tokens": 12, "seed": 7}
TWO = ["The quiet river", "An old boat"]
PATH = "/v1/completions"


@pytest.fixture(params=["django", "asgi"])
async def client(
    request: pytest.FixtureRequest, engine: None, lonely_key: str, echo: ThreadClient
) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client of a site with the model "echo"."""
    async with app(models={"echo": echo}, authenticate=anyone) as ai:
        asgi: Any = ai if request.param == "asgi" else routing.application
        http_client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=asgi))
        async with openai.AsyncOpenAI(
            api_key=lonely_key, base_url="http://testserver/v1", max_retries=0, http_client=http_client
        ) as made:
            yield made


@pytest.fixture
def caller(engine: None, alice_key: str) -> Caller:
    return Caller(key=alice_key)


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """Return the texts and finish reasons by index, and the usage."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    options = {"include_usage": True}
    names = set()
    async for chunk in await client.completions.create(**ASK | fields, stream=True, stream_options=options):
        names.add((chunk.id, chunk.object, chunk.model))
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason is not None:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert len(names) == 1
    return texts, reasons, usage


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 1.2},
        {"prompt": TWO},
        {"prompt": TWO, "n": 2, "echo": True},
        {"prompt": list(b"The quiet river"), "echo": True},
        {"prompt": [list(b"The quiet river"), list(b"An old boat")]},
        {"prompt": TWO, "echo": True, "max_tokens": 0},
        {"stop": " ", "extra_body": {"include_stop": True}},
    ],
    ids=str,
)
async def test_streamed_and_whole_are_the_same(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> None:
    """Texts, indexes, reasons and usage, for a prompt of any form and for several."""
    whole = await client.completions.create(**ASK | fields)
    texts, reasons, usage = await streamed(client, **fields)
    prompts = fields.get("prompt", ASK["prompt"])
    num_prompts = len(prompts) if isinstance(prompts[0], str | list) and not isinstance(prompts, str) else 1
    assert [choice.index for choice in whole.choices] == list(range(num_prompts * fields.get("n", 1)))
    assert {choice.index: choice.text for choice in whole.choices} == {one: texts.get(one, "") for one in reasons}
    assert {choice.index: choice.finish_reason for choice in whole.choices} == reasons
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    assert whole.id.startswith("cmpl-")
    assert whole.object == "text_completion"


async def test_each_choice_has_its_own_prompt(client: openai.AsyncOpenAI) -> None:
    """The choices of several prompts are those that each has alone, in the prompts' order; `echo` shows which."""
    several = await client.completions.create(**ASK | {"prompt": TWO, "n": 2, "echo": True})
    alone = [await client.completions.create(**ASK | {"prompt": prompt, "n": 2, "echo": True}) for prompt in TWO]
    assert [one.text for one in several.choices] == [one.text for each in alone for one in each.choices]
    assert [one.text.startswith(TWO[0]) for one in several.choices] == [True, True, False, False]
    ids = await client.completions.create(**ASK | {"prompt": [list(prompt.encode()) for prompt in TWO], "echo": True})
    assert [one.text for one in ids.choices] == [one.choices[0].text for one in alone]


async def test_the_answer_has_16_tokens_by_default(client: openai.AsyncOpenAI) -> None:
    """As that API's callers expect."""
    fields = {name: value for name, value in ASK.items() if name != "max_tokens"}
    whole = await client.completions.create(**fields, extra_body={"ignore_eos": True})
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16


@pytest.mark.parametrize("is_stream", [False, True])
async def test_logprobs_have_the_legacy_shape(client: openai.AsyncOpenAI, is_stream: bool) -> None:
    """Tokens, their log-probabilities, the likeliest by text, and where each token begins in the text."""
    fields = {**ASK, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    if is_stream:
        chunks = [chunk async for chunk in await client.completions.create(**fields, stream=True)]
        pieces = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
        text = "".join(chunk.choices[0].text for chunk in chunks)
    else:
        whole = await client.completions.create(**fields)
        pieces, text = [whole.choices[0].logprobs], whole.choices[0].text
    joined: dict[str, list[Any]] = {
        name: [one for piece in pieces for one in getattr(piece, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    assert {len(column) for column in joined.values()} == {12}
    for token, logprob, top, offset in zip(*joined.values(), strict=True):
        assert top[token] == logprob <= 0
        assert 1 <= len(top) <= 3
        assert token.startswith("bytes:") or text[offset:].startswith(token)


async def test_errors_name_the_field(client: openai.AsyncOpenAI) -> None:
    """What is wrong, and what this API lacks, is a 400 in that API's shape with its way out."""
    for fields, param, code in (
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": ""}, "prompt", "empty_prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]", "invalid_type"),
        ({"prompt": [[1, 2], "a"]}, "prompt[1]", "invalid_type"),
        ({"prompt": [1, -1]}, "prompt[1]", "invalid_value"),
        ({"prompt": [[1], [2.5]]}, "prompt[1][0]", "invalid_type"),
        ({"prompt": ["a"] * 17}, "prompt", "invalid_value"),
        ({"prompt": ["a" * 300_000] * 2}, "prompt", "context_length_exceeded"),
        ({"prompt": [5, 10**6]}, "prompt_token_ids", "invalid_request"),
        ({"suffix": "the end"}, "suffix", "unsupported_parameter"),
        ({"best_of": 3}, "best_of", "unsupported_parameter"),
        ({"max_tokens": 0}, "max_tokens", "conflicting_fields"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": 20, "echo": True, "prompt": "a" * 3200}, "prompt_logprobs", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "conflicting_fields"),
        ({"extra_body": {"messages": [{"role": "user", "content": "Hi"}]}}, "messages", "unsupported_parameter"),
        ({"extra_body": {"logit_bias": {"9999999": 1}}}, "logit_bias", "invalid_request"),
        ({"extra_body": {"stopp": 1}}, "stopp", "unknown_field"),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            await client.completions.create(**ASK | fields)
        assert (raised.value.param, raised.value.code) == (param, code), fields
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(**ASK | {"model": "nope"})
    best = await client.completions.create(**ASK | {"best_of": 2, "n": 2, "suffix": "", "user": "u"})
    assert len(best.choices) == 2


async def test_a_refused_prompt_ends_those_before_it(caller: Caller) -> None:
    """All prompts begin, or none: the caller's quota counts each, and the places are free again at once."""
    await site.reset()
    limited = {"TESTING": True, "ECHO_STEP_SECONDS": 0.02, "LIMITS": {"MAX_STREAMS_PER_PRINCIPAL": 2}}
    with override_settings(STREAMSERVE=limited):
        await until_ready()
        site_ = site.get_site()
        long = {**ASK, "max_tokens": 1000, "ignore_eos": True}
        never = await caller.post(PATH, {**long, "prompt": ["a", "b", "c"]})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")
        refused = await caller.post(PATH, {**long, "prompt": ["a", "b" * 100_000]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        await until(lambda: all(stream.ended.is_set() for stream in site_.streams.all()))
        assert [stream.summary().finish_reason for stream in site_.streams.all()] == ["abandoned"]
        assert (await caller.post(PATH, {**ASK, "prompt": ["a", "b"]})).status_code == 200
        await site.reset()


async def test_leaving_ends_every_answer_of_the_response(caller: Caller) -> None:
    """Streamed or not: each prompt's generation stops when the reader of them all has left."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.02}):
        await until_ready()
        streams = site.get_site().streams
        ask = {**ASK, "prompt": TWO, "max_tokens": 1000, "ignore_eos": True}
        asking = asyncio.create_task(caller.post(PATH, ask))
        await until(lambda: len(streams.all()) == 2 and all(one.usage.completion_tokens > 2 for one in streams.all()))
        asking.cancel()
        await asyncio.wait([asking])
        response = await caller.post(PATH, {**ask, "stream": True})
        assert len(response["X-Stream-Id"].split(", ")) == 2
        chunks = aiter(response)
        seen = b""
        while seen.count(b"text_completion") < 6:
            seen += await anext(chunks)
        assert b"\nid:" not in seen
        await chunks.aclose()
        async with asyncio.timeout(60):
            for stream in streams.all():
                await stream.ended.wait()
        assert [stream.summary().finish_reason for stream in streams.all()] == ["abandoned"] * 4
        await site.reset()


async def test_one_failed_answer_is_an_error_without_done(caller: Caller, site_gate: Gate) -> None:
    """The other prompt's answer is whole, and no `[DONE]` says that the response were."""
    await site.reset()
    await until_ready()
    site_gate.allow(4)
    ask = {**ASK, "prompt": TWO, "max_tokens": 30, "ignore_eos": True, "stream": True}
    response = await caller.post(PATH, ask)
    first = response["X-Stream-Id"].split(", ")[0]
    await caller.post(f"/streams/{first}/stop")
    site_gate.open()
    frames = [frame.json for frame in parse_sse(await body_of(response))]
    assert [frame["error"]["code"] for frame in frames if "error" in frame] == ["cancelled"]
    ends = [choice for frame in frames for choice in frame.get("choices", []) if choice["finish_reason"]]
    assert [(choice["index"], choice["finish_reason"]) for choice in ends] == [(1, "length")]
    await site.reset()


async def test_a_parked_answer_is_resumed_in_its_shape(caller: Caller) -> None:
    """With one prompt frames have ids; `format=completions` gives the rest of the same completion."""
    response = await caller.post(PATH, {**ASK, "stream": True, "on_disconnect": "park"})
    frames = parse_sse(await body_of(response))
    assert frames[-1].data == "[DONE]"
    middle = len(frames) // 2
    path = f"/v1/streams/{response['X-Stream-Id']}/events?format=completions"
    rest = parse_sse(await body_of(await caller.get(path, **{"last-event-id": frames[middle].id})))
    assert with_joined_text(rest) == with_joined_text(frames[middle + 1 :])


async def test_sent_again_it_is_the_same_answer(caller: Caller) -> None:
    """An Idempotency-Key holds for all prompts of a body; another body is refused."""
    key = {"Idempotency-Key": "completions-1"}
    ask = {"model": "echo", "prompt": TWO, "max_tokens": 12}  # without a seed the answers would differ
    first, again = [(await caller.post(PATH, ask, **key)).json() for _ in range(2)]
    assert first == again
    other = await caller.post(PATH, {**ask, "prompt": TWO[::-1]}, **key)
    assert other.status_code == 422


async def test_special_tokens_of_a_prompt_are_no_text(caller: Caller) -> None:
    """`echo` of ids is their text."""
    ids = [257, *b"Hi", 260, EchoTokenizer().text_ids(" boat")[0]]
    whole = (await caller.post(PATH, {**ASK, "prompt": ids, "echo": True, "max_tokens": 0})).json()
    assert whole["choices"][0]["text"] == "Hi boat"
    assert whole["usage"]["completion_tokens"] == 0
    assert json.dumps(whole["choices"][0]["finish_reason"]) == '"length"'
