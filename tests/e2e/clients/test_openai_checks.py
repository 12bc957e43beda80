"""What users of the official OpenAI client rely on, one check a test, against a model that thinks and calls tools.

The tools and values of each check are a pair that is in no conversation that the model was trained on.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.e2e.clients.conftest import HELLO, MODEL, OSLO, WEATHER, calls_of, folded
from tests.support.servers.web_servers import Server

pytestmark = pytest.mark.sampled("at a temperature, or without its likeliest words, the trained model may say any byte")


def test_models_are_listed(client: openai.OpenAI) -> None:
    """`models.list` and `models.retrieve` know the model; the list has the site's pipelines too."""
    assert next(iter(client.models.list())).id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def test_an_answer(ask: Any) -> None:
    """An answer has an id, a role, text, a reason and counts that add up."""
    whole = ask(HELLO)
    assert whole.id.startswith("chatcmpl-")
    assert (whole.object, whole.model, len(whole.choices)) == ("chat.completion", MODEL, 1)
    (choice,) = whole.choices
    assert (choice.message.role, choice.finish_reason, choice.message.refusal) == ("assistant", "stop", None)
    assert choice.message.content == "Hello! What can I do?"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_streamed_answer(ask: Any) -> None:
    """The deltas make the same message; role first, one finish reason, last."""
    whole = ask(HELLO).choices[0].message
    message, chunks = folded(ask(HELLO, stream=True))
    assert (message["content"], message["reasoning_content"]) == (whole.content, whole.reasoning_content)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_of_a_stream(ask: Any) -> None:
    """With `include_usage` a last chunk without choices has the same counts as the whole answer."""
    *others, last = ask(HELLO, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert {one.usage for one in others} == {None}
    usage = ask(HELLO).usage
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (usage.prompt_tokens, usage.completion_tokens)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_prompt(ask: Any, role: str) -> None:
    """A system prompt, under its old name or its new one, is part of the prompt."""
    system = {"role": role, "content": "You are a helpful assistant."}
    whole = ask([system, *HELLO])
    assert whole.usage.prompt_tokens > ask(HELLO).usage.prompt_tokens
    assert whole.choices[0].message.content == "Hello! What can I do?"


def test_text_parts(ask: Any) -> None:
    """Content may be parts of type text."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]
    assert ask(parts).choices[0].message == ask(HELLO).choices[0].message


def test_an_image_is_refused(ask: Any) -> None:
    """A part that the model cannot read is a 400 that names it."""
    parts = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(parts)
    assert (caught.value.code, caught.value.param) == ("unsupported_content", "messages[0].content[0]")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_of_tokens(client: openai.OpenAI, name: str) -> None:
    """Both names limit the answer, which ends in `length`."""
    limit: Any = {name: 3}
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, **limit)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3


def test_stop_strings(ask: Any) -> None:
    """The answer ends before the stop string."""
    choice = ask(HELLO, stop=["What"], reasoning_effort="none").choices[0]
    assert (choice.message.content.strip(), choice.finish_reason) == ("Hello!", "stop")


def test_seeds_and_temperature(client: openai.OpenAI) -> None:
    """Equal seeds give equal answers at any temperature."""
    texts = [
        client.chat.completions.create(model=MODEL, messages=OSLO, temperature=1.5, seed=seed, max_tokens=30)
        .choices[0]
        .message.to_dict()
        for seed in (5, 5, 6, 7, 8)
    ]
    assert texts[0] == texts[1]
    assert len({json.dumps(text) for text in texts}) > 1


def test_several_choices(ask: Any) -> None:
    """`n` answers to one prompt, each with its own index, streamed and whole."""
    whole = ask(HELLO, n=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert {choice.message.content for choice in whole.choices} == {"Hello! What can I do?"}
    seen = [chunk.choices[0] for chunk in ask(HELLO, n=3, stream=True)]
    assert sorted(one.index for one in seen if one.finish_reason) == [0, 1, 2]


def test_logprobs(ask: Any) -> None:
    """The log probabilities of the text's tokens and its end, with the likeliest others; the thought has none."""
    choice = ask(HELLO, logprobs=True, top_logprobs=2).choices[0]
    tokens = choice.logprobs.content
    assert bytes(byte for one in tokens for byte in one.bytes).decode() == f"{choice.message.content}<|im_end|>"
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in tokens)


def test_reasoning(ask: Any) -> None:
    """The thought is `reasoning_content`, apart from the text, and counted."""
    whole = ask(HELLO)
    assert whole.choices[0].message.reasoning_content.strip() == "No tool is needed."
    assert "<think>" not in whole.choices[0].message.content
    assert 0 < whole.usage.completion_tokens_details.reasoning_tokens < whole.usage.completion_tokens


def test_reasoning_can_be_switched_off(ask: Any) -> None:
    """`reasoning_effort` none: no thought, and none is counted."""
    whole = ask(HELLO, reasoning_effort="none")
    assert getattr(whole.choices[0].message, "reasoning_content", None) is None
    assert whole.choices[0].message.content == "Hello! What can I do?"
    assert whole.usage.completion_tokens_details.reasoning_tokens == 0


