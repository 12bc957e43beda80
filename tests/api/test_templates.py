"""Conversations over HTTP to models whose chat templates differ: the prompt, read back, holds all that was accepted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch", reason="needs the engine extra: pip install streamserve[engine]")

from streamserve.asgi import anyone, app
from streamserve.clients.factory import hf_client
from streamserve.engine.config import EngineConfig, ModelConfig
from tests.conftest import until
from tests.support.models.reciting_model import save_reciting_model
from tests.support.models.templates import SHAPES

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]
CUT = '{"city": "Os'
FUNCTION = {"name": "get_weather", "arguments": CUT}
CALL = {"id": "call_1", "type": "function", "function": FUNCTION, "extra_content": {"signature": "c2ln"}}
# What a client keeps of an answer that was cut in its second call's arguments, and sends back.
LOOP: list[dict[str, Any]] = [
    USER,
    {"id": "msg_1", "timestamp": 1.5, "role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Nine degrees"}]},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models, each with the template of a shape."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: save_reciting_model(folder / name, ["Yes."], SHAPES[name].template) for name in ("qwen3", "guard", "r1")
    }


@pytest.fixture
async def http(folders: dict[str, Path]) -> AsyncIterator[httpx.AsyncClient]:
    """A site with these models."""
    models = {
        name: hf_client(ModelConfig(alias=name, path=str(path), dtype="float32"), EngineConfig(num_blocks=64))
        for name, path in folders.items()
    }
    async with app(models=models, authenticate=anyone) as site:
        for client in models.values():
            client.start()
            await until(lambda client=client: client.describe().state == "ready", 60)  # type: ignore[misc]
        transport = httpx.ASGITransport(app=site)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            yield client


async def chat(http: httpx.AsyncClient, model: str, messages: list[Any], **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": messages, "max_tokens": 1, "prompt_logprobs": 0, **fields}
    return await http.post("/v1/chat/completions", json=body)


def prompt_of(response: httpx.Response) -> str:
    """Return the prompt's text, which its log-probabilities are of; its first token is a tag."""
    assert response.status_code == 200, response.text
    tokens = [next(iter(one.values()))["decoded_token"] for one in response.json()["prompt_logprobs"] if one]
    return "".join(tokens)


async def refusal(response: httpx.Response) -> tuple[str, str]:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["code"], error["param"]


async def test_a_developer_is_heard_where_the_template_knows_none(http: httpx.AsyncClient) -> None:
    """The developer's words are the system's; a template without either names the turn."""
    turns = [{"role": "developer", "content": "ALWAYS SAY BANANA"}, USER]
    assert "|system|>ALWAYS SAY BANANA<end><|user|>hi" in prompt_of(await chat(http, "qwen3", turns))
    # Here they come first of all, and nothing precedes the first token, which therefore has no entry.
    assert prompt_of(await chat(http, "r1", turns)).startswith("LWAYS SAY BANANA<|user|>hi")
    assert await refusal(await chat(http, "guard", turns)) == ("template_error", "messages[0]")


async def test_a_string_reaches_a_template_of_parts(http: httpx.AsyncClient) -> None:
    """And so do parts."""
    for content in ("Is this safe?", [{"type": "text", "text": "Is this safe?"}]):
        assert "Is this safe?<end>" in prompt_of(await chat(http, "guard", [{"role": "user", "content": content}]))


async def test_the_second_turn_of_a_loop_is_answered(http: httpx.AsyncClient) -> None:
    """With arguments that were cut, as an object that has them or as text; a template without calls names the turn."""
    shown = prompt_of(await chat(http, "qwen3", LOOP, tools=TOOLS))
    assert 'get_weather {"partial_json": "{\\"city\\": \\"Os"}' in shown
    assert "Nine degrees" in shown
    assert f"get_weather\n{CUT}<end><result>Nine degrees" in prompt_of(await chat(http, "r1", LOOP))
    assert await refusal(await chat(http, "guard", LOOP)) == ("template_error", "messages[1]")
    for model in ("r1", "guard"):
        assert await refusal(await chat(http, model, [USER], tools=TOOLS)) == ("template_error", "tools")


async def test_the_other_dialects_have_the_same_prompt(http: httpx.AsyncClient) -> None:
    """A Messages conversation is as long as the chat that it is; its errors name its own turns."""
    tools = [{"name": "get_weather", "input_schema": TOOLS[0]["function"]["parameters"]}]  # type: ignore[index]
    turns = [
        USER,
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"partial_json": CUT}, "index": 0}
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "Nine degrees"}]},
    ]  # fmt: skip
    kwargs = {"enable_thinking": False, "thinking": False}
    whole = await chat(http, "qwen3", LOOP, tools=TOOLS, chat_template_kwargs=kwargs)
    assert whole.status_code == 200, whole.text
    body = {"model": "qwen3", "messages": turns, "tools": tools}
    counted = await http.post("/v1/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": len(whole.json()["prompt_logprobs"])}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        wrong = {"model": "guard", "max_tokens": 1, "messages": [USER], "system": "Be kind."}
        assert await refusal(await http.post(path, json=wrong)) == ("template_error", "system")
        wrong = {"model": "guard", "max_tokens": 1, "messages": [USER, *turns]}
        assert await refusal(await http.post(path, json=wrong)) == ("template_error", "messages[2]")
    native = {"model": "guard", "messages": LOOP, "max_tokens": 1}
    assert await refusal(await http.post("/streams", json=native)) == ("template_error", "messages[1]")


async def test_variables_of_the_template(http: httpx.AsyncClient) -> None:
    """What it reads is set; another name is refused with the list of what it reads."""
    asked = await chat(http, "qwen3", [USER], chat_template_kwargs={"enable_thinking": False})
    assert prompt_of(asked).endswith("<think></think>")
    wrong = await chat(http, "qwen3", [USER], chat_template_kwargs={"enable_thinkin": False})
    assert await refusal(wrong) == ("invalid_request", "chat_template_kwargs")
    assert "It reads enable_thinking." in wrong.json()["error"]["message"]
