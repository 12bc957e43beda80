"""`tokenize`: a prompt's token ids, by the server elsewhere that has the tokenizer.

    vllm, sglang     POST /tokenize {"model", "prompt"} or {"model", "messages", …} → {"tokens": [1, 2]}
    llama-server     POST /tokenize {"content", …} → {"tokens": [1, 2]}; before it, of a chat:
                     POST /apply-template {"messages", …} → {"prompt"}

Both stand beside `/v1`, not below it. Other servers have no such route. Event loop.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from streamserve.clients.remote.body import body_of
from streamserve.clients.remote.config import SERVERS, RemoteConfig
from streamserve.clients.remote.errors import UpstreamLost, clean
from streamserve.protocol.requests import START, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    import httpx

_PROMPT_FIELDS = (
    "messages",
    "prompt",
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
_MAX_BYTES = 16 * 1024 * 1024  # of an answer: a million ids and more


class NoTokenizer(Exception):
    """The server counts no tokens; the message gives the reason."""


async def tokenize(
    http: httpx.AsyncClient, config: RemoteConfig, server: str, request: GenerateRequest
) -> tuple[int, ...]:
    """Return the ids of a prompt as the server would see it. Raises NoTokenizer, UpstreamLost, BadRequest."""
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids
    if server not in ("vllm", "vllm-guided", "sglang", "llama-server"):
        raise NoTokenizer(f"a server of the kind {server} has no route for it")
    plain = GenerateRequest(
        model=request.model,
        messages=request.messages,
        prompt=request.prompt,
        sampling=SamplingParams(),
        chat_template_kwargs=request.chat_template_kwargs,
        tools=request.tools,
        tool_choice=request.tool_choice,
        continue_final_message=request.continue_final_message,
    )
    _, body = body_of(plain, START, config.model, server, SERVERS[server])
    fields = {name: body[name] for name in _PROMPT_FIELDS if name in body}
    if server != "llama-server":
        return await _ids(http, config, {"model": config.model, **fields})
    if "messages" in fields:
        fields["prompt"] = (await _post(http, config, "/apply-template", fields)).get("prompt")
    # As its own routes tokenise a prompt.
    return await _ids(http, config, {"content": fields["prompt"], "add_special": True, "parse_special": True})


async def _ids(http: httpx.AsyncClient, config: RemoteConfig, body: dict[str, Any]) -> tuple[int, ...]:
    tokens = (await _post(http, config, "/tokenize", body)).get("tokens")
    if not isinstance(tokens, list) or not all(type(one) is int for one in tokens):
        raise NoTokenizer("its /tokenize gives no list of token ids")
    return tuple(tokens)


async def _post(http: httpx.AsyncClient, config: RemoteConfig, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a route's answer, which is an object."""
    import httpx

    found, url = bytearray(), config.url.removesuffix("/v1") + route
    try:
        async with asyncio.timeout(2 * config.connect_seconds), http.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                raise NoTokenizer(f"its {route} answers {response.status_code}")
            async for part in response.aiter_raw():
                found += part
                if len(found) > _MAX_BYTES:
                    raise NoTokenizer(f"its {route} has no end")
    except TimeoutError as late:
        raise NoTokenizer(f"its {route} did not answer within {2 * config.connect_seconds:g} s") from late
    except httpx.TransportError as error:
        raise UpstreamLost(f"{route}: {clean(str(error)) or type(error).__name__}") from error
    try:
        value = msgspec.json.decode(bytes(found))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise NoTokenizer(f"its {route} gives no JSON object")
    return value