def test_a_thought_is_streamed_before_the_answer(ask: Any) -> None:
    """All deltas of the thought come before those of the text."""
    message, chunks = folded(ask(HELLO, stream=True))
    assert message["reasoning_content"].strip() == "No tool is needed."
    kinds = [
        "thought" if getattr(chunk.choices[0].delta, "reasoning_content", None) else "text"
        for chunk in chunks
        if getattr(chunk.choices[0].delta, "reasoning_content", None) or chunk.choices[0].delta.content
    ]
    assert kinds == sorted(kinds, key=["thought", "text"].index)


def test_the_prompts_log_probabilities(ask: Any, client: openai.OpenAI) -> None:
    """vLLM's field: beside the choices of a chat, in each choice of a completion; not in a stream."""
    answer = ask(HELLO, extra_body={"prompt_logprobs": 2})
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    shown = [next(iter(one.values()))["decoded_token"] for one in answer.prompt_logprobs[1:]]
    assert "Hello!" in "".join(shown)
    text = client.completions.create(model=MODEL, prompt="Hello!", max_tokens=1, extra_body={"prompt_logprobs": 0})
    assert text.choices[0].prompt_logprobs[0] is None
    with pytest.raises(openai.BadRequestError) as caught:
        ask(HELLO, stream=True, extra_body={"prompt_logprobs": 2})
    assert caught.value.param == "prompt_logprobs"


def test_an_unknown_model(client: openai.OpenAI) -> None:
    """A 404 with the code that clients branch on."""
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_errors_have_a_shape(ask: Any) -> None:
    """Code, param, type and a request id."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(HELLO, temperature=9)
    assert (caught.value.code, caught.value.param, caught.value.type) == (
        "invalid_value",
        "temperature",
        "invalid_request_error",
    )
    assert caught.value.request_id


def test_a_bad_schema_is_refused(ask: Any) -> None:
    """A schema that cannot be compiled is a 400 that names the field; nothing is generated."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(HELLO, response_format=schema)
    assert caught.value.param == "response_format"


def test_a_prompt_that_is_too_long(ask: Any) -> None:
    """A 400 with the code that clients branch on."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask([{"role": "user", "content": "Hello! " * 3000}])
    assert caught.value.code == "context_length_exceeded"


def test_a_key_is_needed(site: Server) -> None:
    """A wrong key is a 401."""
    http = openai.DefaultHttpxClient(trust_env=False)
    client = openai.OpenAI(base_url=f"{site.url}/v1", api_key="sk-wrong", max_retries=0, http_client=http)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_what_changes_nothing_is_accepted(ask: Any) -> None:
    """The fields of accounts and caches are accepted."""
    fields = {"user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s"}
    assert ask(HELLO, service_tier="auto", **fields).choices[0].message.content == "Hello! What can I do?"


def test_a_stream_can_be_left(ask: Any) -> None:
    """Closing a stream is no error, and the next answer is whole."""
    with ask(HELLO, stream=True) as stream:
        next(iter(stream))
    assert ask(HELLO).choices[0].message.content == "Hello! What can I do?"


async def test_the_async_client(site: Server, key: str) -> None:
    """The asynchronous client streams calls too."""
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=key, http_client=http) as client:
        stream: Any = await client.chat.completions.create(
            model=MODEL, messages=OSLO, tools=WEATHER, temperature=0, max_tokens=120, stream=True
        )
        chunks = [chunk async for chunk in stream]
    message, _ = folded(chunks)
    assert [call["name"] for call in message["tool_calls"]] == ["get_weather"]


def test_an_answer_is_retrieved(ask: Any, client: openai.OpenAI) -> None:
    """`retrieve` returns the completion again, with its thought and its calls."""
    whole = ask(OSLO, tools=WEATHER)
    assert client.chat.completions.retrieve(whole.id) == whole
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve("chatcmpl-none")


def test_completions_are_stored(ask: Any, client: openai.OpenAI) -> None:
    """`store` keeps them: `list` finds them page by page, `messages.list` what was asked; `update` and `delete`."""
    stored = [ask(OSLO, tools=WEATHER, store=True, metadata={"run": "e2e", "turn": str(turn)}) for turn in range(3)]
    ask(OSLO, tools=WEATHER)
    chats = client.with_options(max_retries=5).chat.completions  # a change right after the answer may be a 409
    assert [one.id for one in chats.list(metadata={"run": "e2e"}, limit=2)] == [one.id for one in stored]
    assert [one.id for one in chats.list(metadata={"run": "e2e"}, order="desc", model=MODEL)] == [
        one.id for one in reversed(stored)
    ]
    first = stored[0]
    (found,) = chats.list(metadata={"turn": "0"})
    assert found.metadata == {"run": "e2e", "turn": "0"}
    assert calls_of(found.choices[0].message) == calls_of(first.choices[0].message)
    assert [(one.role, one.content) for one in chats.messages.list(first.id)] == [("user", OSLO[0]["content"])]
    assert chats.update(first.id, metadata={"turn": "9"}).metadata == {"turn": "9"}
    assert chats.retrieve(first.id).metadata == {"turn": "9"}
    assert chats.delete(first.id).deleted
    with pytest.raises(openai.NotFoundError):
        chats.retrieve(first.id)
    assert [one.id for one in chats.list(metadata={"run": "e2e"})] == [one.id for one in stored[1:]]
