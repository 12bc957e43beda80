"""`probe`: ask a server for its models: is it there, what software is it, does it have the model, how long a context.

It opens and keeps `warm_connections` connections, by as many requests at once. Async; needs httpx.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from streamserve.clients.remote.config import OWNERS, RemoteConfig
from streamserve.clients.remote.errors import UpstreamLost, clean

if TYPE_CHECKING:
    import httpx

_MAX_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a server says of itself. `server` is one of SERVERS; `warning` is for the operator."""

    server: str = "openai"
    max_model_len: int = 0
    warning: str = ""


async def probe(http: httpx.AsyncClient, config: RemoteConfig) -> Found:
    """Return what the server says. Raises UpstreamLost with the reason why it cannot be used."""
    answers = await asyncio.gather(*(_ask(http, config) for _ in range(max(1, config.warm_connections))))
    status, body = answers[0]
    if status in (401, 403):
        raise UpstreamLost(f"it refuses our key ({status}); check API_KEY_ENV")
    if status == 429 or status == 404:  # it is there, and has no such route, or no time for it
        return Found()
    if status != 200:
        raise UpstreamLost(f"GET {config.url}/models answers {status}")
    return _found(body, config)


async def _ask(http: httpx.AsyncClient, config: RemoteConfig) -> tuple[int, bytes]:
    """Return status and body of `GET /models`."""
    import httpx

    body = bytearray()
    try:
        async with asyncio.timeout(2 * config.connect_seconds), http.stream("GET", config.url + "/models") as response:
            async for part in response.aiter_raw():
                body += part
                if len(body) > _MAX_BYTES:
                    raise UpstreamLost("its list of models has no end")
            return response.status_code, bytes(body)
    except TimeoutError as late:
        raise UpstreamLost(f"it did not answer within {2 * config.connect_seconds:g} s") from late
    except httpx.TransportError as error:
        raise UpstreamLost(f"cannot connect: {clean(str(error)) or type(error).__name__}") from error


def _found(body: bytes, config: RemoteConfig) -> Found:
    try:
        value: Any = msgspec.json.decode(body)
        models = [model for model in value["data"] if isinstance(model, dict)]
    except (ValueError, TypeError, KeyError, RecursionError):
        return Found(warning="its /models is no list of models")
    names = [str(model.get("id")) for model in models]
    ours = next((model for model in models if model.get("id") == config.model), models[0] if models else {})
    server = OWNERS.get(str(ours.get("owned_by")), "openai")
    warning = ""
    if names and config.model not in names and server != "llama-server":  # which answers to any name
        warning = f"it has no model {config.model!r}. It has: {', '.join(clean(name) for name in names[:5])}"
    return Found(server=server, max_model_len=_model_len(ours), warning=warning)


def _model_len(model: dict[str, Any]) -> int:
    """Return the context length: vLLM's and SGLang's `max_model_len`, llama-server's `meta.n_ctx`; 0 if not named."""
    meta = model.get("meta")
    known = model.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else 0)
    return known if isinstance(known, int) and not isinstance(known, bool) and known > 0 else 0
